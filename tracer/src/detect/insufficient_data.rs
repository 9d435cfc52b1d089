//! Part of a history is missing, so figures are bounds and some verdicts are withheld.
//!
//! Evidence needed, one of: events of a process were lost; its books contradict themselves (a
//! handle is handed out that they still hold); it was there before the tracer and holds billed
//! bytes that no call explains, or releases handles nobody saw; NVML's rows cannot be true.
//! Refuted by: exact books read back from the kernel; the pre-attach memory being given back.
//! A release of the null handle and the outer call of two layers are no unknown handles.
//!
//! Thresholds: more than 1 GiB billed beyond the calls for a process that predates the tracer (a
//! context with its modules explains up to that), or one release of an unknown handle.

use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Effect, Process};
use crate::record::{Event, Identity};
use crate::units::{at, clock, plural, size};
use std::collections::BTreeSet;

const CATEGORY: Category = Category::InsufficientData;
/// Processes watched at once.
const WATCHED: usize = 4096;

/// Processes whose history has holes.
#[derive(Debug, Default)]
pub(super) struct InsufficientData {
    watched: BTreeSet<Identity>,
    dirty: BTreeSet<Identity>,
    unassigned: u64,
}

impl Detector for InsufficientData {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let ledger = moment.ledger;
        for effect in ledger.effects() {
            match *effect {
                Effect::Contradiction(id) | Effect::GpuUser(id) if self.watched.len() < WATCHED => {
                    let relevant = ledger.process(&id).is_some_and(|process| {
                        ledger.predates_tracer(process)
                            || process
                                .books
                                .as_ref()
                                .is_some_and(|books| books.lost > 0 || books.reused > 0 || books.unknown_frees > 0)
                    });
                    if relevant {
                        self.watched.insert(id);
                        self.dirty.insert(id);
                    }
                }
                Effect::Died(id) if self.watched.remove(&id) => {
                    book.close(CATEGORY, &id.to_string(), "the process ended");
                }
                _ => {}
            }
        }
        if ledger.losses.unassigned > self.unassigned {
            self.unassigned = ledger.losses.unassigned;
            book.raise(anybody(moment));
        }
        if !moment.pulse {
            return;
        }
        // Only a sample or a contradiction can change what is missing.
        let sampled = match moment.event {
            Event::NvmlSample { device, .. } => Some(*device),
            _ => None,
        };
        let dirty = std::mem::take(&mut self.dirty);
        for id in &self.watched {
            let Some(process) = ledger.process(id) else { continue };
            let listed = sampled.is_some_and(|device| process.rows.keys().any(|&(on, _)| on == device));
            if !listed && !dirty.contains(id) {
                continue;
            }
            match claim(process, moment) {
                Some(claim) => book.raise(claim),
                None => book.close(
                    CATEGORY,
                    &id.to_string(),
                    "its books are exact again, or nothing from before the tracer is left",
                ),
            }
        }
        if sampled.is_none() {
            return;
        }
        self.watched.retain(|id| ledger.process(id).is_some_and(Process::is_alive));
        for (&(device, gi), series) in &ledger.devices {
            if series.implausible > 0 {
                book.raise(rows(device, gi, series.implausible, series.implausible_pid, moment));
            }
        }
    }
}

