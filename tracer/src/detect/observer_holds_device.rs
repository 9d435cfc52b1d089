//! Only programs that watch keep a device from being changed.
//!
//! A reset, a MIG change or a driver unload is refused while anybody has the device open, whether
//! memory is held or not.
//!
//! Evidence needed: an administrator's change of a device was refused because it is in use; NVML
//! lists no process there; and a walk of the open files shows who has it open: metrics engines,
//! persistence daemons, this tracer.
//! Refuted by: a process that computes there; the change being made later.
//! Without a walk, or where it finds nobody (a display module in the kernel), that is said instead.
//!
//! Thresholds: the refusal is at most ten minutes old.

use super::{Detector, device_name, process_name};
use crate::engine::{Book, Claim, Moment, Sweep};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Admin, Process};
use crate::record::Holder;
use crate::units::{at, shown};
use std::collections::BTreeSet;

const CATEGORY: Category = Category::ObserverHoldsDevice;
/// Holders named.
const NAMED: usize = 16;

/// Devices whose change was refused.
#[derive(Debug, Default)]
pub(super) struct ObserverHoldsDevice {
    open: BTreeSet<String>,
}

impl Detector for ObserverHoldsDevice {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        if moment.sweep == Sweep::None {
            return;
        }
        let mut now = BTreeSet::new();
        for refusal in latest_refusals(moment) {
            if let Some(claim) = claim(refusal, moment) {
                now.insert(claim.key.clone());
                book.raise(claim);
            }
        }
        for key in self.open.difference(&now) {
            book.close(CATEGORY, key, "the change was made, somebody computes there, or it was not tried again");
        }
        self.open = now;
    }
}

/// Whether a result says that somebody has the device open.
fn is_in_use(result: &str) -> bool {
    let result = result.to_ascii_lowercase();
    ["in_use", "in use", "busy"].iter().any(|word| result.contains(word))
}

/// For each device and instance the last action, where that was refused.
fn latest_refusals<'a>(moment: &Moment<'a>) -> Vec<&'a Admin> {
    let mut seen = BTreeSet::new();
    let recent = |admin: &&Admin| moment.now().saturating_sub(admin.ns) <= moment.config.refused_change_ns;
    let latest = moment.ledger.admin.iter().rev().filter(recent).filter(|admin| seen.insert((admin.device, admin.gi)));
    latest.filter(|admin| admin.device.is_some() && is_in_use(&admin.result)).collect()
}

/// Whether a holder has this device or instance open.
fn holds(holder: &Holder, device: u32) -> bool {
    let name = format!("nvidia{device}");
    holder.files.iter().any(|file| *file == name)
}

fn claim(refusal: &Admin, moment: &Moment<'_>) -> Option<Claim> {
    let ledger = moment.ledger;
    let device = refusal.device?;
    let listed = |gi| ledger.devices.get(&(device, gi)).and_then(|series| series.last);
    let sample = listed(refusal.gi).or_else(|| listed(None));
    if sample.is_some_and(|sample| sample.count > 0) {
        return None;
    }
    let scan = ledger.scan.as_ref().filter(|scan| scan.ns.saturating_add(60_000_000_000) >= refusal.ns);
    let mut holders: Vec<&Holder> =
        scan.iter().flat_map(|scan| &scan.holders).filter(|holder| holds(holder, device)).collect();
    // Whoever computes there has a reason to hold it; the list of processes may lag.
    let computes = |holder: &&Holder| {
        ledger.process(&holder.identity).is_some_and(|process| {
            process.books.as_ref().is_some_and(|books| !books.contexts.is_empty() || books.bytes > 0)
        })
    };
    if holders.iter().any(computes) {
        return None;
    }
    let is_self = |holder: &Holder| ledger.self_tgid == Some(holder.identity.tgid);
    // The one to pause first: others before this tracer, and who holds an instance's capability.
    let caps = |holder: &Holder| holder.files.iter().any(|file| file.contains("caps/"));
    holders.sort_by_key(|holder| (is_self(holder), !(refusal.gi.is_some() && caps(holder)), holder.identity));
    let on = device_name(device, refusal.gi);
    let mut evidence = vec![
        format!("{} of {on} refused {}: {}", shown(&refusal.action, 48), at(refusal.ns), shown(&refusal.result, 48)),
        sample.map_or_else(
            || "NVML has not told its processes".to_owned(),
            |sample| format!("no compute process listed {}", at(sample.ns)),
        ),
    ];
    for holder in holders.iter().take(NAMED) {
        let files: Vec<String> = holder.files.iter().take(8).map(|file| shown(file, 40)).collect();
        let mine = if is_self(holder) { " (self: this tracer)" } else { "" };
        evidence.push(format!(
            "{}{mine} has open: {}",
            process_name(holder.identity.tgid, &holder.comm),
            files.join(", ")
        ));
    }
    match scan {
        Some(scan) if scan.complete => evidence.push(format!("all open files were walked {}", at(scan.ns))),
        Some(scan) => evidence.push(format!("the walk of the open files {} could not read all", at(scan.ns))),
        None => evidence.push("the open files have not been walked".to_owned()),
    }
    let first = holders.first();
    let observers = holders.iter().all(|holder| ledger.is_observer(holder.identity, &holder.comm));
    let confidence = match (first, scan.is_some_and(|scan| scan.complete), observers) {
        (Some(_), true, true) => Confidence::High,
        (Some(_), ..) | (None, true, _) => Confidence::Medium,
        (None, false, _) => Confidence::Low,
    };
    let names: Vec<String> =
        holders.iter().take(NAMED).map(|holder| process_name(holder.identity.tgid, &holder.comm)).collect();
    let subject = first.map_or_else(Subject::default, |holder| Subject::process(holder.identity, &holder.comm));
    let owner = first.and_then(|holder| ledger.process(&holder.identity));
    Some(Claim {
        category: CATEGORY,
        key: refusal.gi.map_or_else(|| format!("gpu{device}"), |gi| format!("gpu{device}-gi{gi}")),
        subject: Subject {
            gi: refusal.gi,
            pod: owner.and_then(|process: &Process| process.pod.clone()),
            container: owner.and_then(|process| process.container.clone()),
            ..subject.on_device(Some(device))
        },
        severity: Severity::Warning,
        confidence,
        bytes: Some(0),
        summary: if names.is_empty() {
            format!("{on} cannot be changed although nothing that was found has it open")
        } else {
            format!(
                "{on} cannot be changed because {} {} it open",
                names.join(", "),
                if names.len() == 1 { "has" } else { "have" }
            )
        },
        evidence,
        advice: if names.is_empty() {
            "Look for holders in the kernel: a display or modeset module (nvidia_drm, nvidia_modeset), vfio, a peer-memory module. Stop what uses it, or unload the module, and try again.".to_owned()
        } else {
            "Pause what watches for the time of the change and start it again afterwards: systemctl stop nvidia-dcgm (or scale the exporter's DaemonSet off the node), nvidia-persistenced, and this tracer if it is listed. No workload has to be ended.".to_owned()
        },
    })
}
