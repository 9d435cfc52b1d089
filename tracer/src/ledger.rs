//! The state of a host, kept exactly from its records.
//!
//! The ledger knows facts, not verdicts: who lives and who made whom, what each process holds by
//! its calls, what NVML bills, what remains of the dead. Detectors read it. Everything in it is
//! bounded, and no record costs more for the history before it.

pub mod books;
mod calls;
pub mod checkpoint;
pub mod classes;
pub mod cycles;
mod device;
pub mod driver_maps;
mod end_state;
mod holders;
mod life;
mod lineage;
pub mod metrics;
mod nvml;
mod owners;
pub mod process;
pub mod series;
mod sharing;
mod teardown;

pub use device::{Device, Failing, Health, Sample};
pub use holders::{Holder, Proof, Search};
pub use owners::{OwnerEnd, OwnerKind};
pub use process::Process;
pub use sharing::{Export, Hold, Pin};
pub use teardown::{Billed, Teardown};

use crate::engine::EngineConfig;
use crate::record::{self, DeviceBalance, Event, Identity, OpaqueId, Record, Text};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Something a record brought about that detectors may want to act on at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A process died.
    Died(Identity),
    /// A process used a GPU for the first time.
    GpuUser(Identity),
    /// A process created a context.
    Context(Identity),
    /// A process's books contradict themselves: events of it were lost.
    Contradiction(Identity),
}

/// The last walk of the open files.
#[derive(Clone, Debug)]
pub struct Scan {
    /// When.
    pub ns: u64,
    /// Whether all could be read.
    pub complete: bool,
    /// Who has device files open, of those that still live.
    pub holders: Vec<record::Holder>,
    ids: BTreeSet<Identity>,
}

/// A kernel message about a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// When.
    pub ns: u64,
    /// Code, where told.
    pub code: Option<u32>,
    /// Device, where told.
    pub device: Option<u32>,
}

/// Something an administrator did to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// When.
    pub ns: u64,
    /// What, such as `mig_destroy`.
    pub action: Text,
    /// NVML index.
    pub device: Option<u32>,
    /// MIG GPU instance.
    pub gi: Option<u32>,
    /// What came of it, such as `in_use`.
    pub result: Text,
}

/// A request for device memory that was refused because there was none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// When.
    pub ns: u64,
    /// Whose request.
    pub id: Identity,
    /// Its name.
    pub comm: Text,
    /// On which device.
    pub device: Option<u32>,
    /// Bytes asked for.
    pub size: u64,
}

/// Totals of what went wrong with the records themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Events lost.
    pub events: u64,
    /// Last loss.
    pub last_ns: Option<u64>,
    /// Losses after which no process was known that they could belong to.
    pub unassigned: u64,
    /// Releases of unknown handles, over all processes.
    pub unknown_frees: u64,
    /// Facts dropped because a limit was reached.
    pub dropped: u64,
}

/// Requests refused and peaks, kept beyond the life of their processes.
const TALLIES: usize = 65_536;
/// Holders kept of one walk of the open files.
const HOLDERS: usize = 16_384;
/// Kernel messages kept.
const XIDS: usize = 64;
/// Refused requests kept.
const REFUSALS: usize = 64;
/// Administrators' actions kept.
const ADMIN: usize = 64;

/// The state of a host.
#[derive(Debug)]
pub struct Ledger {
    /// Time of the last record.
    pub now: u64,
    /// When the tracer began to listen, once known.
    pub attached_ns: Option<u64>,
    /// Whether the tracer said that its probes are in place.
    pub probes_ok: Option<bool>,
    /// Parts of the host that cannot be seen now, and why.
    pub unseen: BTreeMap<Text, Text>,
    /// The tracer's own process.
    pub self_tgid: Option<u32>,
    /// Version of the driver, where told.
    pub driver: Option<Text>,
    /// Requests refused for lack of memory, oldest first.
    pub refusals: VecDeque<Refused>,
    /// NVML's series by device and MIG instance.
    pub devices: BTreeMap<(u32, Option<u32>), Device>,
    /// The last walk of the open files.
    pub scan: Option<Scan>,
    /// Kernel messages about GPUs, oldest first.
    pub xids: VecDeque<Xid>,
    /// What administrators did, oldest first.
    pub admin: VecDeque<Admin>,
    /// What went wrong with the records.
    pub losses: Losses,
    /// Memory of the dead that has not come back, or only just.
    pub teardowns: BTreeMap<(Identity, u32, Option<u32>), Teardown>,
    // Keys come from the kernel, so a fast hash without defence against chosen keys will do.
    processes: FxHashMap<Identity, Process>,
    by_tgid: FxHashMap<u32, Identity>,
    users: BTreeSet<Identity>,
    active: Vec<Identity>,
    pulse: u64,
    orphaned_parents: BTreeMap<u32, Vec<Identity>>,
    dead: VecDeque<Identity>,
    just_died: Vec<Identity>,
    owners: owners::Owners,
    failed_allocs: BTreeMap<u32, u64>,
    peaks: BTreeMap<u32, u64>,
    metrics: metrics::Metrics,
    exporters: BTreeMap<OpaqueId, Identity>,
    declared_floor: BTreeMap<u32, u64>,
    observers: Vec<Text>,
    remembered_dead: usize,
    remembered_processes: usize,
    held_floor: u64,
    effects: Vec<Effect>,
}

