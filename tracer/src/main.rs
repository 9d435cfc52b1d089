//! The `vramtrace` command.

use std::process::ExitCode;

use clap::Parser as _;
use vramtrace::untrusted::{TEXT_LIMIT, printable};
use vramtrace::{cli::Cli, command};

fn main() -> ExitCode {
    command::execute(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("vramtrace: {}", told(&error));
        ExitCode::FAILURE
    })
}

/// The error and its causes; typed errors name their cause themselves, which is not said twice.
/// Names of files in it may hold what rewrites a terminal.
fn told(error: &anyhow::Error) -> String {
    let told = error.chain().fold(String::new(), |told, cause| match cause.to_string() {
        cause if told.is_empty() => cause,
        cause if told.contains(&cause) => told,
        cause => format!("{told}: {cause}"),
    });
    let lines: Vec<_> = told.split('\n').map(|line| printable(line.as_bytes(), TEXT_LIMIT)).collect();
    lines.join("\n")
}
