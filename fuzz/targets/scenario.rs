//! Any bytes as a scenario file: an error or a report, never a panic.

#![no_main]
#![expect(clippy::expect_used, reason = "a panic is what the fuzzer looks for")]

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::scenario::Scenario;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut scenario) = Scenario::read(Path::new("fuzzed"), bytes) else { return };
    let mut engine =
        Engine::new(EngineConfig { devices: scenario.header().devices.clone(), ..EngineConfig::default() });
    while let Ok(Some(record)) = scenario.next_record() {
        engine.push(&record);
    }
    engine.finish();
    let report = engine.report();
    let _ = vramtrace::sink::text::report(&report);
    serde_json::to_string(&report).expect("a report is written as JSON");
});
