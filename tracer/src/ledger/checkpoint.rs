//! Processes whose GPU state another process takes away and brings back (`cuCheckpointProcess*`).

use super::Ledger;
use crate::record::{Identity, Text};

/// What a process went through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing, or all was brought back.
    Running,
    /// Its driver calls wait; its memory is still on the device.
    Locked,
    /// Its memory is in host memory.
    Checkpointed,
}

/// A call that failed, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCall {
    /// Which.
    pub api: Text,
    /// Driver error.
    pub result: i32,
    /// When it failed first.
    pub first_ns: u64,
    /// When it failed last.
    pub ns: u64,
    /// How often.
    pub times: u32,
}

/// The checkpointing of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where it is.
    pub phase: Phase,
    /// Since when.
    pub since_ns: u64,
    /// Bytes NVML billed it before they were taken away.
    pub bytes: u64,
    /// The device that billed most of them.
    pub device: Option<u32>,
    /// Calls that failed since it got there.
    pub failures: Vec<FailedCall>,
    /// Failures that came since the last call that succeeded.
    pub failed: u32,
}

/// Kinds of failures kept.
const FAILURES: usize = 8;

/// What a call does to its target.
fn goal(api: &str) -> Option<Phase> {
    let name = api.rsplit("Process").next().unwrap_or(api).to_ascii_lowercase();
    if name.contains("unlock") {
        Some(Phase::Running)
    } else if name.contains("restore") || name.contains("lock") {
        // Restored memory is back, but calls wait until they are unlocked.
        Some(Phase::Locked)
    } else if name.contains("checkpoint") || name.contains("suspend") {
        Some(Phase::Checkpointed)
    } else {
        None
    }
}

impl Ledger {
    pub(super) fn checkpoint(&mut self, api: &Text, target: u32, result: i32, ns: u64) {
        let id = self.resolve(Identity { tgid: target, start_ns: 0 });
        let (Some(goal), Some(process)) = (goal(api), self.processes.get_mut(&id)) else { return };
        if !process.is_alive() {
            return;
        }
        let largest = process.rows.iter().max_by_key(|(_, row)| row.used).map(|(&(device, _), row)| (device, row.used));
        let owned = process.books.as_ref().map_or(0, |books| books.bytes);
        let state = process.checkpoint.get_or_insert_with(|| Checkpoint {
            phase: Phase::Running,
            since_ns: ns,
            bytes: 0,
            device: None,
            failures: Vec::new(),
            failed: 0,
        });
        if result != 0 {
            state.failed = state.failed.saturating_add(1);
            if let Some(known) = state.failures.iter_mut().find(|known| known.api == *api && known.result == result) {
                known.ns = ns;
                known.times = known.times.saturating_add(1);
            } else if state.failures.len() < FAILURES {
                state.failures.push(FailedCall { api: api.clone(), result, first_ns: ns, ns, times: 1 });
            }
            return;
        }
        if goal == Phase::Checkpointed && state.phase != Phase::Checkpointed {
            state.bytes = largest.map_or(owned, |(_, used)| used);
            state.device = largest.map(|(device, _)| device);
        }
        state.phase = goal;
        state.since_ns = ns;
        state.failed = 0;
        state.failures.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::{Phase, goal};

    #[test]
    fn calls_are_told_apart_by_their_names() {
        assert_eq!(goal("cuCheckpointProcessLock"), Some(Phase::Locked));
        assert_eq!(goal("cuCheckpointProcessCheckpoint"), Some(Phase::Checkpointed));
        assert_eq!(goal("cuCheckpointProcessRestore"), Some(Phase::Locked));
        assert_eq!(goal("cuCheckpointProcessUnlock"), Some(Phase::Running));
        assert_eq!(goal("cuCheckpointProcessGetState"), None);
    }
}
