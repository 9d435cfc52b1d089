//! Walks over processes: who has device files open, who has a driver library mapped, and how much of the
//! driver those that matter have mapped.
//!
//! On a large host a walk takes a noticeable fraction of a second, so walks are made when they can
//! settle something, and in a thread of their own.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use super::clock::boot_ns;
use crate::{
    probe::discover::{self, DiscoverConfig, Discovery},
    proc::{self, DeviceFiles, FdScan, ProcRoot},
    record::{Event, Identity, Task, Text},
};

/// When descriptors are looked at after a process with GPU memory ended: soon, for holders that
/// end soon themselves, and again while memory may still be held.
const AFTER_EXIT: [Duration; 6] = [
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];
/// Least time between walks over descriptors for a dead process that is still billed.
const SUSPECT_AGAIN: Duration = Duration::from_secs(5);
/// How often the whole host is searched for driver libraries. What a process maps as it starts is
/// found at once by other means; this is for what it loads much later.
const LIBRARIES: Duration = Duration::from_secs(30);
/// How often the mappings of the processes that matter are counted. Their growth is judged over
/// minutes, and a list of mappings is long.
const MAPPINGS: Duration = Duration::from_secs(10);

/// Result of a walk.
pub(super) enum Scanned {
    /// Who has device files open, and snapshots of those holders that were not known.
    Holders {
        /// The walk.
        scan: FdScan,
        /// Holders not known before, each after its ancestors.
        unknown: Vec<Event>,
    },
    /// Driver libraries.
    Libraries(Discovery),
    /// What processes have mapped of the driver.
    Mappings(Vec<Event>),
}

/// Decides when to walk.
pub(super) struct Scanner {
    results: mpsc::UnboundedSender<(u64, Scanned)>,
    /// Walks over descriptors that are still to come.
    due: BTreeSet<Instant>,
    suspected: Option<Instant>,
    libraries: Instant,
    mappings: Instant,
}

impl Scanner {
    /// Nothing due yet but what is done again and again.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<(u64, Scanned)>) {
        let (results, scanned) = mpsc::unbounded_channel();
        let now = Instant::now();
        let scanner = Self {
            results,
            due: BTreeSet::new(),
            suspected: None,
            libraries: now + LIBRARIES,
            mappings: now + MAPPINGS,
        };
        (scanner, scanned)
    }

    /// A process that mattered ended.
    pub(super) fn ended(&mut self, now: Instant) {
        self.due.extend(AFTER_EXIT.map(|after| now + after));
    }

    /// A process that is not there is billed for memory.
    pub(super) fn suspect(&mut self, now: Instant) {
        if self.suspected.is_none_or(|last| now.duration_since(last) >= SUSPECT_AGAIN) {
            self.suspected = Some(now);
            self.due.insert(now);
        }
    }

    /// Walks over descriptors if that is due; `known` processes get no snapshot again.
    pub(super) fn scan_holders(&mut self, now: Instant, root: &ProcRoot, device_folder: &Path, known: BTreeSet<u32>) {
        let later = self.due.split_off(&now);
        let due = std::mem::replace(&mut self.due, later);
        // At this very moment counts as due too.
        if !due.is_empty() | self.due.remove(&now) {
            let (root, folder, results) = (root.clone(), device_folder.to_owned(), self.results.clone());
            tokio::task::spawn_blocking(move || {
                let scanned = holders(&root, &folder, &known);
                // Nobody listens any more only when the agent is stopping.
                let _ = results.send((boot_ns(), scanned));
            });
        }
    }

    /// Searches the host for driver libraries if that is due.
    pub(super) fn search_libraries(&mut self, now: Instant, config: &DiscoverConfig) {
        if now >= self.libraries {
            self.libraries = now + LIBRARIES;
            let (config, results) = (config.clone(), self.results.clone());
            tokio::task::spawn_blocking(move || {
                let _ = results.send((boot_ns(), Scanned::Libraries(discover::discover(&config))));
            });
        }
    }

    /// Counts what `users` have mapped of the driver if that is due.
    pub(super) fn count_mappings(
        &mut self,
        now: Instant,
        root: &ProcRoot,
        device_folder: &Path,
        users: impl FnOnce() -> Vec<(Identity, Text)>,
    ) {
        if now >= self.mappings {
            self.mappings = now + MAPPINGS;
            let (root, folder, users, results) =
                (root.clone(), device_folder.to_owned(), users(), self.results.clone());
            tokio::task::spawn_blocking(move || {
                let _ = results.send((boot_ns(), Scanned::Mappings(mappings(&root, &folder, users))));
            });
        }
    }
}

