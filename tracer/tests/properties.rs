//! What must hold for records nobody has thought of.

#![recursion_limit = "256"]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "corpus/any_record.rs"]
mod any_record;

use any_record::Dice;
use proptest::prelude::*;
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::record::Record;

fn any_record() -> impl Strategy<Value = Record> {
    let sizes = prop_oneof![Just(0), 1_u64..10_000_000_000, Just(u64::MAX)];
    let names = (any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>());
    let times = (0_u64..200_000_000_000, prop::option::of(any::<u64>()));
    (any::<usize>(), times, names, sizes, any::<bool>()).prop_map(
        |(kind, (ts_ns, occurred_ns), (who, other, handle, pick), size, flag)| {
            Dice { kind, ts_ns, occurred_ns, who, other, handle, size, pick, flag }.record()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever comes, in whatever order: no panic, the same bytes twice, and live processes never
    /// have outstanding bytes that a peak does not cover.
    #[test]
    fn any_records_in_any_order_are_survived(records in prop::collection::vec(any_record(), 1..250)) {
        let run = || {
            let mut engine = Engine::new(EngineConfig::default());
            for record in &records {
                engine.push(record);
            }
            engine.finish();
            engine.report()
        };
        let report = run();
        prop_assert_eq!(serde_json::to_string(&report).unwrap(), serde_json::to_string(&run()).unwrap());
        let _ = vramtrace::sink::text::report(&report);
        for (tgid, &bytes) in &report.end_state.outstanding_bytes_by_tgid {
            prop_assert!(report.end_state.peak_bytes_by_tgid.get(tgid).is_some_and(|&peak| peak >= bytes));
        }
    }

    /// Remembering little must not make it fall over either.
    #[test]
    fn tight_limits_are_survived(records in prop::collection::vec(any_record(), 1..250)) {
        let config = EngineConfig { remembered_dead: 1, remembered_processes: 3, remembered_findings: 2, ..EngineConfig::default() };
        let mut engine = Engine::new(config);
        for record in &records {
            engine.push(record);
            prop_assert!(engine.ledger().process_count() <= 16);
        }
        engine.finish();
        engine.report();
    }
}
