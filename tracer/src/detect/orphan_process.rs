//! A live process holds GPU memory after its owner is gone.
//!
//! Evidence needed: the process is alive and holds more than the noise floor; and its owner has
//! ended for longer than the grace. Owners are the container, pod or batch job it was born in
//! (its control group *history* counts, the current one may have been left), and recorded
//! ancestors of the same container, pod, job or control group (recorded at the fork: the current
//! parent is only whoever adopted it).
//!
//! Refuted by: an ancestor of another owner (a container runtime that restarts); a clean exit of
//! a launcher before the process touched the GPU (a daemon); hang-up (a terminal that closed
//! under a process that ignores it); a shell or session manager from which the process had
//! detached; a service that goes on working. Driver calls after an owner died by a signal leave a
//! weaker verdict, because a training rank goes on computing without its launcher.
//!
//! Thresholds: 5 s after containers, jobs and ancestors (field reports: healthy trees end within
//! a second or two), 35 s after pods (30 s is the default termination grace and deletion may be
//! told first) and after the process was told to stop with its owner (SIGTERM, SIGINT), 20 s of
//! silence where the owner ended with an error, 60 s where it ended cleanly. Signals are known from
//! recordings that have them; the live tracer does not see them yet.

use super::{Detector, by_cost, device_name, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::books::DeviceBooks;
use crate::ledger::process::{Cause, Death};
use crate::ledger::{Effect, Ledger, OwnerEnd, OwnerKind, Process};
use crate::record::{Event, Identity, Text};
use crate::units::{SECOND, at, duration, shown, size};
use std::collections::{BTreeMap, BTreeSet};

const CATEGORY: Category = Category::OrphanProcess;
const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGQUIT: i32 = 3;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Programs that start others for people and are not what those belong to.
const SESSIONS: [&str; 19] = [
    "bash", "sh", "zsh", "dash", "fish", "ksh", "tcsh", "csh", "sshd", "login", "su", "sudo", "tmux", "screen",
    "systemd", "init", "cron", "crond", "atd",
];

/// Live GPU users with some dead ancestor or ended owner.
#[derive(Debug, Default)]
pub(super) struct OrphanProcess {
    watched: BTreeSet<Identity>,
}

/// How an ancestor ended, as far as ownership is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// By a signal, or after one was sent to it.
    Stopped,
    /// With an error.
    Failed,
    /// With success and of its own accord.
    Cleanly,
    /// Not seen.
    Unseen,
}

/// Why a process counts as left over.
struct Case {
    owner: Option<OwnerEnd>,
    root: Option<(Identity, Text, Death, Ended)>,
    confidence: Confidence,
    severity_cap: Severity,
    since_ns: u64,
}

impl Detector for OrphanProcess {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let ledger = moment.ledger;
        for effect in ledger.effects() {
            match *effect {
                Effect::Died(id) => {
                    self.watched.extend(ledger.descendants(id).into_iter().filter(|id| is_user(ledger, id)));
                    if self.watched.remove(&id) {
                        close_all(id, "the process ended", book);
                    }
                }
                Effect::GpuUser(id) => {
                    let abandoned = ledger.ancestors(id).any(|ancestor| !ancestor.is_alive());
                    let ended = ledger.process(&id).is_some_and(|process| ledger.owner_end(process).is_some());
                    if abandoned || ended {
                        self.watched.insert(id);
                    }
                }
                _ => {}
            }
        }
        if matches!(moment.event, Event::ContainerEvent { .. } | Event::PodEvent { .. } | Event::JobEvent { .. }) {
            self.watched.extend(ledger.gpu_users().filter(|user| ledger.owner_end(user).is_some()).map(|user| user.id));
        }
        if moment.pulse && !self.watched.is_empty() {
            self.judge_all(moment, book);
        }
    }
}

impl OrphanProcess {
    fn judge_all(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let ledger = moment.ledger;
        self.watched.retain(|id| ledger.process(id).is_some());
        let cases: BTreeMap<Identity, Case> = self
            .watched
            .iter()
            .filter_map(|id| ledger.process(id))
            .filter(|process| process.is_alive())
            .filter_map(|process| judge(process, moment).map(|case| (process.id, case)))
            .collect();
        for id in &self.watched {
            let Some(process) = ledger.process(id) else { continue };
            if !process.is_alive() {
                close_all(*id, "the process ended", book);
                continue;
            }
            let Some(case) = cases.get(id) else {
                close_all(*id, "its owner is back, or it serves without one", book);
                continue;
            };
            let siblings: Vec<u32> = cases
                .iter()
                .filter(|(other, other_case)| *other != id && same_incident(case, other_case))
                .map(|(other, _)| other.tgid)
                .collect();
            for device in ledger.devices_of(process) {
                let bytes = ledger.held(process, device);
                let key = key(*id, device);
                if bytes < moment.config.held_floor_bytes {
                    book.close(CATEGORY, &key, "it gave its memory back");
                    continue;
                }
                book.raise(claim(key, process, case, device, bytes, &siblings, moment));
            }
        }
    }
}

