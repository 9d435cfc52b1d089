//! Every scenario file, held against what it expects in all five aspects.

mod corpus;

use vramtrace::engine::EngineConfig;
use vramtrace::{replay, sink};

#[test]
fn every_scenario_gets_the_verdict_it_expects() {
    let cases = corpus::all();
    assert!(cases.len() >= 69, "scenario files are missing: {}", cases.len());
    let mut wrong = Vec::new();
    for case in &cases {
        let report = replay::replay(&case.path, EngineConfig::default()).unwrap();
        let faults = corpus::score(&case.json, &report);
        if faults.any() {
            wrong.push(format!("{}: {faults:#?}", case.id));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_same_file_gives_the_same_bytes() {
    for case in corpus::all() {
        let run = || {
            let report = replay::replay(&case.path, EngineConfig::default()).unwrap();
            (sink::json::report(&report).unwrap(), sink::text::report(&report))
        };
        assert_eq!(run(), run(), "{}", case.id);
    }
}

#[test]
fn changes_tell_the_whole_life_of_each_finding() {
    use vramtrace::engine::Engine;
    use vramtrace::finding::Change;
    for case in corpus::all() {
        let mut scenario = vramtrace::scenario::Scenario::open(&case.path).unwrap();
        let devices = scenario.header().devices.clone();
        let mut engine = Engine::new(EngineConfig { devices, ..EngineConfig::default() });
        let mut changes = Vec::new();
        while let Some(record) = scenario.next_record().unwrap() {
            changes.extend(engine.push(&record));
        }
        changes.extend(engine.finish());
        for finding in engine.report().findings {
            let lives: Vec<&Change> = changes.iter().filter(|change| change.finding().id == finding.id).collect();
            assert!(matches!(lives.first(), Some(Change::Opened(_))), "{}", finding.id);
            let closed = matches!(lives.last(), Some(Change::Closed(_)));
            assert_eq!(closed, finding.closed_ns.is_some(), "{}", finding.id);
            assert_eq!(finding.close_reason.is_some(), closed, "{}", finding.id);
        }
    }
}
