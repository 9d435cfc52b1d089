//! Programs that run on a simulated host.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{Machine, built};

/// A running program whose output is a JSON object a line.
pub struct Program {
    child: Child,
    output: BufReader<ChildStdout>,
    seen: Vec<Value>,
}

/// A workload on this host.
pub fn workload(machine: &Machine, arguments: &[&str]) -> Program {
    let mut command = Command::new(built().join("workload"));
    command.args(arguments);
    Program::start(machine, command)
}

impl Program {
    /// Starts a program on this host.
    pub fn start(machine: &Machine, mut command: Command) -> Self {
        command.envs(machine.host().env()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output, seen: Vec::new() }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its output with this event.
    pub fn wait_for(&mut self, event: &str) -> Value {
        loop {
            let line =
                self.line().unwrap_or_else(|| panic!("the program ended without {event}; it said {:?}", self.seen));
            if line["event"] == event {
                return line;
            }
        }
    }

    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        if line.is_empty() {
            return None;
        }
        let value: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?} is no JSON: {error}"));
        self.seen.push(value.clone());
        Some(value)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits for its end; everything it said.
    pub fn finish(mut self) -> Vec<Value> {
        while self.line().is_some() {}
        self.child.wait().unwrap();
        std::mem::take(&mut self.seen)
    }

    /// Ends it with SIGTERM; everything it said.
    pub fn stop(self) -> Vec<Value> {
        self.signal(Signal::TERM);
        self.finish()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A failed test leaves nothing running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls by symbol, successful and failed ones, as the process with this number counted them.
pub fn calls(lines: &[Value], pid: u32) -> BTreeMap<String, (u64, u64)> {
    let counted = lines.iter().rev().find(|line| line["event"] == "calls" && line["pid"] == pid);
    let calls = counted.and_then(|line| line["calls"].as_object()).expect("no calls were counted");
    let pair = |count: &Value| (count["ok"].as_u64().unwrap(), count["failed"].as_u64().unwrap());
    calls.iter().map(|(symbol, count)| (symbol.clone(), pair(count))).collect()
}
