//! Programs that run on a simulated host.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::lines::Lines;
use crate::{Machine, built};

/// A running program whose output is a JSON object a line.
pub struct Program {
    child: Child,
    output: Lines,
}

/// A workload on this host.
pub fn workload(machine: &Machine, arguments: &[&str]) -> Program {
    let mut command = Command::new(built().join("workload"));
    command.args(arguments);
    Program::start(machine, command)
}

impl Program {
    /// Starts a program on this host.
    pub fn start(machine: &Machine, command: Command) -> Self {
        Self::start_with(command, &machine.host().env())
    }

    /// Starts a program with this in its environment.
    pub fn start_with(mut command: Command, environment: &[(String, String)]) -> Self {
        command.envs(environment.iter().cloned()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let output = Lines::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its output with this event.
    pub fn wait_for(&mut self, event: &str) -> Value {
        loop {
            let line = self.output.next(event);
            let line = line.unwrap_or_else(|| panic!("it ended without {event}; it said {:#?}", self.output.seen()));
            if line["event"] == event {
                return line;
            }
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits for its end; everything it said.
    pub fn finish(mut self) -> Vec<Value> {
        while self.output.next("its end").is_some() {}
        self.child.wait().unwrap();
        self.output.seen().to_vec()
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
