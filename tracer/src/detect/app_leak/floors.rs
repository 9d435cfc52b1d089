//! Floors: the lowest points between work cycles rise from cycle to cycle.

use super::{PAUSE_NS, advice, claim_key, evidence_around, keeps_its_pace, origins, process_name, severity, subject};
use crate::detect::forecast::Forecast;
use crate::engine::{Claim, EngineConfig, Moment};
use crate::finding::Confidence;
use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::ledger::cycles::{Cycles, Floor, Floors};
use crate::units::{at, duration, size};

/// A rise of the floors.
pub(super) struct Rise {
    /// From the first floor that counts to the last.
    cycles: u64,
    first: Floor,
    last: Floor,
    pub(super) gained: u64,
    span_ns: u64,
}

impl Rise {
    fn between(floors: &Floors, judged: &[Floor]) -> Option<Self> {
        let (first, start, last) = (floors.kept.first()?, judged.first()?, judged.last()?);
        let cycles = (judged.len() as u64 - 1).saturating_mul(floors.stride());
        let gained = last.bytes.checked_sub(start.bytes)?;
        Some(Self { cycles, first: *first, last: *last, gained, span_ns: last.ns.saturating_sub(start.ns) })
    }

    fn gap_ns(&self) -> u64 {
        self.span_ns / self.cycles.max(1)
    }
}

/// The start of a program is no cycle of it: judge the latter three quarters.
fn judged(floors: &Floors) -> Option<&[Floor]> {
    floors.kept.get(floors.kept.len() / 4..).filter(|judged| judged.len() >= 3)
}

/// A rise that is told of, or goes on being told of.
pub(super) fn rise(cycles: &Cycles, was_told: bool, moment: &Moment<'_>) -> Option<Rise> {
    let sorts = [&cycles.short, &cycles.long];
    let rising = sorts.into_iter().find_map(|floors| rising(floors, moment.now(), moment.config));
    rising.or_else(|| sorts.into_iter().filter(|_| was_told).find_map(stands))
}

/// Whether the floors rise from cycle to cycle and have not stopped.
fn rising(floors: &Floors, now: u64, config: &EngineConfig) -> Option<Rise> {
    let judged = judged(floors)?;
    let rise = Rise::between(floors, judged).filter(|rise| rise.gained >= config.held_floor_bytes / 2)?;
    let gained = rise.gained;
    let steps: Vec<u64> = judged.windows(2).filter_map(|pair| pair[1].bytes.checked_sub(pair[0].bytes)).collect();
    let all_rise = steps.len() + 1 == judged.len() && steps.iter().all(|&step| step > 0);
    let mut quarters = [0_u64; 4];
    for (index, &step) in steps.iter().enumerate() {
        if let Some(quarter) = quarters.get_mut(index * 4 / steps.len()) {
            *quarter = quarter.saturating_add(step);
        }
    }
    let many = floors.kept.len() >= config.leak_floors && keeps_its_pace(quarters);
    let least = steps.iter().min().copied().unwrap_or(0);
    let most = steps.iter().max().copied().unwrap_or(0);
    // A few cycles prove something only if each leaves as much behind as the one before, or more.
    let accelerating = steps.windows(2).all(|pair| pair[1] >= pair[0]);
    let unloads = judged.iter().all(|floor| floor.high.saturating_sub(floor.bytes).saturating_mul(2) >= floor.high);
    let few = floors.kept.len() >= config.leak_floors_of_unloads
        && unloads
        && gained >= config.held_floor_bytes
        && (least.saturating_mul(2) >= most || accelerating);
    // One block that is ever replaced by a larger one is in use, not forgotten.
    let more_blocks = judged.windows(2).filter(|pair| pair[1].blocks > pair[0].blocks).count() * 2 >= steps.len();
    let third = judged.len() - judged.len().div_ceil(3);
    let late = rise.last.bytes.saturating_sub(judged.get(third.saturating_sub(1))?.bytes);
    let goes_on = late.saturating_mul(5) >= gained
        && now.saturating_sub(rise.last.ns) <= PAUSE_NS.max(kept_gap_ns(&rise, judged).saturating_mul(4));
    // Loading a model with a staging buffer for each part, large or small, looks the same for some minutes.
    let parts = gained / (steps.len() as u64).max(1) >= config.leak_shard_bytes / 4;
    let shards = !unloads && parts && rise.span_ns < config.leak_shard_span_ns;
    let is_leak = all_rise && (many || few) && more_blocks && goes_on && !shards;
    (is_leak && rise.span_ns >= config.leak_span_ns).then_some(rise)
}

