//! NVML does not answer as it should.
//!
//! NVML calls can hang in the kernel, fail on one device, or slow down as memory degrades. While
//! they do, nothing can be said about what the driver bills, and that must be said.
//!
//! Evidence needed: several failures in a row (time-outs or errors) on a device, one call that
//! took far too long, or no sample at all although time passes.
//! Refuted by: "not supported", which is what the device can do and not a failure.
//!
//! Thresholds: 2 failures in a row; 5 s for one call; 30 s without any sample, or four times the usual wait.

use super::{Detector, device_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Device;
use crate::record::Event;
use crate::units::{SECOND, at, clock, duration, shown};

const CATEGORY: Category = Category::MonitorDegraded;
/// A failure that lasts this long is critical: verdicts have been blind for a minute.
const BLIND_NS: u64 = 60 * SECOND;

/// Watches the watcher.
#[derive(Debug, Default)]
pub(super) struct MonitorDegraded;

impl Detector for MonitorDegraded {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        if !moment.pulse {
            return;
        }
        // Only a live host has ticks: a file without samples says nothing about NVML.
        let ticking = *moment.event == Event::Tick;
        // An answer says something of its own device only.
        let only = if let Event::NvmlSample { device, .. } = moment.event { Some(*device) } else { None };
        let degraded = book.has_open(CATEGORY);
        for (&(device, gi), series) in &moment.ledger.devices {
            if only.is_some_and(|only| only != device) {
                continue;
            }
            let key = || gi.map_or_else(|| format!("gpu{device}"), |gi| format!("gpu{device}-gi{gi}"));
            let silent_since = series.answered_ns.filter(|&last| {
                ticking
                    && series.failing.is_none()
                    && series.samples > 1
                    && moment.now().saturating_sub(last)
                        >= moment.config.monitor_silence_ns.max(series.interval_ns.saturating_mul(4))
            });
            let failing = series.failing.as_ref().filter(|failing| {
                failing.count >= moment.config.monitor_failures || failing.longest_ns >= moment.config.monitor_slow_ns
            });
            let slow = series.failing.is_none()
                && series.dur_ns >= moment.config.monitor_slow_ns
                && series.samples > 2
                && series.dur_ns > series.usual_ns.saturating_mul(2);
            if let Some(failing) = failing {
                let lasted = moment.now().saturating_sub(failing.since_ns);
                let severity = if lasted >= BLIND_NS { Severity::Critical } else { Severity::Warning };
                let told = format!(
                    "{} failed answers in a row since {}: {} (longest call {})",
                    failing.count,
                    clock(failing.since_ns),
                    shown(&failing.status, 64),
                    duration(failing.longest_ns)
                );
                book.raise(claim(&key(), device, gi, series, severity, told, moment));
            } else if let Some(last) = silent_since {
                let told = format!("no sample since {} although time passes", clock(last));
                book.raise(claim(&key(), device, gi, series, Severity::Warning, told, moment));
            } else if slow {
                let told = format!(
                    "the last call took {} where {} is usual",
                    duration(series.dur_ns),
                    duration(series.usual_ns)
                );
                book.raise(claim(&key(), device, gi, series, Severity::Info, told, moment));
            } else if degraded
                && (series.good >= moment.config.monitor_failures || series.good > 0 && series.dur_ns < SECOND)
            {
                book.close(CATEGORY, &key(), "NVML answers again");
            }
        }
    }
}

fn claim(
    key: &str,
    device: u32,
    gi: Option<u32>,
    series: &Device,
    severity: Severity,
    told: String,
    moment: &Moment<'_>,
) -> Claim {
    let ledger = moment.ledger;
    let on = device_name(device, gi);
    let summary = format!("NVML is not dependable for {on}: {told}");
    let mut evidence = vec![told];
    evidence.push(series.answered_ns.map_or_else(
        || "it never answered".to_owned(),
        |ns| format!("last good answer {}; {} good, {} failed in all", at(ns), series.samples, series.failures),
    ));
    for xid in ledger.xids.iter().filter(|xid| xid.device.is_none_or(|on| on == device)).rev().take(3) {
        let code = xid.code.map_or_else(String::new, |code| format!(" {code}"));
        evidence.push(format!("the kernel reported Xid{code} {}", at(xid.ns)));
    }
    if let Some(driver) = &ledger.driver {
        evidence.push(format!("driver {driver}"));
    }
    Claim {
        category: CATEGORY,
        key: key.to_owned(),
        subject: Subject { device: Some(device), gi, ..Subject::default() },
        severity,
        confidence: Confidence::High,
        bytes: None,
        summary,
        evidence,
        advice: format!(
            "Until it answers, figures for {on} come from driver calls alone. Look for Xid messages and tasks in state D in the kernel log; do not kill monitoring agents that hang, it can make things worse. If only this agent is affected, check that its container still has the device files."
        ),
    }
}
