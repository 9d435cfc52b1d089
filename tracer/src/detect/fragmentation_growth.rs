//! An allocator takes more and more for objects that do not grow.
//!
//! A caching allocator that cannot use what it has (pieces too small, options that work against each
//! other) asks the driver for more while its objects stay as large as they were.
//!
//! Evidence needed: what the process holds by its calls rises and still does (the same test as for
//! untracked growth), while the framework's own metric of allocated bytes stays well below and does
//! not rise along. Without such a metric this cannot be told from a leak, and `app_leak` says so.
//! Refuted by: a plateau; allocated bytes that grow along.
//!
//! Thresholds: eight samples over two minutes at least, as warming up takes one; 256 MiB gained; allocated at most half of what is
//! held, and grown by at most a quarter of what was gained.

use super::allocators::Allocator;
use super::forecast::Forecast;
use super::standing::EachProcess;
use super::untracked_growth::rising;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::metrics::Meaning;
use crate::units::{MIB, SECOND, at, duration, size};

const CATEGORY: Category = Category::FragmentationGrowth;
/// Less is not worth a finding.
const GAINED: u64 = 256 * MIB;
/// A server that warms up (compiles, tunes, captures graphs) takes more at first as well.
const SPAN_NS: u64 = 120 * SECOND;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::lingering(CATEGORY, judge, "what it holds no longer grows, or its objects do")
}

/// The key of a finding about a process's memory on a device.
pub(super) fn key(process: &Process, device: u32) -> String {
    format!("{}-gpu{device}", process.id)
}

fn judge(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let ledger = moment.ledger;
    let Some(books) = process.books.as_deref().filter(|books| books.unreliable_since_ns.is_none()) else {
        return Vec::new();
    };
    let Some(metric) = ledger.metric_of(process, Meaning::Allocated) else { return Vec::new() };
    let largest = books.devices.iter().filter_map(|(device, on)| Some((device.as_ref().copied()?, on)));
    let Some((device, on)) = largest.max_by_key(|(device, on)| (on.owned.bytes, u32::MAX - device)) else {
        return Vec::new();
    };
    let Some(rise) = rising(on.gap.held.points(), GAINED, SPAN_NS) else { return Vec::new() };
    let (first, last) = (rise.first(), rise.last());
    let held = on.owned.bytes;
    let during = || metric.history.points().iter().filter(|(ns, _)| *ns >= first.0).map(|&(_, bytes)| bytes);
    let (Some(start), Some(most)) = (during().next(), during().max()) else { return Vec::new() };
    let grown = metric.bytes().max(most).saturating_sub(start);
    if most.saturating_mul(2) > held || grown.saturating_mul(4) > rise.gained {
        return Vec::new();
    }
    let name = process_name(process.id.tgid, &process.comm);
    let allocator = Allocator::of(process, ledger.total(device, None));
    let mut evidence = vec![
        format!(
            "held by its calls: {} ({} bytes) {}, {} ({} bytes) {}, {} samples (z {:.1})",
            size(first.1),
            first.1,
            at(first.0),
            size(last.1),
            last.1,
            at(last.0),
            rise.points.len(),
            rise.trend.z
        ),
        format!(
            "{} stayed between {} and {} meanwhile: {} of what is held is not in use",
            crate::units::shown(&metric.name, 64),
            size(during().min().unwrap_or(0)),
            size(most),
            size(held.saturating_sub(metric.bytes()))
        ),
        format!("about {} an hour", size(rise.per_hour())),
    ];
    if books.failed_allocs > 0 {
        evidence.push(format!("{} requests were refused", books.failed_allocs));
    }
    let forecast = Forecast::of(moment, process, Some(device), rise.gained, rise.span_ns());
    evidence.extend(forecast.map(|forecast| forecast.told()));
    evidence.extend(allocator.map(|allocator| allocator.told().to_owned()));
    vec![Claim {
        category: CATEGORY,
        key: key(process, device),
        subject: Subject {
            gi: process.instance(device),
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity: Forecast::severity(forecast.as_ref(), Severity::Warning),
        confidence: if most.saturating_mul(4) <= held { Confidence::High } else { Confidence::Medium },
        bytes: Some(held.saturating_sub(metric.bytes())),
        summary: format!(
            "{name} has taken {} more on GPU {device} in {} while its objects use {}",
            size(rise.gained),
            duration(rise.span_ns()),
            size(metric.bytes())
        ),
        evidence,
        advice: format!(
            "{}. torch.cuda.empty_cache() at a quiet moment gives back what is wholly free. Fewer different shapes (padding to buckets) remove the cause.",
            match allocator {
                Some(Allocator::PyTorchExpandable) =>
                    "Its segments already grow in place (expandable_segments): collect early (garbage_collection_threshold) and leave out options that work against it",
                _ =>
                    "Let segments grow in place (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), or bound splitting (max_split_size_mb) and collect early (garbage_collection_threshold); do not combine expandable_segments with options that work against it",
            }
        ),
    }]
}
