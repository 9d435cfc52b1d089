//! Another process keeps memory that its owner is done with.
//!
//! Memory that was exported lives until nobody has it open. So a dead process's block stays for its
//! importers, and a block that was freed stays as well. That is how sharing works; it is a fault only
//! where the importer has forgotten it.
//!
//! Evidence needed: a live process has an export open (opened and not closed) whose exporter is dead
//! or has freed the block; or it was handed a descriptor of it and the dead exporter's memory has
//! not come back.
//! Refuted by: a close, the end of the importer, the memory's return.
//!
//! Severity: information while the importer shares the exporter's owner and works; a warning where
//! it shows no sign of work, the exporter's owner is another one, or the exporter crashed or was
//! stopped (a cache server that outlives its client); by size where the holder uses no GPU itself, so that nobody can be using it.
//! Confidence: high for imports; for descriptors, which may have been closed unseen, medium, unless
//! the holder was found with device files open after the exit and uses no GPU itself.
//!
//! Thresholds: 128 MiB; 5 s after the exit or the release; five minutes without a driver call or a change of the importer's service.

use super::{Detector, by_cost, process_name};
use crate::engine::{Book, Claim, Moment, Sweep};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Hold, Pin, Process};
use crate::record::Identity;
use crate::units::{at, duration, plural, shown, size};
use std::collections::{BTreeMap, BTreeSet};

const CATEGORY: Category = Category::IpcPinned;
/// Ids named in the evidence.
const NAMED: usize = 8;

/// Who keeps whose memory on which device.
type Key = (Identity, Identity, Option<u32>, Hold);

/// Memory that importers keep.
#[derive(Debug, Default)]
pub(super) struct IpcPinned {
    open: BTreeSet<String>,
    /// When each was noticed.
    noticed: BTreeMap<Key, u64>,
}

impl Detector for IpcPinned {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let died = moment.ledger.effects().iter().any(|effect| matches!(effect, crate::ledger::Effect::Died(_)));
        if moment.sweep == Sweep::None && (!died || self.open.is_empty()) {
            return;
        }
        let mut groups: BTreeMap<Key, Vec<Pin>> = BTreeMap::new();
        for pin in moment.ledger.pins() {
            groups.entry((pin.exporter, pin.holder, pin.device, pin.how)).or_default().push(pin);
        }
        self.noticed.retain(|key, _| groups.contains_key(key));
        let mut now = BTreeSet::new();
        for (key, pins) in &groups {
            // A death is exact; that a block was freed is noticed some time after.
            let noticed = *self.noticed.entry(*key).or_insert(moment.now());
            let since = pins.iter().find_map(|pin| pin.exporter_died_ns).unwrap_or(noticed);
            // Both sides may be about to let go.
            if moment.now().saturating_sub(since) < moment.config.exit_grace_ns {
                continue;
            }
            if let Some(claim) = claim(key, pins, moment) {
                now.insert(claim.key.clone());
                book.raise(claim);
            }
        }
        for key in self.open.difference(&now) {
            book.close(CATEGORY, key, "it was closed, or its holder ended");
        }
        self.open = now;
    }
}

