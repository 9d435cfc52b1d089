//! The subcommands: each takes its options, does its work, and says how it ended.

mod doctor;
mod preflight;
mod replay;
mod run;

use std::process::ExitCode;

use anyhow::Context as _;

use crate::{
    cli::{Cli, Command, DriverArgs, Judging},
    finding::{Report, Severity},
    gpu::{self, MonitorConfig},
    probe::discover::{DiscoverConfig, Scope},
};

/// Findings of severity warning or worse, where the command was asked to judge.
const EXIT_FINDINGS: u8 = 3;

/// Runs what the command line asks for.
pub fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::NvmlHelper { libraries } => Ok(gpu::helper::run(&libraries)),
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the event loop")
}

fn discover_config(driver: &DriverArgs) -> DiscoverConfig {
    let scope = if driver.named_only { Scope::Named } else { Scope::Host };
    DiscoverConfig { explicit: driver.libcuda.clone(), scope, ..DiscoverConfig::default() }
}

fn monitor_config(driver: &DriverArgs) -> MonitorConfig {
    let mut config = MonitorConfig::default();
    if !driver.nvml.is_empty() {
        config.libraries.clone_from(&driver.nvml);
    }
    config
}

fn verdict(report: &Report, judging: Judging) -> ExitCode {
    let found = report.findings.iter().any(|finding| finding.severity >= Severity::Warning);
    if judging.judge && found { ExitCode::from(EXIT_FINDINGS) } else { ExitCode::SUCCESS }
}
