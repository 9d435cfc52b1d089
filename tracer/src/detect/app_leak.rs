//! A process allocates, never gives back, and goes on.
//!
//! Evidence needed, one of:
//! * survivors: many live allocations of one size (and call path, where known) that came one by
//!   one, spread evenly over the time since the first, still coming, while the process's other
//!   memory is balanced, which shows that it is past its start;
//! * floors: the lowest points between its work cycles rise from cycle to cycle, evenly or faster;
//! * refusals: releases that the driver refused and whose memory is still there.
//!
//! Refuted by: growth that came in a burst or has slowed down (a loading model, a cache that
//! warms up, a plateau), most of the growth being elsewhere, memory given back, or an NVML row
//! that does not grow along. Withheld while events of the process are known to be lost.
//!
//! Thresholds: 20 survivors if the threads that allocated them are gone, 30 if they come from one
//! call path (12 of a gibibyte and more, which fill a device before there are 30), else 40; over at least 8 s and 16 MiB; measured in balanced releases (at least 10),
//! each quarter of the work must have brought a tenth of them, the second half 46%, the last
//! quarter 70% of the first (an exponential warm-up fails this once it is a third full); growth must not have
//! paused for four usual gaps of work. Blocks of 64 MiB and more must have come for ten minutes. 24 rising floors (4
//! if each cycle gives back half of what was held, as unloading a model does, and keeps about as
//! much or ever more), with the last third still rising.

use super::forecast::Forecast;
use super::fragmentation_growth;
use super::standing::Standing;
use super::{Detector, process_name};
use crate::engine::{Book, Claim, EngineConfig, Moment, Sweep};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::ledger::trend::{Class, ClassKey, Floor};
use crate::record::Identity;
use crate::units::{GIB, MIB, SECOND, at, clock, duration, plural, shown, size};
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
    let mut claims = refused(process, books, moment);
    if books.unreliable_since_ns.is_some() || books.reused > 0 && !books.resynced {
        return claims;
    }
    let growing = books.growing_classes(moment.config.leak_survivors.min(moment.config.leak_survivors_huge));
    let leaks: Vec<(&ClassKey, &Class)> =
        growing.into_iter().filter(|(key, class)| leaks(process, key, class, books, moment)).collect();
    // Many kinds growing at once are a structure being built, not one thing forgotten: the
    // largest stands for the incident.
    let mut told = BTreeSet::new();
    let mut ordered = leaks.clone();
    ordered.sort_by_key(|(key, class)| (std::cmp::Reverse(class.live.saturating_mul(key.size)), *key));
    for (key, class) in ordered {
        if told.insert((key.device, key.host)) {
            let others: Vec<_> = leaks
                .iter()
                .filter(|(other, _)| other.device == key.device && other.host == key.host && *other != key)
                .copied()
                .collect();
            claims.push(survivors_claim(process, key, class, &others, moment));
        }
    }
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
        if fragments(device) || told.contains(&(device, false)) {
            continue;
        }
        if let Some(rise) = rising(&on_device.cycles.floors, moment.config)
            && follows(process, device, rise.gained, moment)
            && moment.now().saturating_sub(rise.last_ns) <= PAUSE_NS.max(rise.gap_ns.saturating_mul(4))
        {
            claims.push(floors_claim(process, device, &rise, moment));
        }
    }
    claims
}

