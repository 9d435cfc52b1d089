//! The kernel side at work: probes on libraries, the event stream, losses and their repair.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use tokio::io::{Interest, unix::AsyncFd};
use tracer_ebpf::{CallEvent, EventKind, ProcessEvent, ProcessKey, symbols::Op};

use super::{
    Live, Problem,
    books::{Failures, KernelBooks, ProcessBooks},
    clock::boot_ns,
    libraries::Libraries,
    repair::{self, Devices, Repair},
    translate,
};
use crate::{
    gpu::Attribution,
    probe::{
        AttachMethod, Kernel, KernelConfig, KernelError,
        discover::{self, DiscoverConfig, Discovery},
        stream::{KernelEvent, Stream},
    },
    record::{Event, Identity, Record},
};

/// Seconds after which the kernel's state of an ended process is dropped: its last events have been
/// read by then.
const KEEP_ENDED_NS: u64 = 2_000_000_000;

/// What taking off one perf probe costs: the kernel waits for every CPU to have left it.
const DETACH_ONE: Duration = Duration::from_millis(115);

/// The kernel side, attached.
pub(super) struct Tracing {
    wakeups: AsyncFd<OwnedFd>,
    libraries: Libraries,
    stream: Stream,
    kernel: Kernel,
    repair: Repair,
    /// Processes that exited, and when; those with kernel state are dropped after a while.
    ended: HashMap<ProcessKey, u64>,
    books: Vec<ProcessBooks>,
    failures: Failures,
    processes_lost: u64,
}

impl Devices for Attribution {
    fn index(&self, process: &ProcessKey, ordinal: i32) -> Option<u32> {
        self.device(translate::identity(process.tgid, process.start_ns), u32::try_from(ordinal).ok()?)
    }
}

