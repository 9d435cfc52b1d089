//! `script`: a workload written as text, one step a line.

use std::{io::Read, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::run::Run;

mod parse;
mod play;
#[cfg(test)]
mod tests;

/// Arguments of `script`.
#[derive(Args, Debug)]
#[command(after_long_help = include_str!("language.txt"))]
pub(crate) struct Script {
    /// File with the script; - reads it from standard input
    #[arg(required_unless_present = "text", conflicts_with = "text")]
    file: Option<String>,
    /// The script itself, lines separated by newlines
    #[arg(long)]
    text: Option<String>,
}

impl Script {
    pub(crate) fn play(self, run: &Run) -> Result<ExitCode> {
        let text = match (self.text, self.file.as_deref()) {
            (Some(text), _) => text,
            (None, Some("-") | None) => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text).context("reading the script from standard input")?;
                text
            }
            (None, Some(file)) => {
                std::fs::read_to_string(file).with_context(|| format!("reading the script {file}"))?
            }
        };
        play::play(run, &parse::parse(&text)?)
    }
}
