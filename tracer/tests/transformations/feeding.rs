//! How records reach the engine is no part of what they say.

use super::{corpus, events};
use serde_json::Value;
use std::collections::BTreeMap;
use vramtrace::engine::{DeviceInfo, Engine, EngineConfig};
use vramtrace::finding::Change;
use vramtrace::record::Record;

fn engine(scenario: &Value) -> Engine {
    let devices: Vec<DeviceInfo> = serde_json::from_value(scenario["devices"].clone()).unwrap();
    Engine::new(EngineConfig { devices, ..EngineConfig::default() })
}

fn bytes(mut engine: Engine) -> String {
    engine.finish();
    serde_json::to_string(&engine.report()).unwrap()
}

#[test]
fn reports_asked_for_on_the_way_and_a_second_encoding_leave_every_byte_alone() {
    for case in corpus::all() {
        let (mut straight, mut looked_at, mut encoded) = (engine(&case.json), engine(&case.json), engine(&case.json));
        for (index, event) in events(&case.json).iter().enumerate() {
            let record: Record = serde_json::from_value(event.clone()).unwrap();
            straight.push(&record);
            looked_at.push(&record);
            let _ = looked_at.wants_open_files();
            if index % 64 == 0 {
                let _ = looked_at.report();
            }
            let line = serde_json::to_string(&record).unwrap();
            encoded.push(&serde_json::from_str(&line).unwrap());
        }
        let straight = bytes(straight);
        assert_eq!(bytes(looked_at), straight, "{}", case.id);
        assert_eq!(bytes(encoded), straight, "{}", case.id);
    }
}

#[test]
fn the_changes_told_on_the_way_add_up_to_the_report() {
    for case in corpus::all() {
        let mut engine = engine(&case.json);
        let mut told = BTreeMap::new();
        let mut keep = |changes: Vec<Change>| {
            for change in changes {
                let finding = change.finding();
                told.insert((finding.id.clone(), finding.opened_ns), finding.clone());
            }
        };
        for event in events(&case.json) {
            keep(engine.push(&serde_json::from_value(event.clone()).unwrap()));
        }
        keep(engine.finish());
        for finding in engine.report().findings {
            let last = &told[&(finding.id.clone(), finding.opened_ns)];
            assert_eq!((last.severity, last.closed_ns), (finding.severity, finding.closed_ns), "{}", case.id);
        }
    }
}
