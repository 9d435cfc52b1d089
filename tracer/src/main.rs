//! The `vramtrace` command.

use std::process::ExitCode;

use clap::Parser as _;
use vramtrace::untrusted::{TEXT_LIMIT, printable};
use vramtrace::{cli::Cli, command};

fn main() -> ExitCode {
    command::execute(Cli::parse()).unwrap_or_else(|error| {
        // A file's name may hold what rewrites a terminal.
        let line = one_line(&error);
        eprintln!(
            "vramtrace: {}",
            line.split('\n').map(|part| printable(part.as_bytes(), TEXT_LIMIT)).collect::<Vec<_>>().join("\n")
        );
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
