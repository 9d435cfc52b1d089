//! A process pays for a context it does not use.
//!
//! A context costs 100 to 900 MiB whether anything is allocated in it or not. It comes into being
//! by accident: a checkpoint loaded to the default device, pinned memory, a query of free memory,
//! a data loader that touches CUDA.
//!
//! Evidence needed: the context's creation was seen and it still exists; nothing is allocated,
//! imported or pooled on its device for a while; NVML bills a row there; and either the process
//! works on another device, or several children of one parent have such a context, or it has
//! never allocated anywhere. High confidence where it works elsewhere and holds exactly nothing here.
//! Refuted by: any live allocation above the noise, a checkpoint, an MPS server, a program that
//! watches.
//!
//! Thresholds: a minute without memory (a start takes less); five where the process is alone and
//! works nowhere; up to 16 MiB left over (workspaces that libraries make on first use) at medium
//! confidence; rows from 64 MiB on.

use super::standing::EachProcess;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::books::{Books, DeviceBooks};
use crate::ledger::checkpoint::Phase;
use crate::units::{MIB, at, clock, duration, size};

const CATEGORY: Category = Category::StrayContext;
/// What libraries leave allocated in a context they only looked at.
const LEFT_OVER: u64 = 16 * MIB;
/// Rows smaller than this are not worth a word.
const ROW: u64 = 64 * MIB;
/// Siblings named.
const NAMED: usize = 24;

pub(super) fn detector() -> Box<dyn Detector> {
    EachProcess::boxed(CATEGORY, judge, "the context is gone, or it is used now")
}

/// What a process holds on a device by its calls, imports included.
fn holds(books: &Books, device: u32) -> u64 {
    let imports = books.imports.values().filter(|import| import.device == Some(device));
    let imports = imports.fold(0_u64, |sum, import| sum.saturating_add(import.size.max(1)));
    books.devices.get(&Some(device)).map_or(0, DeviceBooks::bytes).saturating_add(imports)
}

/// Devices on which a process has a context and next to nothing else.
fn empty_contexts(process: &Process, books: &Books) -> Vec<u32> {
    let mut devices: Vec<u32> = books.contexts.iter().filter_map(|context| context.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.retain(|&device| holds(books, device) <= LEFT_OVER && process.rows.contains_key(&(device, None)));
    devices
}

fn judge(process: &Process, moment: &Moment<'_>, _: &Book) -> Vec<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let Some(books) = process.books.as_deref() else { return Vec::new() };
    let away = process.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.phase != Phase::Running);
    // What was there before the tracer may hold memory nobody saw.
    if away
        || books.contexts.is_empty()
        || books.unreliable_since_ns.is_some()
        || ledger.is_observer(process.id, &process.comm)
        || process.rows.values().any(|row| row.mps)
    {
        return Vec::new();
    }
    let (work_device, work) = books
        .devices
        .iter()
        .filter_map(|(device, on)| Some((device.as_ref().copied()?, on.bytes())))
        .max_by_key(|&(device, bytes)| (bytes, u32::MAX - device))
        .unwrap_or((0, 0));
    let mut claims = Vec::new();
    for device in empty_contexts(process, books) {
        let held = holds(books, device);
        let Some(billed) = ledger.billed(process, device).filter(|&billed| billed >= ROW) else { continue };
        let on_device = books.contexts.iter().filter(|context| context.device == Some(device));
        let Some(created) = on_device.map(|context| context.ns).max() else { continue };
        let emptied = books.devices.get(&Some(device)).map_or(0, |on| on.last_ns);
        let since = created.max(emptied);
        let quiet = moment.now().saturating_sub(since);
        let elsewhere = work > LEFT_OVER.max(held.saturating_mul(4)) && work_device != device;
        // A server that unloaded its model uses its context again; one that never allocated does not.
        if !elsewhere && books.peak > LEFT_OVER {
            continue;
        }
        let siblings = if elsewhere { Vec::new() } else { siblings(process, device, moment) };
        let needed = if elsewhere || siblings.len() > 1 { config.stray_ns } else { config.stray_alone_ns };
        if quiet < needed {
            continue;
        }
        claims.push(claim(
            process,
            books,
            device,
            held,
            billed,
            since,
            elsewhere.then_some(work_device),
            &siblings,
            moment,
        ));
    }
    claims
}

