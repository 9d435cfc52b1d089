//! Every check and test, in the order in which failures are cheapest to find.

use std::{path::Path, process::Command};

use anyhow::{Context as _, bail};

use crate::{fuzz, object, setup, shell};

/// How long each target is fuzzed: what is found within seconds of a change.
const FUZZED_SECONDS: u32 = 20;

/// A name and what to do.
type Step<'a> = (&'a str, Box<dyn Fn() -> anyhow::Result<()> + 'a>);

/// Runs every step and says which failed.
pub(crate) fn test() -> anyhow::Result<()> {
    if !shell::is_root() {
        bail!(
            "the end-to-end tests load eBPF programs, which needs root: run `sudo -E env \"PATH=$PATH\" cargo xtask test`"
        );
    }
    setup::setup(setup::Purpose::Test)?;
    mount_tracefs()?;
    let cargo = |args: &[&str]| {
        let mut command = shell::cargo();
        command.args(args);
        shell::run(&mut command)
    };
    let steps: Vec<Step<'_>> = vec![
        ("formatting", Box::new(|| cargo(&["fmt", "--all", "--check"]))),
        ("lints", Box::new(|| cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))),
        ("dependencies", Box::new(dependencies)),
        ("eBPF object", Box::new(object::check)),
        // The end-to-end tests run the programs of the workspace, which `cargo test` alone does not build.
        ("build", Box::new(|| cargo(&["build", "--workspace"]))),
        ("tests", Box::new(|| cargo(&["test", "--workspace", "--no-fail-fast"]))),
        ("fuzzing", Box::new(|| fuzz::fuzz(None, FUZZED_SECONDS))),
    ];
    let mut failed = Vec::new();
    for (name, step) in &steps {
        println!("\n== {name}");
        if let Err(error) = step() {
            eprintln!("{error:#}");
            failed.push(*name);
        }
    }
    println!();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    println!(
        "All {} steps passed: {}.",
        steps.len(),
        steps.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    );
    Ok(())
}

/// The advisory database is a repository of its own that not every machine can reach: licences,
/// sources and bans are always checked, advisories where that is possible.
fn dependencies() -> anyhow::Result<()> {
    let deny = || {
        let mut command = Command::new(shell::tools().join("cargo-deny"));
        command.current_dir(shell::root()).args(["--log-level", "error", "check"]);
        command
    };
    shell::run(deny().args(["licenses", "bans", "sources"]))?;
    let mut fetch = Command::new(shell::tools().join("cargo-deny"));
    fetch.current_dir(shell::root()).args(["--log-level", "off", "fetch", "db"]);
    if shell::output(&mut fetch).is_ok() {
        shell::run(deny().args(["advisories"]))
    } else {
        println!("Security advisories were NOT checked: their database cannot be fetched from this machine.");
        Ok(())
    }
}

fn mount_tracefs() -> anyhow::Result<()> {
    let place = "/sys/kernel/tracing";
    if Path::new(place).join("events").is_dir() {
        return Ok(());
    }
    shell::run(Command::new("mount").args(["-t", "tracefs", "nodev", place])).context("the tests need tracefs")
}

/// Runs one benchmark, or each.
pub(crate) fn bench(name: Option<&str>) -> anyhow::Result<()> {
    let mut command = shell::cargo();
    command.args(["bench", "--package", "vramtrace"]);
    match name {
        Some(name) => command.args(["--bench", name]),
        None => command.arg("--benches"),
    };
    shell::run(&mut command)
}

/// Scores the replay of the shared scenarios.
pub(crate) fn score() -> anyhow::Result<()> {
    let shared = shell::root().join("../shared");
    let scorer = shared.join("tools/score_replay.py");
    if !scorer.is_file() {
        bail!(
            "there is no scorer at {}: the scenarios in tests/scenarios are scored by `cargo test` too",
            scorer.display()
        );
    }
    shell::run(shell::cargo().args(["build", "--quiet", "--package", "vramtrace"]))?;
    let mut command = Command::new("python3");
    command.arg(scorer).arg("--bin").arg(shell::root().join("target/debug/vramtrace")).arg(shared.join("scenarios"));
    shell::run(&mut command)
}
