//! Used memory that NVML lists for no one is managed memory.
//!
//! NVML bills managed (unified) memory to no process: the driver keeps it in a client of its own
//! (reported for several tools, and the open kernel modules skip internal clients).
//!
//! Evidence needed: managed memory in a live process's books, and use of the device beyond its
//! floor and its rows.
//! Refuted by: rows that explain the use. Managed memory alone is no finding: its pages may be in
//! host memory.
//!
//! Thresholds: 128 MiB of both. More managed memory than the device has is a warning: pages move
//! back and forth, and such deadlocks were reported.

use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::units::size;

const CATEGORY: Category = Category::ManagedMemory;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::boxed(CATEGORY, judge, "the managed memory was given back, or its pages left the device")
}

fn judge(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let Some(books) = process.books.as_deref() else { return Vec::new() };
    let on = books.devices.iter().filter_map(|(device, on)| Some((device.as_ref().copied()?, on.managed.bytes)));
    on.filter_map(|(device, managed)| on_device(process, device, managed, moment)).collect()
}

fn on_device(process: &Process, device: u32, managed: u64, moment: &Moment<'_>) -> Option<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    if managed < config.held_floor_bytes {
        return None;
    }
    let series = ledger.devices.get(&(device, None))?;
    let last = series.last?;
    let floor = ledger.idle_floor(device);
    let unlisted = last.unattributed()?.saturating_sub(floor.unwrap_or(0));
    let total = ledger.total(device, None);
    let exceeds = total.is_some_and(|total| managed > total);
    if unlisted < config.held_floor_bytes && !exceeds {
        return None;
    }
    let all = ledger
        .gpu_users()
        .filter_map(|user| user.books.as_ref()?.devices.get(&Some(device)))
        .fold(0_u64, |sum, on| sum.saturating_add(on.managed.bytes));
    let dead = ledger.teardowns.values().any(|teardown| teardown.device == device && teardown.returned_ns.is_none());
    // Unlisted bytes beyond all managed memory have another cause.
    let fits = unlisted <= all.saturating_add(config.held_floor_bytes);
    let confidence = match (fits && all == managed, dead || !fits) {
        (true, false) => Confidence::High,
        (_, true) => Confidence::Low,
        _ => Confidence::Medium,
    };
    let bytes = unlisted.min(managed);
    let name = process_name(process.id.tgid, &process.comm);
    let mut evidence = vec![
        format!(
            "{} ({managed} bytes) of managed memory (cuMemAllocManaged) in the books of pid {}",
            size(managed),
            process.id.tgid
        ),
        format!(
            "GPU {device} uses {}; its {} rows explain {}, its floor {}, and {} ({unlisted} bytes) are listed for no one",
            last.used.map_or_else(|| "an unknown amount".to_owned(), size),
            last.count,
            size(last.rows),
            floor.map_or_else(|| "is not known".to_owned(), size),
            size(unlisted)
        ),
    ];
    if let Some(billed) = ledger.billed(process, device) {
        evidence.push(format!("its own row says {} ({billed} bytes)", size(billed)));
    }
    if all > managed {
        evidence.push(format!(
            "other processes have {} of managed memory there: whose pages are resident cannot be told",
            size(all - managed)
        ));
    }
    if let Some(total) = total.filter(|_| exceeds) {
        evidence.push(format!("that is more than the {} of the device: pages move back and forth", size(total)));
    }
    Some(Claim {
        category: CATEGORY,
        key: format!("{}-gpu{device}", process.id),
        subject: Subject {
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity: if exceeds { Severity::Warning } else { Severity::Info },
        confidence,
        bytes: Some(bytes),
        summary: format!("{name} has {} of managed memory on GPU {device}, which NVML bills to no one", size(bytes)),
        evidence,
        advice: "Nothing is lost: NVML and nvidia-smi do not list managed memory by process. Count it by the driver calls shown here; prefetch (cudaMemPrefetchAsync) or advise where pages should be if they move too much, and keep the sum below the device's memory.".to_owned(),
    })
}
