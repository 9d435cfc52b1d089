//! A process's GPU memory is in a checkpoint, and whether it comes back.
//!
//! `checkpointed`: a checkpoint call on the process succeeded and nothing was restored since: its
//! memory is in host memory, its row is gone, its device files stay open.
//! `checkpoint_stuck`: a call to bring it back (or to go on) failed and none has succeeded since, or
//! it was locked and neither checkpointed nor let go: it lives and can do nothing.
//!
//! Refuted by: a later call that succeeds; the end of the process.
//!
//! Thresholds: one failed call is a warning, a second one makes it certain (reported: error 2, then
//! 304 for ever, then 401 on unlock); a minute in the locked state (a lock waits for work in flight).

use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::checkpoint::{Checkpoint, Phase};
use crate::units::{at, clock, duration, plural, shown, size};

pub(super) fn checkpointed() -> Box<dyn Detector> {
    EachProcess::boxed(Category::Checkpointed, away, "its memory was brought back, or that failed")
}

pub(super) fn stuck() -> Box<dyn Detector> {
    EachProcess::boxed(Category::CheckpointStuck, stuck_claims, "a later call succeeded")
}

fn subject(process: &Process, checkpoint: &Checkpoint) -> Subject {
    Subject {
        pod: process.pod.clone(),
        container: process.container.clone(),
        ..Subject::process(process.id, &process.comm).on_device(checkpoint.device)
    }
}

/// Device files found open by the last walk.
fn open_files(process: &Process, moment: &Moment<'_>) -> Option<String> {
    let scan = moment.ledger.scan.as_ref()?;
    let holder = scan.holders.iter().find(|holder| holder.identity == process.id)?;
    let files: Vec<String> = holder.files.iter().take(8).map(|file| shown(file, 32)).collect();
    Some(format!("device files still open {}: {}", at(scan.ns), files.join(", ")))
}

fn away(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let checkpoint = process.checkpoint.as_ref();
    let Some(checkpoint) = checkpoint.filter(|state| state.phase == Phase::Checkpointed && state.failed == 0) else {
        return Vec::new();
    };
    let name = process_name(process.id.tgid, &process.comm);
    let billed = checkpoint.device.and_then(|device| moment.ledger.billed(process, device));
    let mut evidence = vec![format!(
        "checkpointed {} (cuCheckpointProcessCheckpoint); NVML billed it {} ({} bytes) before",
        at(checkpoint.since_ns),
        size(checkpoint.bytes),
        checkpoint.bytes
    )];
    evidence.push(match billed {
        Some(bytes) => format!("NVML still bills it {} ({bytes} bytes)", size(bytes)),
        None => "NVML no longer lists it".to_owned(),
    });
    evidence.extend(open_files(process, moment));
    vec![Claim {
        category: Category::Checkpointed,
        key: process.id.to_string(),
        subject: subject(process, checkpoint),
        severity: Severity::Info,
        confidence: if billed.is_none() { Confidence::High } else { Confidence::Medium },
        bytes: Some(checkpoint.bytes),
        summary: format!("{name} is checkpointed: {} of its GPU memory are in host memory", size(checkpoint.bytes)),
        evidence,
        advice: format!(
            "Nothing has to be done. Pid {} still has the device open, so a reset or MIG change is refused; its memory comes back with a restore. Before ending it, leave it checkpointed: ending a restored process was reported to hang a host.",
            process.id.tgid
        ),
    }]
}

fn stuck_claims(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let Some(checkpoint) = process.checkpoint.as_ref().filter(|state| state.phase != Phase::Running) else {
        return Vec::new();
    };
    let waited = moment.now().saturating_sub(checkpoint.since_ns);
    let locked = checkpoint.phase == Phase::Locked && waited >= moment.config.checkpoint_ns;
    if checkpoint.failed == 0 && !locked {
        return Vec::new();
    }
    let name = process_name(process.id.tgid, &process.comm);
    let state = match checkpoint.phase {
        Phase::Checkpointed => "checkpointed",
        Phase::Locked | Phase::Running => "locked",
    };
    let mut evidence = vec![format!("{state} since {} ({})", clock(checkpoint.since_ns), duration(waited))];
    for failure in &checkpoint.failures {
        evidence.push(format!(
            "{} failed with error {} {} time{}, last {}",
            shown(&failure.api, 64),
            failure.result,
            failure.times,
            plural(u64::from(failure.times)),
            at(failure.ns)
        ));
    }
    if checkpoint.bytes > 0 {
        evidence.push(format!("NVML billed it {} ({} bytes) before", size(checkpoint.bytes), checkpoint.bytes));
    }
    evidence.push("the process is alive and waits: its driver calls do not return".to_owned());
    evidence.extend(open_files(process, moment));
    let certain = checkpoint.failed >= 2;
    vec![Claim {
        category: Category::CheckpointStuck,
        key: process.id.to_string(),
        subject: subject(process, checkpoint),
        severity: if certain { Severity::Critical } else { Severity::Warning },
        confidence: if certain { Confidence::High } else { Confidence::Medium },
        bytes: Some(checkpoint.bytes),
        summary: if checkpoint.failed > 0 {
            format!(
                "{name} stays {state}: {} call{} to move it on failed",
                checkpoint.failed,
                plural(u64::from(checkpoint.failed))
            )
        } else {
            format!("{name} was locked for a checkpoint {} ago and not let go", duration(waited))
        },
        evidence,
        advice: format!(
            "Error 2 means that the device has too little free memory for pid {}: free some and restore again. If restore keeps failing, the process cannot go on: end it while it is checkpointed (not after a partial restore, which was reported to hang the host) and start it anew. Save the driver version and these errors for the vendor.",
            process.id.tgid
        ),
    }]
}