fn claim(process: &Process, moment: &Moment<'_>) -> Option<Claim> {
    let ledger = moment.ledger;
    let name = process_name(process.id.tgid, &process.comm);
    let books = process.books.as_deref();
    let preattach = ledger.preattach_bytes(process);
    let predates = ledger.predates_tracer(process);
    let unknown_frees = books.map_or(0, |books| books.unknown_frees);
    let unreliable =
        books.is_some_and(|books| books.unreliable_since_ns.is_some() || books.reused > 0 && !books.resynced);
    let late = predates && (preattach > moment.config.context_ceiling_bytes || unknown_frees > 0 && preattach > 0);
    if !unreliable && !late && (unknown_frees == 0 || predates) {
        return None;
    }
    let device = ledger.devices_of(process).first().copied();
    let mut evidence = Vec::new();
    let mut causes = Vec::new();
    if let Some(books) = books.filter(|_| unreliable) {
        if books.lost > 0 {
            causes.push(format!("{} events were lost", books.lost));
            evidence.push(format!(
                "{} lost events since {}",
                books.lost,
                clock(books.unreliable_since_ns.unwrap_or(moment.now()))
            ));
        }
        if let Some((handle, ns)) = &books.first_reused {
            causes.push("a handle was reused that its books still held".to_owned());
            evidence.push(format!(
                "handle {} reused {} although its release was not seen ({} such handle{})",
                crate::units::shown(&handle.to_string(), 64),
                at(*ns),
                books.reused,
                plural(books.reused)
            ));
        }
        for device in ledger.devices_of(process) {
            let owned = books.devices.get(&Some(device)).map_or(0, |books| books.owned.bytes);
            if let Some(billed) = ledger.billed(process, device)
                && billed < owned
            {
                evidence.push(format!(
                    "GPU {device}: the ledger says {} ({owned} bytes), NVML bills {} ({billed} bytes), {} less",
                    size(owned),
                    size(billed),
                    size(owned - billed)
                ));
            }
        }
    }
    if late {
        causes.push(format!("{} date from before the tracer", size(preattach)));
        evidence.push(format!(
            "attached after process start: started {}, first seen {}",
            at(process.id.start_ns),
            at(process.seen_ns)
        ));
        evidence.push(format!(
            "{} ({preattach} bytes) billed by NVML that no seen call explains, context included",
            size(preattach)
        ));
    }
    if unknown_frees > 0 {
        if causes.is_empty() {
            causes.push(format!("it released {unknown_frees} handles whose allocation was not seen"));
        }
        evidence.push(format!("{unknown_frees} free{} of unknown handles", plural(unknown_frees)));
    }
    Some(Claim {
        category: CATEGORY,
        key: process.id.to_string(),
        subject: Subject {
            device,
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm)
        },
        severity: Severity::Info,
        confidence: Confidence::High,
        bytes: late.then_some(preattach),
        summary: format!("figures of {name} are bounds: {}", causes.join("; ")),
        evidence,
        advice: if unreliable {
            "Treat this process's ledger as reset: it is an upper bound, and no leak verdict is based on it. A larger ring buffer avoids losses.".to_owned()
        } else {
            "Nothing has to be done. For complete figures the tracer must be running before the process starts."
                .to_owned()
        },
    })
}

fn anybody(moment: &Moment<'_>) -> Claim {
    let losses = &moment.ledger.losses;
    Claim {
        category: CATEGORY,
        key: "host".to_owned(),
        subject: Subject { scope: Some("host".into()), ..Subject::default() },
        severity: Severity::Info,
        confidence: Confidence::High,
        bytes: None,
        summary: format!("{} events were lost that no known process can be held to", losses.events),
        evidence: vec![format!("{} lost events, last {}", losses.events, at(losses.last_ns.unwrap_or(moment.now())))],
        advice: "A process that used the GPU only then may be missing. A larger ring buffer avoids losses.".to_owned(),
    }
}

fn rows(device: u32, gi: Option<u32>, samples: u64, pid: Option<u32>, moment: &Moment<'_>) -> Claim {
    let driver = moment.ledger.driver.as_ref().map_or_else(String::new, |driver| format!(", driver {driver}"));
    Claim {
        category: CATEGORY,
        key: gi.map_or_else(|| format!("rows-gpu{device}"), |gi| format!("rows-gpu{device}-gi{gi}")),
        subject: Subject { device: Some(device), gi, ..Subject::default() },
        severity: Severity::Info,
        confidence: Confidence::High,
        bytes: None,
        summary: format!("NVML's process rows for GPU {device} cannot be true and are not used"),
        evidence: vec![format!(
            "{samples} sample{} named a pid or a size that is impossible, last pid {}{driver}",
            plural(samples),
            pid.unwrap_or(0)
        )],
        advice: "Early R535 drivers write process rows with another layout than they declare; update the driver. Figures come from driver calls until then.".to_owned(),
    }
}
