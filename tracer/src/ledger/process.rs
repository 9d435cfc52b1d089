//! One process: where it belongs, who made it, how it ended.

use super::books::Books;
use super::checkpoint::Checkpoint;
use super::driver_maps::DriverMaps;
use super::sharing::Export;
use crate::record::{Identity, OpaqueId, Text};
use std::collections::{BTreeMap, BTreeSet};

/// How a process became known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It was there before the tracer.
    Snapshot,
    /// It was noticed later, without its fork.
    Start,
    /// Its fork was seen.
    Fork,
    /// A record named it first.
    Implied,
}

/// Where its program image comes from, which decides whether it shares its parent's open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// Forked and not replaced since.
    Forked {
        /// When.
        ns: u64,
    },
    /// Replaced by an exec.
    Executed {
        /// When.
        ns: u64,
    },
    /// Not seen.
    Unknown,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The exit was seen.
    Exit {
        /// Exit code.
        code: i32,
        /// Signal that ended it, or 0.
        signal: i32,
    },
    /// It is gone, but its exit was not seen.
    Unknown,
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// When.
    pub ns: u64,
    /// How.
    pub cause: Cause,
}

impl Death {
    /// Whether it ended with success and not by a signal.
    pub fn was_clean(&self) -> bool {
        matches!(self.cause, Cause::Exit { code: 0, signal: 0 })
    }

    /// In words: `killed by signal 9`, `exited with code 1`.
    pub fn told(&self) -> String {
        match self.cause {
            Cause::Exit { signal, .. } if signal != 0 => format!("killed by signal {signal}"),
            Cause::Exit { code, .. } => format!("exited with code {code}"),
            Cause::Unknown => "gone (its exit was not seen)".to_owned(),
        }
    }
}

/// A place a process was in, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Since when.
    pub ns: u64,
    /// Control group path without the ` (deleted)` mark.
    pub cgroup: Text,
}

/// State of a process as /proc tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// `R`, `S`, `D`, `Z` and their like.
    pub letter: Text,
    /// When it was told last.
    pub ns: u64,
    /// Since when it was told each time.
    pub since_ns: u64,
    /// How often in a row.
    pub times: u32,
    /// Kernel function it sleeps in, where told.
    pub wchan: Option<Text>,
}

impl State {
    /// Whether it sleeps and cannot be woken by a signal.
    pub fn is_uninterruptible(&self) -> bool {
        self.letter.starts_with('D')
    }
}

/// A kernel message about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelMessage {
    /// When.
    pub ns: u64,
    /// `hung_task`, `oom_kill`, `warning` and their like.
    pub facility: Text,
    /// What it said, where told.
    pub text: Text,
}

/// NVML's row of a process on one device or MIG instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Last time it was listed.
    pub ns: u64,
    /// Bytes billed then.
    pub used: u64,
    /// First time it was listed.
    pub first_ns: u64,
    /// Bytes billed then.
    pub first_used: u64,
    /// Since when it has hardly changed.
    pub steady_since_ns: u64,
    /// Bytes billed then.
    pub steady_used: u64,
    /// Whether it is an MPS client's.
    pub mps: bool,
    /// Whether it is graphics only.
    pub graphics: bool,
}

/// A row that moves by less than this, or than one part in 256, has hardly changed.
const STEADY: u64 = 8 << 20;

impl Row {
    pub(super) fn new(ns: u64, used: u64) -> Self {
        Self {
            ns,
            used,
            first_ns: ns,
            first_used: used,
            steady_since_ns: ns,
            steady_used: used,
            mps: false,
            graphics: false,
        }
    }

    pub(super) fn listed(&mut self, ns: u64, used: u64) {
        // The compute and the graphics list may both name a process, with the same bytes.
        self.used = if self.ns == ns { self.used.max(used) } else { used };
        self.ns = ns;
        if self.used.abs_diff(self.steady_used) > STEADY.max(self.steady_used / 256) {
            self.steady_since_ns = ns;
            self.steady_used = self.used;
        }
    }
}

/// Places remembered for one process.
const PLACES: usize = 8;
/// Kernel messages remembered for one process.
const MESSAGES: usize = 8;
/// Exited threads remembered for one process.
const THREADS: usize = 8192;

