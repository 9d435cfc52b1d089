//! The `vramtrace` command.

use std::process::ExitCode;

use clap::Parser as _;
use vramtrace::{cli::Cli, command};

fn main() -> ExitCode {
    command::execute(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("vramtrace: {}", one_line(&error));
        ExitCode::FAILURE
    })
}

/// The error and its causes; typed errors name their cause themselves, which is not said twice.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |line, cause| match cause.to_string() {
        cause if line.is_empty() => cause,
        cause if line.contains(&cause) => line,
        cause => format!("{line}: {cause}"),
    })
}
