//! GPU memory of a dead process comes back, but late.
//!
//! The exit event precedes the closing of the device files, and the driver releases a client
//! afterwards: in one step, after 0.4 to 0.8 s for device memory alone, later with pinned host
//! memory (25.9 s for 243 GB). So a figure that does not fall is no proof of a fault.
//!
//! Evidence needed: a sample after the plain grace that still shows the memory, and nothing that
//! holds it. Refuted by: a holder or importer (another verdict), or time: past the whole grace it
//! becomes a residue.
//!
//! Thresholds: 5 s; 128 MiB.

use super::release::{Key, Pending, Releases, finding_key};
use super::{Detector, device_name, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::units::{at, duration, size};

const CATEGORY: Category = Category::SlowTeardown;

/// Teardowns that take their time.
#[derive(Debug, Default)]
pub(super) struct SlowTeardown {
    releases: Releases,
    done: std::collections::BTreeSet<Key>,
}

impl Detector for SlowTeardown {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        if !moment.pulse {
            return;
        }
        let ledger = moment.ledger;
        self.done.retain(|key| ledger.teardowns.contains_key(key));
        for pending in self.releases.look(moment) {
            let teardown = pending.teardown;
            let key: Key = (teardown.id, teardown.device, teardown.gi);
            let name = finding_key(&key);
            if self.done.contains(&key) {
                continue;
            }
            let late = teardown.billed_ns.unwrap_or(0).saturating_sub(pending.since_ns) >= moment.config.exit_grace_ns
                && teardown.expected >= moment.config.held_floor_bytes;
            if let Some(returned) = teardown.returned_ns {
                self.done.insert(key);
                if late {
                    book.raise(claim(&pending, moment));
                }
                book.close(
                    CATEGORY,
                    &name,
                    &format!(
                        "the memory came back {} after the exit",
                        duration(returned.saturating_sub(teardown.exit_ns))
                    ),
                );
            } else if pending.is_held() {
                book.close(CATEGORY, &name, "something still holds the memory");
            } else if book.is_open(Category::StuckInDriver, &name) {
                book.close(CATEGORY, &name, "its process hangs in the driver");
            } else if book.is_open(Category::ResidualAfterExit, &name) {
                book.close(CATEGORY, &name, "it stayed past its whole grace and counts as a residue");
            } else if late {
                book.raise(claim(&pending, moment));
            }
        }
        for key in book.open_keys(CATEGORY) {
            if !ledger.teardowns.keys().any(|teardown| finding_key(teardown) == key) {
                book.close(CATEGORY, &key, "the incident is no longer followed");
            }
        }
    }
}

fn claim(pending: &Pending<'_>, moment: &Moment<'_>) -> Claim {
    let teardown = pending.teardown;
    let process = moment.ledger.process(&teardown.id);
    let comm = process.map(|process| process.comm.clone()).unwrap_or_default();
    let told = process.and_then(|process| process.death).map_or_else(|| "gone".to_owned(), |death| death.told());
    let on = device_name(teardown.device, teardown.gi);
    let name = process_name(teardown.id.tgid, &comm);
    let grace = moment.config.teardown_grace_ns(teardown.pinned);
    let stayed = teardown.stayed_ns();
    let mut evidence = vec![
        format!("{name}: {told} {}", at(teardown.exit_ns)),
        format!(
            "{} ({} bytes) still shown on {on} {} after the exit, {}",
            size(teardown.expected),
            teardown.expected,
            duration(stayed),
            at(teardown.billed_ns.unwrap_or(teardown.exit_ns))
        ),
    ];
    if teardown.pinned > 0 {
        evidence.push(format!(
            "it held {} ({} bytes, {:.0} GB) of pinned host memory: up to {} are expected",
            size(teardown.pinned),
            teardown.pinned,
            teardown.pinned as f64 / 1e9,
            duration(grace)
        ));
    } else {
        evidence.push("it held no pinned host memory that was seen".to_owned());
    }
    if let Some(gone) = process.and_then(|process| process.gone_ns) {
        evidence.push(format!("left the process table {}", at(gone)));
    } else if let Some(state) =
        process.and_then(|process| process.state.as_ref()).filter(|state| state.ns >= teardown.exit_ns)
    {
        let letter = crate::units::shown(&state.letter, 8);
        evidence.push(format!("exit seen but not reaped: state {letter} {}", at(state.ns)));
    }
    let outcome = if let Some(returned) = teardown.returned_ns {
        evidence.push(format!(
            "first sample without it {} after the exit, {}",
            duration(returned.saturating_sub(teardown.exit_ns)),
            at(returned)
        ));
        format!("took up to {} to come back", duration(returned.saturating_sub(teardown.exit_ns)))
    } else {
        format!("have not come back after {}", duration(stayed))
    };
    let explained = teardown.returned_ns.is_some() || stayed < grace;
    Claim {
        category: CATEGORY,
        key: finding_key(&(teardown.id, teardown.device, teardown.gi)),
        subject: Subject {
            device: Some(teardown.device),
            gi: teardown.gi,
            pod: process.and_then(|process| process.pod.clone()),
            container: process.and_then(|process| process.container.clone()),
            ..Subject::process(teardown.id, &comm)
        },
        severity: Severity::Info,
        confidence: if explained { Confidence::High } else { Confidence::Medium },
        bytes: Some(teardown.expected),
        summary: format!("{} of dead {name} on {on} {outcome}", size(teardown.expected)),
        evidence,
        advice: format!(
            "Nothing has to be ended. Wait until NVML no longer shows the memory of pid {} before the next start on {on}; with large pinned host pools allow a second for every 8 GB.",
            teardown.id.tgid
        ),
    }
}
