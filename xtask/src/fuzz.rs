//! Fuzzing of what is read from others.

use std::{fs, io::Write as _, path::Path, process::Command, process::Stdio};

use anyhow::{Context as _, bail};
use clap::ValueEnum;

use crate::{setup, shell};

/// What is fuzzed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Any bytes as a scenario file, and its records through the engine.
    Scenario,
    /// Any records in any order.
    Engine,
    /// Any bytes as a container's driver library.
    Library,
}

/// A longer scenario makes the fuzzer slow and teaches it no more.
const SEED_LIMIT: u64 = 16 << 10;
/// Memory no input may need, in MiB.
const MEMORY_MIB: u32 = 1024;

/// Fuzzes `target`, or each in turn, for so many seconds. What it learns stays in fuzz/corpus for
/// the next time.
pub(crate) fn fuzz(target: Option<Target>, seconds: u32) -> anyhow::Result<()> {
    setup::setup(setup::Purpose::Test)?;
    let targets = target.map_or_else(|| Target::value_variants().to_vec(), |target| vec![target]);
    targets.into_iter().try_for_each(|target| {
        let name = target.to_possible_value().context("a target has a name")?;
        let name = name.get_name();
        let corpus = shell::root().join("fuzz/corpus").join(name);
        fs::create_dir_all(&corpus).with_context(|| format!("cannot create {}", corpus.display()))?;
        match target {
            Target::Scenario => scenarios(&corpus)?,
            Target::Library => library(&corpus)?,
            // Its input is random choices: there is nothing to begin with.
            Target::Engine => {}
        }
        let mut command = Command::new(shell::tools().join("cargo-fuzz"));
        // No sanitizer: only a nightly compiler has them, and unsafe code is a few reads of kernel events.
        command.current_dir(shell::root()).args(["run", "--sanitizer", "none", "--target-dir", "target/fuzz", name]);
        command.args(["--", "-timeout=10", "-print_final_stats=1", "-verbosity=0"]);
        command.arg(format!("-max_total_time={seconds}")).arg(format!("-rss_limit_mb={MEMORY_MIB}"));
        println!("Fuzzing {name} for {seconds} s.");
        // Its build and what it learnt are of no interest while nothing is found.
        let run = command.output().with_context(|| format!("cannot start `{}`", shell::shown(&command)))?;
        let told = String::from_utf8_lossy(&run.stderr);
        if !run.status.success() {
            bail!("{told}\n`{}` failed ({}): the input above is kept", shell::shown(&command), run.status);
        }
        told.lines().filter(|line| line.starts_with("stat::")).for_each(|line| println!("{line}"));
        Ok(())
    })
}

/// The scenarios as seeds.
fn scenarios(corpus: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(shell::root().join("tests/scenarios")).context("cannot list tests/scenarios")? {
        let entry = entry?;
        if entry.metadata()?.len() <= SEED_LIMIT {
            fs::copy(entry.path(), corpus.join(entry.file_name())).context("cannot copy a seed")?;
        }
    }
    Ok(())
}

/// A small library with a few of the driver's names as a seed.
fn library(corpus: &Path) -> anyhow::Result<()> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-shared", "-nostdlib", "-s", "-O1", "-Wl,--build-id", "-x", "c", "-", "-o"])
        .arg(corpus.join("libcuda.so"));
    let mut gcc = gcc.stdin(Stdio::piped()).spawn().context("cannot start gcc")?;
    let names = ["cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuDevicePrimaryCtxRetain", "cuMemAllocNew"];
    if let Some(mut source) = gcc.stdin.take() {
        for name in names {
            writeln!(source, "int {name}(int *place) {{ return place ? ++*place : 1; }}")?;
        }
    }
    anyhow::ensure!(gcc.wait()?.success(), "gcc cannot build a small library");
    Ok(())
}
