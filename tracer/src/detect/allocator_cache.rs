//! Held memory is a cache: it no longer grows, and its owner can give it back.
//!
//! Frameworks keep freed memory for the next request. From the driver's side that looks like memory
//! that is never freed; what tells it from a leak is that it stops growing, and that the framework
//! itself says how little of it is in use, or that loading and unloading changes nothing.
//!
//! Evidence needed: what the process holds has not moved for a while, and one of:
//! * its own metric of allocated bytes is, or was, well below what it holds;
//! * it has unloaded and loaded again, at least twice, with the same footprint throughout.
//!
//! High confidence where the metric has also moved while the memory stood still.
//! Refuted by: growth, also one that only pauses. A plateau alone is no finding: weights and KV pools stand still as well.
//!
//! Thresholds: a minute without movement; a fifth of what is held, and 128 MiB, unused.

use super::allocators::Allocator;
use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::metrics::{Meaning, Metric};
use crate::units::{at, clock, duration, plural, size};

const CATEGORY: Category = Category::AllocatorCache;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::boxed(CATEGORY, judge, "what it holds has moved")
}

fn judge(process: &Process, moment: &Moment<'_>, book: &Book) -> Vec<Claim> {
    let ledger = moment.ledger;
    let Some(books) = process.books.as_deref().filter(|books| books.unreliable_since_ns.is_none()) else {
        return Vec::new();
    };
    // The metrics are the process's, not a device's: they speak of where it holds most.
    let largest = books.devices.iter().filter_map(|(device, on)| Some(((*device)?, on)));
    let Some((device, on)) = largest.max_by_key(|(device, on)| (on.owned.bytes, u32::MAX - device)) else {
        return Vec::new();
    };
    let held = on.owned.bytes;
    let row = process.rows.get(&(device, None));
    let since = row.map_or(0, |row| row.steady_since_ns).max(on.last_ns);
    let still = moment.now().saturating_sub(since);
    if held < moment.config.held_floor_bytes || still < moment.config.plateau_ns {
        return Vec::new();
    }
    // Growth that is being told of does not become a cache by pausing.
    let grows = [Category::AppLeak, Category::FragmentationGrowth]
        .into_iter()
        .any(|growth| book.open_of(growth).any(|finding| finding.subject.tgid == Some(process.id.tgid)));
    if grows {
        return Vec::new();
    }
    let unused = ledger.metric_of(process, Meaning::Allocated).and_then(|metric| unused(metric, held, since, moment));
    let cycles = ledger.metrics_of(process).into_iter().find(|metric| {
        let calm = row.map_or(on.last_ns, |row| row.steady_since_ns);
        metric.meaning == Meaning::Loaded && metric.cycles >= 2 && metric.first_zero_ns.is_some_and(|ns| ns >= calm)
    });
    let (bytes, confidence, mut evidence) = match (unused, cycles) {
        (Some(unused), _) => unused,
        (None, Some(metric)) => reloads(metric, held, books.live_count()),
        (None, None) => return Vec::new(),
    };
    evidence.push(format!(
        "no driver allocation since {} ({}); {} ({held} bytes) held in {} block{}",
        clock(on.last_ns),
        duration(moment.now().saturating_sub(on.last_ns)),
        size(held),
        on.owned.count,
        plural(on.owned.count)
    ));
    if let Some(row) = row {
        evidence.push(format!("NVML's row has stood at {} since {}", size(row.used), clock(row.steady_since_ns)));
    }
    let allocator = Allocator::of(process, ledger.total(device, None));
    evidence.extend(allocator.map(|allocator| allocator.told().to_owned()));
    let name = process_name(process.id.tgid, &process.comm);
    let lever = allocator.map_or("restart the process or cap its memory at the start", Allocator::lever);
    vec![Claim {
        category: CATEGORY,
        key: format!("{}-gpu{device}", process.id),
        subject: Subject {
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity: Severity::Info,
        confidence,
        bytes: Some(bytes),
        summary: format!(
            "{name} keeps {} on GPU {device} in its allocator's cache: no leak, it has not grown for {}",
            size(bytes),
            duration(still)
        ),
        evidence,
        advice: format!("No action is needed. Only if another tenant needs the memory: {lever}."),
    }]
}

/// Bytes held beyond what the framework says its objects use.
fn unused(metric: &Metric, held: u64, since: u64, moment: &Moment<'_>) -> Option<(u64, Confidence, Vec<String>)> {
    // The plateau, not the rise to it, is what the metric is compared with.
    let values = || metric.history.points().iter().filter(|(ns, _)| *ns >= since).map(|&(_, bytes)| bytes);
    let (least, most) = (values().min()?, values().max()?);
    let bytes = held.saturating_sub(metric.bytes());
    let free = held.saturating_sub(least);
    if free < moment.config.held_floor_bytes.max(held / 5) {
        return None;
    }
    let moved = most.saturating_sub(least) >= held / 10;
    let mut evidence = vec![format!(
        "{}: allocated {} ({} bytes) {}, reserved constant at {}",
        crate::units::shown(&metric.name, 64),
        size(metric.bytes()),
        metric.bytes(),
        at(metric.ns),
        size(held)
    )];
    if moved {
        evidence.push(format!(
            "meanwhile it went between {} and {}: the process is at work within what it holds",
            size(least),
            size(most)
        ));
    }
    // One low value may be the start of a load.
    let confidence = if moved { Confidence::High } else { Confidence::Medium };
    Some((bytes, confidence, evidence))
}

fn reloads(metric: &Metric, held: u64, blocks: usize) -> (u64, Confidence, Vec<String>) {
    let evidence = vec![
        format!(
            "the same footprint over {} cycles of unloading and loading again ({} is now {}, {})",
            metric.cycles,
            crate::units::shown(&metric.name, 64),
            metric.value,
            at(metric.ns)
        ),
        if blocks == 1 {
            "one allocation holds all of it".to_owned()
        } else {
            format!("{blocks} allocations hold all of it")
        },
    ];
    (held, Confidence::Medium, evidence)
}
