//! Some process or library is out of sight of the probes.
//!
//! Evidence needed: a library or its probes reported as not (wholly) traced; or a process that
//! was born under the tracer's eyes, that NVML bills, and that has never made a visible call.
//! Refuted by: the probes being placed later, a call that becomes visible, graphics-only rows, and
//! processes that were there before the tracer (those are pre-attach, not a gap).
//!
//! Thresholds: 30 s without a visible call (a context comes first, so a traced process shows at
//! once); 128 MiB billed.

use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::record::{Event, Identity, Text};
use crate::units::{at, shown, size};
use std::collections::BTreeMap;

const CATEGORY: Category = Category::CoverageGap;
/// Gaps reported at once.
const GAPS: usize = 1024;

/// Gaps that were told, and billed processes without a call.
#[derive(Debug, Default)]
pub(super) struct CoverageGap {
    libraries: BTreeMap<String, Identity>,
}

impl Detector for CoverageGap {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        match moment.event {
            Event::TracerStart { probes_ok: false, .. } => book.raise(whole_host(moment)),
            Event::TracerStart { probes_ok: true, .. } => book.close(CATEGORY, "host", "the probes are in place"),
            Event::LibraryMap { task, path, inode, status, reason } => {
                let status = status.as_deref().unwrap_or("traced");
                self.library(Some(task.identity), path, *inode, status, reason.as_ref(), moment, book);
            }
            Event::ProbeStatus { tgid, start_ns, path, inode, status, reason } => {
                let id = tgid.map(|tgid| Identity { tgid, start_ns: start_ns.unwrap_or(0) });
                let path = path.clone().unwrap_or_default();
                self.library(id, &path, *inode, status, reason.as_ref(), moment, book);
            }
            _ => {}
        }
        if moment.pulse {
            self.libraries.retain(|key, id| {
                let ended = moment.ledger.process(id).is_some_and(|process| !process.is_alive());
                if ended {
                    book.close(CATEGORY, key, "the process ended");
                }
                !ended
            });
            unseen(moment, book);
        }
    }
}

impl CoverageGap {
    #[expect(clippy::too_many_arguments, reason = "they are the fields of one record")]
    fn library(
        &mut self,
        id: Option<Identity>,
        path: &Text,
        inode: Option<u64>,
        status: &str,
        reason: Option<&Text>,
        moment: &Moment<'_>,
        book: &mut Book,
    ) {
        let inode_key = inode.map_or_else(|| shown(path, 128), |inode| format!("inode{inode}"));
        let key = id.map_or_else(|| format!("host-{inode_key}"), |id| format!("{}-{inode_key}", id.tgid));
        if matches!(status, "ok" | "traced" | "attached") {
            book.close(CATEGORY, &key, "its probes are in place");
            self.libraries.remove(&key);
            return;
        }
        if self.libraries.len() >= GAPS && !self.libraries.contains_key(&key) {
            return;
        }
        let process = id.and_then(|id| moment.ledger.process(&id).or_else(|| moment.ledger.current(id.tgid)));
        if let Some(process) = process {
            self.libraries.insert(key.clone(), process.id);
        }
        let billed: u64 = process.map_or(0, |process| billed(process, moment));
        let who = match (process, id) {
            (Some(process), _) => process_name(process.id.tgid, &process.comm),
            (None, Some(id)) => process_name(id.tgid, ""),
            (None, None) => "every process that loads it".to_owned(),
        };
        let status = shown(status, 32);
        let library = if path.is_empty() { "the driver library".to_owned() } else { shown(path, 200) };
        let mut evidence = vec![format!("{library}: {status} {}", at(moment.now()))];
        if let Some(inode) = inode {
            evidence.push(format!("inode {inode}"));
        }
        if let Some(reason) = reason {
            evidence.push(format!("reason: {}", shown(reason, 200)));
        }
        if billed > 0 {
            evidence.push(format!("NVML bills {who} {} ({billed} bytes)", size(billed)));
        }
        let subject = Subject {
            path: (!path.is_empty()).then(|| path.clone()),
            ..process.map_or_else(
                || Subject {
                    tgid: id.map(|id| id.tgid),
                    start_ns: id.map(|id| id.start_ns),
                    scope: id.is_none().then(|| "host".into()),
                    ..Subject::default()
                },
                |process| Subject {
                    device: moment.ledger.devices_of(process).first().copied(),
                    pod: process.pod.clone(),
                    container: process.container.clone(),
                    ..Subject::process(process.id, &process.comm)
                },
            )
        };
        book.raise(Claim {
            category: CATEGORY,
            key,
            subject,
            severity: if status == "partial" { Severity::Info } else { Severity::Warning },
            confidence: Confidence::High,
            bytes: (billed > 0).then_some(billed),
            summary: format!("driver calls of {who} are not {}seen: {library} is {status}", if status == "partial" { "all " } else { "" }),
            evidence,
            advice: "Figures of such processes come from NVML alone and say nothing about single allocations. `vramtrace doctor` tells which library files were found and what keeps the probes off them.".to_owned(),
        });
    }
}

