//! Makes the kernel side's object: from source where this machine can, else the one that is shipped.

#[path = "build/ebpf.rs"]
mod ebpf;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

const OBJECT: &str = "prebuilt/vramtrace.bpf.o";
const RECORD: &str = "prebuilt/vramtrace.bpf.o.sources";

fn main() -> ExitCode {
    for path in [OBJECT, RECORD, "build/ebpf.rs", "build.rs", "../tracer-ebpf", "../Cargo.lock"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed=VRAMTRACE_EBPF");
    match provide() {
        Ok((origin, sources)) => {
            println!("cargo:rustc-env=VRAMTRACE_EBPF_ORIGIN={origin}");
            println!("cargo:rustc-env=VRAMTRACE_EBPF_SOURCES={}", sources.get(..12).unwrap_or(&sources));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Puts the object into the output folder; where it comes from, and the hash of its sources.
fn provide() -> Result<(&'static str, String), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?);
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?);
    let root = here.parent().map(Path::to_owned).unwrap_or_default();
    let forced = env::var("VRAMTRACE_EBPF").ok();
    // A packaged crate stands alone, without the kernel side's sources.
    let sources = root.join("tracer-ebpf/src/main.rs").is_file().then(|| ebpf::sources_hash(&root)).transpose();
    let sources = sources.map_err(|error| format!("cannot read the eBPF sources: {error}"))?;
    let shipped = recorded_sources(&here)?;
    let install = |object: &Path| {
        fs::copy(object, out.join("vramtrace.bpf.o"))
            .map(drop)
            .map_err(|error| format!("cannot copy {}: {error}", object.display()))
    };

    // `…/target/debug/build/vramtrace-…/out`
    let target = out.ancestors().nth(4).unwrap_or(&out).to_owned();
    let tools = root.join("target/tools/bin");
    let toolchain = ebpf::Toolchain::find(&tools).filter(|_| forced.as_deref() != Some("shipped"));
    let mut refused = None;
    if let (Some(sources), Some(toolchain)) = (&sources, &toolchain) {
        match toolchain.build(&root, &target.join("ebpf")) {
            Ok(object) => return install(&object).map(|()| ("built from source", sources.clone())),
            Err(error) => refused = Some(error),
        }
    }
    if forced.as_deref() == Some("source") {
        return Err(refused
            .unwrap_or_else(|| "no toolchain for eBPF programs on this machine: run `cargo xtask setup`".to_owned()));
    }
    match sources {
        Some(sources) if sources != shipped => Err(format!(
            "the shipped eBPF object was made from other sources than these, and cannot be made anew here: {}",
            refused.unwrap_or_else(|| "run `cargo xtask setup`, which installs what that needs".to_owned())
        )),
        _ => {
            if let Some(reason) = refused {
                println!("cargo:warning=using the shipped eBPF object, which has the same sources: {reason}");
            }
            install(&here.join(OBJECT)).map(|()| ("shipped", shipped))
        }
    }
}

/// Hash of the sources the shipped object was made from.
fn recorded_sources(here: &Path) -> Result<String, String> {
    let record = fs::read_to_string(here.join(RECORD)).map_err(|error| format!("cannot read {RECORD}: {error}"))?;
    let line = record.lines().find_map(|line| line.strip_prefix("sources "));
    line.map(str::to_owned).ok_or_else(|| format!("{RECORD} has no line `sources <hash>`"))
}