/// What cannot be read is not told: a count of nothing would be a fall.
fn mappings(root: &ProcRoot, folder: &Path, users: Vec<(Identity, Text)>) -> Vec<Event> {
    let files = DeviceFiles::read(folder);
    let count = |(identity, comm): (Identity, Text)| {
        let process = root.process(identity.tgid).ok()?;
        let stat = process.stat().ok()?;
        // A process that has ended, or whose first thread has, shows nothing.
        if stat.identity != identity || stat.state == 'Z' {
            return None;
        }
        let mapped = files.mapped_in(&process).ok()?;
        let task = Task { pid: identity.tgid, identity, comm };
        Some(Event::DriverMaps { task, count: mapped.count, bytes: mapped.bytes })
    };
    users.into_iter().filter_map(count).collect()
}

fn holders(root: &ProcRoot, folder: &Path, known: &BTreeSet<u32>) -> Scanned {
    let scan = DeviceFiles::read(folder).scan(root).unwrap_or_default();
    let mut unknown = scan.clone();
    unknown.holders.retain(|holder| !known.contains(&holder.identity.tgid));
    let unknown = proc::snapshot(root, &unknown, &BTreeSet::new());
    Scanned::Holders { scan, unknown }
}

/// The walk at the start: the descriptors, and snapshots of all holders and of `users` of a driver
/// library, each after its ancestors.
pub(super) fn first(root: &ProcRoot, folder: &Path, users: &BTreeSet<u32>) -> (Event, Vec<Event>) {
    let scan = DeviceFiles::read(folder).scan(root).unwrap_or_default();
    let known = proc::snapshot(root, &scan, users);
    (scan.into_event(), known)
}

/// The process of a snapshot, if it has device files open: its ancestors are only there for lineage.
pub(super) fn device_user(snapshot: &Event) -> Option<(Identity, Text)> {
    match snapshot {
        Event::ProcSnapshot { life, gpu_fds, .. } if !gpu_fds.is_empty() => {
            Some((life.task.identity, life.task.comm.clone()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_death_is_followed_by_walks_that_thin_out() {
        let (mut scanner, mut results) = Scanner::new();
        let empty = tempfile::tempdir().unwrap();
        let root = ProcRoot::new(empty.path());
        let start = Instant::now();
        scanner.ended(start);
        let mut walks = Vec::new();
        for tenths in 0..=700 {
            let now = start + Duration::from_millis(tenths * 100);
            let before = scanner.due.len();
            scanner.scan_holders(now, &root, empty.path(), BTreeSet::new());
            if scanner.due.len() < before {
                walks.push(tenths);
            }
        }
        assert_eq!(walks, [5, 20, 50, 100, 300, 600]);
        for _ in walks {
            assert!(matches!(results.recv().await, Some((_, Scanned::Holders { .. }))));
        }
    }

    #[test]
    fn a_dead_process_that_stays_billed_is_not_searched_for_at_every_sample() {
        let (mut scanner, _results) = Scanner::new();
        let start = Instant::now();
        for second in 0..10 {
            scanner.suspect(start + Duration::from_secs(second));
        }
        assert_eq!(scanner.due.len(), 2);
    }
}
