//! A process allocates, never gives back, and goes on.
//!
//! Evidence needed, one of:
//! * survivors: many live allocations that are alike (one size, one call path, or at least one
//!   thread) that came one by one, spread evenly over the time since the first, still coming, while
//!   the process's other memory is balanced, which shows that it is past its start; or fewer from
//!   one call path that are ever larger;
//! * floors: the lowest points between its work cycles (requests, or loads of a model that serves
//!   many) rise from cycle to cycle, evenly or faster;
//! * refusals: releases that the driver refused and whose memory is still there.
//!
//! Refuted by: growth that came in a burst or has slowed down (a loading model, a cache that
//! warms up, a plateau), most of the growth being elsewhere, memory given back, or an NVML row
//! that does not grow along. Withheld while events of the process are known to be lost.
//!
//! Thresholds: 20 survivors if the threads that allocated them are gone, 30 if they come from one
//! call path (12 of a gibibyte and more, which fill a device before there are 30), 40 of one size,
//! 100 of one thread; over at least 8 s and 16 MiB, and ten minutes where they are of 64 MiB and
//! more or of differing sizes; measured in balanced releases (at least 10), each quarter of the
//! work must have brought a tenth of them, the second half 46% (and a third of the bytes), the
//! last quarter 70% of the first (an exponential warm-up fails this once it is a third full);
//! growth must not have paused for four usual gaps of work. 8 blocks that grow by half each, with
//! gaps of work within a factor of four. 24 rising floors (4 if each cycle gives back half of what
//! was held, as unloading a model does, and keeps about as much or ever more), with the last third
//! still rising.

mod floors;
mod origins;
mod refusals;
mod survivors;

use super::allocators::Allocator;
use super::forecast::Forecast;
use super::fragmentation_growth;
use super::standing::Standing;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment, Sweep};
use crate::finding::{Category, Severity, Subject};
use crate::ledger::Process;
use crate::record::Identity;
use crate::units::{GIB, SECOND, at, size};
use std::collections::BTreeSet;

const CATEGORY: Category = Category::AppLeak;
/// Growth may pause for this long whatever its usual gap is.
const PAUSE_NS: u64 = 5 * SECOND;
/// Growth is judged at most this often.
const LOOK_NS: u64 = SECOND;
/// A leak that has taken this much is critical.
const CRITICAL: u64 = 8 * GIB;

/// Growth that its owner forgot.
#[derive(Debug)]
pub(super) struct AppLeak {
    standing: Standing,
    /// Processes that made calls since the last look.
    stirred: Vec<Identity>,
    next_ns: u64,
}

impl Default for AppLeak {
    fn default() -> Self {
        Self { standing: Standing::new(CATEGORY), stirred: Vec::new(), next_ns: 0 }
    }
}

impl Detector for AppLeak {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        self.standing.bury(moment, book, "the process ended, and its memory with it");
        if !moment.pulse {
            return;
        }
        self.stirred.extend(moment.ledger.active());
        if moment.now() < self.next_ns && moment.sweep != Sweep::All {
            return;
        }
        self.next_ns = moment.now().saturating_add(LOOK_NS);
        // Those that did something may have begun to leak; those that leak may have stopped.
        self.stirred.extend(self.standing.about());
        let stirred: BTreeSet<Identity> = self.stirred.drain(..).collect();
        for id in stirred {
            let claims = moment.ledger.process(&id).map(|process| judge(process, moment, book)).unwrap_or_default();
            self.standing.hold(id, claims, moment.now(), book, "the growth has stopped or the memory was given back");
        }
    }
}

fn judge(process: &Process, moment: &Moment<'_>, book: &Book) -> Vec<Claim> {
    let Some(books) = process.books.as_deref().filter(|_| process.is_alive()) else { return Vec::new() };
    let mut claims = refusals::claims(process, books, moment);
    if books.unreliable_since_ns.is_some() || books.reused > 0 && !books.resynced {
        return claims;
    }
    claims.extend(survivors::claims(process, books, moment, book));
    // Where the framework says that its objects do not grow, its allocator is what grows.
    let fragmenting = book.has_open(Category::FragmentationGrowth);
    let fragments = |device: Option<u32>| {
        fragmenting
            && device.is_some_and(|device| {
                book.is_open(Category::FragmentationGrowth, &fragmentation_growth::key(process, device))
            })
    };
    claims.retain(|claim| claim.subject.scope.as_deref() != Some("device") || !fragments(claim.subject.device));
    for (&device, on_device) in &books.devices {
        let told = claim_key(process, device, false);
        if fragments(device) || claims.iter().any(|claim| claim.key == told) {
            continue;
        }
        let was_told = book.is_open(CATEGORY, &told);
        if let Some(rise) = floors::rise(&on_device.cycles, was_told, moment)
            && (was_told || follows(process, device, rise.gained, moment))
        {
            claims.push(floors::claim(process, books, device, &rise, moment));
        }
    }
    claims
}