impl Ledger {
    /// An empty ledger.
    pub fn new(config: &EngineConfig) -> Self {
        let mut devices = BTreeMap::new();
        for info in &config.devices {
            devices.insert((info.device, None), Device { total: info.total, ..Device::default() });
        }
        Self {
            now: 0,
            attached_ns: None,
            probes_ok: None,
            unseen: BTreeMap::new(),
            self_tgid: None,
            driver: None,
            refusals: VecDeque::new(),
            devices,
            scan: None,
            xids: VecDeque::new(),
            admin: VecDeque::new(),
            losses: Losses::default(),
            teardowns: BTreeMap::new(),
            processes: FxHashMap::default(),
            by_tgid: FxHashMap::default(),
            users: BTreeSet::new(),
            active: Vec::new(),
            pulse: 1,
            orphaned_parents: BTreeMap::new(),
            dead: VecDeque::new(),
            just_died: Vec::new(),
            owners: owners::Owners::default(),
            failed_allocs: BTreeMap::new(),
            peaks: BTreeMap::new(),
            metrics: metrics::Metrics::default(),
            exporters: BTreeMap::new(),
            declared_floor: config
                .devices
                .iter()
                .filter_map(|info| info.idle_used.map(|used| (info.device, used)))
                .collect(),
            observers: config.observers.clone(),
            remembered_dead: config.remembered_dead,
            remembered_processes: config.remembered_processes,
            held_floor: config.held_floor_bytes,
            effects: Vec::new(),
        }
    }

    /// What the last record brought about.
    pub fn effects(&self) -> &[Effect] {
        &self.effects
    }

    /// A process that is known.
    pub fn process(&self, id: &Identity) -> Option<&Process> {
        self.processes.get(id)
    }

    /// The process that has this number now, or had it last.
    pub fn current(&self, tgid: u32) -> Option<&Process> {
        self.by_tgid.get(&tgid).and_then(|id| self.processes.get(id))
    }

    /// Live processes that use a GPU, in the order of their identities.
    pub fn gpu_users(&self) -> impl Iterator<Item = &Process> {
        self.users.iter().filter_map(|id| self.processes.get(id))
    }

    /// Processes that made driver calls since the last pulse, in no order.
    pub fn active(&self) -> &[Identity] {
        &self.active
    }

    /// Number of processes remembered.
    pub fn process_count(&self) -> usize {
        self.processes.len()
    }

    /// Used bytes of a device without any process, learned or declared.
    pub fn idle_floor(&self, device: u32) -> Option<u64> {
        self.devices
            .get(&(device, None))
            .and_then(|device| device.idle_floor)
            .or_else(|| self.declared_floor.get(&device).copied())
    }

    /// Total memory of a device, once told.
    pub fn total(&self, device: u32, gi: Option<u32>) -> Option<u64> {
        self.devices.get(&(device, gi)).and_then(|device| device.total)
    }

    /// Bytes a live process holds on a device: as billed in the last sample, else by its calls.
    pub fn held(&self, process: &Process, device: u32) -> u64 {
        self.billed(process, device).unwrap_or_else(|| {
            process
                .books
                .as_ref()
                .and_then(|books| books.devices.get(&Some(device)))
                .map_or(0, |books| books.owned.bytes)
        })
    }

