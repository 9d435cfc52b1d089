//! What must hold for records nobody has thought of, and for scenarios whose truth is unchanged.

#![recursion_limit = "256"]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod corpus;

use proptest::prelude::*;
use serde_json::{Value, json};
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::finding::Report;
use vramtrace::record::Record;

/// Any record at all, over few names so that they collide.
fn any_record() -> impl Strategy<Value = Record> {
    let small = 0_u64..6;
    let kinds = prop::sample::select(vec![
        "tracer_start",
        "proc_snapshot",
        "proc_start",
        "fork",
        "exec",
        "exit",
        "reap",
        "proc_absent",
        "proc_state",
        "signal",
        "comm_change",
        "cgroup_move",
        "ctx_create",
        "ctx_destroy",
        "alloc",
        "alloc",
        "free",
        "free_refused",
        "map",
        "unmap",
        "host_alloc",
        "host_free",
        "ipc_export",
        "ipc_import",
        "ipc_close",
        "checkpoint",
        "library_map",
        "probe_status",
        "nvml_sample",
        "nvml_sample",
        "fd_scan",
        "kmsg",
        "lost_events",
        "resync",
        "service_metric",
        "pod_event",
        "container_event",
        "job_event",
        "tick",
        "something_new",
    ]);
    let sizes = prop_oneof![Just(0), 1_u64..10_000_000_000, Just(u64::MAX)];
    (kinds, (0_u64..200_000_000_000, prop::option::of(any::<u64>())), small.clone(), small.clone(), small.clone(), sizes, small, any::<bool>()).prop_map(
        |(kind, (ts, occurred), who, other, handle, size, pick, flag)| {
            let id = |who: u64| json!({"tgid": who, "start_ns": (who % 3) * 10});
            let api = ["cuMemAlloc_v2", "cuMemCreate", "cuMemAllocAsync", "cuDevicePrimaryCtxRetain", "cuCtxDestroy_v2", "cudaMalloc"];
            let phase = ["removed", "COMPLETED", "Deleted", "started", "Failed", ""];
            let state = ["S", "D", "Z", "R", "", "X"];
            let status = ["ok", "timeout", "mem_not_supported", "error:15", "ok", "ok"];
            let apis = api[pick as usize];
            let value = json!({
                "ts_ns": ts, "kind": kind, "occurred_ns": occurred, "pid": if flag { who } else { who + 100 }, "tgid": who,
                "start_ns": (who % 3) * 10, "comm": "p", "ppid": other, "parent_tgid": other, "parent_start_ns": (other % 3) * 10,
                "cgroup": if flag { "/a/job_1" } else { "/b (deleted)" }, "old": "/a", "new": "/b", "container": "c", "pod": "n/p", "job": "1",
                "phase": phase[pick as usize], "state": state[pick as usize], "probes_ok": flag, "gpu_fds": ["nvidia0"], "code": 0,
                "signal": if flag { 9 } else { 0 }, "sig": 15, "group_dead": flag, "new_comm": "q", "api": apis,
                "ctx": format!("{handle:#x}"), "device": handle % 2, "gi": if flag { Some(1) } else { None }, "dur_ns": size,
                "result": if pick == 5 { 2 } else { 0 }, "lib": "libcuda", "handle": format!("{handle:#x}"), "size": size,
                "va": format!("{handle:#x}"), "ipc_id": "i", "target_tgid": other, "path": "/lib", "inode": 1, "status":
                status[pick as usize], "used": size, "total": size, "procs": [{"pid": who, "used": size, "type": "C"}, {"pid": other, "used":
                null, "type": "C", "gi": 1}], "complete": flag, "holders": [id(who), id(other)], "facility": "xid", "count": size, "since_ns":
                ts, "identity": id(who), "live": [{"api": apis, "handle": format!("{handle:#x}"), "size": size, "device": 0, "ts_ns": ts}],
                "balances": [{"device": 0, "host": flag, "bytes": size, "count": 1}], "name": "m", "value": size as f64, "labels": {"tgid": who},
            });
            let mut value = value;
            if matches!(kind, "kmsg") {
                value["code"] = json!(79);
                value["pid"] = json!(null);
            }
            if kind == "library_map" || kind == "probe_status" {
                value["status"] = json!(["traced", "failed", "partial", "ok", "missing", "ok"][pick as usize]);
            }
            serde_json::from_value(value).unwrap()
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
fn twice_the_memory_changes_no_verdict() {
    for case in corpus::all() {
        // Thresholds in bytes are absolute: these sit beside one on purpose.
        if case.id.starts_with("o15")
            || case.id.starts_with("o07")
            || case.id.starts_with("d16")
            || case.id.starts_with("o18")
        {
            continue;
        }
        let names = |report: &Report| {
            let mut names: Vec<String> = report.findings.iter().map(|finding| finding.category.to_string()).collect();
            names.sort();
            names
        };
        let larger = transformed(&case, &SIZES, &|bytes| bytes * 2);
        assert_eq!(names(&corpus::run(&larger)), names(&corpus::run(&case.json)), "{}", case.id);
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
