//! Finding lost events, and making good for them from the kernel's maps.
//!
//! The kernel side counts what it could not hand over, process by process, and its tables stay
//! exact. So a loss is noticed by reading the counts, and repaired by reading the tables: the
//! engine gets the number lost and, once the stream has caught up with the reading, the process's
//! exact books.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tracer_ebpf::{
    Account, AccountKey, CallEvent, EventKind, Family, LiveAllocation, LiveKey, Process, ProcessKey,
    symbols::{Op, TABLE, handle_space},
};

use super::translate;
use crate::{
    probe::{Kernel, KernelError, kernel::Remains},
    record::{DeviceBalance, Event, LiveEntry, OpaqueId},
};

/// Live allocations that are read for a repair; beyond, only sums are, since walking the table
/// takes time in which more events are lost.
const DETAILED_ENTRIES: u64 = 100_000;

/// Watches for losses.
#[derive(Debug, Default)]
pub(super) struct Repair {
    told: HashMap<ProcessKey, u64>,
    reading: Option<Reading>,
}

/// Tables of processes with losses, read while the stream ran on.
#[derive(Debug)]
struct Reading {
    /// Events made before are in the tables already: following them again could only undo what
    /// later, lost ones did.
    from_ns: u64,
    /// The stream must have been followed up to here before the tables can be told.
    until_ns: u64,
    books: BTreeMap<(u32, u64), Books>,
}

/// What the kernel has on one process.
#[derive(Debug)]
struct Books {
    live: BTreeMap<(u32, u64), LiveAllocation>,
    /// Whether `live` is everything; if not, `sums` tell how much is missing from it.
    complete: bool,
    sums: Sums,
}

/// Bytes and count of live memory by kind (pinned host memory or not) and device ordinal.
type Sums = BTreeMap<(bool, i32), (u64, u64)>;

/// NVML index of a process's device ordinal.
pub(super) trait Devices {
    /// `None` when it cannot be told.
    fn index(&self, process: &ProcessKey, ordinal: i32) -> Option<u32>;
}

impl Repair {
    /// Looks for new losses. Returns a record for each process that has some, and remembers to
    /// repair it. `now_ns` is a reading of the boot clock just before.
    pub(super) fn check(&mut self, kernel: &Kernel, now_ns: impl Fn() -> u64) -> Result<Vec<Event>, KernelError> {
        if self.reading.is_some() {
            return Ok(Vec::new());
        }
        let processes = kernel.processes()?;
        let mut events = Vec::new();
        let mut damaged = BTreeMap::new();
        for (key, process) in &processes {
            let missing = process.lost + process.untracked;
            let told = self.told.entry(*key).or_default();
            if missing > *told {
                let identity = translate::identity(key.tgid, key.start_ns);
                events.push(Event::LostEvents {
                    count: missing - *told,
                    cpu: None,
                    since_ns: None,
                    tgid: Some(identity.tgid),
                    start_ns: Some(identity.start_ns),
                });
                *told = missing;
                damaged.insert((key.tgid, key.start_ns), *process);
            }
        }
        if !damaged.is_empty() {
            let total = processes.iter().map(|(_, process)| process.live_entries).sum::<u64>();
            let from_ns = now_ns();
            let books = read_books(kernel, &damaged, total <= DETAILED_ENTRIES)?;
            self.reading = Some(Reading { from_ns, until_ns: now_ns(), books });
        }
        Ok(events)
    }

    /// Once the probes are off: reads the tables of every process that ever lost an event. They
    /// change no more, so whatever is still in the stream is in them.
    pub(super) fn check_last(&mut self, kernel: &Kernel) -> Result<Vec<Event>, KernelError> {
        self.reading = None;
        let events = self.check(kernel, || u64::MAX)?;
        let lossy = |(_, process): &&(ProcessKey, Process)| process.lost + process.untracked > 0;
        let processes = kernel.processes()?;
        let damaged: BTreeMap<_, _> =
            processes.iter().filter(lossy).map(|(key, process)| ((key.tgid, key.start_ns), *process)).collect();
        let books = read_books(kernel, &damaged, true)?;
        self.reading = Some(Reading { from_ns: u64::MAX, until_ns: u64::MAX, books });
        Ok(events)
    }

    /// Follows a call the stream delivered since the tables were read.
    pub(super) fn follow(&mut self, event: &CallEvent) {
        let reading = self.reading.as_mut().filter(|reading| event.ts_ns >= reading.from_ns);
        let Some(books) = reading.and_then(|reading| reading.books.get_mut(&(event.tgid, event.process_start_ns)))
        else {
            return;
        };
        let Some(symbol) = TABLE.get(event.symbol as usize) else { return };
        let key = (handle_space(symbol.family), event.handle);
        let host = symbol.family == Family::Host;
        let refused = event.kind == EventKind::CallRefused as u32;
        match symbol.op {
            Op::Alloc if event.result == 0 => {
                books.live.insert(key, allocation(event, symbol.family));
                books.book(host, event.device, event.size);
            }
            Op::Free if refused && event.size > 0 => {
                books.live.entry(key).or_insert_with(|| allocation(event, symbol.family));
                books.book(host, event.device, event.size);
            }
            Op::Free if !refused => {
                books.live.remove(&key);
                books.unbook(host, event.device, event.size);
            }
            Op::CtxDestroy | Op::PrimaryRelease | Op::PrimaryReset if event.result == 0 && event.size == 0 => {
                let ended = |live: &LiveAllocation| live.context == event.context && live.ts_ns <= event.begin_ns;
                let freed: Vec<_> = books.live.extract_if(.., |_, live| ended(live)).map(|(_, live)| live).collect();
                for live in freed {
                    books.unbook(live.family == Family::Host as u32, live.device, live.size);
                }
            }
            _ => {}
        }
    }

