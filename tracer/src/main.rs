//! The `vramtrace` command.

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use std::io::Write;
use std::path::PathBuf;
use vramtrace::{engine::EngineConfig, replay::replay, sink};

/// Says where each byte of GPU memory is, and why it is still there.
#[derive(Parser)]
#[command(version)]
struct Words {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay recorded events and print what they mean.
    Replay {
        /// A scenario file.
        file: PathBuf,
        /// How to print.
        #[arg(long, value_enum, default_value = "text")]
        format: Format,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// One findings document.
    Json,
}

fn main() -> anyhow::Result<()> {
    let Command::Replay { file, format } = Words::parse().command;
    let report = replay(&file, EngineConfig::default())?;
    let text = match format {
        Format::Text => sink::text::report(&report),
        Format::Json => sink::json::report(&report).context("cannot write the findings document")? + "\n",
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
}
