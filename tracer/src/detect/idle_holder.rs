//! A process holds memory and does nothing.
//!
//! Kernels that run are not traced, so a silent process may well be at work: silence alone is no
//! proof, and the finding says so.
//!
//! Evidence needed: the process is alive and holds memory that has not moved; it has made no driver
//! call about memory, its service has shown no change and NVML's row has been constant all the
//! while. Confidence rises with what says that it is idle: a name like `ray::IDLE`, a scheduler
//! that considers its GPU free, a device on which no kernel ran, a notebook's kernel, work that used to
//! allocate and release all the time and has stopped. Without any of
//! them the process must have been found asleep each time, and it stays a low-confidence note.
//! Refuted by: a call, a metric of its service that changes, a row that moves, a device that
//! computes for it alone, running on a CPU when it was looked at. Left to others: processes whose owner is gone, checkpointed ones,
//! MPS servers, programs that watch. Silence alone is not told of a process whose service is known to be up.
//!
//! Thresholds: 15 minutes with a sign of idleness, 30 without (both from field reports), and twenty
//! times as long as its releases used to take where that they stopped is the only sign; memory
//! from 128 MiB on.

use super::release::finding_key;
use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::checkpoint::Phase;
use crate::ledger::metrics::Meaning;
use crate::units::{SECOND, at, clock, duration, shown, size};

const CATEGORY: Category = Category::IdleHolder;
/// Releases that make a habit, and over how long.
const RELEASES: u64 = 20;
const SPAN_NS: u64 = 300 * SECOND;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::boxed(CATEGORY, judge, "it is at work again, or it gave its memory back")
}

/// Whether a name says that its bearer waits for work.
fn is_idle_name(comm: &str) -> bool {
    comm.to_ascii_lowercase().split(|letter: char| !letter.is_ascii_alphanumeric()).any(|word| word == "idle")
}

/// Whether a name is a notebook kernel's.
fn is_notebook_kernel(comm: &str) -> bool {
    ["ipykernel", "colab-kernel"].iter().any(|name| comm.contains(name))
}

/// Whether a name is that of what starts notebooks' kernels.
fn is_notebook_server(comm: &str) -> bool {
    comm.contains("jupyter")
}

/// Since when it was found asleep each time it was looked at, three times at least.
fn asleep_since(process: &Process) -> Option<u64> {
    process.state.as_ref().filter(|state| state.times >= 3).map(|state| state.since_ns)
}

/// Work that goes on with releases of memory stops when they do. A process that loaded once and
/// computes ever since has few.
fn stopped(process: &Process, device: u32, silent: u64) -> Option<String> {
    let books = process.books.as_deref()?;
    let on = books.devices.get(&Some(device))?;
    let span = process.last_call_ns?.saturating_sub(books.first_ns);
    let steady = books.frees >= RELEASES && books.frees >= on.owned.count.saturating_mul(4) && span >= SPAN_NS;
    let usual = span / books.frees.max(1);
    (steady && silent / 20 >= usual).then(|| {
        format!(
            "its work released memory every {} for {} ({} releases), and has not since",
            duration(usual),
            duration(span),
            books.frees
        )
    })
}

