//! A process hangs inside the driver and cannot be ended.
//!
//! A task in an uninterruptible sleep (state D) takes no signal. While it is being torn down it still
//! owns its memory, so neither its exit nor a SIGKILL gives anything back: this is no residue.
//!
//! Evidence needed: the process was seen in state D again and again without another state in
//! between, and it has exited without having been reaped, or was sent SIGKILL, or sleeps in a
//! function of the driver. High confidence after a minute of it once it has exited, or when the
//! kernel itself reported a hung task.
//! Refuted by: another state, its reaping, its memory's return, a sleep in a function of storage or
//! of a file system while it lives, whatever the kernel's watchdog says.
//!
//! Thresholds: the teardown grace (5 s and a second for each 8 GB pinned) to raise it, a minute to
//! be sure; a process that has not exited must have been in D for that minute.

use super::release::finding_key;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment, Sweep};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::process::State;
use crate::record::Identity;
use crate::units::{at, clock, duration, plural, shown, size};
use std::collections::BTreeSet;

const CATEGORY: Category = Category::StuckInDriver;
const SIGKILL: i32 = 9;

/// Processes that hang.
#[derive(Debug, Default)]
pub(super) struct StuckInDriver {
    open: BTreeSet<String>,
}

impl Detector for StuckInDriver {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let ledger = moment.ledger;
        if moment.sweep == Sweep::None && self.open.is_empty() {
            return;
        }
        let exiting =
            ledger.teardowns.values().filter(|teardown| teardown.returned_ns.is_none()).map(|teardown| teardown.id);
        let hanging = |process: &&Process| process.state.as_ref().is_some_and(State::is_uninterruptible);
        let look: BTreeSet<Identity> =
            exiting.chain(ledger.gpu_users().filter(hanging).map(|process| process.id)).collect();
        let mut now = BTreeSet::new();
        for process in look.iter().filter_map(|id| ledger.process(id)) {
            for claim in judge(process, moment) {
                now.insert(claim.key.clone());
                book.raise(claim);
            }
        }
        for key in self.open.difference(&now) {
            book.close(CATEGORY, key, "it went on, or its memory came back");
        }
        self.open = now;
    }
}

/// Whether a kernel function belongs to the driver.
fn is_drivers(wchan: &str) -> bool {
    ["uvm_", "nvidia", "nv_", "_nv", "rm_", "os_acquire", "os_wait", "nvkms", "dma_fence"]
        .iter()
        .any(|prefix| wchan.starts_with(prefix))
}

/// Whether a kernel function waits for storage or a file system, which hang for reasons of their own.
fn is_storages(wchan: &str) -> bool {
    const PREFIXES: [&str; 21] = [
        "io_schedule",
        "folio_wait",
        "wait_on_page",
        "__wait_on_bit",
        "wait_on_bit",
        "__wait_on_buffer",
        "blk_",
        "bio_",
        "rq_qos",
        "wbt_",
        "jbd2_",
        "ext4_",
        "xfs_",
        "btrfs_",
        "nfs",
        "rpc_",
        "ceph_",
        "fuse_",
        "request_wait_answer",
        "lustre",
        "balance_dirty",
    ];
    PREFIXES.iter().any(|prefix| wchan.starts_with(prefix))
}

fn judge(process: &Process, moment: &Moment<'_>) -> Vec<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let Some(state) = process.state.as_ref().filter(|state| state.is_uninterruptible()) else { return Vec::new() };
    if process.gone_ns.is_some() {
        return Vec::new();
    }
    let hung = process.kernel_messages.iter().find(|message| message.facility == "hung_task");
    let slept = state.ns.saturating_sub(state.since_ns);
    let in_driver = state.wchan.as_deref().is_some_and(is_drivers);
    if process.is_alive() && state.wchan.as_deref().is_some_and(is_storages) {
        return Vec::new();
    }
    let held: Vec<(u32, Option<u32>, u64, u64)> = if process.is_alive() {
        process.rows.iter().map(|(&(device, gi), row)| (device, gi, row.used, 0)).collect()
    } else {
        ledger
            .teardowns
            .values()
            .filter(|teardown| teardown.id == process.id && teardown.returned_ns.is_none())
            .map(|teardown| (teardown.device, teardown.gi, teardown.billed, teardown.pinned))
            .collect()
    };
    let killed = process.signal.filter(|&(signal, ns)| signal == SIGKILL && ns <= state.ns);
    let certain = slept >= config.stuck_ns || hung.is_some();
    let mut claims = Vec::new();
    for (device, gi, bytes, pinned) in held {
        let due = if let Some(death) = process.death {
            // Still asleep where it should long have let go.
            let late = state.ns.saturating_sub(death.ns) >= config.teardown_grace_ns(pinned);
            late && (state.times >= 2 || hung.is_some())
        } else {
            let killed_long = killed.is_some_and(|(_, ns)| state.ns.saturating_sub(ns) >= config.stuck_ns);
            state.times >= 2 && slept >= config.stuck_ns && (in_driver || killed_long || hung.is_some())
        };
        if due {
            claims.push(claim(process, state, device, gi, bytes, certain, moment));
        }
    }
    claims
}

