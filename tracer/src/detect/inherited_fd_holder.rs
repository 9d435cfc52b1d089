//! Children that inherited device files keep a dead process's GPU memory alive.
//!
//! The driver frees a client when the last descriptor of its device file is closed. A child that
//! was forked after the device was opened, and never executed another image, shares that
//! descriptor; it need not make a single driver call. NVML then bills a process that no longer
//! exists. It looks like a driver fault and is none.
//!
//! Evidence needed: the process is dead, a sample after the grace still shows its memory, and
//! live descendants inherited its files (lineage), or a walk of the open files finds them (proof).
//! Refuted by: an exec since the fork without files left open, a fork before the device was
//! opened, files that it inherited from a forebear other than the dead process, a complete walk
//! that does not find the child, or the memory's return.
//!
//! Thresholds: 5 s after the exit (teardown takes under a second), 128 MiB.

use super::release::{Key, finding_key};
use super::{Detector, by_cost, device_name, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Billed, Holder, Process, Proof, Search, Teardown};
use crate::units::{at, duration, plural, shown, size};
use std::collections::BTreeMap;

const CATEGORY: Category = Category::InheritedFdHolder;
/// Holders named one by one.
const NAMED: usize = 256;

/// Holders seen so far, by incident.
#[derive(Debug, Default)]
pub(super) struct InheritedFdHolder {
    incidents: BTreeMap<Key, Vec<Holder>>,
}

impl Detector for InheritedFdHolder {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        if !moment.pulse {
            return;
        }
        let ledger = moment.ledger;
        self.incidents.retain(|key, _| {
            let gone = !ledger.teardowns.contains_key(key);
            if gone {
                book.close(CATEGORY, &finding_key(key), "the incident is no longer followed");
            }
            !gone
        });
        for (key, teardown) in &ledger.teardowns {
            if teardown.returned_ns.is_some() {
                if self.incidents.remove(key).is_some() {
                    book.close(CATEGORY, &finding_key(key), "the memory came back");
                }
                continue;
            }
            let late =
                teardown.billed_ns.is_some_and(|ns| ns >= teardown.exit_ns.saturating_add(moment.config.exit_grace_ns));
            if !late || teardown.billed < moment.config.held_floor_bytes {
                continue;
            }
            let search = ledger.search_holders(teardown);
            if search.holders.is_empty() {
                if self.incidents.remove(key).is_some() {
                    book.close(CATEGORY, &finding_key(key), "no holder is left");
                }
                continue;
            }
            let known = self.incidents.entry(*key).or_default();
            for holder in &search.holders {
                if let Some(known) = known.iter_mut().find(|known| known.id == holder.id) {
                    known.clone_from(holder);
                } else if known.len() < NAMED {
                    known.push(holder.clone());
                }
            }
            let claim = claim(key, teardown, &search, known, moment);
            book.raise(claim);
        }
    }
}

fn claim(key: &Key, teardown: &Teardown, search: &Search, known: &[Holder], moment: &Moment<'_>) -> Claim {
    let ledger = moment.ledger;
    let dead = ledger.process(&teardown.id);
    let comm = dead.map(|process| process.comm.clone()).unwrap_or_default();
    let told = dead.and_then(|process| process.death).map_or_else(|| "gone".to_owned(), |death| death.told());
    let on = device_name(teardown.device, teardown.gi);
    let proven = search.holders.iter().any(|holder| holder.proof == Proof::LineageAndFiles);
    let lineage = search.holders.iter().any(|holder| holder.proof != Proof::Files);
    let cost = by_cost(teardown.billed, moment.now().saturating_sub(teardown.exit_ns), moment.config);
    let (confidence, severity) = match (proven, lineage, search.is_complete()) {
        (true, ..) => (Confidence::High, cost),
        (false, true, _) | (false, false, true) => (Confidence::Medium, cost),
        (false, false, false) => (Confidence::Low, Severity::Info),
    };
    let mut evidence = vec![format!(
        "pid {} exited: {told} {}{}",
        teardown.id.tgid,
        at(teardown.exit_ns),
        dead.and_then(|process| process.gone_ns)
            .map_or_else(String::new, |ns| format!(", left the process table {}", at(ns)))
    )];
    evidence.push(match teardown.by {
        Billed::ByRow => format!(
            "NVML still bills pid {} {} ({} bytes) on {on} {}",
            teardown.id.tgid,
            size(teardown.billed),
            teardown.billed,
            at(teardown.billed_ns.unwrap_or(moment.now()))
        ),
        Billed::Unattributed => format!(
            "{on} uses {} ({} bytes) more than its floor and its listed processes explain {}",
            size(teardown.billed),
            teardown.billed,
            at(teardown.billed_ns.unwrap_or(moment.now()))
        ),
    });
    for holder in known {
        let alive = ledger.process(&holder.id).is_none_or(Process::is_alive);
        let fork = holder.forked_ns.map_or_else(
            || "no fork from it was seen".to_owned(),
            |ns| format!("forked {}, no exec since fork", at(ns)),
        );
        let files: Vec<String> = holder.files.iter().take(8).map(|file| shown(file, 32)).collect();
        let files = if files.is_empty() {
            "open device files not yet looked for".to_owned()
        } else {
            format!("open device files {}", files.join(", "))
        };
        let end = if alive { "" } else { "; has ended since" };
        evidence.push(format!("holder {}: {fork}; {files}{end}", process_name(holder.id.tgid, &holder.comm)));
    }
    evidence.push(match search.scan {
        Some((ns, true)) => format!("all open files were walked {}", at(ns)),
        Some((ns, false)) => format!("open files were walked {}, but not all could be read", at(ns)),
        None => "open files have not been walked since the exit".to_owned(),
    });
    let alive: Vec<&Holder> = search.holders.iter().collect();
    let list: Vec<String> = alive.iter().take(NAMED).map(|holder| holder.id.tgid.to_string()).collect();
    let count = alive.len() as u64;
    let first = known.first();
    let subject = Subject {
        device: Some(teardown.device),
        gi: teardown.gi,
        billed_tgid: Some(teardown.id.tgid),
        pod: dead.and_then(|process| process.pod.clone()),
        container: dead.and_then(|process| process.container.clone()),
        ..first.map_or_else(Subject::default, |holder| Subject::process(holder.id, &holder.comm))
    };
    Claim {
        category: CATEGORY,
        key: finding_key(key),
        subject,
        severity,
        confidence,
        bytes: Some(teardown.billed),
        summary: format!(
            "{} of dead {} stay on {on} because {count} live process{} its device files open: {}",
            size(teardown.billed),
            process_name(teardown.id.tgid, &comm),
            if count == 1 { " has" } else { "es have" },
            list.join(", ")
        ),
        evidence,
        advice: format!(
            "The driver is not at fault. End all of the surviving holder{} (pid{} {}) after checking that {} still what this finding names; the memory \
             comes back when the last one has closed its files, {} after the exit so far. To prevent it, create workers before the device \
             is first used, use the spawn or forkserver start method, or close inherited device files in the child.",
            plural(count),
            plural(count),
            list.join(" "),
            if count == 1 { "it is" } else { "they are" },
            duration(moment.now().saturating_sub(teardown.exit_ns))
        ),
    }
}
