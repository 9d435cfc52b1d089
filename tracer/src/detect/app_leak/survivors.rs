//! Survivors: allocations that are alike and are never given back.

use super::{advice, claim_key, evidence_around, follows, keeps_its_pace, process_name, severity, subject};
use crate::detect::forecast::Forecast;
use crate::engine::{Book, Claim, EngineConfig, Moment};
use crate::finding::Confidence;
use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::ledger::classes::{Class, ClassKey, Likeness, Mark};
use crate::record::OpaqueId;
use crate::units::{SECOND, clock, duration, shown, size};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How a class grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// As many survivors for as much work.
    Even,
    /// Ever larger ones, for as much work each.
    Doubling,
}

/// A class that grows as a leak does.
struct Growth<'a> {
    key: &'a ClassKey,
    class: &'a Class,
    pace: Pace,
    /// Bytes it gained while it was watched.
    gained: u64,
    /// Bytes the process gained meanwhile.
    process_gained: u64,
}

/// One claim for each device and for pinned memory.
pub(super) fn claims(process: &Process, books: &Books, moment: &Moment<'_>, book: &Book) -> Vec<Claim> {
    let config = moment.config;
    let by_size = books.by_size.with_survivors(config.leak_survivors.min(config.leak_survivors_huge));
    let by_origin = books.by_origin.with_survivors(config.leak_doublings as u64);
    let mut scopes: BTreeMap<_, [Vec<Growth<'_>>; 2]> = BTreeMap::new();
    for (sort, classes) in [by_size, by_origin].into_iter().enumerate() {
        for (key, class) in classes {
            let told = was_told(process, key.device, key.host, book);
            if let Some(growth) = growth(process, key, class, books, told, moment) {
                scopes.entry((key.device, key.host)).or_default()[sort].push(growth);
            }
        }
    }
    let mut claims = Vec::new();
    for ((device, host), sorts) in scopes {
        let told = was_told(process, device, host, book);
        let [by_size, by_origin] = sorts.map(|growths| if told { largest_first(growths) } else { most_of_it(growths) });
        // The size says more than the call path alone, unless it tells less than half of the story.
        let told = match (by_size.first(), by_origin.first()) {
            (Some(size), Some(origin)) if size.class.live.bytes < origin.class.live.bytes / 2 => by_origin,
            (Some(_), _) => by_size,
            _ => by_origin,
        };
        if let Some((first, others)) = told.split_first() {
            claims.push(claim(process, first, others, moment));
        }
    }
    claims
}

/// Whether a finding is open. It takes less to go on than to begin: what was seen once is still
/// there, whatever the memory around it does.
fn was_told(process: &Process, device: Option<u32>, host: bool, book: &Book) -> bool {
    book.is_open(super::CATEGORY, &claim_key(process, device, host))
}

/// Many kinds that grow at once are one incident: the largest stands for it.
fn largest_first(mut growths: Vec<Growth<'_>>) -> Vec<Growth<'_>> {
    growths.sort_by_key(|growth| (Reverse(growth.class.live.bytes), growth.key));
    growths
}

/// Those that together are most of what the process gained, or none.
fn most_of_it(growths: Vec<Growth<'_>>) -> Vec<Growth<'_>> {
    let growths = largest_first(growths);
    let gained = growths.iter().fold(0_u64, |sum, growth| sum.saturating_add(growth.gained));
    match growths.first() {
        Some(first) if gained.saturating_mul(2) >= first.process_gained => growths,
        _ => Vec::new(),
    }
}

/// Survivors needed: what an exited thread left behind nobody will free; what one call path keeps
/// may be a cache; one size alone may be two places in the program, one thread alone all of it.
fn needed(process: &Process, key: &ClassKey, class: &Class, config: &EngineConfig) -> u64 {
    match &key.likeness {
        _ if threads_gone(process, class) => config.leak_survivors,
        Likeness::Size { size, stack: Some(_) } if *size >= config.leak_huge_bytes => config.leak_survivors_huge,
        Likeness::Size { stack: Some(_), .. } | Likeness::Path(_) => {
            config.leak_survivors.midpoint(config.leak_survivors_without_stack)
        }
        Likeness::Size { stack: None, .. } => config.leak_survivors_without_stack,
        Likeness::Thread(_) => config.leak_survivors_of_thread,
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

/// Growth must have gone on for this long. A model is loaded within minutes, from one call path in
/// blocks of many sizes, or in large ones of one size.
fn needed_span_ns(process: &Process, key: &ClassKey, class: &Class, config: &EngineConfig) -> u64 {
    let shards = match key.likeness {
        Likeness::Size { size, .. } => size >= config.leak_shard_bytes && !threads_gone(process, class),
        Likeness::Path(_) | Likeness::Thread(_) => true,
    };
    if shards { config.leak_span_ns.max(config.leak_shard_span_ns) } else { config.leak_span_ns }
}

fn growth<'a>(
    process: &Process,
    key: &'a ClassKey,
    class: &'a Class,
    books: &Books,
    was_told: bool,
    moment: &Moment<'_>,
) -> Option<Growth<'a>> {
    let config = moment.config;
    // Given back in part: a pool that breathes.
    let breathes = class.live.count.saturating_mul(10) < class.most.saturating_mul(9)
        || class.live.bytes < class.live.peak / 10 * 9;
    let few = class.live.count < needed(process, key, class, config);
    let doubles = matches!(key.likeness, Likeness::Path(_)) && doubles(&class.marks, config);
    if breathes || class.live.bytes < config.leak_bytes || few && !doubles {
        return None;
    }
    let pace = if few { Pace::Doubling } else { Pace::Even };
    let marks = if was_told || few {
        &class.marks[..]
    } else {
        // A start, a night or a burst of other growth in the first half says nothing of the second.
        let latter = &class.marks[class.marks.len() / 2..];
        let [gained, needed] = [survivors(latter), needed(process, key, class, config)];
        [&class.marks[..], latter]
            .into_iter()
            .find(|marks| is_even(marks) && (marks.len() == class.marks.len() || gained >= needed))?
    };
    let (first, last) = (marks.first()?, marks.last()?);
    if last.ns.saturating_sub(first.ns) < needed_span_ns(process, key, class, config) {
        return None;
    }
    // The process is at work: its other memory comes and goes. That work is the clock of the
    // growth, so that a leak in a service with busy and quiet hours is even, and a start is not.
    let work = last.frees.saturating_sub(first.frees);
    if work < config.leak_balanced_frees.max(survivors(marks) / 4) {
        return None;
    }
    // Still growing while it works. What was told of stays so until it has not grown for half as
    // much work as it took to grow.
    let usual = (work / (marks.len() as u64 - 1).max(1)).saturating_mul(4);
    let pause = if was_told { usual.max(work / 2) } else { usual };
    if books.frees.saturating_sub(last.frees) > config.leak_balanced_frees.max(pause) {
        return None;
    }
    let gained = last.held.saturating_sub(first.held);
    let process_gained = last.bytes.saturating_sub(first.bytes);
    (was_told || key.host || follows(process, key.device, gained, moment)).then_some(Growth {
        key,
        class,
        pace,
        gained,
        process_gained,
    })
}

/// How many survivors came from the first of these marks to the last.
fn survivors(marks: &[Mark]) -> u64 {
    marks.first().zip(marks.last()).map_or(0, |(first, last)| last.live.saturating_sub(first.live))
}

/// Whether the survivors came evenly for the work done: a load comes in a burst, a warm-up slows
/// down. What they hold may vary with their sizes, but may not run dry.
fn is_even(marks: &[Mark]) -> bool {
    let (Some(first), Some(last)) = (marks.first(), marks.last()) else { return false };
    let work = u128::from(last.frees.saturating_sub(first.frees)).max(1);
    let (mut counts, mut bytes) = ([0_u64; 4], [0_u64; 4]);
    for pair in marks.windows(2) {
        let [from, to] = pair else { continue };
        let middle = from.frees.midpoint(to.frees).saturating_sub(first.frees);
        let quarter = (u128::from(middle) * 4 / work).min(3) as usize;
        counts[quarter] = counts[quarter].saturating_add(to.live.saturating_sub(from.live));
        bytes[quarter] = bytes[quarter].saturating_add(to.held.saturating_sub(from.held));
    }
    let gained = survivors(marks);
    let held = last.held.saturating_sub(first.held);
    counts.iter().all(|&quarter| quarter.saturating_mul(10) >= gained)
        && keeps_its_pace(counts)
        && bytes[2].saturating_add(bytes[3]) >= held / 3
}

/// Whether each of the last blocks is larger than the one before by half or more, and came after as
/// much work, within a factor of four. An arena that doubles is extended when it is full, so that
/// its steps come ever later, unless what it is asked for doubles too.
fn doubles(marks: &[Mark], config: &EngineConfig) -> bool {
    let Some(from) = marks.len().checked_sub(config.leak_doublings) else { return false };
    let steps: Vec<(u64, u64, u64)> = marks[from..]
        .windows(2)
        .map(|pair| {
            let [before, after] = [pair[0], pair[1]];
            (after.live - before.live, after.held.saturating_sub(before.held), after.frees - before.frees)
        })
        .collect();
    let one_by_one = steps.iter().all(|&(survivors, ..)| survivors == 1);
    let larger = steps.windows(2).all(|pair| pair[1].1 >= pair[0].1.saturating_add(pair[0].1 / 2));
    let least = steps.iter().map(|&(.., work)| work).min().unwrap_or(0);
    let most = steps.iter().map(|&(.., work)| work).max().unwrap_or(u64::MAX);
    one_by_one && larger && least >= config.leak_balanced_frees && most <= least.saturating_mul(4)
}

fn claim(process: &Process, growth: &Growth<'_>, others: &[Growth<'_>], moment: &Moment<'_>) -> Claim {
    let Growth { key, class, pace, .. } = growth;
    let all = [growth].into_iter().chain(others).map(kept);
    let (count, bytes) =
        all.fold((0_u64, 0_u64), |(count, bytes), live| (count.saturating_add(live.0), bytes.saturating_add(live.1)));
    let live = &class.live;
    let span = class.last_ns.saturating_sub(class.first_ns);
    let threads_gone = threads_gone(process, class);
    let stack = stack_of(key);
    let long = span >= 600 * SECOND && live.count >= 100 && (threads_gone || stack.is_some());
    let confidence = match key.likeness {
        Likeness::Thread(_) => Confidence::Low,
        _ if long => Confidence::High,
        _ => Confidence::Medium,
    };
    let device = key.device.filter(|_| !key.host);
    let forecast = Forecast::of(moment, process, device, bytes, span);
    let name = process_name(process.id.tgid, &process.comm);
    let kind = if key.host { "pinned host memory" } else { "GPU memory" };
    let mut evidence = vec![
        format!(
            "{}, {} ({} bytes) in all, allocated one by one from {} to {}",
            survivors_of(growth),
            size(kept(growth).1),
            kept(growth).1,
            clock(class.first_ns),
            clock(class.last_ns)
        ),
        format!("of {} such allocations {} were ever given back", class.allocs, class.frees),
        match pace {
            Pace::Even => {
                let per_hour = kept(growth).1 as f64 / span.max(1) as f64 * 3600.0 * SECOND as f64;
                format!(
                    "over {}: one every {}, about {} an hour",
                    duration(span),
                    duration(span / live.count.max(1)),
                    size(per_hour as u64)
                )
            }
            Pace::Doubling => format!(
                "each larger than the one before by half or more, one every {}, after as much work each",
                duration(span / live.count.max(1))
            ),
        },
    ];
    let frees = class
        .marks
        .last()
        .map_or(0, |mark| mark.frees)
        .saturating_sub(class.marks.first().map_or(0, |mark| mark.frees));
    evidence.push(format!("meanwhile its other memory was balanced: {frees} releases, so it is past its start"));
    evidence.push(match (stack, &key.likeness) {
        (Some(stack), _) => format!("all from one call path: stack {}", shown(&stack.to_string(), 64)),
        (None, Likeness::Thread(tid)) => {
            format!("call paths are not known, so all that thread {tid} allocates is taken together")
        }
        (None, _) => "call paths are not known, so one size stands for one place in the program".to_owned(),
    });
    if threads_gone {
        evidence.push(format!(
            "the allocating threads exited ({} of the {} last looked at); nothing in them can release it",
            dead_threads(process, class),
            class.threads.len()
        ));
    }
    evidence.extend(others.iter().take(4).map(|other| {
        let from = stack_of(other.key).map(|stack| format!(" from stack {}", shown(&stack.to_string(), 64)));
        format!("also {}, {} in all{}", survivors_of(other), size(kept(other).1), from.unwrap_or_default())
    }));
    evidence.extend(evidence_around(process, device, forecast, moment));
    let blocks = match key.likeness {
        Likeness::Size { size: each, .. } if others.is_empty() => format!("blocks of {}", size(each)),
        _ => "blocks of differing sizes".to_owned(),
    };
    Claim {
        category: super::CATEGORY,
        key: claim_key(process, key.device, key.host),
        subject: subject(process, key.device, key.host),
        severity: severity(bytes, forecast),
        confidence,
        bytes: Some(bytes),
        summary: format!("{name} keeps {} of {kind} in {count} {blocks} and goes on taking more", size(bytes)),
        evidence,
        advice: advice(process, threads_gone),
    }
}

/// Blocks and bytes that are told as the leak. What a thread held before may be its model.
fn kept(growth: &Growth<'_>) -> (u64, u64) {
    let Class { live, marks, .. } = growth.class;
    let before = marks.first().filter(|_| matches!(growth.key.likeness, Likeness::Thread(_)));
    let (count, bytes) = before.map_or((0, 0), |mark| (mark.live, mark.held));
    (live.count.saturating_sub(count), live.bytes.saturating_sub(bytes))
}

fn stack_of(key: &ClassKey) -> Option<&OpaqueId> {
    match &key.likeness {
        Likeness::Size { stack, .. } => stack.as_ref(),
        Likeness::Path(stack) => Some(stack),
        Likeness::Thread(_) => None,
    }
}

fn survivors_of(growth: &Growth<'_>) -> String {
    let (count, bytes) = kept(growth);
    match growth.key.likeness {
        Likeness::Size { size: each, .. } => format!("{count} survivors of size {each} bytes ({})", size(each)),
        Likeness::Path(_) | Likeness::Thread(_) => {
            format!("{count} survivors of differing sizes, {} on average", size(bytes / count.max(1)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Mark, doubles, is_even};
    use crate::engine::EngineConfig;

    /// Marks of blocks that came one by one: the work before each, and its size.
    fn marks(blocks: impl IntoIterator<Item = (u64, u64)>) -> Vec<Mark> {
        let (mut frees, mut held) = (0, 0);
        let mark = |(live, (work, size))| {
            frees += work;
            held += size;
            Mark { ns: frees, live, held, frees, bytes: held }
        };
        (1..).zip(blocks).map(mark).collect()
    }

    #[test]
    fn blocks_of_differing_sizes_are_even_by_number() {
        assert!(is_even(&marks((0..60).map(|block| (10, 1 + block * 37 % 19)))), "any sizes");
        assert!(is_even(&marks((0..60).map(|block| (10, 1 + block)))), "larger and larger");
        assert!(!is_even(&marks((0..60).map(|block| (10 + block, 10)))), "ever more seldom");
        assert!(!is_even(&marks((0..60).map(|block| (10, 1 << (15 - block / 4))))), "ever smaller");
        assert!(!is_even(&marks((0..60).map(|block| (if block < 50 { 0 } else { 40 }, 10)))), "a burst");
    }

    #[test]
    fn blocks_that_double_for_as_much_work_are_no_arena() {
        let config = EngineConfig::default();
        let doubling = |works: [u64; 10]| {
            doubles(&marks((0..).map(|block| 64 << block).zip(works).map(|(size, work)| (work, size))), &config)
        };
        assert!(doubling([40; 10]));
        assert!(doubling([40, 20, 60, 40, 30, 20, 70, 40, 20, 60]), "uneven requests");
        assert!(!doubling([10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120]), "an arena for even demand");
        assert!(!doubling([0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), "a load");
        assert!(!doubles(&marks([(40, 64); 10]), &config), "no larger");
        assert!(!doubles(&marks([(40, 64), (40, 128), (40, 256)]), &config), "too few");
    }
}
