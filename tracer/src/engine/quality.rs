//! How much of the truth could be seen.

use super::Book;
use crate::finding::{Category, DataQuality};
use crate::ledger::Ledger;
use crate::units::size;

pub(super) fn judge(ledger: &Ledger, book: &Book, context_ceiling: u64) -> (DataQuality, Vec<String>) {
    let mut quality = DataQuality::Full;
    let mut reasons = Vec::new();
    let mut lower = |to: DataQuality, reason: String| {
        quality = quality.max(to);
        reasons.push(reason);
    };
    if ledger.probes_ok == Some(false) {
        lower(DataQuality::Degraded, "the tracer said that its probes are not in place".to_owned());
    }
    for (part, reason) in &ledger.unseen {
        lower(DataQuality::Partial, format!("{part}: {reason}"));
    }
    let unreliable = ledger
        .gpu_users()
        .filter(|user| user.books.as_ref().is_some_and(|books| books.unreliable_since_ns.is_some()))
        .count();
    let losses = &ledger.losses;
    if unreliable > 0 {
        lower(
            DataQuality::Degraded,
            format!("{} events were lost; the figures of {unreliable} live processes are not repaired", losses.events),
        );
    } else if losses.events > 0 {
        lower(DataQuality::Partial, format!("{} events were lost", losses.events));
    }
    for (&(device, gi), series) in &ledger.devices {
        let name = match gi {
            Some(gi) => format!("GPU {device} instance {gi}"),
            None => format!("GPU {device}"),
        };
        if let Some(failing) = series.failing.as_ref().filter(|failing| failing.count > 1) {
            lower(DataQuality::Degraded, format!("NVML gives no answer for {name} ({})", failing.status));
        } else if series.failures > 0 {
            lower(DataQuality::Partial, format!("NVML gave no answer for {name} {} times", series.failures));
        }
        if series.implausible > 0 {
            lower(DataQuality::Degraded, format!("NVML's rows for {name} cannot be true and were not used"));
        }
        if series.no_totals {
            let told = if series.samples == 0 {
                format!("NVML tells nothing of {name}: what the driver bills is not known")
            } else {
                format!("{name} cannot tell its total memory use")
            };
            lower(DataQuality::Partial, told);
        }
        let split = ledger.devices.range((device, Some(0))..=(device, Some(u32::MAX))).next().is_some();
        if series.unsized_rows || series.names_instances && !split {
            lower(DataQuality::Partial, format!("NVML does not tell the size of each process on {name}"));
        }
    }
    if book.has_open(Category::MonitorDegraded) {
        lower(DataQuality::Degraded, "NVML does not answer as it should".to_owned());
    }
    if book.ever(Category::CoverageGap) {
        lower(DataQuality::Partial, "some processes or libraries were out of the probes' sight".to_owned());
    }
    let preattach: u64 = ledger
        .gpu_users()
        .map(|user| ledger.preattach_bytes(user))
        .filter(|&bytes| bytes > context_ceiling)
        .fold(0, u64::saturating_add);
    if preattach > 0 {
        lower(DataQuality::Partial, format!("{} were allocated before the tracer came", size(preattach)));
    }
    if losses.unknown_frees > 0 {
        lower(
            DataQuality::Partial,
            format!("{} releases named memory whose allocation was not seen", losses.unknown_frees),
        );
    }
    if losses.dropped > 0 {
        lower(DataQuality::Partial, format!("{} facts were dropped because a limit was reached", losses.dropped));
    }
    (quality, reasons)
}
