//! Scenarios changed in ways that leave their truth alone, and in ways that do not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../corpus/mod.rs"]
mod corpus;
mod feeding;
mod interleaved;
mod other_truth;
mod same_truth;

use serde_json::{Value, json};
use vramtrace::finding::Report;

/// The fields that hold times, in nanoseconds.
const TIMES: [&str; 7] = ["ts_ns", "start_ns", "parent_start_ns", "to_start_ns", "occurred_ns", "since_ns", "begin_ns"];
/// The fields that hold process numbers.
const PIDS: [&str; 7] = ["pid", "tgid", "ppid", "parent_tgid", "self_tgid", "to_tgid", "target_tgid"];
const SECOND: u64 = 1_000_000_000;

/// A verdict without its wording: category, severity, confidence, bytes, whether it was closed.
type Verdict = (String, String, String, Option<u64>, bool);

/// The verdicts of a report, sorted.
fn verdicts(report: &Report) -> Vec<Verdict> {
    let mut verdicts: Vec<_> = report
        .findings
        .iter()
        .map(|finding| {
            (
                finding.category.to_string(),
                finding.severity.to_string(),
                finding.confidence.to_string(),
                finding.bytes,
                finding.closed_ns.is_some(),
            )
        })
        .collect();
    verdicts.sort();
    verdicts
}

/// The same verdicts, with figures that differ by a twentieth at most: growth is measured between
/// points that a history of another length thins elsewhere.
fn assert_alike(after: &[Verdict], before: &[Verdict], what: &str) {
    let without_bytes = |verdicts: &[Verdict]| -> Vec<Verdict> {
        verdicts
            .iter()
            .cloned()
            .map(|(category, severity, sure, _, closed)| (category, severity, sure, None, closed))
            .collect()
    };
    assert_eq!(without_bytes(after), without_bytes(before), "{what}");
    for (after, before) in after.iter().zip(before) {
        let [now, then] = [after, before].map(|verdict| verdict.3.unwrap_or(0));
        assert!(now.abs_diff(then) <= then / 20, "{what}: {after:?} {before:?}");
    }
}

/// Applies `change` to every field named in `keys`, at any depth.
fn map_fields(value: &mut Value, keys: &[&str], change: &dyn Fn(&Value) -> Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                if keys.contains(&key.as_str()) && !value.is_object() && !value.is_array() {
                    *value = change(value);
                } else {
                    map_fields(value, keys, change);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| map_fields(value, keys, change)),
        _ => {}
    }
}

/// The same for fields that hold whole numbers.
fn map_numbers(value: &mut Value, keys: &[&str], change: &dyn Fn(u64) -> u64) {
    map_fields(value, keys, &|value| value.as_u64().map_or_else(|| value.clone(), |number| json!(change(number))));
}

/// The events of a scenario.
fn events(scenario: &Value) -> &Vec<Value> {
    scenario["events"].as_array().unwrap()
}

fn ts(event: &Value) -> u64 {
    event["ts_ns"].as_u64().unwrap()
}

/// When a scenario begins and ends.
fn span(scenario: &Value) -> (u64, u64) {
    (ts(events(scenario).first().unwrap()), ts(events(scenario).last().unwrap()))
}
