//! Installing what the build and the tests need.

use std::{fs, process::Command};

use anyhow::{Context as _, bail};

use crate::{ebpf, shell};

/// Debian's and Ubuntu's packages: a compiler with `core` for BPF and the LLVM its linker needs,
/// then what the tests run.
const PACKAGES: &[&str] = &[
    "rustc-web",
    "libstd-rust-web-dev-bpf",
    "llvm-22-dev",
    "llvm-22",
    "libzstd-dev",
    "zlib1g-dev",
    "gcc",
    "g++",
    "libc6-dev",
    "make",
    "python3-venv",
    "util-linux",
];

/// A program built from source.
struct Tool {
    purpose: Purpose,
    name: &'static str,
    version: &'static str,
    options: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
}

const TOOLS: &[Tool] = &[
    Tool {
        purpose: Purpose::Build,
        name: "bpf-linker",
        version: "0.13.0",
        options: &["--no-default-features", "--features", "llvm-22"],
        environment: &[("LLVM_PREFIX", "/usr/lib/llvm-22")],
    },
    Tool { purpose: Purpose::Test, name: "cargo-deny", version: "0.20.2", options: &[], environment: &[] },
    Tool { purpose: Purpose::Test, name: "cargo-fuzz", version: "0.13.2", options: &[], environment: &[] },
];

/// What is going to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Building and running.
    Build,
    /// Also the checks and tests.
    Test,
}

/// Installs whatever is missing.
pub(crate) fn setup(purpose: Purpose) -> anyhow::Result<()> {
    let tools = TOOLS.iter().filter(|tool| tool.purpose == Purpose::Build || purpose == Purpose::Test);
    let complete = ebpf::Toolchain::find(&shell::tools()).is_some()
        && has("gcc")
        && tools.clone().all(Tool::is_installed)
        && (purpose == Purpose::Build || has("g++") && python_is_current());
    if complete {
        println!("Everything is set up.");
        return Ok(());
    }
    if has("apt-get") {
        packages()?;
    } else if !has_nightly_source() {
        bail!(
            "this is neither Debian nor Ubuntu, and rustup's nightly has no library source to build eBPF programs with. Run\n\
             \n    rustup toolchain install nightly --component rust-src\n    cargo install bpf-linker --version {} --root {}\n\
             \nand this again. (Without an eBPF toolchain the shipped object is used: `cargo build` works as it is.)",
            TOOLS[0].version,
            shell::root().join("target/tools").display()
        );
    }
    tools.clone().try_for_each(Tool::install)?;
    if purpose == Purpose::Test {
        python()?;
    }
    if ebpf::Toolchain::find(&shell::tools()).is_none() {
        bail!(
            "the packages are installed, but no compiler for eBPF programs is found: please report this with the output of `apt-cache policy rustc-web libstd-rust-web-dev-bpf`"
        );
    }
    println!("Everything is set up.");
    Ok(())
}

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn has_nightly_source() -> bool {
    let sysroot = shell::output(Command::new("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]));
    sysroot.is_ok_and(|path| std::path::Path::new(path.trim()).join("lib/rustlib/src/rust/library/core").is_dir())
}

fn packages() -> anyhow::Result<()> {
    let installed = shell::output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev} ${Package}\n"]))?;
    let is_installed =
        |name: &str| installed.lines().any(|line| line == format!("ii  {name}") || line == format!("ii {name}"));
    let missing: Vec<&str> = PACKAGES.iter().copied().filter(|name| !is_installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let commands = format!("apt-get update && apt-get install --no-install-recommends {}", missing.join(" "));
    if !shell::is_root() {
        bail!(
            "packages are missing and only root can install them. Run\n\n    sudo sh -c '{commands}'\n\nand this again."
        );
    }
    println!("Installing {}.", missing.join(", "));
    shell::run(Command::new("apt-get").args(["update", "-q"])).context("the package lists cannot be had")?;
    let mut install = Command::new("apt-get");
    install
        .args(["install", "-q", "-y", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    shell::run(&mut install).context(
        "packages cannot be installed; `llvm-22-dev` and `rustc-web` come with Debian 12 (security updates) and later",
    )
}

impl Tool {
    fn is_installed(&self) -> bool {
        shell::tools().join(self.name).is_file()
    }

    fn install(&self) -> anyhow::Result<()> {
        if self.is_installed() {
            return Ok(());
        }
        println!("Building {} {} (one to three minutes).", self.name, self.version);
        let mut install = shell::cargo();
        install.args(["install", "--quiet", "--locked", self.name, "--version", self.version, "--root"]);
        install.arg(shell::root().join("target/tools")).args(self.options);
        // Its own target folder: this workspace's may be locked by the cargo that runs us.
        install.env("CARGO_TARGET_DIR", shell::root().join("target/tools/build"));
        install.envs(self.environment.iter().copied());
        shell::run(&mut install)?;
        // Half a gigabyte that is of no use any more.
        fs::remove_dir_all(shell::root().join("target/tools/build")).context("cannot clean up target/tools/build")
    }
}

/// The Python programs the end-to-end tests trace, in an environment of their own.
fn python() -> anyhow::Result<()> {
    if python_is_current() {
        return Ok(());
    }
    let root = shell::root();
    let environment = root.join("target/venv");
    println!("Installing the Python clients of the end-to-end tests.");
    shell::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
    let mut install = Command::new(environment.join("bin/pip"));
    install.args(["install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    shell::run(install.arg(root.join(PYTHON_REQUIREMENTS)))?;
    fs::copy(root.join(PYTHON_REQUIREMENTS), environment.join("installed.txt"))
        .context("cannot note what was installed")?;
    Ok(())
}

const PYTHON_REQUIREMENTS: &str = "tests/clients/requirements.txt";

fn python_is_current() -> bool {
    let root = shell::root();
    let wanted = fs::read(root.join(PYTHON_REQUIREMENTS));
    let installed = fs::read(root.join("target/venv/installed.txt"));
    matches!((wanted, installed), (Ok(wanted), Ok(installed)) if wanted == installed)
}
