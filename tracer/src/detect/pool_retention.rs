//! A stream-ordered pool keeps memory that was released to it.
//!
//! `cuMemFreeAsync` releases to the pool, not to the device. The pool gives pages back when its
//! streams are waited for, and only what exceeds its release threshold.
//!
//! Evidence needed: allocations of a pool were released, nothing was allocated from it for a
//! while or its work has long needed much less than it holds, and NVML still bills the process what the books and its learned overhead do not explain, up
//! to what the pool once held. High confidence where the books are complete and a threshold that
//! keeps as much was seen.
//! Refuted by: new allocations from the pool, a row that falls, books with holes.
//!
//! Thresholds: a minute without an allocation from the pool (between requests a pool is doing its
//! work), else what is beyond the most its work had allocated within five to ten minutes; 128 MiB retained; a warning from 1 GiB on.

use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::books::{Books, Pool};
use crate::units::{at, duration, plural, size};
use std::collections::BTreeMap;

const CATEGORY: Category = Category::PoolRetention;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::boxed(CATEGORY, judge, "the pool gave the memory back, or it is used again")
}

fn judge(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let Some(books) = process.books.as_deref().filter(|books| books.unreliable_since_ns.is_none()) else {
        return Vec::new();
    };
    let mut by_device: BTreeMap<u32, Vec<&Pool>> = BTreeMap::new();
    for pool in books.pools.iter().filter(|pool| pool.allocs > 0) {
        if let Some(device) = pool.device {
            by_device.entry(device).or_default().push(pool);
        }
    }
    by_device.into_iter().filter_map(|(device, pools)| on_device(process, books, device, &pools, moment)).collect()
}

fn on_device(process: &Process, books: &Books, device: u32, pools: &[&Pool], moment: &Moment<'_>) -> Option<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let billed = ledger.billed(process, device)?;
    let row = process.rows.get(&(device, None))?;
    let last_alloc = pools.iter().map(|pool| pool.last_alloc_ns).max()?;
    let last_free = pools.iter().map(|pool| pool.last_free_ns).max().filter(|&ns| ns > 0)?;
    let since = last_alloc.max(last_free);
    let quiet = row.ns.saturating_sub(since);
    let on = books.devices.get(&Some(device))?;
    let overhead = on.gap.least.unwrap_or(0);
    let used = pools.iter().fold(0_u64, |sum, pool| sum.saturating_add(pool.used.bytes));
    let peak = pools.iter().fold(0_u64, |sum, pool| sum.saturating_add(pool.used.peak));
    let idle = quiet >= config.pool_idle_ns;
    // A pool at work needs what it has needed of late.
    let recent = || pools.iter().try_fold(0_u64, |sum, pool| Some(sum.saturating_add(pool.recent.bytes()?)));
    let needed = if idle { used } else { recent()?.max(used) };
    // What one pool's pages can be: not more than it once held beyond what it needs.
    let others = on.owned.bytes.saturating_sub(used).saturating_add(overhead);
    let retained = billed.saturating_sub(others).saturating_sub(needed).min(peak.saturating_sub(needed));
    if retained < config.held_floor_bytes {
        return None;
    }
    let (allocs, frees) = pools.iter().fold((0, 0), |(allocs, frees), pool| (allocs + pool.allocs, frees + pool.frees));
    let threshold = books.pools.iter().filter_map(|pool| pool.threshold).max();
    let keeps = threshold.is_some_and(|threshold| threshold >= retained.saturating_add(used));
    let late = ledger.predates_tracer(process) && books.contexts_created == 0;
    let holes = late || books.unknown_frees > 0;
    let confidence = match (keeps, holes) {
        (true, false) => Confidence::High,
        (false, true) => Confidence::Low,
        _ => Confidence::Medium,
    };
    let severity = if retained >= config.critical_bytes { Severity::Warning } else { Severity::Info };
    let mut evidence = vec![
        if allocs == frees {
            format!(
                "all frees seen: {frees} of {allocs} stream-ordered allocations were released, the last {}",
                at(last_free)
            )
        } else {
            format!(
                "{frees} of {allocs} stream-ordered allocations were released; {} ({used} bytes) are still allocated",
                size(used)
            )
        },
        format!(
            "NVML bills {} ({billed} bytes): {} are in the books, {} were its overhead before, and {} ({retained} bytes) are the pool's",
            size(billed),
            size(on.owned.bytes),
            size(overhead),
            size(retained)
        ),
    ];
    if !idle {
        evidence.push(format!(
            "its work has had at most {} ({needed} bytes) allocated within the last minutes",
            size(needed)
        ));
    }
    evidence.push(match threshold {
        Some(u64::MAX) => "release_threshold was set to unlimited: the pool never gives back by itself".to_owned(),
        Some(bytes) => format!("release_threshold was set to {} ({bytes} bytes)", size(bytes)),
        None => "release_threshold was not seen to be set; its default 0 gives back when a stream, event or context is next waited for".to_owned(),
    });
    if let Some((ns, keep)) = pools.iter().filter_map(|pool| pool.trimmed).filter(|&(ns, _)| ns < row.ns).max() {
        evidence.push(format!(
            "a trim to {} {} gave nothing back: work on its streams had not ended",
            size(keep),
            at(ns)
        ));
    }
    for metric in ledger.metrics_of(process).into_iter().filter(|metric| metric.changed_ns > 0).take(4) {
        evidence.push(format!("its service told {} {}", metric.told(), at(metric.ns)));
    }
    let name = process_name(process.id.tgid, &process.comm);
    Some(Claim {
        category: CATEGORY,
        key: format!("{}-gpu{device}", process.id),
        subject: Subject {
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity,
        confidence,
        bytes: Some(retained),
        summary: format!(
            "{name} keeps {} in stream-ordered pools on GPU {device}, {} after the last of {frees} release{}",
            size(retained),
            duration(moment.now().saturating_sub(last_free)),
            plural(frees)
        ),
        evidence,
        advice: "On unload, synchronise the stream and trim the pool (cuMemPoolTrimTo, cudaMemPoolTrimTo) with its context current, or set a finite release threshold (cudaMemPoolAttrReleaseThreshold). PyTorch with backend:cudaMallocAsync: torch.cuda.empty_cache(). It is no leak: the process can use the memory again, others cannot.".to_owned(),
    })
}
