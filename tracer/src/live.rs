//! The live host as a source of records.
//!
//! Kernel events, NVML samples and /proc facts come from different places at different speeds. Here
//! they become one sequence of records in order of time, the only thing the engine sees.

mod books;
mod clock;
mod libraries;
mod processes;
mod repair;
mod sampling;
mod scanning;
mod tracing;
mod translate;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    time::{Interval, MissedTickBehavior, interval},
};

pub use books::{KernelBooks, ProcessBooks};
pub use clock::{Calendar, boot_ns};

use self::{
    processes::Processes,
    sampling::Sampled,
    scanning::{Scanned, Scanner},
    tracing::Tracing,
};
use crate::{
    gpu::{Attribution, DeviceView, Devices, MonitorConfig},
    probe::{
        KernelConfig,
        discover::{DiscoverConfig, Discovery},
    },
    proc::ProcRoot,
    record::{Event, Identity, Record, Text},
};

/// How often the rings are looked into. Early enough that a finding is never late for it, seldom
/// enough to cost nothing; a ring that fills faster wakes its reader.
const READING: Duration = Duration::from_millis(50);
/// How often processes are looked at.
const LOOKING: Duration = Duration::from_secs(1);

/// Names of the parts that may be out of sight.
const NVML: &str = "NVML";
const LIBRARY: &str = "driver library";
const PROBES: &str = "eBPF probes";

/// What to watch, and where.
#[derive(Clone, Debug)]
pub struct LiveConfig {
    /// The kernel side.
    pub kernel: KernelConfig,
    /// Where driver libraries are looked for.
    pub discover: DiscoverConfig,
    /// How NVML is asked.
    pub monitor: MonitorConfig,
    /// How often NVML is asked.
    pub sample_interval: Duration,
    /// Folder of the GPU's device files.
    pub device_folder: PathBuf,
}

/// Something that keeps a part of the host out of sight. The rest goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What is missing.
    pub part: &'static str,
    /// Why, and what to do.
    pub reason: String,
}

/// What remains to be told when tracing ends.
pub struct Finish {
    /// The last records.
    pub records: Vec<Record>,
    /// What the kernel side counted, where it could be read.
    pub books: Option<KernelBooks>,
    /// Parts that could not be seen, as far as not told before.
    pub problems: Vec<Problem>,
}

/// The live host.
pub struct Live {
    root: ProcRoot,
    device_folder: PathBuf,
    tracing: Option<Tracing>,
    processes: Processes,
    attribution: Attribution,
    scanner: Scanner,
    sampled: mpsc::Receiver<(u64, Sampled)>,
    scanned: mpsc::UnboundedReceiver<(u64, Scanned)>,
    reading: Interval,
    looking: Interval,
    /// Records of other sources than the kernel's rings, until the rings have caught up with them.
    waiting: Vec<Record>,
    problems: Vec<Problem>,
}

