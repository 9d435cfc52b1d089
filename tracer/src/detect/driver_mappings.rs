//! A process maps more and more of the driver's device files that no allocation accounts for.
//!
//! Contexts, channels, pinned memory, imports and graphs each map device files (`/dev/nvidia*`) into
//! the process. Their number settles after the start. Where it keeps growing something is created and
//! not destroyed, which shows in `/proc/PID/maps` without any probe, and which ends when the kernel
//! allows the process no further mapping (`vm.max_map_count`, 65,530 unless it was raised): the next
//! allocation then fails with memory to spare.
//!
//! Evidence needed: the number of mappings rises as [`rising`] says.
//! Refuted by: a number that settles or falls; live allocations in the books that rise as well by at
//! least half as many, since then the mappings are theirs and `app_leak` judges them.
//!
//! Thresholds: 128 mappings gained over two minutes (one more context costs some tens, and comes in
//! one step); a warning from half of what the kernel allows on.

use super::standing::EachProcess;
use super::untracked_growth::{Rise, rising};
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::units::{SECOND, at, duration, size};

const CATEGORY: Category = Category::UntrackedGrowth;
const SPAN_NS: u64 = 120 * SECOND;
const MAPPINGS: u64 = 128;
/// `DEFAULT_MAX_MAP_COUNT` of the kernel (`include/linux/mm.h`).
const ALLOWED: u64 = 65_530;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::lingering(CATEGORY, judge, "the number of mappings no longer grows")
}

fn judge(process: &Process, _: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let Some(maps) = &process.driver_maps else { return Vec::new() };
    let counts: Vec<(u64, u64)> = maps.points().iter().map(|mapped| (mapped.ns, mapped.count)).collect();
    let Some(rise) = rising(&counts, MAPPINGS, SPAN_NS) else { return Vec::new() };
    let (first, last) = (rise.first(), rise.last());
    let at_point = |ns| maps.points().iter().find(move |mapped| mapped.ns == ns);
    let (Some(from), Some(to)) = (at_point(first.0), at_point(last.0)) else { return Vec::new() };
    let allocated = to.live.saturating_sub(from.live);
    if allocated.saturating_mul(2) >= rise.gained {
        return Vec::new();
    }
    vec![claim(process, &rise, to.bytes, process.books.is_some().then_some(allocated))]
}

fn claim(process: &Process, rise: &Rise<'_>, bytes: u64, allocated: Option<u64>) -> Claim {
    let (first, last) = (rise.first(), rise.last());
    let name = process_name(process.id.tgid, &process.comm);
    let mut evidence = vec![
        format!(
            "device files mapped in /proc/{}/maps: {} {}, {} {}, in {} looks (z {:.1})",
            process.id.tgid,
            first.1,
            at(first.0),
            last.1,
            at(last.0),
            rise.points.len(),
            rise.trend.z
        ),
        format!("they take {} of address space, which is not memory", size(bytes)),
        match allocated {
            Some(count) => {
                format!("its books gained {count} live allocations meanwhile, which does not account for it")
            }
            None => "none of its calls was seen, so what its allocations account for is not known".to_owned(),
        },
    ];
    let per_hour = rise.per_hour();
    if per_hour > 0 {
        let left_ns = u128::from(ALLOWED.saturating_sub(last.1)) * 3600 * u128::from(SECOND) / u128::from(per_hour);
        evidence.push(format!(
            "at {per_hour} an hour it reaches the {ALLOWED} mappings that the kernel allows by default in {} at the latest: its other mappings count as well",
            duration(u64::try_from(left_ns).unwrap_or(u64::MAX))
        ));
    }
    Claim {
        category: CATEGORY,
        key: format!("{}-mappings", process.id),
        subject: Subject {
            scope: Some("driver_mappings".into()),
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm)
        },
        severity: if last.1 >= ALLOWED / 2 { Severity::Warning } else { Severity::Info },
        confidence: if allocated.is_some() { Confidence::Medium } else { Confidence::Low },
        bytes: None,
        summary: format!(
            "{name} maps {} more of the driver's device files than {} ago and goes on",
            rise.gained,
            duration(rise.span_ns())
        ),
        evidence,
        advice: format!(
            "Look for contexts, streams, events, graphs, pinned buffers or IPC handles that the program creates for each job and never destroys. Compare `grep -c /dev/nvidia /proc/{}/maps` before and after a job.",
            process.id.tgid
        ),
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::{Engine, EngineConfig};
    use crate::finding::Severity;
    use crate::units::SECOND;
    use serde_json::{Value, json};

    fn report(counts: impl Iterator<Item = u64>, allocate: bool) -> Vec<crate::finding::Finding> {
        let mut engine = Engine::new(EngineConfig::default());
        let mut push = |mut record: Value, second: u64, kind: &str| {
            let fields = record.as_object_mut().unwrap();
            fields.extend([
                ("ts_ns".to_owned(), json!(second * SECOND)),
                ("kind".to_owned(), json!(kind)),
                ("pid".to_owned(), json!(7)),
                ("tgid".to_owned(), json!(7)),
                ("start_ns".to_owned(), json!(1)),
                ("comm".to_owned(), json!("serve")),
            ]);
            engine.push(&serde_json::from_value(record).unwrap());
        };
        push(json!({"state": "S", "gpu_fds": ["nvidia0"]}), 0, "proc_snapshot");
        let mut handle = 0;
        let mut before = None;
        for (index, count) in counts.enumerate() {
            let second = 10 * index as u64;
            let more = before.replace(count).map_or(0, |before| count.saturating_sub(before));
            for _ in 0..if allocate { more } else { 0 } {
                handle += 1;
                push(
                    json!({"api": "cuMemHostAlloc", "handle": format!("h{handle}"), "size": 4096}),
                    second,
                    "host_alloc",
                );
            }
            push(json!({"count": count, "bytes": count * 4096}), second, "driver_maps");
        }
        engine.finish();
        engine.report().findings
    }

    #[test]
    fn only_growth_that_goes_on_and_that_no_allocation_accounts_for() {
        let growing = || (0..40).map(|index| 90 + index * 12);
        let found = report(growing(), false);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].id, "untracked_growth-7@1-mappings");
        assert_eq!((found[0].severity, found[0].bytes), (Severity::Info, None));
        assert_eq!(report(growing(), true), [], "the allocations account for it");
        assert_eq!(report((0..40).map(|index| 90 + index.min(8) * 40), false), [], "settled after the start");
        assert_eq!(report((0..40).map(|index| if index < 20 { 90 } else { 400 }), false), [], "one step");
        let near = report((0..40).map(|index| 30_000 + index * 200), false);
        assert_eq!(near[0].severity, Severity::Warning);
    }
}
