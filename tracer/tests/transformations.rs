//! Scenarios changed in ways that leave their truth alone, and in ways that do not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod corpus;

use serde_json::{Value, json};
use vramtrace::engine::EngineConfig;
use vramtrace::finding::Report;

/// The verdicts without their wording.
fn verdicts(report: &Report) -> Vec<(String, String, String, Option<u64>, bool)> {
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

/// Applies `change` to every number under one of `keys`, at any depth.
fn map_numbers(value: &mut Value, keys: &[&str], change: &dyn Fn(u64) -> u64) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value.as_u64() {
                    Some(number) if keys.contains(&key.as_str()) => *value = json!(change(number)),
                    _ => map_numbers(value, keys, change),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| map_numbers(value, keys, change)),
        _ => {}
    }
}

fn transformed(case: &corpus::Case, keys: &[&str], change: &dyn Fn(u64) -> u64) -> Value {
    let mut json = case.json.clone();
    map_numbers(&mut json["events"], keys, change);
    map_numbers(&mut json["devices"], keys, change);
    json
}

const PIDS: [&str; 7] = ["pid", "tgid", "ppid", "parent_tgid", "self_tgid", "to_tgid", "target_tgid"];
const TIMES: [&str; 6] = ["ts_ns", "start_ns", "parent_start_ns", "occurred_ns", "since_ns", "begin_ns"];
const SIZES: [&str; 5] = ["size", "used", "total", "idle_used", "reserved"];

#[test]
fn other_process_numbers_change_no_verdict() {
    for case in corpus::all() {
        // Rows that cannot be true must stay so.
        let renamed =
            transformed(&case, &PIDS, &|pid| if (2..4_000_000).contains(&pid) { 4_100_000 - pid } else { pid });
        assert_eq!(verdicts(&corpus::run(&renamed)), verdicts(&corpus::run(&case.json)), "{}", case.id);
    }
}

#[test]
fn another_time_of_boot_changes_no_verdict() {
    for case in corpus::all() {
        let shifted = transformed(&case, &TIMES, &|ns| ns + 777_000_000_000_000);
        let (before, after) = (corpus::run(&case.json), corpus::run(&shifted));
        assert_eq!(verdicts(&after), verdicts(&before), "{}", case.id);
        for (before, after) in before.findings.iter().zip(&after.findings) {
            assert_eq!(after.opened_ns, before.opened_ns + 777_000_000_000_000, "{}", case.id);
        }
    }
}

#[test]
fn twice_the_memory_loses_no_verdict() {
    for case in corpus::all() {
        let mut larger = transformed(&case, &SIZES, &|bytes| bytes * 2);
        for event in larger["events"].as_array_mut().unwrap() {
            if event["kind"] == "service_metric" && event["name"].as_str().unwrap().contains("bytes") {
                event["value"] = json!(event["value"].as_f64().unwrap() * 2.0);
            }
        }
        let (mut before, after) = (corpus::run(&case.json).findings, corpus::run(&larger).findings);
        for found in after {
            match before.iter().position(|old| old.category == found.category) {
                Some(index) => drop(before.remove(index)),
                // Thresholds in bytes are absolute: what was below one may now be above it.
                None => assert!(
                    found.bytes.is_none_or(|bytes| bytes <= 2 * EngineConfig::default().context_ceiling_bytes),
                    "{}: {found:?}",
                    case.id
                ),
            }
        }
        assert_eq!(before, [], "{}", case.id);
    }
}

