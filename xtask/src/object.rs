//! The eBPF object: built, shipped with the repository, and checked against its sources.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

use crate::{ebpf, setup, shell};

const OBJECT: &str = "tracer/prebuilt/vramtrace.bpf.o";
const RECORD: &str = "tracer/prebuilt/vramtrace.bpf.o.sources";

/// Builds the object, installing the toolchain first if it is missing; its path.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    let toolchain = toolchain()?;
    toolchain.build(&shell::root(), &shell::root().join("target/ebpf")).map_err(anyhow::Error::msg)
}

/// Whether the shipped object was made from the present sources, so that no toolchain is needed.
pub(crate) fn is_current() -> bool {
    let record = fs::read_to_string(shell::root().join(RECORD)).unwrap_or_default();
    let sources = record.lines().find_map(|line| line.strip_prefix("sources "));
    ebpf::sources_hash(&shell::root()).is_ok_and(|hash| sources == Some(hash.as_str()))
}

fn toolchain() -> anyhow::Result<ebpf::Toolchain> {
    if let Some(toolchain) = ebpf::Toolchain::find(&shell::tools()) {
        return Ok(toolchain);
    }
    setup::setup(setup::Purpose::Build)?;
    ebpf::Toolchain::find(&shell::tools()).context("the eBPF toolchain is still not found after set-up")
}

/// What the record beside the shipped object says: sources, toolchain, object.
fn record(object: &Path) -> anyhow::Result<String> {
    let sources = ebpf::sources_hash(&shell::root()).context("cannot read the eBPF sources")?;
    let toolchain = version(&toolchain()?)?;
    let object = file_hash(object)?;
    Ok(format!("sources {sources}\ntoolchain {toolchain}\nobject {object}\n"))
}

fn version(toolchain: &ebpf::Toolchain) -> anyhow::Result<String> {
    let rustc = match &toolchain.compiler {
        ebpf::Compiler::Precompiled(rustc) => shell::output(Command::new(rustc).arg("--version"))?,
        ebpf::Compiler::BuildStd => {
            shell::output(Command::new("rustup").args(["run", "nightly", "rustc", "--version"]))?
        }
    };
    let linker = shell::output(Command::new(&toolchain.linker).arg("--version"))?;
    Ok(format!("{}, {}", rustc.trim(), linker.trim()))
}

fn file_hash(path: &Path) -> anyhow::Result<String> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(ebpf::hex(&Sha256::digest(content)))
}

/// Builds the object and puts it into the repository.
pub(crate) fn ship() -> anyhow::Result<()> {
    let built = build()?;
    let root = shell::root();
    fs::copy(&built, root.join(OBJECT)).with_context(|| format!("cannot write {OBJECT}"))?;
    fs::write(root.join(RECORD), record(&built)?).with_context(|| format!("cannot write {RECORD}"))?;
    println!("{OBJECT} is up to date");
    Ok(())
}

/// Fails when the shipped object is not what the present sources give. The bytes are compared where
/// this machine has the toolchain the shipped one was made with; another compiler gives other bytes.
pub(crate) fn check() -> anyhow::Result<()> {
    let root = shell::root();
    let shipped = fs::read_to_string(root.join(RECORD)).with_context(|| format!("cannot read {RECORD}"))?;
    let built = build()?;
    let fresh = record(&built)?;
    let field = |text: &str, name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let remedy = "run `cargo xtask build-ebpf --ship` and commit the result";
    if field(&shipped, "sources ") != field(&fresh, "sources ") {
        bail!("{OBJECT} was made from other sources: {remedy}");
    }
    let shipped_object = file_hash(&root.join(OBJECT))?;
    if field(&shipped, "object ") != Some(shipped_object) {
        bail!("{OBJECT} is not the file {RECORD} speaks of: {remedy}");
    }
    if field(&shipped, "toolchain ") == field(&fresh, "toolchain ") {
        if field(&shipped, "object ") != field(&fresh, "object ") {
            bail!("{OBJECT} differs from what its sources give with the same toolchain: {remedy}");
        }
        println!("{OBJECT} is byte for byte what its sources give");
    } else {
        println!(
            "{OBJECT} has the present sources; its bytes were not compared, since it was made with another toolchain"
        );
    }
    Ok(())
}