/// What is known of one process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Who.
    pub id: Identity,
    /// Its name.
    pub comm: Text,
    /// How it became known.
    pub seen: Seen,
    /// When it became known.
    pub seen_ns: u64,
    /// Who made it, as recorded at the fork or, for older processes, when it became known. It is
    /// never derived from the current parent, which changes when the parent dies.
    pub parent: Option<Identity>,
    /// Current parent's process id.
    pub ppid: u32,
    /// Number of recorded ancestors.
    pub depth: u16,
    /// Children that are remembered.
    pub children: BTreeSet<Identity>,
    /// Where it was and is; the first and the latest are kept.
    pub places: Vec<Place>,
    /// Whether its control group was removed under it.
    pub cgroup_deleted: bool,
    /// Container id.
    pub container: Option<Text>,
    /// `namespace/name` of the pod.
    pub pod: Option<Text>,
    /// Process id in its own namespace.
    pub nspid: Option<u32>,
    /// When it was forked, if that was seen.
    pub forked_ns: Option<u64>,
    /// The parent it had before it was adopted by another, and when that was noticed.
    pub reparented: Option<(u32, u64)>,
    /// Where its image comes from.
    pub image: Image,
    /// Whether it had device files open when it became known.
    pub gpu_files: bool,
    /// State as /proc told it last.
    pub state: Option<State>,
    /// Last time anything showed it alive.
    pub alive_ns: u64,
    /// Last signal sent to it.
    pub signal: Option<(i32, u64)>,
    /// Threads that exited.
    pub exited_threads: BTreeSet<u32>,
    /// Its end.
    pub death: Option<Death>,
    /// When it was found to have left the process table.
    pub gone_ns: Option<u64>,
    /// Its last driver call that asked for something (not a release).
    pub last_demand_ns: Option<u64>,
    /// Its last driver call of any kind.
    pub last_call_ns: Option<u64>,
    /// Last time a metric of the service it provides changed.
    pub service_ns: Option<u64>,
    /// Its GPU memory; absent while it never used a GPU.
    pub books: Option<Box<Books>>,
    /// NVML's rows by device and MIG instance.
    pub rows: BTreeMap<(u32, Option<u32>), Row>,
    /// What it offered to other processes, by id.
    pub exports: BTreeMap<OpaqueId, Export>,
    /// Whether it was checkpointed, once somebody tried.
    pub checkpoint: Option<Checkpoint>,
    /// What it had mapped of the driver, once that was looked at.
    pub driver_maps: Option<Box<DriverMaps>>,
    /// Kernel messages about it, oldest first.
    pub kernel_messages: Vec<KernelMessage>,
    /// The name it had before it renamed itself, and when it did.
    pub renamed: Option<(Text, u64)>,
    /// The pulse in which it was last noted as active.
    pub(super) active_in: u64,
}

impl Process {
    pub(super) fn new(id: Identity, seen: Seen, ns: u64) -> Self {
        Self {
            id,
            comm: Text::default(),
            seen,
            seen_ns: ns,
            parent: None,
            ppid: 0,
            depth: 0,
            children: BTreeSet::new(),
            places: Vec::new(),
            cgroup_deleted: false,
            container: None,
            pod: None,
            nspid: None,
            forked_ns: None,
            reparented: None,
            image: Image::Unknown,
            gpu_files: false,
            state: None,
            alive_ns: ns,
            signal: None,
            exited_threads: BTreeSet::new(),
            death: None,
            gone_ns: None,
            last_demand_ns: None,
            last_call_ns: None,
            service_ns: None,
            books: None,
            rows: BTreeMap::new(),
            exports: BTreeMap::new(),
            checkpoint: None,
            driver_maps: None,
            kernel_messages: Vec::new(),
            renamed: None,
            active_in: 0,
        }
    }

    /// The MIG instance of a device that it was last billed on, or `None` for the whole device.
    pub fn instance(&self, device: u32) -> Option<u32> {
        let on = self.rows.range((device, None)..=(device, Some(u32::MAX)));
        on.max_by_key(|(_, row)| row.ns).and_then(|(&(_, gi), _)| gi)
    }

    /// Whether it has not been seen to end.
    pub fn is_alive(&self) -> bool {
        self.death.is_none()
    }

    /// Whether it ever used a GPU, as far as can be seen.
    pub fn uses_gpu(&self) -> bool {
        self.books.is_some() || !self.rows.is_empty() || self.gpu_files
    }

    /// When it first used a GPU, as far as can be seen.
    pub fn first_gpu_ns(&self) -> Option<u64> {
        // Files that were open at attach were opened at some time before.
        let attached = self.gpu_files.then_some(self.id.start_ns);
        let called = self.books.as_ref().map(|books| books.first_ns);
        let billed = self.rows.values().map(|row| row.first_ns).min();
        [attached, called, billed].into_iter().flatten().min()
    }

    /// Device memory in its ledger.
    pub fn outstanding(&self) -> u64 {
        self.books.as_ref().map_or(0, |books| books.bytes)
    }

    /// Pinned host memory in its ledger.
    pub fn pinned(&self) -> u64 {
        self.books.as_ref().map_or(0, |books| books.host.bytes)
    }

    /// Current control group.
    pub fn cgroup(&self) -> Option<&Text> {
        self.places.last().map(|place| &place.cgroup)
    }

    /// Batch jobs its control groups named, oldest first.
    pub fn jobs(&self) -> impl Iterator<Item = &str> {
        self.places.iter().filter_map(|place| job_of(&place.cgroup))
    }

