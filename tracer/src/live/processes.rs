//! What /proc tells of the processes that matter: those that call the driver, hold its device files
//! or are billed by NVML.

use std::collections::{BTreeMap, BTreeSet};

use crate::proc::{self, Presence, ProcRoot, Watch};
use crate::record::{Event, Identity, Text};

/// Processes that matter and have not left the process table.
#[derive(Debug)]
pub struct Processes {
    root: ProcRoot,
    known: BTreeMap<Identity, Known>,
}

#[derive(Debug)]
struct Known {
    comm: Text,
    /// `None` when the process was gone before it could be watched.
    watch: Option<Watch>,
    exited: bool,
}

impl Processes {
    /// None yet.
    pub fn new(root: ProcRoot) -> Self {
        Self { root, known: BTreeMap::new() }
    }

    /// Where facts are read from.
    pub fn root(&self) -> &ProcRoot {
        &self.root
    }

    /// Identity of the process that has this number now.
    pub fn identity(&self, pid: u32) -> Option<Identity> {
        self.root.identity(pid).ok()
    }

    /// Watches a process of which everything else is already told.
    pub fn watch(&mut self, identity: Identity, comm: &Text) -> bool {
        if self.known.contains_key(&identity) {
            return false;
        }
        let watch = Watch::open(&self.root, identity).ok();
        self.known.insert(identity, Known { comm: comm.clone(), watch, exited: false });
        true
    }

    /// A process turned out to matter; its start, if it is new and still there to be looked at.
    pub fn meet(&mut self, identity: Identity, comm: &Text) -> Option<Event> {
        if !self.watch(identity, comm) {
            return None;
        }
        match proc::proc_start(&self.root, identity.tgid) {
            Ok(event @ Event::ProcStart { .. }) if belongs_to(&event, identity) => Some(event),
            _ => None,
        }
    }

    /// The last thread of a process exited. Whether the process mattered.
    pub fn exited(&mut self, identity: Identity) -> bool {
        self.known.get_mut(&identity).map(|known| known.exited = true).is_some()
    }

    /// Processes that have left the process table since last asked.
    pub fn reaped(&mut self) -> Vec<Event> {
        let root = &self.root;
        let mut gone = Vec::new();
        self.known.retain(|identity, known| {
            let event = match &known.watch {
                Some(watch) => matches!(watch.presence(), Ok(Presence::Reaped)).then(|| watch.reaped()),
                None => match proc::look_up(root, *identity, &known.comm) {
                    Ok(event @ Event::ProcAbsent { .. }) => Some(event),
                    _ => None,
                },
            };
            let stays = event.is_none();
            gone.extend(event);
            stays
        });
        gone
    }

    /// The state of every process that matters.
    pub fn states(&self) -> Vec<Event> {
        let state = |(identity, known): (&Identity, &Known)| proc::look_up(&self.root, *identity, &known.comm).ok();
        self.known.iter().filter_map(state).filter(|event| matches!(event, Event::ProcState { .. })).collect()
    }

    /// Whether this number belongs to a process that matters and lives.
    pub fn is_alive(&self, pid: u32) -> bool {
        let pids = Identity { tgid: pid, start_ns: 0 }..=Identity { tgid: pid, start_ns: u64::MAX };
        self.known.range(pids).any(|(_, known)| !known.exited)
    }

    /// Numbers of the processes that matter.
    pub fn pids(&self) -> BTreeSet<u32> {
        self.known.keys().map(|identity| identity.tgid).collect()
    }
}

fn belongs_to(event: &Event, identity: Identity) -> bool {
    matches!(event, Event::ProcStart { life } if life.task.identity == identity)
}
