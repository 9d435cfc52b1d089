//! NVML bills a process more and more that no allocation explains.
//!
//! Beyond its allocations a process pays for contexts, code modules, local memory and whatever
//! allocates without a traced call (graphs, libraries inside the driver). That overhead settles
//! after the start; where it keeps growing, something leaks that no allocation ledger shows.
//!
//! Evidence needed: the difference between NVML's row and the books, after what imports, pools and
//! page rounding can explain, rises by Mann and Kendall's test (1 in 100), with a slope that is
//! positive within its confidence interval, over the latter three quarters of its history, and still
//! in the last third. More modules loaded than unloaded names the cause.
//! Refuted by: a difference that settles, steps only at the start, falls again; books with holes.
//!
//! Thresholds: eight samples over a minute at least; 128 MiB gained; a warning at half a GiB or
//! where modules explain it (later code and local memory cost up to some hundred MiB once).

use super::forecast::Forecast;
use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::books::{Books, Gap};
use crate::robust::{Trend, trend};
use crate::units::{MIB, SECOND, at, duration, size};

const CATEGORY: Category = Category::UntrackedGrowth;
/// Samples needed of the judged part.
const POINTS: usize = 8;
/// Time it must span.
const SPAN_NS: u64 = 60 * SECOND;
/// Growth from here on is a warning whatever its cause.
const WARNING: u64 = 512 * MIB;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::lingering(CATEGORY, judge, "the difference no longer grows")
}

/// A rise that has not ended: the points it is judged by, and its line.
pub(super) struct Rise<'a> {
    pub(super) points: &'a [(u64, u64)],
    pub(super) gained: u64,
    pub(super) trend: Trend,
}

impl Rise<'_> {
    /// When and how much it was at first.
    pub(super) fn first(&self) -> (u64, u64) {
        self.points.first().copied().unwrap_or_default()
    }

    /// And last.
    pub(super) fn last(&self) -> (u64, u64) {
        self.points.last().copied().unwrap_or_default()
    }

    pub(super) fn span_ns(&self) -> u64 {
        self.last().0.saturating_sub(self.first().0)
    }

    /// How much an hour.
    pub(super) fn per_hour(&self) -> u64 {
        (self.trend.slope * 3600.0 * SECOND as f64).max(0.0) as u64
    }
}

/// Whether a history has risen by at least so much, over at least so long, and still does. The start of
/// a program is no part of its trend.
pub(super) fn rising(history: &[(u64, u64)], at_least: u64, span_ns: u64) -> Option<Rise<'_>> {
    let points = history.get(history.len() / 4..)?;
    if points.len() < POINTS {
        return None;
    }
    let (first, last) = (points.first()?, points.last()?);
    let gained = last.1.saturating_sub(first.1);
    let late = points.get(points.len() * 2 / 3)?;
    let still = last.1.saturating_sub(late.1).saturating_mul(8) >= gained;
    let long = last.0.saturating_sub(first.0) >= span_ns;
    if gained < at_least || !long || !still {
        return None;
    }
    trend(points).filter(Trend::rises).map(|trend| Rise { points, gained, trend })
}

fn judge(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let Some(books) = process.books.as_deref().filter(|books| books.unreliable_since_ns.is_none()) else {
        return Vec::new();
    };
    let on = books.devices.iter().filter_map(|(device, on)| Some((device.as_ref().copied()?, &on.gap)));
    on.filter_map(|(device, gap)| on_device(process, books, device, gap, moment)).collect()
}