fn claim(
    process: &Process,
    state: &State,
    device: u32,
    gi: Option<u32>,
    bytes: u64,
    certain: bool,
    moment: &Moment<'_>,
) -> Claim {
    let ledger = moment.ledger;
    let name = process_name(process.id.tgid, &process.comm);
    let wchan = state.wchan.as_deref().unwrap_or_default();
    let place = if wchan.is_empty() { String::new() } else { format!(" in {}", shown(wchan, 64)) };
    let mut evidence = vec![format!(
        "state D{place} from {} to {} ({}), {} time{} in a row",
        clock(state.since_ns),
        clock(state.ns),
        duration(state.ns.saturating_sub(state.since_ns)),
        state.times,
        plural(u64::from(state.times))
    )];
    if let Some(death) = process.death {
        evidence.push(format!("exit seen but not reaped: {} {}", death.told(), at(death.ns)));
    }
    if let Some((signal, ns)) = process.signal {
        evidence.push(format!("signal {signal} sent {} had no further effect", at(ns)));
    }
    for message in &process.kernel_messages {
        let kind = message.facility.replace('_', " ");
        evidence.push(format!("kernel, {} {}: {}", shown(&kind, 32), at(message.ns), shown(&message.text, 160)));
    }
    for xid in ledger.xids.iter().filter(|xid| xid.device.is_none_or(|on| on == device)).rev().take(3) {
        let code = xid.code.map_or_else(String::new, |code| format!(" {code}"));
        evidence.push(format!("the kernel reported Xid{code} {}", at(xid.ns)));
    }
    evidence.push(format!("{} ({bytes} bytes) are still billed on GPU {device}", size(bytes)));
    if let Some(driver) = &ledger.driver {
        evidence.push(format!("driver {driver}"));
    }
    let dying = if process.is_alive() { "hangs" } else { "hangs in its exit" };
    Claim {
        category: CATEGORY,
        key: finding_key(&(process.id, device, gi)),
        subject: Subject {
            gi,
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity: if certain { Severity::Critical } else { Severity::Warning },
        confidence: if certain { Confidence::High } else { Confidence::Medium },
        bytes: Some(bytes),
        summary: format!(
            "{name} {dying}{place} for {}, and its {} on GPU {device} with it",
            duration(moment.now().saturating_sub(process.death.map_or(state.since_ns, |death| death.ns))),
            size(bytes)
        ),
        evidence,
        advice: format!(
            "Do not keep killing pid {}: a task in state D takes no signal. Save its kernel stack (/proc/{}/stack), the kernel log and nvidia-bug-report.sh now, while it hangs; keep new work off the node (cordon it). Only a GPU reset, which may be refused while it hangs, or a reboot clears it.",
            process.id.tgid, process.id.tgid
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_drivers, is_storages};

    #[test]
    fn functions_of_the_driver() {
        assert!(
            is_drivers("uvm_va_space_destroy") && is_drivers("os_acquire_rwlock_write") && is_drivers("nvidia_close")
        );
        assert!(is_storages("io_schedule") && is_storages("nfs4_wait") && !is_storages("uvm_lock"));
        assert!(!is_drivers("io_schedule") && !is_drivers("rwsem_down_write_slowpath") && !is_drivers(""));
    }
}