    /// Whether both were ever under the same owner: container, pod, job, or control group.
    pub fn shared_owner_with(&self, other: &Self) -> bool {
        match (&self.container, &other.container) {
            (Some(mine), Some(theirs)) => return mine == theirs,
            // Whoever runs containers does not own what is inside.
            (Some(_), None) if !other.places.is_empty() => return false,
            _ => {}
        }
        if self.places.is_empty() || other.places.is_empty() {
            // Nothing tells them apart: the lineage alone decides.
            return true;
        }
        self.working_places().any(|mine| other.places.iter().any(|theirs| mine.cgroup == theirs.cgroup))
            || self.jobs().any(|job| other.jobs().any(|theirs| theirs == job))
            || self.pod.is_some() && self.pod == other.pod
    }

    /// Places it was in when it first used a GPU, or later. Those it only passed through while it
    /// was being set up (a container starts in its runtime's control group) own nothing of it.
    fn working_places(&self) -> impl Iterator<Item = &Place> {
        let since = self.first_gpu_ns().unwrap_or(0);
        let first = self.places.iter().rposition(|place| place.ns <= since).unwrap_or(0);
        self.places.iter().skip(first)
    }

    /// A child is where its parent is until something else is told.
    pub(super) fn inherit_place(&mut self, place: Option<Place>, container: Option<Text>, pod: Option<Text>, ns: u64) {
        if self.places.is_empty()
            && let Some(place) = place
        {
            self.places.push(Place { ns, ..place });
            self.container = self.container.take().or(container);
            self.pod = self.pod.take().or(pod);
        }
    }

    pub(super) fn moved(&mut self, cgroup: &str, ns: u64) {
        let (path, deleted) = match cgroup.strip_suffix(" (deleted)") {
            Some(path) => (path, true),
            None => (cgroup, false),
        };
        if path.is_empty() {
            return;
        }
        self.cgroup_deleted = deleted;
        if self.places.last().is_some_and(|place| place.cgroup == path) {
            return;
        }
        if self.places.len() == PLACES {
            // The first place names the owner it was born under: keep it, and the latest.
            self.places.remove(1);
        }
        self.places.push(Place { ns, cgroup: path.into() });
    }

    pub(super) fn told_state(&mut self, letter: &Text, wchan: Option<&Text>, ns: u64) {
        match self.state.as_mut().filter(|state| state.letter == *letter) {
            Some(state) => {
                state.ns = ns;
                state.times = state.times.saturating_add(1);
                state.wchan = wchan.cloned().or(state.wchan.take());
            }
            None => {
                self.state = Some(State { letter: letter.clone(), ns, since_ns: ns, times: 1, wchan: wchan.cloned() });
            }
        }
    }

    pub(super) fn told_by_kernel(&mut self, message: KernelMessage) {
        if self.kernel_messages.len() == MESSAGES {
            self.kernel_messages.remove(0);
        }
        self.kernel_messages.push(message);
    }

    pub(super) fn thread_exited(&mut self, tid: u32) {
        if self.exited_threads.len() < THREADS {
            self.exited_threads.insert(tid);
        }
    }
}

/// The batch job a control group path names: `job_881` (Slurm), `jobid/12.server` (PBS).
pub(crate) fn job_of(cgroup: &str) -> Option<&str> {
    let mut parts = cgroup.split('/').peekable();
    while let Some(part) = parts.next() {
        if part == "jobid" {
            return parts.peek().copied().filter(|id| !id.is_empty());
        }
        let id =
            part.strip_prefix("job_").or_else(|| part.strip_prefix("job-")).or_else(|| part.strip_prefix("pbspro-"));
        if let Some(id) = id {
            let id = id.strip_suffix(".slice").or_else(|| id.strip_suffix(".scope")).unwrap_or(id);
            if !id.is_empty() {
                return Some(id);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{Process, Seen, job_of};
    use crate::record::Identity;

    #[test]
    fn jobs_are_read_from_control_groups() {
        assert_eq!(job_of("/system.slice/slurmstepd.scope/job_881/step_0"), Some("881"));
        assert_eq!(job_of("/slurm/uid_1000/job_77/step_batch"), Some("77"));
        assert_eq!(job_of("/pbs_jobs.service/jobid/12.server"), Some("12.server"));
        assert_eq!(job_of("/kubepods.slice/pod-a1/cri-7f01"), None);
        assert_eq!(job_of("/job_"), None);
    }

    #[test]
    fn places_keep_the_first_and_the_latest() {
        let mut process = Process::new(Identity { tgid: 1, start_ns: 1 }, Seen::Fork, 0);
        for index in 0..20 {
            process.moved(&format!("/g{index}"), index);
        }
        process.moved("/g19 (deleted)", 30);
        assert_eq!(process.places.len(), 8);
        assert_eq!(process.places[0].cgroup, "/g0");
        assert_eq!(process.places[7].cgroup, "/g19");
        assert!(process.cgroup_deleted);
    }
}