fn claim(&(exporter_id, holder_id, device, how): &Key, pins: &[Pin], moment: &Moment<'_>) -> Option<Claim> {
    let (ledger, config) = (moment.ledger, moment.config);
    let (exporter, holder) = (ledger.process(&exporter_id)?, ledger.process(&holder_id)?);
    let told = pins.iter().fold(0_u64, |sum, pin| sum.saturating_add(pin.bytes));
    let residue = ledger.teardowns.values().find(|teardown| {
        teardown.id == exporter_id && Some(teardown.device) == device && teardown.returned_ns.is_none()
    });
    // A descriptor's block may be of unknown size: then what has not come back is what it keeps.
    let bytes = match how {
        Hold::Import => told,
        Hold::Descriptor => {
            residue.map_or(told, |teardown| if told > 0 { told.min(teardown.billed) } else { teardown.billed })
        }
    };
    if bytes < config.held_floor_bytes {
        return None;
    }
    if how == Hold::Descriptor {
        // Within the grace of the teardown nothing can be told from what has not come back.
        let teardown = residue?;
        if teardown.stayed_ns() < config.teardown_grace_ns(teardown.pinned) {
            return None;
        }
    }
    let since = pins.iter().map(|pin| pin.since_ns).min()?;
    let died = pins.iter().find_map(|pin| pin.exporter_died_ns);
    let worked = [holder.last_call_ns, holder.service_ns].into_iter().flatten().max().unwrap_or(0);
    let idle = moment.now().saturating_sub(worked.max(since)) >= config.importer_idle_ns;
    let same_pod = holder.pod.is_some() && holder.pod == exporter.pod;
    let same_owner = same_pod || holder.shared_owner_with(exporter);
    // A hand-over ends well; whoever crashed or was stopped did not mean to leave its memory.
    let crashed = exporter.death.is_some_and(|death| !death.was_clean()) || ledger.owner_end(exporter).is_some();
    let computes = holder.books.as_ref().is_some_and(|books| !books.contexts.is_empty()) || !holder.rows.is_empty();
    let severity = match (how, computes) {
        (Hold::Descriptor, false) => by_cost(bytes, moment.now().saturating_sub(since), config),
        _ if idle || died.is_some() && (!same_owner || crashed) => Severity::Warning,
        _ => Severity::Info,
    };
    // A descriptor may have been closed unseen; a holder that uses no GPU itself and has device files
    // open after the exit has no others.
    let open = died.is_some_and(|died| {
        let scan = ledger.scan.as_ref().filter(|scan| scan.complete && scan.ns > died);
        scan.is_some_and(|scan| scan.holders.iter().any(|open| open.identity == holder_id))
    });
    let certain = how == Hold::Import || open && !computes;
    let confidence = if certain { Confidence::High } else { Confidence::Medium };
    let name = process_name(holder_id.tgid, &holder.comm);
    let from = process_name(exporter_id.tgid, &exporter.comm);
    let ids: Vec<String> = pins.iter().take(NAMED).map(|pin| shown(&pin.ipc.to_string(), 64)).collect();
    let mut evidence = vec![format!(
        "{} block{} of {from}, {} ({bytes} bytes): {}",
        pins.len(),
        plural(pins.len() as u64),
        size(bytes),
        ids.join(", ")
    )];
    evidence.push(match (died, exporter.death) {
        (Some(ns), Some(death)) => format!("exporter {} exited {} ({})", exporter_id.tgid, at(ns), death.told()),
        _ => format!("exporter {} is alive and has freed the memory", exporter_id.tgid),
    });
    evidence.push(match how {
        Hold::Import => format!("importer {} opened it {} and has not closed it", holder_id.tgid, at(since)),
        Hold::Descriptor => {
            format!("pid {} was handed a descriptor of it; opening or closing it was not seen", holder_id.tgid)
        }
    });
    if let Some(row) = device.and_then(|device| ledger.billed(holder, device)) {
        evidence.push(format!("NVML bills the importer {} ({row} bytes)", size(row)));
    }
    if how == Hold::Descriptor && open {
        evidence.push(format!(
            "pid {} has device files open since, as the last walk of all open files found",
            holder_id.tgid
        ));
    }
    evidence.push(owners(holder, exporter, same_owner));
    evidence.push(if worked == 0 {
        "the holder has made no driver call".to_owned()
    } else {
        format!("the holder last showed work {}{}", at(worked), if idle { ", long ago" } else { "" })
    });
    if let Some(teardown) = residue {
        evidence.push(format!("{} of the dead exporter's memory have not come back", size(teardown.billed)));
    }
    let device_key = device.map_or_else(String::new, |device| format!("-gpu{device}"));
    let what = if how == Hold::Import { "has it open" } else { "was handed a descriptor" };
    Some(Claim {
        category: CATEGORY,
        key: format!(
            "{holder_id}-of-{exporter_id}{device_key}{}",
            if how == Hold::Import { "" } else { "-descriptor" }
        ),
        subject: Subject {
            exporter_tgid: Some(exporter_id.tgid),
            pod: holder.pod.clone(),
            container: holder.container.clone(),
            ..Subject::process(holder_id, &holder.comm).on_device(device)
        },
        severity,
        confidence,
        bytes: Some(bytes),
        summary: format!(
            "{} of {} {from} stay{} because {name} {what}",
            size(bytes),
            if died.is_some() { "dead" } else { "live" },
            died.map_or_else(String::new, |ns| format!(
                " {} after its exit",
                duration(moment.now().saturating_sub(ns))
            ))
        ),
        evidence,
        advice: if severity == Severity::Info {
            format!(
                "None while pid {} uses it: the memory goes when it closes it. If it should not hold it any more, it must close the handle; ending it would end its own work.",
                holder_id.tgid
            )
        } else {
            format!(
                "Let pid {} drop what it got from pid {} (cuIpcCloseMemHandle; close the descriptor; drop cached peer mappings), or restart it alone at a quiet moment. Nothing else has to be ended, and it is no fault of the driver.",
                holder_id.tgid, exporter_id.tgid
            )
        },
    })
}

fn owners(holder: &Process, exporter: &Process, same: bool) -> String {
    let name = |process: &Process| {
        let owner = process.pod.as_ref().or(process.container.as_ref()).or(process.cgroup());
        owner.map_or_else(|| "an unknown owner".to_owned(), |owner| shown(owner, 96))
    };
    if same {
        format!("both belong to {}", name(holder))
    } else {
        format!("the holder belongs to {}, the exporter to {}", name(holder), name(exporter))
    }
}
