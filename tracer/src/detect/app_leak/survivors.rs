//! Survivors: allocations of one kind that are never given back.

use super::{advice, evidence_around, follows, keeps_its_pace, process_name, scope_key, severity, subject};
use crate::detect::forecast::Forecast;
use crate::engine::{Claim, EngineConfig, Moment};
use crate::finding::Confidence;
use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::ledger::trend::{Class, ClassKey};
use crate::units::{SECOND, clock, duration, shown, size};

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

pub(super) fn leaks(process: &Process, key: &ClassKey, class: &Class, books: &Books, moment: &Moment<'_>) -> bool {
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

pub(super) fn claim(
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
    let forecast = Forecast::of(moment, process, key.device.filter(|_| !key.host), bytes, span);
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
    evidence.extend(evidence_around(process, key.device.filter(|_| !key.host), forecast, moment));
    Claim {
        category: super::CATEGORY,
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
