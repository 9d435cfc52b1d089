//! `vramtrace replay`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;

use super::verdict;
use crate::{
    cli::{Format, ReplayArgs},
    engine::EngineConfig,
    sink,
};

pub(super) fn replay(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let report = crate::replay::replay(&args.file, EngineConfig::default())?;
    let text = match args.format {
        Format::Text => sink::text::report(&report),
        Format::Json => sink::json::report(&report).context("cannot write the findings document")? + "\n",
    };
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    Ok(verdict(&report, args.judging))
}
