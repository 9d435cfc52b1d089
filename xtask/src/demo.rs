//! The main job: trace what there is, or a simulated host.

use std::process::Command;

use anyhow::Context as _;

use crate::{setup, shell};

/// Traces the real GPU where NVML finds one, else a simulated host.
pub(crate) fn run() -> anyhow::Result<()> {
    setup::setup()?;
    let vramtrace = shell::root().join("target/release/vramtrace");
    shell::run(shell::cargo().args(["build", "--release", "--workspace"]))?;
    let mut doctor = Command::new(&vramtrace);
    let output = doctor.args(["doctor", "--format", "json"]).output().context("cannot start vramtrace doctor")?;
    let examination: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("vramtrace doctor gave no document")?;
    println!("{}", examination["nvml"]);
    Ok(())
}
