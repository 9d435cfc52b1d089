//! NVML samples: rows matched to identities, and the memory of the dead followed.

use super::Ledger;
use super::device::{Health, Sample, implausible};
use super::process::{Row, Seen};
use super::teardown::{Billed, Teardown};
use crate::record::{Event, Identity, NvmlRow, Record};
use std::collections::BTreeMap;

/// Memory of dead processes followed at once.
const TEARDOWNS: usize = 4096;
/// MIG instances and devices followed.
const SERIES: usize = 4096;

impl Ledger {
    pub(super) fn apply_sample(&mut self, record: &Record) {
        let Event::NvmlSample { device, gi, status, used, total, procs, gpu_util, dur_ns, .. } = &record.event else {
            return;
        };
        let (ns, device, gi) = (record.ts_ns, *device, *gi);
        if self.devices.len() >= SERIES && !self.devices.contains_key(&(device, gi)) {
            self.losses.dropped = self.losses.dropped.saturating_add(1);
            return;
        }
        let health = Health::of(status);
        let series = self.devices.entry((device, gi)).or_default();
        match health {
            Health::Failing => return series.failed(ns, status, *dur_ns),
            Health::Unavailable => {
                series.no_totals = true;
                return;
            }
            Health::NoTotals => series.no_totals = true,
            Health::Ok => {}
        }
        series.answered(ns, *dur_ns);
        series.utilized(ns, *gpu_util);
        if let Some(pid) = implausible(procs, total.or(series.total)) {
            series.implausible += 1;
            series.implausible_pid = Some(pid);
            return;
        }
        let used = if health == Health::NoTotals { None } else { *used };
        series.unsized_rows |= procs.iter().any(|row| row.used.is_none() && row.gi.is_none());
        series.names_instances |= gi.is_none() && procs.iter().any(|row| row.gi.is_some());
        // The compute and the graphics list may both name a process, with the same bytes.
        let mut by_pid: BTreeMap<u32, u64> = BTreeMap::new();
        for row in procs {
            if let Some(used) = row.used {
                let known = by_pid.entry(row.pid).or_default();
                *known = (*known).max(used);
            }
        }
        let sample = Sample {
            ns,
            used,
            total: *total,
            rows: by_pid.values().fold(0, |sum, used| sum.saturating_add(*used)),
            count: procs.len(),
            sized: procs.iter().all(|row| row.used.is_some()),
        };
        series.sampled(sample);
        let mut billed: BTreeMap<Identity, u64> = BTreeMap::new();
        for row in procs {
            self.row(row, device, gi, ns, &mut billed);
        }
        self.follow_teardowns(device, gi, &sample, &billed);
    }

    fn row(&mut self, row: &NvmlRow, device: u32, gi: Option<u32>, ns: u64, billed: &mut BTreeMap<Identity, u64>) {
        let id = self.row_owner(row.pid, device);
        let id = match id {
            Some(id) => id,
            None => self.ensure(Identity { tgid: row.pid, start_ns: 0 }, Seen::Implied, ns),
        };
        let Some(used) = row.used else { return };
        let known = billed.entry(id).or_default();
        *known = (*known).max(used);
        let key = (device, gi.or(row.gi));
        let Some(process) = self.processes.get_mut(&id).filter(|process| process.is_alive()) else { return };
        process.alive_ns = process.alive_ns.max(ns);
        let entry = process.rows.entry(key).or_insert_with(|| Row::new(ns, used));
        entry.listed(ns, used);
        if key.1.is_none()
            && let Some(books) = process.books.as_mut()
        {
            books.billed(device, used, ns);
        }
        entry.mps = row.kind.starts_with("M+");
        entry.graphics = row.kind == "G";
        self.used_gpu(id);
    }

    /// Rows carry a number only. While a new process that has not touched the GPU has the number
    /// of a dead one whose memory is not back, the row is the dead one's.
    fn row_owner(&self, pid: u32, device: u32) -> Option<Identity> {
        let current = self.by_tgid.get(&pid).copied();
        let current_uses = current.and_then(|id| self.processes.get(&id)).is_some_and(super::Process::uses_gpu);
        if current_uses {
            return current;
        }
        let first = Identity { tgid: pid, start_ns: 0 };
        let last = Identity { tgid: pid, start_ns: u64::MAX };
        self.teardowns
            .range((first, 0, None)..=(last, u32::MAX, Some(u32::MAX)))
            .rev()
            .find(|(_, teardown)| teardown.device == device && teardown.returned_ns.is_none())
            .map(|((id, ..), _)| *id)
            .or(current)
    }

