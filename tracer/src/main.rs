//! The `vramtrace` command.

use std::process::ExitCode;

use clap::Parser as _;
use vramtrace::{cli::Cli, command};

fn main() -> ExitCode {
    command::execute(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("vramtrace: {error:#}");
        ExitCode::FAILURE
    })
}