    /// The repaired books, once the stream has been followed up to `settled_ns`.
    pub(super) fn finished(&mut self, settled_ns: u64, devices: &impl Devices) -> Vec<Event> {
        let Some(reading) = self.reading.take_if(|reading| settled_ns >= reading.until_ns) else { return Vec::new() };
        let resync = |((tgid, start_ns), books): ((u32, u64), Books)| {
            let process = ProcessKey { tgid, pad: 0, start_ns };
            let live = books
                .live
                .into_iter()
                .filter_map(|((_, handle), live)| {
                    let symbol = TABLE.get(live.symbol as usize)?;
                    Some(LiveEntry {
                        api: symbol.name.into(),
                        handle: OpaqueId::from(handle),
                        size: live.size,
                        device: devices.index(&process, live.device),
                        ts_ns: live.ts_ns,
                    })
                })
                .collect();
            let identity = translate::identity(tgid, start_ns);
            let balances = named(process, books.sums, devices);
            Event::Resync { identity, live, complete: books.complete, balances }
        };
        reading.books.into_iter().map(resync).collect()
    }

    /// Forgets a process that is gone.
    pub(super) fn forget(&mut self, process: &ProcessKey) {
        self.told.remove(process);
    }
}

fn allocation(event: &CallEvent, family: Family) -> LiveAllocation {
    LiveAllocation {
        size: event.size,
        context: event.context,
        ts_ns: event.ts_ns,
        device: event.device,
        family: family as u32,
        symbol: event.symbol,
        ..LiveAllocation::NONE
    }
}

fn read_books(
    kernel: &Kernel,
    damaged: &BTreeMap<(u32, u64), Process>,
    detailed: bool,
) -> Result<BTreeMap<(u32, u64), Books>, KernelError> {
    let accounts: HashMap<AccountKey, Account> = kernel
        .accounts()?
        .into_iter()
        .filter(|(key, account)| {
            damaged.get(&(key.tgid, key.start_ns)).is_some_and(|process| process.image_ns == account.image_ns)
        })
        .collect();
    let mut books: BTreeMap<(u32, u64), Books> = damaged
        .iter()
        .map(|(key, process)| {
            let complete = detailed && process.untracked == 0;
            (*key, Books { live: BTreeMap::new(), complete, sums: sums(*key, &accounts) })
        })
        .collect();
    if detailed {
        for (key, live) in kernel.live()? {
            if let Some(books) = books.get_mut(&(key.tgid, key.start_ns))
                && accounts.get(&account_key(&key, &live)).is_some_and(|account| account.epoch_ns == live.epoch_ns)
            {
                books.live.insert((key.space, key.handle), live);
            }
        }
    }
    Ok(books)
}

/// The account an allocation is booked on.
pub(super) fn account_key(key: &LiveKey, live: &LiveAllocation) -> AccountKey {
    AccountKey { tgid: key.tgid, device: live.account_device, start_ns: key.start_ns, context: live.context }
}

impl Books {
    fn book(&mut self, host: bool, ordinal: i32, size: u64) {
        let sum = self.sums.entry((host, ordinal)).or_default();
        *sum = (sum.0.saturating_add(size), sum.1.saturating_add(1));
    }

    fn unbook(&mut self, host: bool, ordinal: i32, size: u64) {
        let sum = self.sums.entry((host, ordinal)).or_default();
        *sum = (sum.0.saturating_sub(size), sum.1.saturating_sub(1));
    }
}

/// Sums of a process's accounts by device, pinned host memory apart.
pub(super) fn balances(
    (tgid, start_ns): (u32, u64),
    accounts: &HashMap<AccountKey, Account>,
    devices: &impl Devices,
) -> Vec<DeviceBalance> {
    named(ProcessKey { tgid, pad: 0, start_ns }, sums((tgid, start_ns), accounts), devices)
}

fn sums((tgid, start_ns): (u32, u64), accounts: &HashMap<AccountKey, Account>) -> Sums {
    let mut sums = Sums::new();
    for (_, account) in accounts.iter().filter(|(key, _)| (key.tgid, key.start_ns) == (tgid, start_ns)) {
        for family in Family::ALL {
            let balance = account.balances[family as usize];
            if balance.count > 0 {
                let sum = sums.entry((family == Family::Host, account.device)).or_default();
                *sum = (sum.0 + balance.bytes, sum.1 + balance.count);
            }
        }
    }
    sums
}

/// The same by NVML index.
fn named(process: ProcessKey, sums: Sums, devices: &impl Devices) -> Vec<DeviceBalance> {
    let mut named: BTreeMap<(bool, Option<u32>), (u64, u64)> = BTreeMap::new();
    for ((host, ordinal), (bytes, count)) in sums {
        let device = if host { None } else { devices.index(&process, ordinal) };
        let sum = named.entry((host, device)).or_default();
        *sum = (sum.0 + bytes, sum.1 + count);
    }
    let balance = |((host, device), (bytes, count))| DeviceBalance { device, host, bytes, count };
    named.into_iter().map(balance).collect()
}

/// Whether processes in `gone` left allocations in the live table.
pub(super) fn remains(processes: &[(ProcessKey, Process)], gone: &BTreeSet<(u32, u64)>) -> Remains {
    let left =
        |(key, process): &(ProcessKey, Process)| process.live_entries > 0 && gone.contains(&(key.tgid, key.start_ns));
    if processes.iter().any(left) { Remains::Some } else { Remains::None }
}
