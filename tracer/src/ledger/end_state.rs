//! The ledger's facts at one moment, as documents carry them.

use super::Ledger;
use super::process::Process;
use crate::finding::EndState;
use std::collections::BTreeMap;

impl Ledger {
    /// The facts now.
    pub fn end_state(&self) -> EndState {
        let mut end = EndState { failed_allocs: self.failed_allocs.clone(), ..EndState::default() };
        end.peak_bytes_by_tgid.clone_from(&self.peaks);
        for process in self.gpu_users() {
            let tgid = process.id.tgid;
            add(&mut end.outstanding_bytes_by_tgid, tgid, process.outstanding());
            add(&mut end.outstanding_host_bytes_by_tgid, tgid, process.pinned());
            add(&mut end.outstanding_bytes_by_identity, process.id.to_string(), process.outstanding());
            add(&mut end.preattach_bytes_by_tgid, tgid, self.preattach_bytes(process));
            if let Some(books) = &process.books
                && books.peak > 0
            {
                let peak = end.peak_bytes_by_tgid.entry(tgid).or_default();
                *peak = (*peak).max(books.peak);
            }
            if let Some(pod) = &process.pod {
                let held = self
                    .devices_of(process)
                    .iter()
                    .fold(0_u64, |sum, &device| sum.saturating_add(self.held(process, device)));
                add(&mut end.bytes_by_pod, pod.clone(), held);
            }
            for (&(device, gi), row) in &process.rows {
                let last = self.devices.get(&(device, gi)).and_then(|series| series.last);
                if let Some(gi) = gi
                    && last.is_some_and(|last| last.ns == row.ns)
                {
                    add(&mut end.bytes_by_mig_instance, format!("{device}/{gi}"), row.used);
                }
            }
        }
        for (&(device, gi), series) in &self.devices {
            if gi.is_some() {
                continue;
            }
            if let Some(floor) = self.idle_floor(device) {
                end.idle_floor_bytes.insert(device, floor);
            }
            if let Some(used) = series.used {
                end.device_used.insert(format!("device{device}_used"), used);
            }
        }
        end
    }

    /// Billed bytes of a process that was there before the tracer, above what its calls explain.
    /// A process whose context was created under the tracer's eyes has none.
    pub fn preattach_bytes(&self, process: &Process) -> u64 {
        if !self.predates_tracer(process) {
            return 0;
        }
        let seen_context = process.books.as_ref().is_some_and(|books| books.contexts_created > 0);
        if seen_context {
            return 0;
        }
        self.devices_of(process).iter().fold(0_u64, |sum, &device| {
            let owned = process
                .books
                .as_ref()
                .and_then(|books| books.devices.get(&Some(device)))
                .map_or(0, |books| books.owned.bytes);
            sum.saturating_add(self.billed(process, device).unwrap_or(0).saturating_sub(owned))
        })
    }

    /// Whether a process may have used the GPU before the tracer saw its calls.
    pub fn predates_tracer(&self, process: &Process) -> bool {
        use super::process::Seen;
        match process.seen {
            Seen::Snapshot => true,
            Seen::Fork => false,
            // Noticed without its fork: its start decides, where it is known.
            Seen::Start | Seen::Implied => {
                process.id.start_ns != 0 && self.attached_ns.is_some_and(|attached| process.id.start_ns < attached)
            }
        }
    }
}

fn add<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, bytes: u64) {
    if bytes > 0 {
        let sum = map.entry(key).or_default();
        *sum = sum.saturating_add(bytes);
    }
}