/// Whether NVML's row grew along, as far as it can be seen: a ledger that grows alone has missed releases.
fn follows(process: &Process, device: Option<u32>, gained: u64, moment: &Moment<'_>) -> bool {
    let Some(device) = device else { return true };
    let Some(row) = process.rows.get(&(device, process.instance(device))) else {
        return true;
    };
    let owned =
        process.books.as_ref().and_then(|books| books.devices.get(&Some(device))).map_or(0, |books| books.owned.bytes);
    // A row from before the last call says nothing of it.
    let moved = process.books.as_ref().and_then(|books| books.devices.get(&Some(device))).map_or(0, |on| on.last_ns);
    let stale = moment.ledger.billed(process, device).is_none() || row.ns < moved;
    // Rows lag by a sample; half of what was gained must have arrived.
    stale || row.used.saturating_add(gained / 2) >= owned
}

/// By what was taken, and by how soon nothing is left.
fn severity(bytes: u64, forecast: Option<Forecast>) -> Severity {
    let by_size = if bytes >= CRITICAL { Severity::Critical } else { Severity::Warning };
    Forecast::severity(forecast.as_ref(), by_size)
}

/// What surrounds the growth: NVML's row, the address space, the allocator, the room that is left.
fn evidence_around(
    process: &Process,
    device: Option<u32>,
    forecast: Option<Forecast>,
    moment: &Moment<'_>,
) -> Vec<String> {
    let row = device.and_then(|device| process.rows.get(&(device, process.instance(device)))).map(|row| {
        format!(
            "NVML's row went from {} {} to {} {}",
            size(row.first_used),
            at(row.first_ns),
            size(row.used),
            at(row.ns)
        )
    });
    let mapped = process.mapped_from_to().filter(|(first, last)| last.count > first.count).map(|(first, last)| {
        format!(
            "the driver's device files in its address space went from {} mappings {} to {} {}",
            first.count,
            at(first.ns),
            last.count,
            at(last.ns)
        )
    });
    // What an allocator keeps for later and what a program forgot look alike to the driver.
    let allocator =
        device.and_then(|device| Allocator::of(process, moment.ledger.total(device, process.instance(device))));
    let allocator = allocator.map(|allocator| allocator.told().to_owned());
    [row, mapped, allocator, forecast.map(|forecast| forecast.told())].into_iter().flatten().collect()
}

/// One claim for each process and kind of memory.
fn claim_key(process: &Process, device: Option<u32>, host: bool) -> String {
    let id = process.id;
    match (host, device) {
        (true, _) => format!("{id}-host"),
        (false, Some(device)) => format!("{id}-gpu{device}"),
        (false, None) => format!("{id}-gpu"),
    }
}

fn subject(process: &Process, device: Option<u32>, host: bool) -> Subject {
    Subject {
        device,
        gi: device.and_then(|device| process.instance(device)),
        scope: Some(if host { "pinned_host" } else { "device" }.into()),
        pod: process.pod.clone(),
        container: process.container.clone(),
        ..Subject::process(process.id, &process.comm)
    }
}

fn advice(process: &Process, threads_gone: bool) -> String {
    let fix = if threads_gone {
        "Reuse worker threads, or destroy library handles and workspaces before a thread ends"
    } else {
        "Look for the place in the program that allocates this and does not free it"
    };
    format!(
        "{fix}. Until it is fixed, restart pid {} alone when its memory nears the device's limit; caches that are given back on demand (torch.cuda.empty_cache) do not help if this is no cache.",
        process.id.tgid
    )
}

/// Whether growth by quarters does not slow down, beyond what chance does to a steady one.
fn keeps_its_pace(quarters: [u64; 4]) -> bool {
    let [first, second, third, last] = quarters.map(u128::from);
    (third + last) * 100 >= (first + second + third + last) * 46 && last * 10 >= first * 7
}
