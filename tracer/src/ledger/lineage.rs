//! Who made whom, from recorded forks.

use super::Ledger;
use super::process::{Image, Process};
use crate::record::Identity;

/// Longest chain of ancestors kept; a longer one is cut, or a process that forks and exits for
/// ever would keep all its ancestors.
const DEPTH: u16 = 64;
/// Descendants looked at in one search.
const DESCENDANTS: usize = 8192;

impl Ledger {
    pub(super) fn link(&mut self, id: Identity, parent: Identity) {
        if id == parent || self.descends(parent, id) {
            return;
        }
        let Some(depth) = self.processes.get(&parent).map(|parent| parent.depth) else { return };
        if depth >= DEPTH {
            return;
        }
        let Some(process) = self.processes.get_mut(&id) else { return };
        let before = process.parent.replace(parent);
        process.depth = depth + 1;
        if process.ppid == 0 {
            process.ppid = parent.tgid;
        }
        if let Some(before) = before.filter(|before| *before != parent)
            && let Some(before) = self.processes.get_mut(&before)
        {
            before.children.remove(&id);
        }
        if let Some(parent) = self.processes.get_mut(&parent) {
            parent.children.insert(id);
        }
    }

    /// Recorded ancestors, nearest first.
    pub fn ancestors(&self, id: Identity) -> impl Iterator<Item = &Process> {
        let mut next = self.process(&id).and_then(|process| process.parent);
        let mut left = usize::from(DEPTH) * 2;
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let process = self.process(&next?)?;
            next = process.parent;
            Some(process)
        })
    }

    /// Whether `ancestor` is among the recorded ancestors of `id`.
    pub fn descends(&self, id: Identity, ancestor: Identity) -> bool {
        self.ancestors(id).any(|process| process.id == ancestor)
    }

    /// Whether its open device files are those of an ancestor that had them when it forked: no exec
    /// since has closed them.
    pub(super) fn inherited_files(&self, id: Identity) -> bool {
        let mut heir = self.process(&id);
        for ancestor in self.ancestors(id) {
            let Some(Image::Forked { ns }) = heir.map(|heir| heir.image) else { return false };
            if ancestor.first_gpu_ns().is_some_and(|opened_ns| opened_ns <= ns) {
                return true;
            }
            heir = Some(ancestor);
        }
        false
    }

    /// Remembered descendants, living or dead, in the order of the search.
    pub fn descendants(&self, id: Identity) -> Vec<Identity> {
        let mut found = Vec::new();
        let mut open = vec![id];
        while let Some(next) = open.pop() {
            let Some(process) = self.process(&next) else { continue };
            for &child in &process.children {
                if found.len() >= DESCENDANTS {
                    return found;
                }
                found.push(child);
                open.push(child);
            }
        }
        found
    }

    /// Live descendants with the time of the fork through which they inherited the files of `id`;
    /// `u64::MIN` where an exec on the way should have closed them.
    pub(super) fn inheriting_descendants(&self, id: Identity) -> Vec<(Identity, u64)> {
        let mut found = Vec::new();
        let mut open = vec![(id, None::<u64>, true)];
        let mut looked = 0_usize;
        while let Some((next, first_fork, inherits)) = open.pop() {
            let Some(process) = self.process(&next) else { continue };
            for child_id in &process.children {
                looked += 1;
                if looked > DESCENDANTS {
                    return found;
                }
                let Some(child) = self.process(child_id) else { continue };
                let forked = child.forked_ns.unwrap_or(child.seen_ns);
                // An exec between two forks closed the files before the second.
                let closed = next != id && matches!(process.image, Image::Executed { ns } if ns < forked);
                let child_inherits = inherits && !closed;
                let first = first_fork.unwrap_or(forked);
                if child.is_alive() {
                    found.push((*child_id, if child_inherits { first } else { u64::MIN }));
                }
                open.push((*child_id, Some(first), child_inherits));
            }
        }
        found.sort_unstable();
        found
    }
}