impl Live {
    /// Puts everything in place that can be. What cannot is told by [`Live::take_problems`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn start(config: LiveConfig) -> Self {
        let root = config.discover.proc_root.clone();
        let mut problems = Vec::new();
        let tracing = match Tracing::start(&config.kernel, config.discover) {
            Ok(tracing) => Some(tracing),
            Err(error) => {
                problems.push(Problem { part: PROBES, reason: error.to_string() });
                None
            }
        };
        let sampled = sampling::start(config.monitor, config.sample_interval);
        let (scanner, scanned) = Scanner::new();
        let mut reading = interval(READING);
        reading.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looking = interval(LOOKING);
        looking.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut live = Self {
            processes: Processes::new(root.clone()),
            root,
            device_folder: config.device_folder,
            tracing,
            attribution: Attribution::new(&Devices::default()),
            scanner,
            sampled,
            scanned,
            reading,
            looking,
            waiting: Vec::new(),
            problems: Vec::new(),
        };
        live.first_look();
        for Problem { part, reason } in problems {
            live.unseen(part, reason);
        }
        live
    }

    /// What is there already: libraries, and the processes that use or hold the devices.
    fn first_look(&mut self) {
        let probes_ok = self.tracing.is_some();
        self.tell(Event::TracerStart { probes_ok, self_tgid: Some(std::process::id()), driver: None });
        let mut users = std::collections::BTreeSet::new();
        if let Some(discovery) = self.tracing.as_ref().map(Tracing::search) {
            users = discovery.users();
            self.adopt(discovery);
            if self.libraries().is_some_and(|libraries| libraries.is_empty()) {
                let reason = "none was found on this host or in a running process; one that is loaded later is traced from then on".to_owned();
                self.unseen(LIBRARY, reason);
            }
        }
        let (scan, known) = scanning::first(&self.root, &self.device_folder, &users);
        let identities: Vec<(Identity, Text)> = known.iter().filter_map(scanning::device_user).collect();
        self.tell_all(known);
        self.tell(scan);
        for (identity, comm) in identities {
            self.processes.watch(identity, &comm);
            self.learn_environment(identity);
        }
    }

    /// Parts of the host that cannot be seen, as far as not told before.
    pub fn take_problems(&mut self) -> Vec<Problem> {
        std::mem::take(&mut self.problems)
    }

    /// Libraries that carry probes; `None` where no probe can be set.
    pub fn libraries(&self) -> Option<Vec<String>> {
        self.tracing.as_ref().map(|tracing| tracing.libraries().map(str::to_owned).collect())
    }

    /// Entry points that carry probes, over all libraries.
    pub fn probes(&self) -> usize {
        self.tracing.as_ref().map_or(0, Tracing::probes)
    }

    /// How long taking the probes off will take, where that is long enough to be told.
    pub fn slow_detach(&self) -> Option<Duration> {
        self.tracing.as_ref().and_then(Tracing::slow_detach)
    }

    /// Has the open files of all processes walked; the answer comes as a record.
    pub fn walk_open_files(&mut self) {
        self.scanner.suspect(Instant::now());
    }

    /// The next records, in order of time. Waits for the next look into the rings at most, and may
    /// be empty. Cancelling loses nothing.
    pub async fn next(&mut self) -> Vec<Record> {
        tokio::select! {
            _ = self.reading.tick() => {}
            () = tracing::woken(self.tracing.as_mut()) => {}
            Some((ts_ns, sampled)) = self.sampled.recv() => self.on_sampled(ts_ns, sampled),
            Some((ts_ns, scanned)) = self.scanned.recv() => self.on_scanned(ts_ns, scanned),
            _ = self.looking.tick() => self.look(),
        }
        self.collect()
    }

    /// A part of the host cannot be seen: the user is told at once, and the report will say so.
    fn unseen(&mut self, part: &'static str, reason: String) {
        self.tell(Event::Unseen { part: part.into(), reason: Some(Text::from(&reason)) });
        self.problems.push(Problem { part, reason });
    }

    fn tell(&mut self, event: Event) {
        self.tell_at(boot_ns(), event);
    }

    fn tell_all(&mut self, events: Vec<Event>) {
        for event in events {
            self.tell(event);
        }
    }

    fn tell_at(&mut self, ts_ns: u64, event: Event) {
        self.waiting.push(Record { ts_ns, occurred_ns: None, event });
    }

    fn on_sampled(&mut self, ts_ns: u64, sampled: Sampled) {
        match sampled {
            Sampled::Devices(devices) => self.attribution.set_devices(&devices),
            Sampled::Samples(samples) => {
                for sample in samples {
                    if let Event::NvmlSample { procs, .. } = &sample {
                        let pids: Vec<u32> = procs.iter().map(|row| row.pid).collect();
                        for pid in pids {
                            self.meet_billed(ts_ns, pid);
                        }
                    }
                    self.tell_at(ts_ns, sample);
                }
            }
            Sampled::Problem(Some(reason)) => self.unseen(NVML, reason),
            Sampled::Problem(None) => self.tell_at(ts_ns, Event::Unseen { part: NVML.into(), reason: None }),
        }
    }

    /// NVML bills a process that has made no call yet, or none since the tracer came.
    fn meet_billed(&mut self, ts_ns: u64, pid: u32) {
        if self.processes.is_alive(pid) {
            return;
        }
        let Some(identity) = self.processes.identity(pid) else {
            // Billed and not there: somebody may hold its files.
            self.scanner.suspect(Instant::now());
            return;
        };
        if let Some(start) = self.processes.meet(identity, &Text::default()) {
            self.tell_at(ts_ns, start);
            self.learn_environment(identity);
            if let Some(tracing) = &mut self.tracing {
                tracing.executed(pid, Instant::now());
            }
        }
    }

    fn on_scanned(&mut self, ts_ns: u64, scanned: Scanned) {
        match scanned {
            Scanned::Holders { scan, unknown } => {
                for event in unknown {
                    if let Some((identity, comm)) = scanning::device_user(&event)
                        && self.processes.watch(identity, &comm)
                    {
                        self.tell_at(ts_ns, event);
                        self.learn_environment(identity);
                    }
                }
                self.tell_at(ts_ns, scan.into_event());
            }
            Scanned::Libraries(discovery) => self.adopt(discovery),
            Scanned::Mappings(events) => {
                for event in events {
                    self.tell_at(ts_ns, event);
                }
            }
        }
    }

    fn adopt(&mut self, discovery: Discovery) {
        let Some(tracing) = &mut self.tracing else { return };
        let none_before = tracing.probes() == 0;
        let (events, problem) = tracing.adopt(discovery);
        let some_now = tracing.probes() > 0;
        self.problems.extend(problem);
        self.tell_all(events);
        if none_before && some_now {
            self.tell(Event::Unseen { part: LIBRARY.into(), reason: None });
        }
    }

    /// Once a second: states, losses, libraries being loaded, and the walks that are due.
    fn look(&mut self) {
        let now = Instant::now();
        self.tell_all(self.processes.states());
        if let Some(tracing) = &mut self.tracing {
            let loading = tracing.search_loading(now);
            let (losses, problem) = tracing.check(&self.attribution);
            self.problems.extend(problem);
            self.scanner.search_libraries(now, tracing.discover_config());
            self.adopt(loading);
            self.tell_all(losses);
        }
        self.scanner.scan_holders(now, &self.root, &self.device_folder, self.processes.pids());
        self.scanner.count_mappings(now, &self.root, &self.device_folder, || self.processes.living());
        self.tell(Event::Tick);
    }

    /// Everything that is known up to a moment ago, in order of time.
    fn collect(&mut self) -> Vec<Record> {
        let now_ns = boot_ns();
        for event in self.processes.reaped() {
            if let Event::Exit { task, .. } = &event {
                let problem = self.tracing.as_mut().and_then(|tracing| tracing.ended_unseen(task.identity));
                self.problems.extend(problem);
                self.scanner.ended(Instant::now());
            }
            self.tell(event);
        }
        let Some(mut tracing) = self.tracing.take() else {
            return in_order(std::mem::take(&mut self.waiting));
        };
        let (mut records, settled_ns) = tracing.read(now_ns, self);
        self.waiting.extend(tracing.repaired(settled_ns, &self.attribution));
        self.tracing = Some(tracing);
        records.extend(self.waiting.extract_if(.., |record| record.ts_ns <= settled_ns));
        in_order(records)
    }

    /// Takes the probes off and tells what the kernel side has counted.
    pub fn finish(mut self) -> Finish {
        let Some(mut tracing) = self.tracing.take() else {
            return Finish { records: in_order(self.waiting), books: None, problems: self.problems };
        };
        // Nothing more comes once the probes are off, so nothing needs to settle.
        let (losses, problem) = tracing.detach();
        self.problems.extend(problem);
        self.tell_all(losses);
        let (rest, _) = tracing.read(u64::MAX, &mut self);
        self.waiting.extend(rest);
        let mut records = in_order(std::mem::take(&mut self.waiting));
        // Last, whatever its time: it replaces what the events before it made of the books.
        records.extend(tracing.repaired(u64::MAX, &self.attribution));
        let (books, problem) = match tracing.books(&self.attribution) {
            Ok(books) => (Some(books), None),
            Err(problem) => (None, Some(problem)),
        };
        self.problems.extend(problem);
        Finish { records, books, problems: self.problems }
    }

    fn learn_environment(&mut self, identity: Identity) {
        let environment = self.root.process(identity.tgid).and_then(|process| {
            let environment = process.cuda_environment()?;
            Ok((environment, process.nspid()?.is_some()))
        });
        if let Ok((environment, contained)) = environment {
            let view = if contained { DeviceView::Container } else { DeviceView::Host };
            self.attribution.learn_environment(
                identity,
                environment.visible_devices.as_deref(),
                environment.device_order.as_deref(),
                view,
            );
        }
    }
}

fn in_order(mut records: Vec<Record>) -> Vec<Record> {
    records.sort_by_key(|record| record.ts_ns);
    records
}