    pub(super) fn open_teardowns(&mut self, id: Identity, ns: u64) {
        let Some(process) = self.processes.get(&id) else { return };
        let pinned = process.pinned();
        let mut open: BTreeMap<(u32, Option<u32>), (u64, bool)> = BTreeMap::new();
        for (&key, row) in &process.rows {
            let current = self.devices.get(&key).and_then(|device| device.last).is_some_and(|last| last.ns == row.ns);
            if current {
                open.insert(key, (row.used, row.mps));
            }
        }
        if let Some(books) = &process.books {
            for (device, books) in &books.devices {
                let Some(device) = *device else { continue };
                let instance = open.keys().any(|&(on, gi)| on == device && gi.is_some());
                let split = self.devices.range((device, Some(0))..=(device, Some(u32::MAX))).next().is_some();
                if !instance && !split && books.bytes() > 0 {
                    let entry = open.entry((device, None)).or_insert((0, false));
                    // Memory taken since the last sample is not in its row yet.
                    entry.0 = entry.0.max(books.owned.bytes);
                }
            }
        }
        for ((device, gi), (expected, mps)) in open {
            if self.teardowns.len() >= TEARDOWNS {
                self.losses.dropped = self.losses.dropped.saturating_add(1);
                return;
            }
            let floor = if gi.is_none() { self.idle_floor(device) } else { None };
            let series = self.devices.get(&(device, gi));
            let baseline = series.and_then(|series| series.unattributed).or(floor).unwrap_or(0);
            let others = self.others_on(device, id);
            self.teardowns.insert(
                (id, device, gi),
                Teardown {
                    id,
                    device,
                    gi,
                    exit_ns: ns,
                    expected,
                    pinned,
                    mps,
                    baseline,
                    others,
                    used_before: series.and_then(|series| series.used),
                    samples: 0,
                    billed_ns: None,
                    billed: expected,
                    by: Billed::ByRow,
                    returned_ns: None,
                },
            );
        }
    }

    fn others_on(&self, device: u32, but: Identity) -> u64 {
        self.gpu_users()
            .filter(|user| user.id != but)
            .filter_map(|user| user.books.as_ref()?.devices.get(&Some(device)))
            .fold(0, |sum, books| sum.saturating_add(books.bytes()))
    }

    fn follow_teardowns(&mut self, device: u32, gi: Option<u32>, sample: &Sample, billed: &BTreeMap<Identity, u64>) {
        let mut open: Vec<(Identity, u32, Option<u32>)> = self
            .teardowns
            .iter()
            .filter(|(key, teardown)| {
                key.1 == device && key.2 == gi && teardown.returned_ns.is_none() && teardown.exit_ns <= sample.ns
            })
            .map(|(key, _)| *key)
            .collect();
        if open.is_empty() {
            return;
        }
        // What no row explains can be counted once only: it goes to the largest of the dead.
        open.sort_by_key(|key| self.teardowns.get(key).map(|teardown| (u64::MAX - teardown.expected, teardown.id)));
        let others = self.others_on(device, Identity { tgid: 0, start_ns: 0 });
        let mut spent = 0_u64;
        for key in open {
            let floor = self.held_floor;
            let Some(teardown) = self.teardowns.get_mut(&key) else { continue };
            if let Some(&bytes) = billed.get(&key.0) {
                teardown.still(sample.ns, bytes, Billed::ByRow);
                continue;
            }
            let residue = if let Some(unattributed) = sample.unattributed() {
                unattributed.saturating_sub(teardown.baseline)
            } else if let (false, Some(used), Some(was)) = (sample.sized, sample.used, teardown.used_before) {
                let grown = others.saturating_sub(teardown.others);
                used.saturating_sub(was.saturating_sub(teardown.expected)).saturating_sub(grown)
            } else {
                // Shared memory counted twice, or no totals: only the row could have told.
                0
            };
            let residue = residue.saturating_sub(spent).min(teardown.expected);
            if residue >= floor {
                spent = spent.saturating_add(residue);
                teardown.still(sample.ns, residue, Billed::Unattributed);
            } else {
                teardown.returned(sample.ns);
            }
        }
    }
}