fn judge(process: &Process, moment: &Moment<'_>, book: &Book) -> Vec<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let away = process.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.phase != Phase::Running);
    if away
        || ledger.is_observer(process.id, &process.comm)
        || process.rows.values().any(|row| row.graphics)
        || process.state.as_ref().is_some_and(|state| state.letter.starts_with('R') || state.is_uninterruptible())
    {
        return Vec::new();
    }
    let mut claims = Vec::new();
    for (&(device, gi), row) in &process.rows {
        if row.used < config.held_floor_bytes || ledger.billed(process, device).is_none() {
            continue;
        }
        let renamed = process.renamed.as_ref().map_or(0, |(_, ns)| *ns);
        let since = [process.last_call_ns, process.service_ns, Some(row.steady_since_ns), Some(renamed)]
            .into_iter()
            .flatten()
            .max()
            .unwrap_or(process.seen_ns);
        let silent = moment.now().saturating_sub(since);
        if silent < config.idle_told_ns {
            continue;
        }
        // A process whose owner is gone is told of as such.
        if book.is_open(Category::OrphanProcess, &finding_key(&(process.id, device, None))) {
            continue;
        }
        let mut signs = Vec::new();
        if is_idle_name(&process.comm) {
            let before = process.renamed.as_ref().map_or_else(String::new, |(before, ns)| {
                format!(", which was {} until {}", shown(before, 32), clock(*ns))
            });
            signs.push(format!("it calls itself {}{before}: its owner counts it as idle", shown(&process.comm, 32)));
        }
        for metric in ledger.metrics_of_device(device).filter(|metric| metric.meaning == Meaning::Free) {
            if metric.value > 0.0 {
                signs.push(format!(
                    "the scheduler says that the device is free: {} {}",
                    metric.told(),
                    at(metric.changed_ns)
                ));
            }
        }
        let series = ledger.devices.get(&(device, None));
        if let Some(quiet) = series.and_then(|series| series.quiet_since_ns).filter(|&quiet| quiet <= since) {
            signs.push(format!("no kernel ran on GPU {device} since {} (NVML's utilization)", clock(quiet)));
        }
        // A device that computes for this process alone.
        let alone = series.and_then(|series| series.last).is_some_and(|last| last.count == 1);
        if alone && series.and_then(|series| series.busy_ns).is_some_and(|busy| busy > since) {
            continue;
        }
        // A kernel is often named after its interpreter; then the server that started it tells.
        let parent = process.parent.and_then(|parent| ledger.process(&parent));
        if is_notebook_kernel(&process.comm) || is_notebook_server(&process.comm) {
            signs.push(format!(
                "{} belongs to a notebook, which lives on when its tab is closed",
                shown(&process.comm, 32)
            ));
        } else if let Some(server) = parent.filter(|parent| is_notebook_server(&parent.comm)) {
            signs.push(format!(
                "{} started it: a notebook's kernel lives on when its tab is closed",
                shown(&server.comm, 32)
            ));
        }
        let stopped = if signs.is_empty() { stopped(process, device, silent) } else { None };
        if silent >= config.idle_silent_ns && asleep_since(process).is_some() {
            signs.extend(stopped);
        }
        let needed = if signs.is_empty() { config.idle_silent_ns } else { config.idle_told_ns };
        // Without any sign, only a process that was found asleep each time, and serves nobody.
        let asleep = asleep_since(process)
            .is_some_and(|asleep| moment.now().saturating_sub(asleep.max(since)) >= config.idle_silent_ns);
        let unknown = signs.is_empty() && (process.service_ns.is_some() || row.mps || !asleep);
        if silent < needed || unknown {
            continue;
        }
        claims.push(claim(process, device, gi, row.used, since, silent, signs, moment));
    }
    claims
}

#[expect(clippy::too_many_arguments, reason = "they are the parts of one verdict")]
fn claim(
    process: &Process,
    device: u32,
    gi: Option<u32>,
    bytes: u64,
    since: u64,
    silent: u64,
    signs: Vec<String>,
    moment: &Moment<'_>,
) -> Claim {
    let ledger = moment.ledger;
    let name = process_name(process.id.tgid, &process.comm);
    let (severity, confidence) = match signs.len() {
        0 => (Severity::Info, Confidence::Low),
        1 => (Severity::Warning, Confidence::Medium),
        _ => (Severity::Warning, Confidence::High),
    };
    let told = !signs.is_empty();
    let mut evidence = vec![format!(
        "idle: no memory call, no change of its service and no change of its row since {} ({})",
        clock(since),
        duration(silent)
    )];
    evidence.extend(signs);
    evidence.push(format!("NVML bills it {} ({bytes} bytes) on GPU {device} all the while", size(bytes)));
    let parent = process.parent.and_then(|parent| ledger.process(&parent));
    match parent {
        Some(parent) if parent.is_alive() => {
            evidence.push(format!("parent {} alive ({}): it is no orphan", parent.id.tgid, shown(&parent.comm, 32)));
        }
        _ => evidence.push(format!("parent {}", process.ppid)),
    }
    if let Some(state) = &process.state {
        evidence.push(format!("state {} {}, {} times in a row", shown(&state.letter, 8), at(state.ns), state.times));
    }
    if !told {
        evidence.push(
            "not ruled out: kernels that run are not traced, so it may compute without asking for memory".to_owned(),
        );
    }
    Claim {
        category: CATEGORY,
        key: finding_key(&(process.id, device, gi)),
        subject: Subject {
            gi,
            pod: process.pod.clone(),
            container: process.container.clone(),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity,
        confidence,
        bytes: Some(bytes),
        summary: format!(
            "{name} holds {} on GPU {device} and has not touched it for {}",
            size(bytes),
            duration(silent)
        ),
        evidence,
        advice: format!(
            "Ask the owner of pid {} whether it is still needed. Let pooled workers exit after a GPU task (Ray: max_calls=1, or actors that are ended explicitly; Celery: worker_max_tasks_per_child), shut notebook kernels down rather than closing their tab, or unload the model between requests.",
            process.id.tgid
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::is_idle_name;

    #[test]
    fn names_that_say_idle() {
        assert!(is_idle_name("ray::IDLE") && is_idle_name("worker-idle") && is_idle_name("IDLE"));
        assert!(!is_idle_name("idler") && !is_idle_name("ray::train_task") && !is_idle_name(""));
    }
}