fn billed(process: &Process, moment: &Moment<'_>) -> u64 {
    moment
        .ledger
        .devices_of(process)
        .iter()
        .filter_map(|&device| moment.ledger.billed(process, device))
        .fold(0, u64::saturating_add)
}

/// Processes that NVML bills and that never made a visible call although they were born here.
fn unseen(moment: &Moment<'_>, book: &mut Book) {
    let ledger = moment.ledger;
    if !matches!(moment.event, Event::NvmlSample { .. }) || ledger.attached_ns.is_none() {
        return;
    }
    let mut standing = Vec::new();
    for process in ledger.gpu_users() {
        if process.books.is_some()
            || process.id.start_ns == 0
            || ledger.predates_tracer(process)
            || ledger.is_observer(process.id, &process.comm)
        {
            continue;
        }
        let Some((&(device, gi), row)) = process.rows.iter().find(|(_, row)| !row.graphics) else { continue };
        let long = row.ns.saturating_sub(row.first_ns) >= moment.config.unseen_calls_ns;
        let Some(bytes) = ledger.billed(process, device) else { continue };
        if !long || bytes < moment.config.held_floor_bytes {
            continue;
        }
        let key = format!("{}-calls", process.id);
        let name = process_name(process.id.tgid, &process.comm);
        book.raise(Claim {
            category: CATEGORY,
            key: key.clone(),
            subject: Subject { device: Some(device), gi, pod: process.pod.clone(), container: process.container.clone(), ..Subject::process(process.id, &process.comm) },
            severity: Severity::Warning,
            confidence: Confidence::Medium,
            bytes: Some(bytes),
            summary: format!("NVML bills {name} {} on GPU {device}, but none of its driver calls is seen", size(bytes)),
            evidence: vec![
                format!("born {}, after the tracer", at(process.id.start_ns)),
                format!("first billed {}, now {} ({bytes} bytes)", at(row.first_ns), size(bytes)),
                "no context, allocation or other driver call of it was seen".to_owned(),
            ],
            advice: "It probably maps a driver library that has no probes (a copy of its own in a container, or another path). `vramtrace doctor` lists the library files found; its figures come from NVML alone until then.".to_owned(),
        });
        standing.push(key);
    }
    for key in book.open_keys(CATEGORY) {
        if key.ends_with("-calls") && !standing.contains(&key) {
            book.close(CATEGORY, &key, "its calls are seen now, or it ended");
        }
    }
}

fn whole_host(moment: &Moment<'_>) -> Claim {
    Claim {
        category: CATEGORY,
        key: "host".to_owned(),
        subject: Subject { scope: Some("host".into()), ..Subject::default() },
        severity: Severity::Warning,
        confidence: Confidence::High,
        bytes: None,
        summary: "the tracer's probes are not in place: no driver call is seen".to_owned(),
        evidence: vec![format!("told by the tracer {}", at(moment.now()))],
        advice: "Run `vramtrace doctor` to see what is missing. Until then figures come from NVML alone.".to_owned(),
    }
}
