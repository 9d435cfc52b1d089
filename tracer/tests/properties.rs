//! What must hold for records nobody has thought of.

#![recursion_limit = "256"]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use proptest::prelude::*;
use serde_json::json;
use vramtrace::engine::{Engine, EngineConfig};
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
        "fd_transfer",
        "pool_attr",
        "pool_trim",
        "va_reserve",
        "module_load",
        "module_unload",
        "admin_event",
        "api_error",
        "unseen",
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
                "pool": format!("{other:#x}"), "attr": "release_threshold", "keep": size, "to_tgid": other, "action": "mig_destroy",
                "text": "t", "part": "x", "reason": if flag { Some("y") } else { None }, "wchan": "uvm_lock", "gpu_util": pick * 20,
            });
            let mut value = value;
            if matches!(kind, "kmsg") {
                value["code"] = json!(79);
                value["pid"] = if flag { json!(who) } else { json!(null) };
                value["facility"] = json!(["xid", "hung_task", "warning", "oom_kill", "xid", ""][pick as usize]);
            }
            if kind == "admin_event" {
                value["result"] = json!("in_use");
            }
            if kind == "pool_attr" {
                value["value"] = json!(size);
            }
            if kind == "service_metric" {
                let names = ["torch_reserved_bytes", "torch_allocated_bytes", "vllm:num_requests_running", "requests_total", "m", "queue"];
                value["name"] = json!(names[pick as usize]);
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
