//! Every scenario file, held against what it expects in all five aspects.

mod corpus;

use vramtrace::engine::EngineConfig;
use vramtrace::finding::Category;
use vramtrace::{replay, sink};

#[test]
fn every_scenario_gets_the_verdict_it_expects() {
    let cases = corpus::all();
    assert!(cases.len() >= 110, "scenario files are missing: {}", cases.len());
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

/// A verdict that closes and opens again with every other sample is an alarm nobody listens to.
#[test]
fn growth_that_goes_on_is_told_of_once() {
    for case in corpus::all() {
        let report = replay::replay(&case.path, EngineConfig::default()).unwrap();
        let mut told = std::collections::BTreeMap::new();
        for finding in report.findings.iter().filter(|finding| finding.category == Category::AppLeak) {
            *told.entry(&finding.id).or_insert(0) += 1;
        }
        assert!(told.values().all(|&times| times == 1), "{}: {told:?}", case.id);
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
