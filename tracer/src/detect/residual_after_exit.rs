//! GPU memory of a dead process stays although nothing is seen to hold it.
//!
//! This is the verdict against the driver, so everything else must be ruled out first.
//!
//! Evidence needed: the exit, and that the process left the process table (a task that is still
//! being torn down owns its memory); samples after the grace that still show the memory, either in
//! a row of the dead process or as use that neither the device's floor nor any row explains. Rows
//! of other processes are subtracted, so another's growth in the same interval explains itself.
//! On MIG, only the instance's own series counts: the parent adds up all instances.
//! High confidence also needs a complete walk of the open files without a holder, no export, and
//! no managed memory of others (NVML bills that to no one).
//! Refuted by: live children that inherited the files, processes that import the memory, a
//! process that got the same number, or the memory's return.
//!
//! Thresholds: grace of 5 s plus a second for every 8 GB of pinned host memory (measured teardown:
//! 0.4 to 0.8 s; 25.9 s with 243 GB); twice that without a walk of the open files; 128 MiB.

use super::release::{Key, Pending, Releases, finding_key};
use super::{Detector, by_cost, device_name, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Billed, Process};
use crate::units::{at, duration, size};

const CATEGORY: Category = Category::ResidualAfterExit;

/// Memory of the dead that nothing holds.
#[derive(Debug, Default)]
pub(super) struct ResidualAfterExit {
    releases: Releases,
}

impl Detector for ResidualAfterExit {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        if !moment.pulse {
            return;
        }
        for pending in self.releases.look(moment) {
            let teardown = pending.teardown;
            let key: Key = (teardown.id, teardown.device, teardown.gi);
            if let Some(returned) = teardown.returned_ns {
                if !book.has_open(CATEGORY) {
                    continue;
                }
                let reason = format!(
                    "the memory came back {} after the exit",
                    duration(returned.saturating_sub(teardown.exit_ns))
                );
                book.close(CATEGORY, &finding_key(&key), &reason);
                continue;
            }
            match judge(&pending, moment) {
                Some(verdict) => book.raise(verdict),
                None if pending.is_held() => {
                    book.close(CATEGORY, &finding_key(&key), "a holder of the memory was found");
                }
                None => {}
            }
        }
        // Teardowns that are no longer followed leave no finding open for ever.
        for key in book.open_keys(CATEGORY) {
            if !moment.ledger.teardowns.keys().any(|teardown| finding_key(teardown) == key) {
                book.close(CATEGORY, &key, "the incident is no longer followed");
            }
        }
    }
}

/// What is known of a dead process's end.
#[derive(Clone, Copy)]
enum Departure {
    Left(u64),
    Zombie(u64),
    Unseen,
    StillThere,
}

fn departure(process: &Process) -> Departure {
    let died = process.death.map_or(0, |death| death.ns);
    match (&process.gone_ns, &process.state) {
        (Some(ns), _) => Departure::Left(*ns),
        // A zombie has closed its files: only its entry is left.
        (None, Some(state)) if state.ns >= died => {
            if state.letter.starts_with(['Z', 'X']) {
                Departure::Zombie(state.ns)
            } else {
                Departure::StillThere
            }
        }
        _ => Departure::Unseen,
    }
}

fn judge(pending: &Pending<'_>, moment: &Moment<'_>) -> Option<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let teardown = pending.teardown;
    let billed_ns = teardown.billed_ns?;
    if pending.is_held() || pending.search.itself || teardown.billed < config.held_floor_bytes {
        return None;
    }
    let process = ledger.process(&teardown.id)?;
    let grace = config.teardown_grace_ns(teardown.pinned);
    let stayed = billed_ns.saturating_sub(pending.since_ns);
    let complete = pending.search.is_complete();
    let needed = if complete { grace } else { grace.saturating_mul(config.unproven_residue_graces) };
    if stayed < needed {
        return None;
    }
    let mut missing = Vec::new();
    let departure = departure(process);
    match departure {
        Departure::Left(_) | Departure::Zombie(_) => {}
        Departure::StillThere => return None,
        // A search that no longer finds its files says almost as much, after a while.
        Departure::Unseen if !complete || stayed < grace.max(config.unreaped_ns) => return None,
        Departure::Unseen => {
            missing.push("it was not seen to leave the process table".to_owned());
        }
    }
    match pending.search.scan {
        Some((_, true)) => {}
        Some((ns, false)) => missing.push(format!("the walk of the open files {} could not read all of them", at(ns))),
        None => missing.push("the open files have not been walked since the exit".to_owned()),
    }
    if !process.exports.is_empty() {
        missing
            .push(format!("it exported {} blocks, which a process out of sight may have open", process.exports.len()));
    }
    if teardown.by == Billed::Unattributed {
        let managed = ledger.gpu_users().find(|user| {
            let books = user.books.as_ref().and_then(|books| books.devices.get(&Some(teardown.device)));
            books.is_some_and(|books| books.managed.bytes >= config.held_floor_bytes)
        });
        if let Some(user) = managed {
            missing.push(format!("managed memory of pid {} is billed to no one and may be part of it", user.id.tgid));
        }
    }
    if teardown.mps {
        missing.push("it was an MPS client, whose memory the MPS server gives back".to_owned());
    }
    if process.death.is_some_and(|death| death.cause == crate::ledger::process::Cause::Unknown) {
        missing.push("its exit was not seen".to_owned());
    }
    let confidence = match (missing.len(), teardown.by) {
        (0, _) => Confidence::High,
        (1 | 2, _) | (_, Billed::ByRow) => Confidence::Medium,
        _ => Confidence::Low,
    };
    let severity = match confidence {
        Confidence::High => by_cost(teardown.billed, stayed, config),
        Confidence::Medium => Severity::Warning,
        Confidence::Low => Severity::Info,
    };
    Some(claim(pending, process, departure, grace, stayed, &missing, confidence, severity, moment))
}