fn on_device(process: &Process, books: &Books, device: u32, gap: &Gap, moment: &Moment<'_>) -> Option<Claim> {
    let rise = rising(gap.unexplained.points(), moment.config.held_floor_bytes, SPAN_NS)?;
    let modules = books.modules_loaded.saturating_sub(books.modules_unloaded);
    let loads = books.modules_loaded > 0 && modules.saturating_mul(2) > books.modules_loaded && modules >= 8;
    let (first, last) = (rise.first(), rise.last());
    let confidence = match (rise.points.len() >= 2 * POINTS, loads) {
        (true, _) | (_, true) => Confidence::High,
        _ => Confidence::Medium,
    };
    let forecast = Forecast::of(moment, process, Some(device), rise.gained, rise.span_ns());
    // Little is no alarm, however little is left.
    let severity = if loads || rise.gained >= WARNING {
        Forecast::severity(forecast.as_ref(), Severity::Warning)
    } else {
        Severity::Info
    };
    let name = process_name(process.id.tgid, &process.comm);
    let mut evidence = vec![
        format!(
            "unexplained by its calls: {} ({} bytes) {}, {} ({} bytes) {}",
            size(first.1),
            first.1,
            at(first.0),
            size(last.1),
            last.1,
            at(last.0)
        ),
        format!(
            "about {} an hour over {}, in {} samples (z {:.1}); 95% between {} and {} an hour",
            size(rise.per_hour()),
            duration(rise.span_ns()),
            rise.points.len(),
            rise.trend.z,
            size((rise.trend.low * 3600.0 * SECOND as f64).max(0.0) as u64),
            size((rise.trend.high * 3600.0 * SECOND as f64).max(0.0) as u64)
        ),
        format!(
            "its books on GPU {device} say {}, balanced or constant meanwhile",
            size(books.devices.get(&Some(device)).map_or(0, |on| on.owned.bytes))
        ),
    ];
    evidence.push(if books.modules_loaded > 0 {
        format!("{} code modules loaded, {} unloaded", books.modules_loaded, books.modules_unloaded)
    } else {
        "no module loads were seen; graphs and library-internal allocations make no traced call".to_owned()
    });
    evidence.extend(forecast.map(|forecast| forecast.told()));
    Some(Claim {
        category: CATEGORY,
        key: format!("{}-gpu{device}", process.id),
        subject: Subject {
            gi: process.instance(device),
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity,
        confidence,
        bytes: Some(rise.gained),
        summary: format!(
            "{name} is billed {} more on GPU {device} than {} ago without allocating it",
            size(rise.gained),
            duration(rise.span_ns())
        ),
        evidence,
        advice: if loads {
            "Unload modules and libraries that are no longer used (cuModuleUnload, cuLibraryUnload), and compile each kernel once rather than for each job.".to_owned()
        } else {
            "Look at CUDA graphs (cuDeviceGraphMemTrim; keep graphs rather than capturing again), at growing local memory (cuCtxSetLimit, stack size) and at libraries that keep handles. A newer driver may help where none of them applies.".to_owned()
        },
    })
}

#[cfg(test)]
mod tests {
    use super::{SPAN_NS, rising};
    use crate::units::{MIB, SECOND};

    fn history(values: &[u64]) -> Vec<(u64, u64)> {
        values.iter().enumerate().map(|(index, mib)| (index as u64 * 10 * SECOND, mib * MIB)).collect()
    }

    #[test]
    fn only_what_keeps_growing_rises() {
        let steady: Vec<u64> = (0..16).map(|index| 300 + index * 20).collect();
        assert_eq!(rising(&history(&steady), MIB, SPAN_NS).unwrap().gained, 220 * MIB);
        let settled: Vec<u64> = (0..32).map(|index| 300 + u64::min(index, 12) * 20).collect();
        assert!(rising(&history(&settled), MIB, SPAN_NS).is_none(), "settled");
        let start: Vec<u64> = [300, 400, 500, 600].into_iter().chain([600; 12]).collect();
        assert!(rising(&history(&start), MIB, SPAN_NS).is_none(), "grew at the start");
        let saw: Vec<u64> = (0..32).map(|index| 300 + (index % 4) * 100).collect();
        assert!(rising(&history(&saw), MIB, SPAN_NS).is_none(), "comes and goes");
        let step: Vec<u64> = [300; 20].into_iter().chain([900; 4]).collect();
        assert!(rising(&history(&step), MIB, SPAN_NS).is_none(), "one step");
    }
}