    /// Bytes that the last sample of a device bills a live process.
    pub fn billed(&self, process: &Process, device: u32) -> Option<u64> {
        let mut sum = None;
        for (&(on, gi), row) in &process.rows {
            let current = on == device
                && self.devices.get(&(on, gi)).and_then(|device| device.last).is_some_and(|last| last.ns == row.ns);
            if current {
                sum = Some(sum.unwrap_or(0_u64).max(row.used));
            }
        }
        sum
    }

    /// Devices a process is known to hold memory or a context on.
    pub fn devices_of(&self, process: &Process) -> BTreeSet<u32> {
        let rows = process.rows.keys().map(|&(device, _)| device);
        let books = process.books.iter().flat_map(|books| {
            books
                .devices
                .keys()
                .filter_map(|device| *device)
                .chain(books.contexts.iter().filter_map(|context| context.device))
        });
        rows.chain(books).collect()
    }

    /// The end of whoever owned a process, if one was told after the process was born.
    pub fn owner_end(&self, process: &Process) -> Option<OwnerEnd> {
        self.owners.end_of(process)
    }

    /// Takes a record in.
    pub(crate) fn apply(&mut self, record: &Record) {
        self.effects.clear();
        self.forget_the_idle();
        self.now = self.now.max(record.ts_ns);
        match &record.event {
            Event::Alloc { .. }
            | Event::Free { .. }
            | Event::FreeRefused { .. }
            | Event::HostAlloc { .. }
            | Event::HostFree { .. }
            | Event::Map { .. }
            | Event::Unmap { .. }
            | Event::CtxCreate { .. }
            | Event::CtxDestroy { .. }
            | Event::IpcExport { .. }
            | Event::IpcImport { .. }
            | Event::IpcClose { .. }
            | Event::PoolAttr { .. }
            | Event::PoolTrim { .. }
            | Event::ModuleLoad { .. }
            | Event::ModuleUnload { .. }
            | Event::VaReserve { .. }
            | Event::Checkpoint { .. } => self.apply_call(record),
            Event::NvmlSample { .. } => self.apply_sample(record),
            Event::FdScan { complete, holders } => {
                let kept = holders.len().min(HOLDERS);
                self.scan = Some(Scan {
                    ns: record.ts_ns,
                    complete: *complete && kept == holders.len(),
                    holders: holders.iter().take(kept).cloned().collect(),
                    ids: holders.iter().take(kept).map(|holder| holder.identity).collect(),
                });
            }
            Event::DriverMaps { task, count, bytes } => {
                self.mapped(task.identity, *count, *bytes, record.ts_ns);
            }
            Event::LostEvents { count, since_ns, tgid, start_ns, .. } => {
                let id = tgid.map(|tgid| Identity { tgid, start_ns: start_ns.unwrap_or(0) });
                self.lost(record.ts_ns, *count, *since_ns, id);
            }
            Event::Resync { identity, live, complete, balances } => {
                let missing: &[DeviceBalance] = if *complete { &[] } else { balances };
                self.resync(*identity, live, missing, record.ts_ns);
            }
            Event::AdminEvent { action, device, gi, result } => {
                if self.admin.len() == ADMIN {
                    self.admin.pop_front();
                }
                self.admin.push_back(Admin {
                    ns: record.ts_ns,
                    action: action.clone(),
                    device: *device,
                    gi: *gi,
                    result: result.clone().unwrap_or_default(),
                });
            }
            Event::FdTransfer { .. } => self.transferred(record),
            Event::Kmsg { facility, code, device, .. } if facility == "xid" => {
                if self.xids.len() == XIDS {
                    self.xids.pop_front();
                }
                self.xids.push_back(Xid { ns: record.ts_ns, code: *code, device: *device });
            }
            Event::ServiceMetric { .. } => self.metric(record),
            Event::ContainerEvent { container, phase } => {
                self.owners.told(OwnerKind::Container, container, phase, record.ts_ns);
            }
            Event::PodEvent { pod, phase } => self.owners.told(OwnerKind::Pod, pod, phase, record.ts_ns),
            Event::JobEvent { job, state } => self.owners.told(OwnerKind::Job, job, state, record.ts_ns),
            _ => self.apply_life(record),
        }
    }

    /// Ends a pulse: who is active is counted anew.
    pub(crate) fn pulse_done(&mut self) {
        self.active.clear();
        self.pulse += 1;
    }

    fn tally(map: &mut BTreeMap<u32, u64>, tgid: u32) -> Option<&mut u64> {
        if map.len() >= TALLIES && !map.contains_key(&tgid) {
            return None;
        }
        Some(map.entry(tgid).or_default())
    }
}