#[expect(clippy::too_many_arguments, reason = "they are the parts of one verdict")]
fn claim(
    pending: &Pending<'_>,
    process: &Process,
    departure: Departure,
    grace: u64,
    stayed: u64,
    missing: &[String],
    confidence: Confidence,
    severity: Severity,
    moment: &Moment<'_>,
) -> Claim {
    let ledger = moment.ledger;
    let teardown = pending.teardown;
    let on = device_name(teardown.device, teardown.gi);
    let name = process_name(teardown.id.tgid, &process.comm);
    let told = process.death.map_or_else(|| "gone".to_owned(), |death| death.told());
    let mut evidence = vec![format!("{name}, started {}: {told} {}", at(teardown.id.start_ns), at(teardown.exit_ns))];
    match departure {
        Departure::Left(ns) => evidence.push(format!("reaped: left the process table {}", at(ns))),
        Departure::Zombie(ns) => {
            evidence.push(format!("a zombie {}: its files are closed, only its parent's wait is missing", at(ns)));
        }
        Departure::Unseen | Departure::StillThere => {}
    }
    evidence.push(format!(
        "held {} ({} bytes) when it died; {} ({} bytes) are still there {} after nothing held it any more, {} samples later",
        size(teardown.expected),
        teardown.expected,
        size(teardown.billed),
        teardown.billed,
        duration(stayed),
        teardown.samples
    ));
    let series = ledger.devices.get(&(teardown.device, teardown.gi));
    if let Some(last) = series.and_then(|series| series.last) {
        let used = last.used.map_or_else(|| "unknown".to_owned(), |used| format!("{} ({used} bytes)", size(used)));
        evidence.push(match teardown.by {
            Billed::ByRow => format!("NVML still lists pid {} {}; {on} uses {used}", teardown.id.tgid, at(last.ns)),
            Billed::Unattributed => format!(
                "{on} uses {used} {}: {} listed processes explain {}, and {} was its floor before",
                at(last.ns),
                last.count,
                size(last.rows),
                size(teardown.baseline)
            ),
        });
    }
    evidence.push(format!(
        "grace {} ({} of pinned host memory)",
        duration(grace),
        if teardown.pinned == 0 { "none".to_owned() } else { size(teardown.pinned) }
    ));
    if let Some((ns, true)) = pending.search.scan {
        evidence.push(format!("all open files were walked {}: no process holds its device files", at(ns)));
    }
    evidence.push("no live child inherited its files and no process is known to import its memory".to_owned());
    for xid in ledger.xids.iter().filter(|xid| xid.device.is_none_or(|device| device == teardown.device)).rev().take(3)
    {
        let code = xid.code.map_or_else(String::new, |code| format!(" {code}"));
        evidence.push(format!("the kernel reported Xid{code} {}", at(xid.ns)));
    }
    if let Some(driver) = &ledger.driver {
        evidence.push(format!("driver {driver}"));
    }
    evidence.extend(missing.iter().map(|missing| format!("not ruled out: {missing}")));
    let verdict = match confidence {
        Confidence::High => "the driver did not give it back",
        Confidence::Medium | Confidence::Low => "no holder is known, but not every other cause is ruled out",
    };
    let next = if pending.search.is_complete() {
        "Save the evidence (nvidia-bug-report.sh, kernel log, driver version) for the driver's vendor."
    } else {
        "First walk /proc/*/fd as root for open /dev/nvidia* files; only if no process has any, treat it as a driver fault and save nvidia-bug-report.sh and the kernel log."
    };
    Claim {
        category: CATEGORY,
        key: finding_key(&(teardown.id, teardown.device, teardown.gi)),
        subject: Subject {
            device: Some(teardown.device),
            gi: teardown.gi,
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(teardown.id, &process.comm)
        },
        severity,
        confidence,
        bytes: Some(teardown.billed),
        summary: format!(
            "{} of dead {name} stay on {on} {} after its exit: {verdict}",
            size(teardown.billed),
            duration(moment.now().saturating_sub(teardown.exit_ns))
        ),
        evidence,
        advice: format!(
            "There is no process to end: pid {} is gone and killing others would not help. {next} The memory comes back with a reset of {on} once its other work has been drained, or with a driver reload.",
            teardown.id.tgid
        ),
    }
}