impl Tracing {
    /// Loads the programs and listens to process lives. Libraries are adopted by the caller.
    pub(super) fn start(config: &KernelConfig, discover: DiscoverConfig) -> Result<Self, KernelError> {
        let mut kernel = Kernel::load(config)?;
        let stream = Stream::new(kernel.take_rings()?);
        // A descriptor of its own: the ring's is closed with the stream, whenever that is.
        let wakeups = rustix::io::fcntl_dupfd_cloexec(stream.calls_fd(), 3)
            .map_err(io::Error::from)
            // SAFETY: an owned descriptor stays open, and the same, as long as it is registered.
            .and_then(|fd| unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from))
            .map_err(|source| KernelError::Wait { source })?;
        Ok(Self {
            wakeups,
            libraries: Libraries::new(discover),
            stream,
            kernel,
            repair: Repair::default(),
            ended: HashMap::new(),
            books: Vec::new(),
            failures: Failures::default(),
            processes_lost: 0,
        })
    }

    /// Searches the whole host for driver libraries.
    pub(super) fn search(&self) -> Discovery {
        discover::discover(self.libraries.config())
    }

    /// Searches the processes that are loading libraries.
    pub(super) fn search_loading(&mut self, now: Instant) -> Discovery {
        self.libraries.search_loading(now)
    }

    /// Where libraries are searched.
    pub(super) fn discover_config(&self) -> &DiscoverConfig {
        self.libraries.config()
    }

    /// Libraries that carry probes.
    pub(super) fn libraries(&self) -> impl Iterator<Item = &str> {
        self.libraries.attached()
    }

    /// Entry points that carry probes.
    pub(super) fn probes(&self) -> usize {
        self.libraries.probes()
    }

    /// How long taking the probes off will take, where the kernel takes them off one by one.
    pub(super) fn slow_detach(&self) -> Option<Duration> {
        let one_by_one = self.kernel.attach_method() == AttachMethod::Perf;
        let wait = DETACH_ONE * u32::try_from(2 * self.probes()).unwrap_or(u32::MAX);
        (one_by_one && wait >= Duration::from_secs(1)).then_some(wait)
    }

    /// Puts probes on new libraries.
    pub(super) fn adopt(&mut self, discovery: Discovery) -> (Vec<Event>, Option<Problem>) {
        let before = self.libraries.attached().count();
        let events = self.libraries.adopt(&mut self.kernel, discovery);
        let first = before == 0 && self.libraries.attached().count() > 0;
        let failed = if first { self.kernel.set_traced_since(boot_ns()).err() } else { None };
        (events, failed.as_ref().map(problem))
    }

    /// A process replaced its image.
    pub(super) fn executed(&mut self, pid: u32, now: Instant) {
        self.libraries.executed(pid, now);
    }

    /// Reads the stream into records; also up to when it is complete.
    pub(super) fn read(&mut self, now_ns: u64, live: &mut Live) -> (Vec<Record>, u64) {
        let mut records = Vec::new();
        for event in self.stream.read(now_ns) {
            match event {
                KernelEvent::Call(event) => self.call(&event, live, &mut records),
                KernelEvent::Life(event) => self.life(&event, live, &mut records),
            }
        }
        (records, Stream::settled_ns(now_ns))
    }

    fn call(&mut self, event: &CallEvent, live: &mut Live, records: &mut Vec<Record>) {
        self.repair.follow(event);
        if event.result != 0 {
            self.failures.note(event);
        }
        let identity = live.identity(event.tgid, event.process_start_ns);
        // Once for each process: it may be gone by now, and its events many.
        if !live.processes.knows(identity) {
            let start = live.processes.meet(identity, &translate::comm(&event.comm));
            records.extend(start.map(|start| at(event.ts_ns, start)));
            live.learn_environment(identity);
        }
        let ordinal = translate::ordinal(event);
        let is_uuid = translate::symbol(event).is_some_and(|symbol| symbol.op == Op::DeviceUuid);
        if let (true, 0, Some(ordinal)) = (is_uuid, event.result, ordinal) {
            live.attribution.learn_uuid(identity, ordinal, translate::uuid(event));
        }
        let device = ordinal.and_then(|ordinal| live.attribution.device(identity, ordinal));
        records.extend(translate::call(event, identity, device).map(|said| at(event.ts_ns, said)));
    }

    fn life(&mut self, event: &ProcessEvent, live: &mut Live, records: &mut Vec<Record>) {
        let mut event = *event;
        if event.process_start_ns == 0 && !complete_untyped(&mut event, live) {
            return;
        }
        let identity = live.identity(event.tgid, event.process_start_ns);
        let now = Instant::now();
        match EventKind::from_raw(event.kind) {
            Some(EventKind::Exec) => {
                live.attribution.forget(identity);
                if live.processes.knows(identity) {
                    live.learn_environment(identity);
                }
                self.libraries.executed(event.tgid, now);
            }
            Some(EventKind::Exit) => {
                let key = ProcessKey { tgid: event.tgid, pad: 0, start_ns: event.process_start_ns };
                // Of two last threads that exit at once each may have said this.
                if self.ended.insert(key, event.ts_ns).is_some() {
                    return;
                }
                self.libraries.ended(event.tgid);
                live.processes.forget_number(event.tgid);
                if live.processes.exited(identity) {
                    live.scanner.ended(now);
                }
            }
            _ => {}
        }
        let parent = (event.parent_tgid != 0).then(|| live.identity(event.parent_tgid, event.parent_start_ns));
        records.extend(translate::life(&event, identity, parent).map(|said| at(event.ts_ns, said)));
    }

    /// A process ended and its event was lost: its state in the kernel is dropped all the same.
    pub(super) fn ended_unseen(&mut self, identity: Identity) -> Option<Problem> {
        self.libraries.ended(identity.tgid);
        let processes = match self.kernel.processes() {
            Ok(processes) => processes,
            Err(error) => return Some(problem(&error)),
        };
        let keys = processes.into_iter().map(|(key, _)| key);
        let its = keys.filter(|key| translate::identity(key.tgid, key.start_ns) == identity);
        self.ended.extend(its.map(|key| (key, boot_ns())));
        None
    }

    /// Looks for lost events, and drops the kernel's state of processes that ended.
    pub(super) fn check(&mut self, attribution: &Attribution) -> (Vec<Event>, Option<Problem>) {
        match self.try_check(attribution) {
            Ok(events) => (events, None),
            Err(error) => (Vec::new(), Some(problem(&error))),
        }
    }

    fn try_check(&mut self, attribution: &Attribution) -> Result<Vec<Event>, KernelError> {
        let mut events = self.repair.check(&self.kernel, boot_ns)?;
        let counters = self.kernel.counters()?;
        let lost = counters[tracer_ebpf::Counter::ProcessesLost as usize] + self.stream.malformed();
        if lost > self.processes_lost {
            let count = lost - self.processes_lost;
            events.push(Event::LostEvents { count, cpu: None, since_ns: None, tgid: None, start_ns: None });
            self.processes_lost = lost;
        }
        self.bury(attribution)?;
        Ok(events)
    }

    /// Keeps the last books of ended processes and drops their entries.
    fn bury(&mut self, attribution: &Attribution) -> Result<(), KernelError> {
        let now_ns = boot_ns();
        let gone: BTreeSet<(u32, u64)> = self
            .ended
            .iter()
            .filter(|(_, ended_ns)| now_ns.saturating_sub(**ended_ns) >= KEEP_ENDED_NS)
            .map(|(key, _)| (key.tgid, key.start_ns))
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        self.ended.retain(|key, _| !gone.contains(&(key.tgid, key.start_ns)));
        let processes = self.kernel.processes()?;
        let dead: HashSet<ProcessKey> =
            processes.iter().map(|(key, _)| *key).filter(|key| gone.contains(&(key.tgid, key.start_ns))).collect();
        if dead.is_empty() {
            return Ok(());
        }
        let accounts = self.kernel.accounts()?.into_iter().collect();
        for (key, process) in processes.iter().filter(|(key, _)| dead.contains(key)) {
            let failures = self.failures.take(key);
            self.books.push(ProcessBooks::new(key, process, true, failures, &accounts, attribution));
            self.repair.forget(key);
        }
        super::books::trim(&mut self.books);
        self.kernel.forget(&dead, repair::remains(&processes, &gone))
    }

    /// Books repaired after losses, as records, once the stream has caught up.
    pub(super) fn repaired(&mut self, settled_ns: u64, attribution: &Attribution) -> Vec<Record> {
        let ts_ns = settled_ns.min(boot_ns());
        self.repair.finished(settled_ns, attribution).into_iter().map(|event| at(ts_ns, event)).collect()
    }

    /// Takes the probes off, and reads for the last time what was lost.
    pub(super) fn detach(&mut self) -> (Vec<Event>, Option<Problem>) {
        let losses = std::mem::take(&mut self.libraries)
            .detach(&mut self.kernel)
            .and_then(|()| self.repair.check_last(&self.kernel));
        match losses {
            Ok(events) => (events, None),
            Err(error) => (Vec::new(), Some(problem(&error))),
        }
    }

    /// What the kernel side has on every process, and what it counted.
    pub(super) fn books(&mut self, attribution: &Attribution) -> Result<KernelBooks, Problem> {
        self.read_books(attribution).map_err(|error| problem(&error))
    }

    fn read_books(&mut self, attribution: &Attribution) -> Result<KernelBooks, KernelError> {
        let processes = self.kernel.processes()?;
        let accounts = self.kernel.accounts()?.into_iter().collect();
        let mut books = std::mem::take(&mut self.books);
        for (key, process) in &processes {
            let failures = self.failures.take(key);
            let ended = self.ended.contains_key(key);
            books.push(ProcessBooks::new(key, process, ended, failures, &accounts, attribution));
        }
        let open_calls = self.kernel.open_calls()?;
        Ok(KernelBooks::new(self.kernel.counters()?, open_calls, self.stream.malformed(), books))
    }
}

