//! What /proc tells of the processes that matter: those that call the driver, hold its device files
//! or are billed by NVML.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use crate::proc::{self, Presence, ProcRoot, Watch};
use crate::record::{Event, Identity, Task, Text};

/// How long the kernel's event of an end may take to be read. Longer means that it was lost.
const EVENT_DELAY: Duration = Duration::from_millis(500);

/// Processes that matter and have not left the process table.
#[derive(Debug)]
pub(super) struct Processes {
    root: ProcRoot,
    known: BTreeMap<Identity, Known>,
    /// Identities of processes whose start the kernel side does not tell, by number.
    numbers: HashMap<u32, Identity>,
}

#[derive(Debug)]
struct Known {
    comm: Text,
    /// `None` when the process was gone before it could be watched.
    watch: Option<Watch>,
    exited: bool,
    /// When it was first seen to have ended without an event.
    ended_at: Option<Instant>,
}

impl Known {
    fn presence(&self, root: &ProcRoot, identity: Identity) -> Presence {
        match &self.watch {
            Some(watch) => watch.presence().unwrap_or(Presence::Running),
            None => match proc::look_up(root, identity, &self.comm) {
                Ok(Event::ProcAbsent { .. }) => Presence::Reaped,
                _ => Presence::Running,
            },
        }
    }
}

impl Processes {
    /// None yet.
    pub(super) fn new(root: ProcRoot) -> Self {
        Self { root, known: BTreeMap::new(), numbers: HashMap::new() }
    }

    /// Identity of the process that has this number now.
    pub(super) fn identity(&self, pid: u32) -> Option<Identity> {
        self.root.identity(pid).ok()
    }

    /// The same, remembered: for kernel events that tell only a number, also when the process is
    /// gone by the time they are read.
    pub(super) fn numbered(&mut self, pid: u32) -> Option<Identity> {
        if let Some(identity) = self.numbers.get(&pid) {
            return Some(*identity);
        }
        let identity = self.identity(pid)?;
        self.numbers.insert(pid, identity);
        Some(identity)
    }

    /// A number may be another process's from now on.
    pub(super) fn forget_number(&mut self, pid: u32) {
        self.numbers.remove(&pid);
    }

    /// Watches a process of which everything else is already told.
    pub(super) fn watch(&mut self, identity: Identity, comm: &Text) -> bool {
        if self.known.contains_key(&identity) {
            return false;
        }
        let watch = Watch::open(&self.root, identity).ok();
        self.known.insert(identity, Known { comm: comm.clone(), watch, exited: false, ended_at: None });
        true
    }

    /// Whether this process is known to matter.
    pub(super) fn knows(&self, identity: Identity) -> bool {
        self.known.contains_key(&identity)
    }

    /// A process turned out to matter; its start, if it is new and still there to be looked at.
    pub(super) fn meet(&mut self, identity: Identity, comm: &Text) -> Option<Event> {
        if !self.watch(identity, comm) {
            return None;
        }
        match proc::proc_start(&self.root, identity.tgid) {
            Ok(event @ Event::ProcStart { .. }) if belongs_to(&event, identity) => Some(event),
            _ => None,
        }
    }

    /// The last thread of a process exited. Whether the process mattered.
    pub(super) fn exited(&mut self, identity: Identity) -> bool {
        self.known.get_mut(&identity).map(|known| known.exited = true).is_some()
    }

    /// Processes that have ended or left the process table since last asked. An end whose kernel
    /// event did not arrive is told here, without its code.
    pub(super) fn reaped(&mut self) -> Vec<Event> {
        let root = &self.root;
        let mut events = Vec::new();
        self.known.retain(|identity, known| {
            let presence = known.presence(root, *identity);
            if presence != Presence::Running && !known.exited {
                // The kernel's own event settles a moment later than this can be seen.
                if known.ended_at.get_or_insert_with(Instant::now).elapsed() < EVENT_DELAY {
                    return true;
                }
                known.exited = true;
                let task = Task { pid: identity.tgid, identity: *identity, comm: known.comm.clone() };
                events.push(Event::Exit { task, ppid: 0, code: None, signal: 0, group_dead: true });
            }
            if presence == Presence::Reaped {
                events.push(known.watch.as_ref().map_or_else(|| proc::absent(*identity, &known.comm), Watch::reaped));
            }
            presence != Presence::Reaped
        });
        events
    }

    /// The state of every process that matters.
    pub(super) fn states(&self) -> Vec<Event> {
        let state = |(identity, known): (&Identity, &Known)| proc::look_up(&self.root, *identity, &known.comm).ok();
        self.known.iter().filter_map(state).filter(|event| matches!(event, Event::ProcState { .. })).collect()
    }

    /// Processes that matter and live, with their names.
    pub(super) fn living(&self) -> Vec<(Identity, Text)> {
        let living = self.known.iter().filter(|(_, known)| !known.exited);
        living.map(|(identity, known)| (*identity, known.comm.clone())).collect()
    }

    /// Whether this number belongs to a process that matters and lives.
    pub(super) fn is_alive(&self, pid: u32) -> bool {
        let pids = Identity { tgid: pid, start_ns: 0 }..=Identity { tgid: pid, start_ns: u64::MAX };
        self.known.range(pids).any(|(_, known)| !known.exited)
    }

    /// Numbers of the processes that matter.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.known.keys().map(|identity| identity.tgid).collect()
    }
}

fn belongs_to(event: &Event, identity: Identity) -> bool {
    matches!(event, Event::ProcStart { life } if life.task.identity == identity)
}