fn kept_gap_ns(rise: &Rise, judged: &[Floor]) -> u64 {
    rise.span_ns / (judged.len() as u64 - 1).max(1)
}

/// Whether a rise that was told of still stands: the memory has not come back, and the last third of
/// the floors, give or take a twentieth of the rise, is higher than those before. Cycles differ, so
/// that not every one must leave something behind; and while there are none, nothing has changed.
fn stands(floors: &Floors) -> Option<Rise> {
    let judged = judged(floors)?;
    let (before, late) = judged.split_at(judged.len() - judged.len() / 3);
    let highest = |floors: &[Floor]| floors.iter().map(|floor| floor.bytes).max().unwrap_or(0);
    let (start, last) = (judged.first()?, judged.last()?);
    let rose = highest(judged).saturating_sub(start.bytes);
    let came_back = highest(judged).saturating_sub(last.bytes) > rose / 4;
    let goes_on = highest(late).saturating_sub(highest(before)) > rose / 20;
    Rise::between(floors, judged).filter(|_| goes_on && !came_back)
}

pub(super) fn claim(process: &Process, books: &Books, device: Option<u32>, rise: &Rise, moment: &Moment<'_>) -> Claim {
    let name = process_name(process.id.tgid, &process.comm);
    let each = rise.gained / rise.cycles.max(1);
    let mut evidence = vec![
        format!(
            "the lowest point between work cycles rose over {} cycles: {} ({} bytes) more now, {} for each cycle, one cycle every {}",
            rise.cycles,
            size(rise.gained),
            rise.gained,
            size(each),
            duration(rise.gap_ns())
        ),
        format!(
            "first floor {} {}, last floor {} {}",
            size(rise.first.bytes),
            at(rise.first.ns),
            size(rise.last.bytes),
            at(rise.last.ns)
        ),
    ];
    evidence.extend(origins::told(books, device, rise.first.ns, rise.gained));
    let forecast = Forecast::of(moment, process, device, rise.gained, rise.span_ns);
    evidence.extend(evidence_around(process, device, forecast, moment));
    let on = device.map_or_else(|| "the GPU".to_owned(), |device| format!("GPU {device}"));
    let confidence =
        if rise.cycles >= 2 * moment.config.leak_floors as u64 { Confidence::High } else { Confidence::Medium };
    Claim {
        category: super::CATEGORY,
        key: claim_key(process, device, false),
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

#[cfg(test)]
mod tests {
    use super::{rising, stands};
    use crate::engine::EngineConfig;
    use crate::ledger::cycles::{Floor, Floors};
    use crate::units::{MIB, SECOND};

    fn floors(values: &[u64], swing: u64) -> Floors {
        let floor = |(index, &mib): (usize, &u64)| Floor {
            ns: index as u64 * 60 * SECOND,
            bytes: mib * MIB,
            high: mib * MIB + swing * MIB,
            blocks: mib,
        };
        let mut floors = Floors::default();
        floors.kept = values.iter().enumerate().map(floor).collect();
        floors
    }

    #[test]
    fn only_floors_that_go_on_rising_count() {
        let config = EngineConfig::default();
        let rises = |values: &[u64]| rising(&floors(values, 64), 0, &config).is_some();
        let unloads = |values: &[u64]| rising(&floors(values, 4000), 0, &config).is_some();
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

    #[test]
    fn a_rise_stands_until_the_memory_is_back_or_nothing_more_is_left_behind() {
        let stands = |values: &[u64]| stands(&floors(values, 64)).is_some();
        let even: Vec<u64> = (0..24).map(|index| 10 + index * 20).collect();
        let then = |more: &[u64]| [even.as_slice(), more].concat();
        assert!(stands(&even));
        assert!(stands(&then(&[470, 470, 470, 490, 485])), "some cycles leave nothing");
        assert!(!stands(&then(&[470, 472, 469, 471, 470, 473, 470, 472, 471, 470, 474, 470])), "stopped");
        assert!(!stands(&then(&[300])), "given back");
    }

    #[test]
    fn a_block_that_is_replaced_by_a_larger_one_is_no_leak() {
        let mut replaced = floors(&(0..40).map(|index| 10 + index * 20).collect::<Vec<_>>(), 64);
        assert!(rising(&replaced, 0, &EngineConfig::default()).is_some());
        replaced.kept.iter_mut().for_each(|floor| floor.blocks = 3);
        assert!(rising(&replaced, 0, &EngineConfig::default()).is_none());
    }
}