/// Live children of the same parent that are in the same case.
fn siblings(process: &Process, device: u32, moment: &Moment<'_>) -> Vec<u32> {
    let ledger = moment.ledger;
    let Some(parent) = process.parent.and_then(|parent| ledger.process(&parent)) else { return Vec::new() };
    let alike = parent.children.iter().take(1024).filter_map(|id| ledger.process(id)).filter(|child| {
        child.is_alive() && child.books.as_deref().is_some_and(|books| empty_contexts(child, books).contains(&device))
    });
    alike.map(|child| child.id.tgid).collect()
}

#[expect(clippy::too_many_arguments, reason = "they are the parts of one verdict")]
fn claim(
    process: &Process,
    books: &Books,
    device: u32,
    held: u64,
    billed: u64,
    since: u64,
    work: Option<u32>,
    siblings: &[u32],
    moment: &Moment<'_>,
) -> Claim {
    let name = process_name(process.id.tgid, &process.comm);
    let mut evidence = Vec::new();
    for context in books.contexts.iter().filter(|context| context.device == Some(device)) {
        let handle = context.handle.as_ref().map_or_else(String::new, |handle| format!(" {handle}"));
        evidence.push(format!(
            "context{handle} on device {device} created {} in {}",
            at(context.ns),
            duration(context.dur_ns)
        ));
    }
    evidence.push(if held == 0 {
        format!(
            "no outstanding allocation on device {device} since {}; NVML bills {} ({billed} bytes) there",
            clock(since),
            size(billed)
        )
    } else {
        format!("only {} allocated on device {device}; NVML bills {} ({billed} bytes) there", size(held), size(billed))
    });
    if let Some(device) = work {
        let bytes = books.devices.get(&Some(device)).map_or(0, DeviceBooks::bytes);
        evidence.push(format!("primary device {device}: {} allocated there", size(bytes)));
    } else {
        evidence.push("it has nothing allocated on any device".to_owned());
    }
    if books.host.bytes > 0 {
        evidence
            .push(format!("it holds {} of pinned host memory: pinning alone opens a context", size(books.host.bytes)));
    }
    if siblings.len() > 1 {
        let named: Vec<String> = siblings.iter().take(NAMED).map(ToString::to_string).collect();
        evidence.push(format!(
            "{} children of pid {} are in the same case: {}",
            siblings.len(),
            process.ppid,
            named.join(", ")
        ));
    }
    let confidence = match (held, work, siblings.len()) {
        (0, Some(_), _) => Confidence::High,
        (_, None, 0 | 1) => Confidence::Low,
        _ => Confidence::Medium,
    };
    let severity = if confidence == Confidence::Low { Severity::Info } else { Severity::Warning };
    Claim {
        category: CATEGORY,
        key: format!("{}-gpu{device}", process.id),
        subject: Subject {
            pod: process.pod.clone(),
            container: process.container.clone(),
            parent_tgid: process.parent.filter(|_| siblings.len() > 1).map(|parent| parent.tgid),
            ..Subject::process(process.id, &process.comm).on_device(Some(device))
        },
        severity,
        confidence,
        bytes: Some(billed),
        summary: format!("{name} pays {} on GPU {device} for a context it has not used for {}", size(billed), duration(moment.now().saturating_sub(since))),
        evidence,
        advice: "Choose the device before the first CUDA call (torch.cuda.set_device, jax.default_device) or restrict CUDA_VISIBLE_DEVICES for each process; load checkpoints to the CPU or to the own device (map_location); keep CUDA out of data loaders and of processes that only ask for free memory (NVML answers without a context). Nothing has to be ended.".to_owned(),
    }
}
