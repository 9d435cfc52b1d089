//! Floors: the lowest points between work cycles rise from cycle to cycle.

use super::{advice, claim_key, evidence_around, keeps_its_pace, process_name, severity, subject};
use crate::detect::forecast::Forecast;
use crate::engine::{Claim, EngineConfig, Moment};
use crate::finding::Confidence;
use crate::ledger::Process;
use crate::ledger::cycles::Floor;
use crate::units::{at, duration, size};

/// A rise of the floors.
pub(super) struct Rise {
    floors: usize,
    first: Floor,
    last_bytes: u64,
    pub(super) last_ns: u64,
    pub(super) gained: u64,
    /// From the first floor that counts to the last.
    span_ns: u64,
    pub(super) gap_ns: u64,
}

/// Whether the floors rise from cycle to cycle and have not stopped.
pub(super) fn rising(floors: &[Floor], config: &EngineConfig) -> Option<Rise> {
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
        span_ns: span,
        gap_ns: span / (judged.len() as u64 - 1).max(1),
    })
}

pub(super) fn claim(process: &Process, device: Option<u32>, rise: &Rise, moment: &Moment<'_>) -> Claim {
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
    let forecast = Forecast::of(moment, process, device, rise.gained, rise.span_ns);
    evidence.extend(evidence_around(process, device, forecast, moment));
    let on = device.map_or_else(|| "the GPU".to_owned(), |device| format!("GPU {device}"));
    let confidence = if rise.floors >= 2 * moment.config.leak_floors { Confidence::High } else { Confidence::Medium };
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
    use super::rising;
    use crate::engine::EngineConfig;
    use crate::ledger::cycles::Floor;
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
