//! Any records in any order: no panic, the same report twice.

#![no_main]
#![recursion_limit = "256"]
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a panic is what the fuzzer looks for")]

#[path = "../../tracer/tests/corpus/any_record.rs"]
mod any_record;

use any_record::Dice;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::record::Record;

/// Longer histories find no more and take longer.
const RECORDS: usize = 300;

fn dice(input: &mut Unstructured<'_>) -> Result<Dice> {
    Ok(Dice {
        kind: usize::from(input.arbitrary::<u8>()?),
        // Mostly in seconds, so that thresholds are passed and times are equal.
        ts_ns: if input.ratio(1, 16)? {
            input.arbitrary()?
        } else {
            u64::from(input.arbitrary::<u8>()?) * 1_000_000_000
        },
        occurred_ns: input.arbitrary()?,
        who: input.arbitrary()?,
        other: input.arbitrary()?,
        handle: input.arbitrary()?,
        size: if input.ratio(1, 16)? { input.arbitrary()? } else { u64::from(input.arbitrary::<u8>()?) << 28 },
        pick: input.arbitrary()?,
        flag: input.arbitrary()?,
    })
}

fn report(config: &EngineConfig, records: &[Record]) -> String {
    let mut engine = Engine::new(config.clone());
    for record in records {
        engine.push(record);
    }
    engine.finish();
    serde_json::to_string(&engine.report()).expect("a report is written as JSON")
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let mut config = EngineConfig::default();
    // Remembering little leads to forgetting, which has its own ways to fail.
    if input.arbitrary().unwrap_or(false) {
        config = EngineConfig { remembered_dead: 1, remembered_processes: 3, remembered_findings: 2, ..config };
    }
    let mut records = Vec::new();
    while records.len() < RECORDS && !input.is_empty() {
        let Ok(dice) = dice(&mut input) else { break };
        records.push(dice.record());
    }
    assert_eq!(report(&config, &records), report(&config, &records), "the same records give the same report");
});
