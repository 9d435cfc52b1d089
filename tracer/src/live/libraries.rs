//! Driver libraries on this host, and the probes on them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::probe::{
    Kernel, KernelError,
    discover::{DiscoverConfig, Discovery, Found, Origin, Refused, Scope},
    kernel::LibraryProbes,
    library::LibraryIdentity,
};
use crate::record::{Event, Identity, Task, Text};
use crate::untrusted::printable;

/// How long after an exec a process is looked at for newly mapped libraries: dynamic loading is
/// over by then, and what is loaded later on demand is found by the full search.
const LOADING: Duration = Duration::from_secs(10);

/// The driver libraries met so far.
#[derive(Default)]
pub(super) struct Libraries {
    config: DiscoverConfig,
    attached: Vec<Attached>,
    /// Libraries that cannot be traced and of which that has been said, by process; 0 for none.
    told: BTreeMap<u32, BTreeSet<String>>,
    loading: BTreeMap<u32, Instant>,
}

struct Attached {
    identity: LibraryIdentity,
    path: String,
    points: usize,
    probes: LibraryProbes,
}

impl Libraries {
    /// Looks where the configuration says.
    pub(super) fn new(config: DiscoverConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Where to look.
    pub(super) fn config(&self) -> &DiscoverConfig {
        &self.config
    }

    /// Libraries that carry probes.
    pub(super) fn attached(&self) -> impl Iterator<Item = &str> {
        self.attached.iter().map(|library| library.path.as_str())
    }

    /// Entry points that carry probes.
    pub(super) fn probes(&self) -> usize {
        self.attached.iter().map(|library| library.points).sum()
    }

    /// A process replaced its image: it may map a library not met before.
    pub(super) fn executed(&mut self, pid: u32, now: Instant) {
        self.loading.insert(pid, now + LOADING);
    }

    /// A process ended.
    pub(super) fn ended(&mut self, pid: u32) {
        self.loading.remove(&pid);
        self.told.remove(&pid);
    }

    /// Looks at the processes that may be loading libraries now.
    pub(super) fn search_loading(&mut self, now: Instant) -> Discovery {
        self.loading.retain(|_, until| *until > now);
        let mut discovery = Discovery::default();
        for pid in self.loading.keys() {
            discovery.search_process(&self.config.proc_root, *pid);
        }
        discovery
    }

    /// Puts probes on the libraries that have none yet. What cannot be traced is told, once for
    /// each process it concerns.
    pub(super) fn adopt(&mut self, kernel: &mut Kernel, discovery: Discovery) -> Vec<Event> {
        let mut events = Vec::new();
        let in_scope = |found: &Found| self.config.scope == Scope::Host || found.origin == Origin::Configured;
        let found: Vec<Found> = discovery.found.into_iter().filter(in_scope).collect();
        for found in found {
            if !self.attached.iter().any(|library| library.identity.is_same_file(&found.library.identity)) {
                self.attach(kernel, &found, &mut events);
            }
        }
        for refused in discovery.refused {
            self.tell(&refused, &mut events);
        }
        events
    }

    fn attach(&mut self, kernel: &mut Kernel, found: &Found, events: &mut Vec<Event>) {
        let library = &found.library;
        let path = library.path.display().to_string();
        let status = |status: &str, reason: Option<String>| Event::ProbeStatus {
            tgid: None,
            start_ns: None,
            path: Some(shown(&path)),
            inode: Some(library.identity.inode),
            status: status.into(),
            reason: reason.map(|reason| shown(&reason)),
        };
        match kernel.attach(&library.attach_path(), &library.points) {
            Ok(probes) => {
                events.push(status("ok", None));
                self.attached.push(Attached {
                    identity: library.identity.clone(),
                    path,
                    points: library.points.len(),
                    probes,
                });
            }
            Err(error) => {
                if self.told.entry(0).or_default().insert(path.clone()) {
                    events.push(status("failed", Some(error.to_string())));
                }
            }
        }
    }

    fn tell(&mut self, refused: &Refused, events: &mut Vec<Event>) {
        let path = refused.path.display().to_string();
        for pid in &refused.pids {
            if !self.told.entry(*pid).or_default().insert(path.clone()) {
                continue;
            }
            let identity = self.config.proc_root.identity(*pid).unwrap_or(Identity { tgid: *pid, start_ns: 0 });
            events.push(Event::LibraryMap {
                task: Task { pid: *pid, identity, comm: Text::default() },
                path: shown(&path),
                inode: None,
                status: Some("untraced".into()),
                reason: Some(shown(&refused.reason.to_string())),
            });
        }
    }

    /// Takes every probe off.
    pub(super) fn detach(self, kernel: &mut Kernel) -> Result<(), KernelError> {
        self.attached.into_iter().try_for_each(|library| kernel.detach(library.probes))
    }
}

/// Paths and reasons come from containers.
fn shown(text: &str) -> Text {
    printable(text.as_bytes(), 1024)
}
