//! What a workload says about itself: one JSON object a line on standard output, so that a test can compare what was
//! traced with what was done.

use std::{collections::BTreeMap, io::Write, sync::Mutex};

use serde::Serialize;

use crate::driver::Outcomes;

/// A line of output. Every line also carries `pid` and `role`, because children share their parent's output.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event<'a> {
    /// The process begins.
    Start,
    /// The steady state is reached.
    Ready,
    /// Another process was started.
    Child {
        /// Its process id.
        child_pid: u32,
        /// Its role.
        child_role: &'a str,
    },
    /// A child ended and was waited for.
    ChildEnd {
        /// Its process id.
        child_pid: u32,
        /// Its exit code, absent when a signal ended it.
        code: Option<i32>,
    },
    /// The ordinal of a device and the UUID the driver gave for it.
    Device {
        /// Ordinal in this process.
        device: i32,
        /// UUID in the form NVML shows.
        uuid: String,
    },
    /// Driver calls of this process so far, by exported symbol.
    Calls {
        /// Counts by outcome.
        calls: BTreeMap<&'static str, Outcomes>,
    },
    /// What this process holds, in requested bytes.
    Live {
        /// Everything.
        #[serde(flatten)]
        total: Held,
        /// By family.
        families: BTreeMap<&'static str, Held>,
        /// By device ordinal.
        devices: BTreeMap<i32, Held>,
    },
    /// A call that was expected to fail, or allowed to, and what the driver answered.
    Outcome {
        /// What was attempted.
        case: &'a str,
        /// `CUresult`.
        code: i32,
    },
    /// A remark of a script.
    Message {
        /// Its text.
        text: &'a str,
    },
    /// The process ends now.
    End {
        /// Why.
        reason: &'a str,
    },
}

/// An amount of live memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Held {
    /// Requested bytes.
    pub(crate) bytes: u64,
    /// Allocations.
    pub(crate) count: u64,
}

impl std::ops::AddAssign for Held {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.count += other.count;
    }
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    event: Event<'a>,
    pid: u32,
    role: &'a str,
}

/// Writes the lines of one process.
pub(crate) struct Report {
    role: Mutex<String>,
}

impl Report {
    /// A report under `role`.
    pub(crate) fn new(role: String) -> Self {
        Self { role: Mutex::new(role) }
    }

    /// Changes the role that later lines carry.
    pub(crate) fn rename(&self, role: &str) {
        role.clone_into(&mut self.role.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    /// Writes one line with a single system call, so lines of processes that share the output do not mix.
    pub(crate) fn emit(&self, event: Event<'_>) {
        let role = self.role.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let line = Line { event, pid: std::process::id(), role: &role };
        if let Ok(mut text) = serde_json::to_vec(&line) {
            text.push(b'\n');
            // A reader that has gone away must not change what the workload does to the driver.
            let _ = std::io::stdout().lock().write_all(&text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(event: Event<'_>) -> serde_json::Value {
        serde_json::to_value(Line { event, pid: 7, role: "serve" }).unwrap()
    }

    #[test]
    fn lines_are_flat_objects_with_event_pid_and_role() {
        assert_eq!(line(Event::Ready), serde_json::json!({"event": "ready", "pid": 7, "role": "serve"}));
        let total = Held { bytes: 4096, count: 1 };
        let live = Event::Live { total, families: [("device", total)].into(), devices: [(0, total)].into() };
        let held = serde_json::json!({"bytes": 4096, "count": 1});
        assert_eq!(
            line(live),
            serde_json::json!({"event": "live", "pid": 7, "role": "serve", "bytes": 4096, "count": 1,
                "families": {"device": held}, "devices": {"0": held}})
        );
    }
}