/// Whether NVML's row grew along, as far as it can be seen: a ledger that grows alone has missed releases.
fn follows(process: &Process, device: Option<u32>, gained: u64, moment: &Moment<'_>) -> bool {
    let Some(device) = device else { return true };
    let Some(row) = process.rows.iter().filter(|((on, _), _)| *on == device).map(|(_, row)| row).next_back() else {
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

/// Survivors needed: what an exited thread left behind nobody will free; what one call path keeps
/// may be a cache; one size alone may be two places in the program.
fn needed(process: &Process, key: &ClassKey, class: &Class, config: &EngineConfig) -> u64 {
    match (threads_gone(process, class), &key.stack) {
        (true, _) => config.leak_survivors,
        (false, Some(_)) if key.size >= config.leak_huge_bytes => config.leak_survivors_huge,
        (false, Some(_)) => config.leak_survivors.midpoint(config.leak_survivors_without_stack),
        (false, None) => config.leak_survivors_without_stack,
    }
}

fn dead_threads(process: &Process, class: &Class) -> usize {
    class.threads.iter().filter(|tid| process.exited_threads.contains(tid)).count()
}

/// Whether the threads that allocated are gone, but for the last few.
fn threads_gone(process: &Process, class: &Class) -> bool {
    let dead = dead_threads(process, class);
    dead > 0 && dead * 10 >= class.threads.len() * 8
}

fn leaks(process: &Process, key: &ClassKey, class: &Class, books: &Books, moment: &Moment<'_>) -> bool {
    let config = moment.config;
    let (Some(first), Some(last)) = (class.marks.first(), class.marks.last()) else { return false };
    let span = last.ns.saturating_sub(first.ns);
    let bytes = class.live.saturating_mul(key.size);
    if class.live < needed(process, key, class, config) || span < config.leak_span_ns || bytes < config.leak_bytes {
        return false;
    }
    // Large blocks one after the other are how a model is loaded, which takes minutes at most.
    if key.size >= config.leak_shard_bytes && span < config.leak_shard_span_ns && !threads_gone(process, class) {
        return false;
    }
    // Given back in part: a pool that breathes.
    if class.live.saturating_mul(10) < class.most.saturating_mul(9) {
        return false;
    }
    // The process is at work: its other memory comes and goes. That work is the clock of the
    // growth, so that a leak in a service with busy and quiet hours is even, and a start is not.
    let gained = last.live.saturating_sub(first.live);
    let work = last.frees.saturating_sub(first.frees);
    if work < config.leak_balanced_frees.max(gained / 4) {
        return false;
    }
    // Still growing while it works.
    let usual = work / (class.marks.len() as u64 - 1).max(1);
    if books.frees.saturating_sub(last.frees) > config.leak_balanced_frees.max(usual.saturating_mul(4)) {
        return false;
    }
    // Evenly: a load comes in a burst, a warm-up slows down.
    let mut quarters = [0_u64; 4];
    for pair in class.marks.windows(2) {
        let [from, to] = pair else { continue };
        let middle = from.frees.midpoint(to.frees).saturating_sub(first.frees);
        let quarter = (u128::from(middle) * 4 / u128::from(work)).min(3) as usize;
        if let Some(live) = quarters.get_mut(quarter) {
            *live += to.live.saturating_sub(from.live);
        }
    }
    let even = quarters.iter().all(|&quarter| quarter.saturating_mul(10) >= gained) && keeps_its_pace(quarters);
    // Most of the process's growth is this.
    let grown = last.bytes.saturating_sub(first.bytes);
    let share = gained.saturating_mul(key.size).saturating_mul(2) >= grown;
    even && share && (key.host || follows(process, key.device, gained.saturating_mul(key.size), moment))
}

fn survivors_claim(
    process: &Process,
    key: &ClassKey,
    class: &Class,
    others: &[(&ClassKey, &Class)],
    moment: &Moment<'_>,
) -> Claim {
    let bytes = class.live.saturating_mul(key.size);
    let span = class.last_ns.saturating_sub(class.first_ns);
    let threads_gone = threads_gone(process, class);
    let long = span >= 600 * SECOND && class.live >= 100 && (threads_gone || key.stack.is_some());
    let confidence = if long { Confidence::High } else { Confidence::Medium };
    let forecast = Forecast::of(moment, key.device.filter(|_| !key.host), bytes, span);
    let name = process_name(process.id.tgid, &process.comm);
    let kind = if key.host { "pinned host memory" } else { "GPU memory" };
    let per_hour = bytes as f64 / span.max(1) as f64 * 3600.0 * SECOND as f64;
    let mut evidence = vec![
        format!(
            "{} survivors of size {} bytes ({}), {} ({bytes} bytes) in all, allocated one by one from {} to {}",
            class.live,
            key.size,
            size(key.size),
            size(bytes),
            clock(class.first_ns),
            clock(class.last_ns)
        ),
        format!("of {} such allocations {} were ever given back", class.allocs, class.frees),
        format!(
            "evenly spread over {}: one every {}, about {} an hour",
            duration(span),
            duration(span / class.live.max(1)),
            size(per_hour as u64)
        ),
    ];
    let frees = class
        .marks
        .last()
        .map_or(0, |mark| mark.frees)
        .saturating_sub(class.marks.first().map_or(0, |mark| mark.frees));
    evidence.push(format!("meanwhile its other memory was balanced: {frees} releases, so it is past its start"));
    if let Some(stack) = &key.stack {
        evidence.push(format!("all from one call path: stack {}", shown(&stack.to_string(), 64)));
    } else {
        evidence.push("call paths are not known, so one size stands for one place in the program".to_owned());
    }
    if threads_gone {
        evidence.push(format!(
            "the allocating threads exited ({} of the {} last looked at); nothing in them can release it",
            dead_threads(process, class),
            class.threads.len()
        ));
    }
    for (key, class) in others.iter().take(4) {
        evidence.push(format!("also {} survivors of size {} bytes", class.live, key.size));
    }
    row_evidence(process, key.device, &mut evidence);
    evidence.extend(forecast.map(|forecast| forecast.told()));
    Claim {
        category: CATEGORY,
        key: format!("{}-{}", process.id, scope_key(key.device, key.host)),
        subject: subject(process, key.device, key.host),
        severity: severity(bytes, forecast),
        confidence,
        bytes: Some(bytes),
        summary: format!(
            "{name} keeps {} of {kind} in {} blocks of {} and goes on taking more",
            size(bytes),
            class.live,
            size(key.size)
        ),
        evidence,
        advice: advice(process, threads_gone),
    }
}

/// By what was taken, and by how soon nothing is left.
fn severity(bytes: u64, forecast: Option<Forecast>) -> Severity {
    let by_size = if bytes >= CRITICAL { Severity::Critical } else { Severity::Warning };
    Forecast::severity(forecast.as_ref(), by_size)
}

fn row_evidence(process: &Process, device: Option<u32>, evidence: &mut Vec<String>) {
    if let Some((_, row)) = process.rows.iter().find(|((on, _), _)| Some(*on) == device) {
        evidence.push(format!(
            "NVML's row went from {} {} to {} {}",
            size(row.first_used),
            at(row.first_ns),
            size(row.used),
            at(row.ns)
        ));
    }
    if let Some((first, last)) = process.mapped_from_to().filter(|(first, last)| last.count > first.count) {
        evidence.push(format!(
            "the driver's device files in its address space went from {} mappings {} to {} {}",
            first.count,
            at(first.ns),
            last.count,
            at(last.ns)
        ));
    }
}

fn scope_key(device: Option<u32>, host: bool) -> String {
    match (host, device) {
        (true, _) => "host".to_owned(),
        (false, Some(device)) => format!("gpu{device}"),
        (false, None) => "gpu".to_owned(),
    }
}

fn subject(process: &Process, device: Option<u32>, host: bool) -> Subject {
    Subject {
        device,
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
        "Look for the place in the program that allocates this size and does not free it"
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

/// A rise of the floors.
struct Rise {
    floors: usize,
    first: Floor,
    last_bytes: u64,
    last_ns: u64,
    gained: u64,
    gap_ns: u64,
}

/// Whether the floors rise from cycle to cycle and have not stopped.
fn rising(floors: &[Floor], config: &EngineConfig) -> Option<Rise> {
    let (first, last) = (floors.first()?, floors.last()?);
    // The start of a program is no cycle of it: judge the latter three quarters.
    let judged = floors.get(floors.len() / 4..).filter(|judged| judged.len() >= 3)?;
    let start = judged.first()?;
    let gained = last.bytes.checked_sub(start.bytes).filter(|&gained| gained >= config.held_floor_bytes / 2)?;
    let steps: Vec<u64> = judged.windows(2).filter_map(|pair| pair[1].bytes.checked_sub(pair[0].bytes)).collect();
    let all_rise = steps.len() + 1 == judged.len() && steps.iter().all(|&step| step > 0);
    let mut quarters = [0_u64; 4];
    for (index, &step) in steps.iter().enumerate() {
        if let Some(quarter) = quarters.get_mut(index * 4 / steps.len()) {
            *quarter = quarter.saturating_add(step);
        }
    }
    let many = floors.len() >= config.leak_floors && gained >= config.held_floor_bytes / 2 && keeps_its_pace(quarters);
    let least = steps.iter().min().copied().unwrap_or(0);
    let most = steps.iter().max().copied().unwrap_or(0);
    // A few cycles prove something only if each leaves as much behind as the one before, or more.
    let accelerating = steps.windows(2).all(|pair| pair[1] >= pair[0]);
    let unloads = judged.iter().all(|floor| floor.high.saturating_sub(floor.bytes).saturating_mul(2) >= floor.high);
    let few = floors.len() >= config.leak_floors_of_unloads
        && unloads
        && gained >= config.held_floor_bytes
        && (least.saturating_mul(2) >= most || accelerating);
    let third = judged.len() - judged.len().div_ceil(3);
    let late = last.bytes.saturating_sub(judged.get(third.saturating_sub(1))?.bytes);
    let goes_on = late.saturating_mul(5) >= gained;
    let span = last.ns.saturating_sub(start.ns);
    // Loading a model with a staging buffer for each part looks the same for some minutes.
    let shards = !unloads && least >= config.leak_shard_bytes && span < config.leak_shard_span_ns;
    (all_rise && (many || few) && goes_on && !shards && span >= config.leak_span_ns).then(|| Rise {
        floors: judged.len(),
        first: *first,
        last_bytes: last.bytes,
        last_ns: last.ns,
        gained,
        gap_ns: span / (judged.len() as u64 - 1).max(1),
    })
}

fn floors_claim(process: &Process, device: Option<u32>, rise: &Rise, moment: &Moment<'_>) -> Claim {
    let name = process_name(process.id.tgid, &process.comm);
    let cycles = rise.floors as u64 - 1;
    let each = rise.gained / cycles.max(1);
    let mut evidence = vec![
        format!(
            "the lowest point between work cycles rose {} times in a row: {} ({} bytes) more now, {} for each cycle, one cycle every {}",
            cycles,
            size(rise.gained),
            rise.gained,
            size(each),
            duration(rise.gap_ns)
        ),
        format!(
            "first floor {} {}, last floor {} {}",
            size(rise.first.bytes),
            at(rise.first.ns),
            size(rise.last_bytes),
            at(rise.last_ns)
        ),
    ];
    row_evidence(process, device, &mut evidence);
    let forecast = Forecast::of(moment, device, rise.gained, rise.last_ns.saturating_sub(rise.first.ns));
    evidence.extend(forecast.map(|forecast| forecast.told()));
    let on = device.map_or_else(|| "the GPU".to_owned(), |device| format!("GPU {device}"));
    let confidence = if rise.floors >= 2 * moment.config.leak_floors { Confidence::High } else { Confidence::Medium };
    Claim {
        category: CATEGORY,
        key: format!("{}-{}", process.id, scope_key(device, false)),
        subject: subject(process, device, false),
        severity: severity(rise.gained, forecast),
        confidence,
        bytes: Some(rise.gained),
        summary: format!(
            "{name} keeps {} more on {on} after each work cycle, {} so far",
            size(each),
            size(rise.gained)
        ),
        evidence,
        advice: advice(process, false),
    }
}

/// Releases that the driver refused and whose memory is therefore still there.
fn refused(process: &Process, books: &Books, moment: &Moment<'_>) -> Vec<Claim> {
    let mut claims = Vec::new();
    for refusal in books.refused_frees.iter().filter(|refusal| refusal.count >= 3) {
        let bytes = if refusal.host { books.host.bytes } else { books.bytes };
        if bytes < 16 * MIB {
            continue;
        }
        let name = process_name(process.id.tgid, &process.comm);
        let kind = if refusal.host { "pinned host memory" } else { "GPU memory" };
        let severe = bytes >= moment.config.held_floor_bytes;
        claims.push(Claim {
            category: CATEGORY,
            key: format!("{}-refused-{}-{}", process.id, shown(&refusal.api, 48), refusal.result),
            subject: subject(process, None, refusal.host),
            severity: if severe { Severity::Warning } else { Severity::Info },
            confidence: Confidence::Medium,
            bytes: Some(bytes),
            summary: format!("{name} releases {kind}, the driver refuses with error {}, and {} stay", refusal.result, size(bytes)),
            evidence: vec![
                format!(
                    "{} refused {} time{} with error {}, last {}",
                    shown(&refusal.api, 48),
                    refusal.count,
                    plural(refusal.count),
                    refusal.result,
                    at(refusal.ns)
                ),
                format!("{} ({bytes} bytes) of {kind} are still allocated", size(bytes)),
            ],
            advice: "A release that fails must be repeated or moved: error 800 (not permitted) means it was called from a stream callback, where the driver allows no calls.".to_owned(),
        });
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::rising;
    use crate::engine::EngineConfig;
    use crate::ledger::trend::Floor;
    use crate::units::{MIB, SECOND};

    fn floors(values: &[u64], swing: u64) -> Vec<Floor> {
        values
            .iter()
            .enumerate()
            .map(|(index, &mib)| Floor {
                ns: index as u64 * 10 * SECOND,
                bytes: mib * MIB,
                high: mib * MIB + swing * MIB,
            })
            .collect()
    }

    #[test]
    fn only_floors_that_go_on_rising_count() {
        let config = EngineConfig::default();
        let rises = |values: &[u64]| rising(&floors(values, 64), &config).is_some();
        let unloads = |values: &[u64]| rising(&floors(values, 4000), &config).is_some();
        assert!(!rises(&[100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200]), "parts of a model");
        let even: Vec<u64> = (0..24).map(|index| 10 + index * 20).collect();
        assert!(rises(&even), "even");
        let slowing: Vec<u64> = (0..40).map(|index| 4000 * index / (index + 30)).collect();
        assert!(!rises(&slowing), "slows down");
        assert!(!rises(&[10, 30, 50, 70, 90, 110, 130, 150]), "a cache may still be warming up");
        assert!(unloads(&[100, 200, 400, 800, 1600]), "faster and faster");
        assert!(unloads(&[100, 300, 500, 700]), "each unload keeps as much");
        assert!(!rises(&[100, 300, 500, 700]), "no unload, too few");
        assert!(!unloads(&[10, 500, 900, 950, 960, 965, 966, 967, 968, 969, 970, 971, 972]), "warm-up");
        assert!(!unloads(&[10, 30, 50, 70, 70, 70, 70, 70]), "plateau");
        assert!(!unloads(&[10, 90, 20, 80, 30, 70, 40, 60, 50, 60, 40, 30, 60]), "sawtooth");
        assert!(!rises(&[100, 200]), "too few");
    }
}