fn key(id: Identity, device: u32) -> String {
    format!("{id}-gpu{device}")
}

fn close_all(id: Identity, reason: &str, book: &mut Book) {
    let prefix = format!("{id}-gpu");
    for key in book.open_keys(CATEGORY) {
        if key.starts_with(&prefix) {
            book.close(CATEGORY, &key, reason);
        }
    }
}

fn is_user(ledger: &Ledger, id: &Identity) -> bool {
    ledger.process(id).is_some_and(|process| process.is_alive() && process.uses_gpu())
}

fn same_incident(a: &Case, b: &Case) -> bool {
    let roots = matches!((&a.root, &b.root), (Some(a), Some(b)) if a.0 == b.0);
    let owners = matches!((&a.owner, &b.owner), (Some(a), Some(b)) if a.kind == b.kind && a.id == b.id);
    roots || owners
}

fn ended(process: &Process, death: Death) -> Ended {
    match death.cause {
        Cause::Exit { signal, .. } if signal != 0 => Ended::Stopped,
        // A handler that turns a signal into a clean exit: what mattered is that it was told to stop.
        Cause::Exit { .. }
            if process.signal.is_some_and(|(sig, ns)| {
                matches!(sig, SIGINT | SIGQUIT | SIGKILL | SIGTERM) && ns.saturating_add(60 * SECOND) >= death.ns
            }) =>
        {
            Ended::Stopped
        }
        Cause::Exit { code: 0, .. } => Ended::Cleanly,
        Cause::Exit { .. } => Ended::Failed,
        Cause::Unknown => Ended::Unseen,
    }
}

fn hung_up(death: Death) -> bool {
    matches!(death.cause, Cause::Exit { signal: SIGHUP, .. } | Cause::Exit { code: 129, signal: 0 })
}

/// The farthest dead ancestor that owned the process.
fn dead_owner(process: &Process, ledger: &Ledger) -> Option<(Identity, Text, Death, Ended)> {
    let first_gpu = process.first_gpu_ns().unwrap_or(u64::MAX);
    let mut detached = false;
    let mut found: Option<(Identity, Text, Death, Ended)> = None;
    for ancestor in ledger.ancestors(process.id) {
        let Some(death) = ancestor.death else { continue };
        if !process.shared_owner_with(ancestor) {
            continue;
        }
        let how = ended(ancestor, death);
        if how == Ended::Cleanly && death.ns <= first_gpu {
            detached = true;
            continue;
        }
        if hung_up(death) || detached && SESSIONS.contains(&ancestor.comm.as_str()) {
            continue;
        }
        let weaker = how == Ended::Cleanly && found.as_ref().is_some_and(|(.., known)| *known != Ended::Cleanly);
        // A launcher or shell that ended well says nothing; one that used the GPU itself may have owned.
        if weaker || how == Ended::Cleanly && !ancestor.uses_gpu() {
            continue;
        }
        found = Some((ancestor.id, ancestor.comm.clone(), death, how));
    }
    found
}

