//! The main job: trace the real GPU where there is one, else a simulated host on which things go
//! wrong.

use std::{
    fs,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::{
    object,
    setup::{self, Purpose},
    shell,
};

/// How long the simulated host is traced: the slowest verdict, a leak, needs ten seconds of steady
/// growth.
const TRACED: Duration = Duration::from_secs(20);
/// Probes are in place by then; the workloads are to be seen from their first call.
const HEAD_START: Duration = Duration::from_millis(1500);

/// What it runs.
const PACKAGES: &[&str] = &[
    "--package",
    "vramtrace",
    "--package",
    "simgpu",
    "--package",
    "simgpu-cuda",
    "--package",
    "simgpu-nvml",
    "--package",
    "workloads",
];

/// What is planted: the category of the finding it must lead to, and what it is.
const PLANTED: [(&str, &str); 4] = [
    ("app_leak", "a service that forgets a 4 MiB block ten times a second"),
    ("process_churn", "a pool that replaces its workers all the time"),
    ("orphan_process", "two workers whose front end was killed"),
    ("residual_after_exit", "a driver that keeps 2 GiB of a job that ended"),
];

/// Traces what there is.
pub(crate) fn run() -> anyhow::Result<()> {
    if !shell::is_root() {
        bail!("tracing loads eBPF programs, which needs root: run `sudo -E env \"PATH=$PATH\" cargo xtask run`");
    }
    // Minutes that a newcomer need not wait: with the shipped object everything builds.
    if !object::is_current() {
        setup::setup(Purpose::Build)?;
    }
    let first = if built("vramtrace").exists() { "" } else { " (the first time: about 5 minutes on two cores)" };
    println!("Building{first}.");
    shell::run(shell::cargo().args(["build", "--release"].iter().chain(PACKAGES)))?;
    let vramtrace = built("vramtrace");
    if has_gpu(&vramtrace)? {
        println!("NVML finds a GPU: tracing this host. Ctrl-C ends it.\n");
        return shell::run(Command::new(vramtrace).arg("run"));
    }
    println!("NVML finds no GPU here: tracing a simulated host with two devices instead.");
    simulated(&vramtrace)
}

fn built(program: &str) -> PathBuf {
    shell::root().join("target/release").join(program)
}

fn has_gpu(vramtrace: &Path) -> anyhow::Result<bool> {
    let output = Command::new(vramtrace).args(["doctor", "--format", "json"]).output();
    let output = output.context("cannot start vramtrace doctor")?;
    let examination: Value = serde_json::from_slice(&output.stdout).context("vramtrace doctor gave no document")?;
    Ok(examination["nvml"]["devices"].as_array().is_some_and(|devices| !devices.is_empty()))
}

/// A process that ends with the demonstration, whatever happens.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

fn simulated(vramtrace: &Path) -> anyhow::Result<()> {
    let folder = shell::root().join("target/demo");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let simgpu = |arguments: &[&str]| {
        let mut command = Command::new(built("simgpu"));
        command.args(arguments).env("SIMGPU_DIR", &folder);
        shell::run(&mut command)
    };
    simgpu(&["init", "--devices", "2", "--context-time", "250ms"])?;
    simgpu(&["fault", "leave-behind", "--bytes", "2GiB", "--comm", "batch-job"])?;

    let report = folder.join("findings.json");
    let mut trace = Command::new(vramtrace);
    trace.args(["run", "--duration", &format!("{}s", TRACED.as_secs()), "--report"]).arg(&report);
    // The simulated host and nothing else: other processes of the real one are not a part of it.
    trace.arg("--named-only").arg("--libcuda").arg(folder.join("lib/libcuda.so.1"));
    trace.arg("--nvml-library").arg(folder.join("lib/libnvidia-ml.so.1"));
    trace.arg("--device-folder").arg(folder.join("dev")).env("SIMGPU_DIR", &folder);
    println!("\n$ {}", shell::shown(&trace));
    let mut tracer = Owned(trace.spawn().context("cannot start vramtrace")?);
    let start = Instant::now();
    std::thread::sleep(HEAD_START);

    let workloads: [&[&str]; 5] = [
        &["serve"],
        &["leak"],
        &["--device", "1", "churn", "--life", "200ms"],
        &["--device", "1", "orphan", "--size", "2GiB"],
        &["--name", "batch-job", "residue", "--size", "3GiB"],
    ];
    let running: Vec<Owned> =
        workloads.iter().map(|arguments| workload(&folder, arguments)).collect::<Result<_, _>>()?;
    let status = loop {
        if let Some(status) = tracer.0.try_wait().context("cannot wait for vramtrace")? {
            break status;
        }
        progress(start.elapsed());
        std::thread::sleep(Duration::from_millis(500));
    };
    drop(running);
    end_orphans(&folder)?;
    if !status.success() {
        bail!("vramtrace ended with {status}");
    }
    judge(&report)
}

fn workload(folder: &Path, arguments: &[&str]) -> anyhow::Result<Owned> {
    let mut command = Command::new(built("workload"));
    command.args(arguments).env("SIMGPU_DIR", folder).env("LD_LIBRARY_PATH", folder.join("lib"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map(Owned).context("cannot start a workload")
}

/// On a terminal, a line that is written over by what comes next.
fn progress(elapsed: Duration) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[Ktracing, {} of {} s\r", elapsed.as_secs().min(TRACED.as_secs()), TRACED.as_secs());
    }
}

/// The planted orphans have nobody left to end them.
fn end_orphans(folder: &Path) -> anyhow::Result<()> {
    let shown = shell::output(Command::new(built("simgpu")).arg("show").env("SIMGPU_DIR", folder))?;
    let view: Value = serde_json::from_str(&shown).context("simgpu show gave no document")?;
    for client in view["clients"].as_array().into_iter().flatten() {
        let pid = client["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        if let (Some(pid), Some("orphan-worker")) =
            (pid.and_then(rustix::process::Pid::from_raw), client["comm"].as_str())
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
    Ok(())
}

/// Every planted fault must have been found, and nothing else.
fn judge(path: &Path) -> anyhow::Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let report: Value = serde_json::from_str(&text).context("the report is no document")?;
    let findings = report["findings"].as_array().context("the report has no findings")?;
    println!("\nPlanted on the simulated host, beside a healthy service:");
    let mut missed = 0;
    for (category, what) in PLANTED {
        let found = findings.iter().any(|finding| finding["category"] == category);
        missed += usize::from(!found);
        println!("  {} {category:<20} {what}", if found { "found " } else { "MISSED" });
    }
    let planted = |finding: &&Value| PLANTED.iter().any(|(category, _)| finding["category"] == *category);
    let others: Vec<&Value> = findings.iter().filter(|finding| !planted(finding)).collect();
    for other in &others {
        println!("  FALSE  {}: {}", other["category"], other["summary"]);
    }
    if missed > 0 || !others.is_empty() {
        bail!("{missed} planted faults were missed and {} findings are false", others.len());
    }
    println!("All of them were found, and nothing else was reported.\n");
    println!("The findings as a document: {}", path.display());
    println!(
        "On a host with a GPU:       {} run (and doctor, which says what it would miss)",
        built("vramtrace").display()
    );
    Ok(())
}
