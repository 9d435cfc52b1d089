//! The kernel side's exact figures, as told when tracing ends.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use tracer_ebpf::{Account, AccountKey, CallEvent, Counter, Process, ProcessKey, symbols::TABLE};

use super::{
    repair::{self, Devices},
    translate,
};
use crate::record::{DeviceBalance, Identity};

/// Ended processes whose figures are kept, newest last.
const ENDED: usize = 4096;

/// What the kernel side counted.
#[derive(Clone, Debug, Serialize)]
pub struct KernelBooks {
    /// Every counter, by name. `entries` and `returns` are probe hits; each call event is either in
    /// `calls_delivered` or in `calls_lost`.
    pub counters: BTreeMap<&'static str, u64>,
    /// Calls open at the end.
    pub open_calls: usize,
    /// Records in the rings that were not understood; always 0 unless something is broken.
    pub malformed: u64,
    /// Processes that called the driver.
    pub processes: Vec<ProcessBooks>,
}

/// Exact figures of one process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessBooks {
    /// The process.
    #[serde(flatten)]
    pub identity: Identity,
    /// Whether it has ended.
    pub ended: bool,
    /// Call events it made, lost ones included.
    pub events: u64,
    /// Call events the ring had no room for.
    pub lost: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Those calls by entry point and result, as far as their events arrived.
    pub failures: Vec<Failure>,
    /// Frees of handles that were not known.
    pub unknown_frees: u64,
    /// Allocations the live table had no room for.
    pub untracked: u64,
    /// Live bytes and allocations at the end, by device.
    pub balances: Vec<DeviceBalance>,
}

/// Calls of one entry point that returned the same error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Entry point.
    pub api: &'static str,
    /// `CUresult`.
    pub result: i32,
    /// How many.
    pub count: u64,
}

/// Failed calls by process. Entry points are few and so are the errors each can return.
#[derive(Debug, Default)]
pub(super) struct Failures(HashMap<ProcessKey, BTreeMap<(u32, i32), u64>>);

impl Failures {
    /// Most different errors of a process that are told apart.
    const KINDS: usize = 256;

    pub(super) fn note(&mut self, event: &CallEvent) {
        let key = ProcessKey { tgid: event.tgid, pad: 0, start_ns: event.process_start_ns };
        let failures = self.0.entry(key).or_default();
        if failures.len() < Self::KINDS || failures.contains_key(&(event.symbol, event.result)) {
            *failures.entry((event.symbol, event.result)).or_default() += 1;
        }
    }

    pub(super) fn take(&mut self, key: &ProcessKey) -> Vec<Failure> {
        let failures = self.0.remove(key).unwrap_or_default();
        let told = |((symbol, result), count): ((u32, i32), u64)| {
            TABLE.get(symbol as usize).map(|symbol| Failure { api: symbol.name, result, count })
        };
        failures.into_iter().filter_map(told).collect()
    }
}

impl KernelBooks {
    pub(super) fn new(
        counters: [u64; Counter::COUNT as usize],
        open_calls: usize,
        malformed: u64,
        mut processes: Vec<ProcessBooks>,
    ) -> Self {
        processes.sort_by_key(|process| process.identity);
        Self { counters: Counter::NAMES.into_iter().zip(counters).collect(), open_calls, malformed, processes }
    }
}

impl ProcessBooks {
    pub(super) fn new(
        key: &ProcessKey,
        process: &Process,
        ended: bool,
        failures: Vec<Failure>,
        accounts: &HashMap<AccountKey, Account>,
        devices: &impl Devices,
    ) -> Self {
        // Accounts of an image the process has replaced hold nothing any more.
        let own = |account: &AccountKey, value: &Account| {
            (account.tgid, account.start_ns) == (key.tgid, key.start_ns) && value.image_ns == process.image_ns
        };
        let own: HashMap<AccountKey, Account> =
            accounts.iter().filter(|(key, value)| own(key, value)).map(|(key, value)| (*key, *value)).collect();
        Self {
            identity: translate::identity(key.tgid, key.start_ns),
            ended,
            events: process.seq,
            lost: process.lost,
            failed: process.failed,
            failures,
            unknown_frees: process.unknown_frees,
            untracked: process.untracked,
            balances: repair::balances((key.tgid, key.start_ns), &own, devices),
        }
    }
}

/// Keeps the newest.
pub(super) fn trim(books: &mut Vec<ProcessBooks>) {
    let excess = books.len().saturating_sub(ENDED);
    books.drain(..excess);
}