fn judge(process: &Process, moment: &Moment<'_>) -> Option<Case> {
    let (ledger, config, now) = (moment.ledger, moment.config, moment.now());
    // Told to stop together with its owner, it may be saving its work: that long it is waited for.
    let saves = |ended_ns: u64| {
        process.signal.is_some_and(|(signal, ns)| {
            (signal == SIGTERM || signal == SIGINT)
                && ns <= ended_ns.saturating_add(config.owner_grace_ns)
                && now < ns.saturating_add(config.pod_grace_ns)
        })
    };
    let owner = ledger.owner_end(process).filter(|end| {
        let grace = if end.kind == OwnerKind::Pod { config.pod_grace_ns } else { config.owner_grace_ns };
        now >= end.ns.saturating_add(grace) && process.alive_ns > end.ns && !saves(end.ns)
    });
    let root = dead_owner(process, ledger)
        .filter(|(.., death, _)| now >= death.ns.saturating_add(config.owner_grace_ns) && !saves(death.ns));
    if let Some(end) = owner {
        let since_ns = root.as_ref().map_or(end.ns, |(.., death, _)| death.ns.min(end.ns));
        return Some(Case {
            owner: Some(end),
            root,
            confidence: Confidence::High,
            severity_cap: Severity::Critical,
            since_ns,
        });
    }
    let (.., death, how) = *root.as_ref()?;
    let settled = death.ns.saturating_add(config.owner_grace_ns);
    let serves = process.service_ns.is_some_and(|ns| ns > settled);
    let works = process.last_demand_ns.is_some_and(|ns| ns > settled);
    let seen_alive = process.alive_ns > death.ns;
    let paused = |least: u64| now.saturating_sub(process.last_demand_ns.unwrap_or(0).max(death.ns)) >= least;
    let (confidence, severity_cap) = match how {
        _ if serves || !seen_alive => return None,
        Ended::Stopped if works => (Confidence::Medium, Severity::Warning),
        Ended::Stopped if !works => (Confidence::High, Severity::Critical),
        Ended::Failed if !works && paused(config.failed_owner_silence_ns) => (Confidence::High, Severity::Critical),
        Ended::Unseen if !works => (Confidence::Medium, Severity::Critical),
        Ended::Cleanly if !works && paused(config.clean_owner_silence_ns) => (Confidence::Medium, Severity::Warning),
        _ => return None,
    };
    Some(Case { owner: None, root, confidence, severity_cap, since_ns: death.ns })
}

fn claim(
    key: String,
    process: &Process,
    case: &Case,
    device: u32,
    bytes: u64,
    siblings: &[u32],
    moment: &Moment<'_>,
) -> Claim {
    let (ledger, now) = (moment.ledger, moment.now());
    let name = process_name(process.id.tgid, &process.comm);
    let since = duration(now.saturating_sub(case.since_ns));
    let mut evidence = Vec::new();
    let mut why = String::new();
    if let Some(end) = &case.owner {
        let kind = match end.kind {
            OwnerKind::Container => "container",
            OwnerKind::Pod => "pod",
            OwnerKind::Job => "job",
        };
        let id = shown(&end.id, 128);
        why = format!("its {kind} {id} is {}", shown(&end.phase.to_lowercase(), 32));
        evidence.push(format!("{kind} {id} {} {}", shown(&end.phase.to_lowercase(), 32), at(end.ns)));
    }
    if let Some((root, comm, death, how)) = &case.root {
        let owner = process_name(root.tgid, comm);
        let told = death.told();
        if why.is_empty() {
            why = format!("its owner {owner} is gone ({told})");
        }
        let how = match how {
            Ended::Stopped | Ended::Failed | Ended::Cleanly => String::new(),
            Ended::Unseen => "; the exit itself was not seen".to_owned(),
        };
        let parent = if process.parent == Some(*root) { "parent" } else { "ancestor" };
        evidence.push(format!("dead {parent} {owner}: {told} {}{how}", at(death.ns)));
        let mut chain = vec![process.id.tgid.to_string()];
        for ancestor in ledger.ancestors(process.id) {
            chain.push(ancestor.id.tgid.to_string());
            if ancestor.id == *root {
                break;
            }
        }
        evidence.push(format!("lineage as recorded at fork or attach: {}", chain.join(" <- ")));
    }
    let state = process
        .state
        .as_ref()
        .map_or_else(String::new, |state| format!(", state {} {}", shown(&state.letter, 8), at(state.ns)));
    let host =
        process.nspid.map_or_else(String::new, |nspid| format!("; host pid {}, pid {nspid} inside", process.id.tgid));
    evidence.push(format!(
        "holder {name} started {}, last seen alive {}{state}{host}",
        at(process.id.start_ns),
        at(process.alive_ns)
    ));
    adoption(process, case, ledger, &mut evidence);
    for pair in process.places.windows(2) {
        if let [from, to] = pair {
            evidence.push(format!(
                "control group changed {}: from {} to {}",
                at(to.ns),
                shown(&from.cgroup, 160),
                shown(&to.cgroup, 160)
            ));
        }
    }
    if process.cgroup_deleted {
        evidence.push("its control group has been deleted under it".to_owned());
    }
    holdings(process, device, bytes, ledger, &mut evidence);
    let victims: Vec<_> = ledger
        .refusals
        .iter()
        .filter(|refused| {
            refused.ns > case.since_ns && refused.device.is_none_or(|on| on == device) && refused.id != process.id
        })
        .collect();
    for victim in victims.iter().take(5) {
        evidence.push(format!(
            "refused for lack of memory since: {} wanted {} {}",
            process_name(victim.id.tgid, &victim.comm),
            size(victim.size),
            at(victim.ns)
        ));
    }
    if !siblings.is_empty() {
        let list: Vec<String> = siblings.iter().take(64).map(u32::to_string).collect();
        evidence.push(format!("left over by the same owner: pids {}", list.join(", ")));
    }
    let severity = if victims.is_empty() {
        by_cost(bytes, moment.now().saturating_sub(case.since_ns), moment.config)
    } else {
        Severity::Critical
    };
    let summary = format!("{name} still holds {} on GPU {device} although {why}, {since} ago", size(bytes));
    let subject = Subject {
        device: Some(device),
        pod: process.pod.clone(),
        container: process.container.clone(),
        nspid: process.nspid,
        job: job(process, case),
        lineage_root_tgid: case.root.as_ref().map(|(root, ..)| root.tgid),
        ..Subject::process(process.id, &process.comm)
    };
    Claim {
        category: CATEGORY,
        key,
        subject,
        severity: severity.min(case.severity_cap),
        confidence: case.confidence,
        bytes: Some(bytes),
        summary,
        evidence,
        advice: advice(process, case),
    }
}