#[test]
fn repeated_samples_and_strangers_change_no_verdict() {
    for case in corpus::all() {
        let mut json = case.json.clone();
        let mut events = Vec::new();
        for (index, event) in case.json["events"].as_array().unwrap().iter().enumerate() {
            events.push(event.clone());
            // A failed answer in a row is a fact; a repeated good one is not.
            if event["kind"] == "nvml_sample" && event["status"] == "ok" {
                events.push(event.clone());
            }
            let (ts, pid) = (event["ts_ns"].clone(), 3_900_000 + index);
            let life = json!({"ts_ns": ts, "kind": "fork", "pid": pid, "tgid": pid, "start_ns": ts, "comm": "sh", "ppid": 3_899_999,
                "parent_tgid": 3_899_999, "parent_start_ns": 5, "cgroup": "/system.slice/cron.service"});
            events.push(life);
            events.push(json!({"ts_ns": ts, "kind": "exit", "pid": pid, "tgid": pid, "start_ns": ts, "comm": "sh", "code": 1, "signal": 0, "group_dead": true}));
        }
        json["events"] = Value::Array(events);
        assert_eq!(verdicts(&corpus::run(&json)), verdicts(&corpus::run(&case.json)), "{}", case.id);
    }
}

/// The scenario with some of its events changed or (`None`) left out.
fn edited(id: &str, edit: impl Fn(Value) -> Option<Value>) -> Report {
    let mut json = corpus::case(id).json;
    let events = json["events"].take();
    json["events"] = Value::Array(events.as_array().unwrap().iter().cloned().filter_map(edit).collect());
    corpus::run(&json)
}

fn raised(report: &Report, category: &str) -> bool {
    report.findings.iter().any(|finding| finding.category.name() == category)
}

const BASE: u64 = 1_000_000_000_000_000;

#[test]
fn a_changed_truth_changes_the_verdict() {
    // The owner lives on.
    let owner_lives = edited("d02", |event| {
        let of_owner = event["tgid"] == 31913 && (event["kind"] == "exit" || event["kind"] == "reap");
        (!of_owner && event["kind"] != "proc_state").then_some(event)
    });
    assert!(!raised(&owner_lives, "orphan_process"));

    // The memory comes back a second after the exit.
    let back_in_time = |event: Value, exit_s: u64| {
        let mut event = event;
        if event["kind"] == "nvml_sample" && event["ts_ns"].as_u64() > Some(BASE + (exit_s + 1) * 1_000_000_000) {
            event["procs"] = json!([]);
            event["used"] = json!(4_194_304);
        }
        Some(event)
    };
    assert!(!raised(&edited("d03", |event| back_in_time(event, 30)), "inherited_fd_holder"));
    assert!(!raised(&edited("o03", |event| back_in_time(event, 20)), "residual_after_exit"));
    assert!(!raised(&edited("o05", |event| back_in_time(event, 20)), "slow_teardown"));

    // The survivors are given back.
    let freed = edited("d05", |event| {
        let mut event = event;
        if event["kind"] == "alloc" && event["stack_id"] == "S7" {
            event["result"] = json!(2);
        }
        Some(event)
    });
    assert!(!raised(&freed, "app_leak"));

    // The workers exec: the files are closed, so the driver is to blame for what stays.
    let mut execs = corpus::case("d03").json;
    let events = execs["events"].as_array_mut().unwrap();
    let forks: Vec<Value> = events.iter().filter(|event| event["kind"] == "fork").cloned().collect();
    for fork in forks {
        let at = events.iter().position(|event| *event == fork).unwrap();
        let mut exec = fork;
        exec["kind"] = json!("exec");
        events.insert(at + 1, exec);
    }
    for event in events.iter_mut().filter(|event| event["kind"] == "fd_scan") {
        event["holders"] = json!([]);
    }
    let report = corpus::run(&execs);
    assert!(!raised(&report, "inherited_fd_holder"));
    assert!(raised(&report, "residual_after_exit"));

    // No pinned memory explains the time.
    let unpinned =
        edited("o05", |event| (event["kind"] != "host_alloc" && event["kind"] != "fd_scan").then_some(event));
    assert!(!raised(&unpinned, "residual_after_exit"), "it was reaped only after the memory came back");

    // The container was not removed and its first process lives.
    let untouched = edited("d12", |event| {
        let end = event["kind"] == "container_event" || event["tgid"] == 68010 && event["kind"] != "proc_snapshot";
        (!end && event["kind"] != "proc_state").then_some(event)
    });
    assert!(!raised(&untouched, "orphan_process"));
}
