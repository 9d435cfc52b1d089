//! The tracer, run as users run it.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::lines::Lines;
use crate::{Machine, PATIENCE, built};

/// `vramtrace run` on a simulated host.
pub struct Tracer {
    child: Child,
    output: Lines,
}

/// What a run said.
pub struct Run {
    /// Every line before the summary.
    pub lines: Vec<Value>,
    /// The summary.
    pub summary: Value,
    /// From SIGTERM to the end of the process.
    pub stopping: Duration,
}

impl Tracer {
    /// Starts tracing this host's driver library and no other, and waits until the probes are in
    /// place.
    pub fn start(machine: &Machine, options: &[&str]) -> Self {
        let library = machine.libcuda().display().to_string();
        Self::start_with(machine, &[&["--named-only", "--libcuda", &library], options].concat())
    }

    /// Starts tracing with just these options and this host's NVML.
    pub fn start_with(machine: &Machine, options: &[&str]) -> Self {
        let mut command = Command::new(built().join("vramtrace"));
        command.args(["run", "--format", "json"]);
        command.arg("--nvml-library").arg(machine.host().lib_dir().join("libnvidia-ml.so.1"));
        command.arg("--device-folder").arg(machine.host().device_dir()).args(options);
        // Not LD_LIBRARY_PATH: the tracer itself must not load the libraries it traces.
        command.env(simgpu::DIRECTORY, machine.host().directory());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let output = Lines::new(child.stdout.take().unwrap());
        let mut tracer = Self { child, output };
        tracer.wait_for("started", |_| true);
        tracer
    }

    /// Waits for a line with this event that is as wanted.
    pub fn wait_for(&mut self, event: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let line = self.output.next(event);
            let line = line.unwrap_or_else(|| panic!("it ended without {event}; it said {:#?}", self.output.seen()));
            if line["event"] == event && wanted(&line) {
                return line;
            }
            assert!(start.elapsed() < PATIENCE, "waited in vain for {event}; it said {:#?}", self.output.seen());
        }
    }

    /// Waits for a finding of this category to be opened; the finding.
    pub fn wait_for_finding(&mut self, category: &str) -> Value {
        let opened = |line: &Value| line["change"] == "opened" && line["finding"]["category"] == category;
        self.wait_for("finding", opened)["finding"].clone()
    }

    /// Waits for a finding of this category to be closed; the finding.
    pub fn wait_for_close(&mut self, category: &str) -> Value {
        let closed = |line: &Value| line["change"] == "closed" && line["finding"]["category"] == category;
        self.wait_for("finding", closed)["finding"].clone()
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives it time to see what has happened, then ends it with SIGTERM.
    pub fn stop(self) -> Run {
        self.stop_with(Signal::TERM)
    }

    /// The same with another signal.
    pub fn stop_with(mut self, signal: Signal) -> Run {
        // Events settle within a few milliseconds and losses are looked for once a second.
        std::thread::sleep(Duration::from_millis(1500));
        let start = Instant::now();
        kill_process(Pid::from_raw(self.pid().cast_signed()).unwrap(), signal).unwrap();
        while self.output.next("its end").is_some() {}
        let status = self.child.wait().unwrap();
        let stopping = start.elapsed();
        assert!(status.success(), "the tracer ended with {status}");
        let mut lines = self.output.seen().to_vec();
        let summary = lines.pop().unwrap();
        assert_eq!(summary["event"], "summary");
        Run { lines, summary, stopping }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // A failed test leaves nothing attached.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    /// One of the kernel side's counters.
    pub fn counter(&self, name: &str) -> u64 {
        self.summary["kernel"]["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
    }

    /// The kernel side's figures of a process.
    pub fn process(&self, pid: u32) -> &Value {
        let processes = self.summary["kernel"]["processes"].as_array().unwrap();
        processes.iter().find(|process| process["tgid"] == pid).unwrap_or_else(|| panic!("pid {pid} was not seen"))
    }

    /// Live bytes and allocations of a process at its end, by the kernel side: of a device, or of
    /// pinned host memory for `None`.
    pub fn balance(&self, pid: u32, device: Option<u32>) -> (u64, u64) {
        let balances = self.process(pid)["balances"].as_array().unwrap();
        let wanted = |balance: &&Value| match device {
            Some(device) => balance["device"] == device && balance["host"] == false,
            None => balance["host"] == true,
        };
        let figure = |balance: &Value, name: &str| balance[name].as_u64().unwrap();
        balances.iter().find(wanted).map_or((0, 0), |balance| (figure(balance, "bytes"), figure(balance, "count")))
    }

    /// Findings of a category at the end, open and closed.
    pub fn findings(&self, category: &str) -> Vec<&Value> {
        self.all_findings().iter().filter(|finding| finding["category"] == category).collect()
    }

    /// All findings at the end, open and closed.
    pub fn all_findings(&self) -> &[Value] {
        self.summary["report"]["findings"].as_array().unwrap()
    }

    /// The engine's ledger at the end: outstanding device bytes of a process that lives.
    pub fn outstanding(&self, pid: u32) -> u64 {
        self.summary["report"]["end_state"]["outstanding_bytes_by_tgid"][pid.to_string()].as_u64().unwrap_or(0)
    }
}
