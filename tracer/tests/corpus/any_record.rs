//! Any record at all, over few names so that records meet: what property tests and fuzzing share.

use serde_json::json;
use vramtrace::record::Record;

/// What a record is made of. Names and choices wrap around.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dice {
    pub(crate) kind: usize,
    pub(crate) ts_ns: u64,
    pub(crate) occurred_ns: Option<u64>,
    pub(crate) who: u8,
    pub(crate) other: u8,
    pub(crate) handle: u8,
    pub(crate) size: u64,
    pub(crate) pick: u8,
    pub(crate) flag: bool,
}

/// Names and choices there are of each sort.
const NAMES: u8 = 6;

/// Kinds of records; what happens often stands here twice.
const KINDS: [&str; 50] = [
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
    "driver_maps",
    "tick",
    "something_new",
];

impl Dice {
    /// The record.
    pub(crate) fn record(&self) -> Record {
        let Self { kind, ts_ns: ts, occurred_ns: occurred, size, flag, .. } = *self;
        let kind = KINDS[kind % KINDS.len()];
        let [who, other, handle, pick] =
            [self.who, self.other, self.handle, self.pick].map(|die| u64::from(die % NAMES));
        let id = |who: u64| json!({"tgid": who, "start_ns": (who % 3) * 10});
        let api = [
            "cuMemAlloc_v2",
            "cuMemCreate",
            "cuMemAllocAsync",
            "cuDevicePrimaryCtxRetain",
            "cuCtxDestroy_v2",
            "cudaMalloc",
        ];
        let phase = ["removed", "COMPLETED", "Deleted", "started", "Failed", ""];
        let state = ["S", "D", "Z", "R", "", "X"];
        let status = ["ok", "timeout", "mem_not_supported", "error:15", "ok", "ok"];
        let api = api[pick as usize];
        let handle_text = format!("{handle:#x}");
        let rows = json!([{"pid": who, "used": size, "type": "C"}, {"pid": other, "used": null, "type": "C", "gi": 1}]);
        let live = json!([{"api": api, "handle": handle_text, "size": size, "device": 0, "ts_ns": ts}]);
        let mut value = json!({
            "ts_ns": ts, "kind": kind, "occurred_ns": occurred, "since_ns": ts,
            "pid": if flag { who } else { who + 100 }, "tgid": who, "start_ns": (who % 3) * 10, "comm": "p",
            "ppid": other, "parent_tgid": other, "parent_start_ns": (other % 3) * 10, "new_comm": "q",
            "cgroup": if flag { "/a/job_1" } else { "/b (deleted)" }, "old": "/a", "new": "/b",
            "container": "c", "pod": "n/p", "job": "1", "phase": phase[pick as usize],
            "state": state[pick as usize], "wchan": "uvm_lock", "gpu_fds": ["nvidia0"],
            "code": 0, "signal": if flag { 9 } else { 0 }, "sig": 15, "group_dead": flag,
            "api": api, "lib": "libcuda", "ctx": handle_text, "handle": handle_text, "va": handle_text,
            "pool": format!("{other:#x}"), "attr": "release_threshold", "keep": size, "size": size, "dur_ns": size,
            "device": handle % 2, "gi": if flag { Some(1) } else { None }, "result": if pick == 5 { 2 } else { 0 },
            "ipc_id": "i", "target_tgid": other, "to_tgid": other, "path": "/lib", "inode": 1,
            "status": status[pick as usize], "used": size, "total": size, "procs": rows, "gpu_util": pick * 20,
            "probes_ok": flag, "complete": flag, "holders": [id(who), id(other)], "identity": id(who),
            "live": live, "balances": [{"device": 0, "host": flag, "bytes": size, "count": 1}],
            "name": "m", "value": size as f64, "labels": {"tgid": who}, "count": size,
            "facility": "xid", "text": "t", "part": "x", "reason": if flag { Some("y") } else { None },
            "action": "mig_destroy", "bytes": size,
        });
        if kind == "kmsg" {
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
            let names = [
                "torch_reserved_bytes",
                "torch_allocated_bytes",
                "vllm:num_requests_running",
                "requests_total",
                "m",
                "queue",
            ];
            value["name"] = json!(names[pick as usize]);
        }
        if kind == "library_map" || kind == "probe_status" {
            value["status"] = json!(["traced", "failed", "partial", "ok", "missing", "ok"][pick as usize]);
        }
        serde_json::from_value(value).unwrap()
    }
}
