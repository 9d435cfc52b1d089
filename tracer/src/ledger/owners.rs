//! Containers, pods and jobs: what was told of their end.

use super::process::Process;
use crate::record::Text;
use std::collections::BTreeMap;

/// What kind of owner ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnerKind {
    /// A container.
    Container,
    /// A pod.
    Pod,
    /// A batch job.
    Job,
}

/// The end of an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerEnd {
    /// What it was.
    pub kind: OwnerKind,
    /// Its id.
    pub id: Text,
    /// Phase or state that was told.
    pub phase: Text,
    /// When.
    pub ns: u64,
}

/// Ends remembered of each kind.
const ENDS: usize = 4096;

/// Ends of owners, by kind and id.
#[derive(Debug, Default)]
pub(super) struct Owners {
    ends: BTreeMap<(OwnerKind, Text), (u64, Text)>,
}

impl Owners {
    pub(super) fn told(&mut self, kind: OwnerKind, id: &Text, phase: &Text, ns: u64) {
        let key = (kind, id.clone());
        if !is_end(kind, phase) {
            if is_start(phase) {
                self.ends.remove(&key);
            }
            return;
        }
        if self.ends.len() >= ENDS {
            let oldest = self.ends.iter().min_by_key(|(_, (ns, _))| *ns).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.ends.remove(&oldest);
            }
        }
        // The first end told is the one that counts: "died" is followed by "removed".
        self.ends.entry(key).or_insert_with(|| (ns, phase.clone()));
    }

    pub(super) fn end_of(&self, process: &Process) -> Option<OwnerEnd> {
        let container = process.container.as_ref().map(|id| (OwnerKind::Container, id.clone()));
        let pod = process.pod.as_ref().map(|id| (OwnerKind::Pod, id.clone()));
        let jobs = process.jobs().map(|job| (OwnerKind::Job, Text::from(job)));
        container
            .into_iter()
            .chain(pod)
            .chain(jobs)
            .filter_map(|key| self.ends.get(&key).map(|end| (key, end)))
            // A process born after the end belongs to a later life of the same owner.
            .filter(|(_, (ns, _))| process.id.start_ns <= *ns && process.seen_ns <= *ns)
            .map(|((kind, id), (ns, phase))| OwnerEnd { kind, id, phase: phase.clone(), ns: *ns })
            .min_by_key(|end| (end.ns, end.kind))
    }
}

fn is_end(kind: OwnerKind, phase: &str) -> bool {
    let phase = phase.to_ascii_lowercase();
    let ends: &[&str] = match kind {
        OwnerKind::Container => {
            &["removed", "deleted", "died", "die", "dead", "exited", "stopped", "destroy", "destroyed", "killed"]
        }
        OwnerKind::Pod => &["deleted", "succeeded", "failed", "removed"],
        OwnerKind::Job => &[
            "completed",
            "complete",
            "failed",
            "cancelled",
            "canceled",
            "timeout",
            "ended",
            "finished",
            "killed",
            "deadline",
            "node_fail",
            "out_of_memory",
            "preempted",
            "removed",
            "deleted",
            "succeeded",
        ],
    };
    ends.contains(&phase.as_str())
}

fn is_start(phase: &str) -> bool {
    let phase = phase.to_ascii_lowercase();
    ["running", "started", "start", "restarted", "created"].contains(&phase.as_str())
}

#[cfg(test)]
mod tests {
    use super::{OwnerKind, Owners};
    use crate::ledger::process::{Process, Seen};
    use crate::record::{Identity, Text};

    fn member(start_ns: u64) -> Process {
        let mut process = Process::new(Identity { tgid: 1, start_ns }, Seen::Fork, start_ns);
        process.container = Some("ab12".into());
        process
    }

    #[test]
    fn a_restarted_container_is_not_ended_and_its_new_processes_never_are() {
        let mut owners = Owners::default();
        let id = Text::from("ab12");
        owners.told(OwnerKind::Container, &id, &"died".into(), 50);
        assert_eq!(owners.end_of(&member(10)).map(|end| end.ns), Some(50));
        assert_eq!(owners.end_of(&member(60)), None);
        owners.told(OwnerKind::Container, &id, &"started".into(), 55);
        assert_eq!(owners.end_of(&member(10)), None);
    }
}
