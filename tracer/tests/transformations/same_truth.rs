//! What the verdicts must not depend on.

use super::{PIDS, TIMES, assert_alike, corpus, events, map_fields, map_numbers, span, verdicts};
use serde_json::{Value, json};
use vramtrace::engine::EngineConfig;

const SIZES: [&str; 5] = ["size", "used", "total", "idle_used", "reserved"];
const NAMES: [&str; 6] = ["handle", "va", "ipc_id", "stack_id", "pool", "ctx"];

/// Every scenario gives the same verdicts after `change`.
fn verdicts_stay(change: impl Fn(&mut Value)) {
    for case in corpus::all() {
        let mut changed = case.json.clone();
        change(&mut changed);
        assert_eq!(verdicts(&corpus::run(&changed)), verdicts(&corpus::run(&case.json)), "{}", case.id);
    }
}

/// Replaces each event by what `change` makes of it.
fn each_event(scenario: &mut Value, change: impl Fn(usize, &Value) -> Vec<Value>) {
    let changed = events(scenario).iter().enumerate().flat_map(|(index, event)| change(index, event)).collect();
    scenario["events"] = Value::Array(changed);
}

#[test]
fn other_process_numbers_change_no_verdict() {
    // Rows that cannot be true must stay so.
    verdicts_stay(|scenario| {
        map_numbers(&mut scenario["events"], &PIDS, &|pid| {
            if (2..4_000_000).contains(&pid) { 4_100_000 - pid } else { pid }
        });
    });
}

#[test]
fn other_handles_and_addresses_change_no_verdict() {
    verdicts_stay(|scenario| {
        map_fields(&mut scenario["events"], &NAMES, &|name| match name.as_str() {
            Some(name) => json!(format!("~{}", name.chars().rev().collect::<String>())),
            None => name.clone(),
        });
    });
}

#[test]
fn another_time_of_boot_changes_no_verdict() {
    const LATER: u64 = 777_000_000_000_000;
    for case in corpus::all() {
        let mut shifted = case.json.clone();
        map_numbers(&mut shifted["events"], &TIMES, &|ns| ns + LATER);
        let (before, after) = (corpus::run(&case.json), corpus::run(&shifted));
        assert_eq!(verdicts(&after), verdicts(&before), "{}", case.id);
        for (before, after) in before.findings.iter().zip(&after.findings) {
            assert_eq!(after.opened_ns, before.opened_ns + LATER, "{}", case.id);
        }
    }
}

#[test]
fn a_clock_that_runs_a_little_faster_or_slower_changes_no_verdict() {
    for (percent, case) in corpus::all().into_iter().flat_map(|case| [(98, case.clone()), (102, case)]) {
        let mut scaled = case.json.clone();
        let (start, _) = span(&scaled);
        map_numbers(&mut scaled["events"], &TIMES, &|ns| {
            if ns < start { ns } else { start + (ns - start) / 100 * percent }
        });
        let what = format!("{} at {percent} %", case.id);
        assert_alike(&verdicts(&corpus::run(&scaled)), &verdicts(&corpus::run(&case.json)), &what);
    }
}

#[test]
fn twice_the_memory_loses_no_verdict() {
    for case in corpus::all() {
        let mut larger = case.json.clone();
        map_numbers(&mut larger["events"], &SIZES, &|bytes| bytes * 2);
        map_numbers(&mut larger["devices"], &SIZES, &|bytes| bytes * 2);
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
fn repeated_samples_change_no_verdict() {
    verdicts_stay(|scenario| {
        each_event(scenario, |_, event| {
            // A failed answer in a row is a fact; a repeated good one is not.
            let again = event["kind"] == "nvml_sample" && event["status"] == "ok";
            vec![event.clone(); if again { 2 } else { 1 }]
        });
    });
}

#[test]
fn strangers_without_a_gpu_change_no_verdict() {
    verdicts_stay(|scenario| {
        each_event(scenario, |index, event| {
            let (ts, pid) = (&event["ts_ns"], 3_900_000 + index);
            vec![
                event.clone(),
                json!({"ts_ns": ts, "kind": "fork", "pid": pid, "tgid": pid, "start_ns": ts, "comm": "sh", "ppid": 3_899_999,
                    "parent_tgid": 3_899_999, "parent_start_ns": 5, "cgroup": "/system.slice/cron.service"}),
                json!({"ts_ns": ts, "kind": "exit", "pid": pid, "tgid": pid, "start_ns": ts, "comm": "sh", "code": 1,
                    "signal": 0, "group_dead": true}),
            ]
        });
    });
}

#[test]
fn reservations_of_addresses_change_no_verdict() {
    verdicts_stay(|scenario| {
        each_event(scenario, |_, event| {
            if event["kind"] == "va_reserve" {
                return Vec::new();
            }
            if event["kind"] != "alloc" {
                return vec![event.clone()];
            }
            let mut reserved = event.clone();
            reserved["kind"] = json!("va_reserve");
            reserved["api"] = json!("cuMemAddressReserve");
            reserved["va"] = json!("0x7fff00000000");
            vec![reserved, event.clone()]
        });
    });
}

#[test]
fn the_order_of_what_processes_did_at_one_time_changes_no_verdict() {
    let calls = ["alloc", "free", "host_alloc", "host_free", "map", "unmap", "ctx_create", "module_load", "proc_state"];
    verdicts_stay(|scenario| {
        let mut reordered: Vec<Value> = Vec::new();
        let mut together: Vec<Value> = Vec::new();
        for event in events(scenario) {
            let of_one_process = calls.iter().any(|kind| event["kind"] == *kind) || event["kind"] == "proc_snapshot";
            if !of_one_process || together.first().is_some_and(|first| first["ts_ns"] != event["ts_ns"]) {
                together.sort_by_key(|event| u64::MAX - event["tgid"].as_u64().unwrap());
                reordered.append(&mut together);
            }
            if of_one_process {
                together.push(event.clone());
            } else {
                reordered.push(event.clone());
            }
        }
        reordered.append(&mut together);
        scenario["events"] = Value::Array(reordered);
    });
}