fn adoption(process: &Process, case: &Case, ledger: &Ledger, evidence: &mut Vec<String>) {
    // Whoever adopted the process, or the nearest living link between it and its dead owner.
    let mut link = Some(process);
    while let Some(process) = link {
        if let Some((from, ns)) = process.reparented {
            let adopter = ledger.current(process.ppid).map_or("", |adopter| adopter.comm.as_str());
            evidence.push(format!(
                "pid {} was adopted by {} {} (ppid {}, before {from})",
                process.id.tgid,
                process_name(process.ppid, adopter),
                at(ns),
                process.ppid
            ));
            return;
        }
        link = process
            .parent
            .filter(|parent| case.root.as_ref().is_none_or(|(root, ..)| root != parent))
            .and_then(|parent| ledger.process(&parent));
    }
}

fn holdings(process: &Process, device: u32, bytes: u64, ledger: &Ledger, evidence: &mut Vec<String>) {
    let billed = ledger.billed(process, device);
    let books = process.books.as_ref().and_then(|books| books.devices.get(&Some(device))).map_or(0, DeviceBooks::bytes);
    let mps = process.rows.iter().any(|(&(on, _), row)| on == device && row.mps);
    match billed {
        Some(billed) => evidence.push(format!(
            "NVML's per-process row bills it {} ({billed} bytes){} on GPU {device}; {} by its own calls",
            size(billed),
            if mps { " as an MPS client" } else { "" },
            size(books)
        )),
        None => evidence.push(format!("{} ({bytes} bytes) by its own calls on GPU {device}", size(books))),
    }
    if let Some(total) = ledger.total(device, None).filter(|&total| total > 0) {
        evidence.push(format!("that is {:.1}% of {}", bytes as f64 * 100.0 / total as f64, device_name(device, None)));
    }
    if let Some(last) = process.last_demand_ns {
        evidence.push(format!("its last request to the driver was {}", at(last)));
    }
}

fn job(process: &Process, case: &Case) -> Option<Text> {
    match &case.owner {
        Some(end) if end.kind == OwnerKind::Job => Some(end.id.clone()),
        _ => process.jobs().next().map(Text::from),
    }
}

fn advice(process: &Process, case: &Case) -> String {
    let tgid = process.id.tgid;
    let mps = process.rows.values().any(|row| row.mps);
    let stop = if mps {
        format!(
            "End pid {tgid} through the MPS control daemon (terminate_client), not by a signal: a killed MPS client can damage the others."
        )
    } else {
        format!(
            "Check that pid {tgid} is still {} started {}, then end that pid alone: kill -TERM {tgid}, and kill -KILL {tgid} if it is there 10 s later.",
            shown(&process.comm, 32),
            at(process.id.start_ns)
        )
    };
    let prevent = match case.owner.as_ref().map(|end| end.kind) {
        Some(OwnerKind::Container | OwnerKind::Pod) => {
            "To prevent it, run the container with an init that reaps and forwards signals, and do not share the host's pid or IPC namespace."
        }
        Some(OwnerKind::Job) => {
            "To prevent it, keep the job's processes in its control group (no setsid or scope of their own) and add an epilog check."
        }
        None => {
            "To prevent it, give workers parent-death handling (PR_SET_PDEATHSIG or a watched pipe), or a supervisor that kills the whole control group."
        }
    };
    let doubt = if case.confidence < Confidence::High { "It may be meant to run on: ask its user first. " } else { "" };
    format!("{doubt}{stop} {prevent}")
}