/// Waits until the ring of calls is filling up; for ever where there is none.
pub(super) async fn woken(tracing: Option<&mut Tracing>) {
    match tracing {
        Some(tracing) => {
            if let Ok(mut ready) = tracing.wakeups.readable().await {
                ready.clear_ready();
            }
        }
        None => std::future::pending().await,
    }
}

fn at(ts_ns: u64, event: Event) -> Record {
    Record { ts_ns, occurred_ns: None, event }
}

fn problem(error: &KernelError) -> Problem {
    Problem { part: "eBPF maps", reason: error.to_string() }
}

/// On a kernel without type information a fork may be a thread's and a main thread's exit not its
/// process's: /proc tells, and the event is corrected. `false` when it says nothing about a process.
fn complete_untyped(event: &mut ProcessEvent, live: &mut Live) -> bool {
    match EventKind::from_raw(event.kind) {
        Some(EventKind::Fork) => {
            live.processes.forget_number(event.tgid);
            live.root.process(event.tgid).and_then(|child| child.tgid()).is_ok_and(|tgid| tgid == event.tgid)
        }
        Some(EventKind::Exit) => {
            let threads =
                live.root.process(event.tgid).and_then(|process| process.stat()).map_or(0, |stat| stat.threads);
            if threads > 1 {
                event.kind = EventKind::ThreadExit as u32;
            }
            true
        }
        _ => true,
    }
}

impl Live {
    /// A process by number and start; where the kernel does not tell the start, /proc does.
    fn identity(&mut self, tgid: u32, start_ns: u64) -> Identity {
        if start_ns == 0 {
            return self.processes.numbered(tgid).unwrap_or(Identity { tgid, start_ns: 0 });
        }
        translate::identity(tgid, start_ns)
    }
}
