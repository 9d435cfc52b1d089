//! The ledger against the driver's semantics, with exact values.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use serde_json::{Value, json};
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::finding::{Category, DataQuality, EndState};
use vramtrace::record::Record;

const MIB: u64 = 1 << 20;

/// An engine that is fed one process's records, a second apart.
struct Host {
    engine: Engine,
    now: u64,
}

impl Host {
    fn new() -> Self {
        let mut host = Self { engine: Engine::new(EngineConfig::default()), now: 1_000_000_000_000 };
        host.tell(json!({"kind": "tracer_start", "probes_ok": true}));
        host.tell(json!({"kind": "fork", "ppid": 1, "cgroup": "/a", "parent_tgid": 1, "parent_start_ns": 5}));
        host
    }

    fn tell(&mut self, mut fields: Value) {
        self.now += 1_000_000_000;
        let defaults =
            json!({"ts_ns": self.now, "pid": 7, "tgid": 7, "start_ns": 70, "comm": "app", "result": 0, "device": 0});
        for (key, value) in defaults.as_object().unwrap() {
            if fields.get(key).is_none() {
                fields[key] = value.clone();
            }
        }
        let record: Record = serde_json::from_value(fields).unwrap();
        self.engine.push(&record);
    }

    fn alloc(&mut self, api: &str, handle: &str, mib: u64) {
        self.tell(json!({"kind": "alloc", "api": api, "handle": handle, "size": mib * MIB, "lib": "libcuda"}));
    }

    fn free(&mut self, api: &str, handle: &str) {
        self.tell(json!({"kind": "free", "api": api, "handle": handle, "lib": "libcuda"}));
    }

    fn end(&self) -> EndState {
        self.engine.report().end_state
    }

    fn held(&self) -> u64 {
        self.end().outstanding_bytes_by_tgid.get(&7).copied().unwrap_or(0) / MIB
    }

    fn raised(&self, category: Category) -> bool {
        self.engine.report().findings.iter().any(|finding| finding.category == category)
    }
}

#[test]
fn destroying_a_context_frees_its_memory_but_neither_vmm_nor_pools() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc1"}));
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.alloc("cuMemAllocManaged", "0x11", 20);
    host.alloc("cuMemAllocAsync", "0x12", 40);
    host.alloc("cuMemCreate", "0x10", 80);
    host.tell(json!({"kind": "host_alloc", "api": "cuMemHostAlloc", "handle": "0x10", "size": 5 * MIB}));
    assert_eq!(host.held(), 150);
    assert_eq!(host.end().outstanding_host_bytes_by_tgid[&7], 5 * MIB);
    host.tell(json!({"kind": "ctx_destroy", "api": "cuCtxDestroy_v2", "ctx": "0xc1"}));
    assert_eq!(host.held(), 120);
    assert!(host.end().outstanding_host_bytes_by_tgid.is_empty());
}

#[test]
fn a_context_at_the_address_of_another_says_that_the_other_and_its_memory_are_gone() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc1"}));
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc2"}));
    host.tell(json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x10", "size": 10 * MIB, "lib": "libcuda", "ctx": "0xc1"}));
    host.tell(json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x20", "size": 20 * MIB, "lib": "libcuda", "ctx": "0xc2"}));
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc1"}));
    assert_eq!(host.held(), 20);
}

#[test]
fn a_context_created_at_the_same_address_since_the_call_began_survives() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc1"}));
    host.tell(json!({"kind": "ctx_destroy", "api": "cuCtxDestroy_v2", "ctx": "0xc1"}));
    let begin = host.now - 500_000_000;
    host.tell(json!({"kind": "ctx_create", "api": "cuCtxCreate_v2", "ctx": "0xc1"}));
    host.tell(json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x10", "size": MIB, "ctx": "0xc1"}));
    host.tell(json!({"kind": "ctx_destroy", "api": "cuCtxDestroy_v2", "ctx": "0xc1", "begin_ns": begin}));
    assert_eq!(host.held(), 1);
}

#[test]
fn primary_contexts_are_counted_and_reset_ignores_the_count() {
    let mut host = Host::new();
    let retain = json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1"});
    host.tell(retain.clone());
    host.tell(retain.clone());
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.tell(json!({"kind": "ctx_destroy", "api": "cuDevicePrimaryCtxRelease"}));
    assert_eq!(host.held(), 10);
    host.tell(json!({"kind": "ctx_destroy", "api": "cuDevicePrimaryCtxRelease"}));
    assert_eq!(host.held(), 0);
    host.tell(retain.clone());
    host.tell(retain);
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.tell(json!({"kind": "ctx_destroy", "api": "cuDevicePrimaryCtxReset_v2"}));
    assert_eq!(host.held(), 0);
}

#[test]
fn physical_memory_lives_until_no_handle_and_no_mapping_remain() {
    let mut host = Host::new();
    host.alloc("cuMemCreate", "0xf1", 20);
    host.tell(json!({"kind": "va_reserve", "va": "0x1000", "size": 1_000_000 * MIB}));
    host.tell(json!({"kind": "map", "va": "0x1000", "handle": "0xf1", "size": 20 * MIB}));
    host.free("cuMemRelease", "0xf1");
    assert_eq!(host.held(), 20, "still mapped");
    host.tell(json!({"kind": "unmap", "va": "0x1000", "size": 20 * MIB}));
    assert_eq!(host.held(), 0);
    host.alloc("cuMemCreate", "0xf2", 20);
    host.alloc("cuMemRetainAllocationHandle", "0xf2", 20);
    host.free("cuMemRelease", "0xf2");
    assert_eq!(host.held(), 20, "another reference");
    host.free("cuMemRelease", "0xf2");
    assert_eq!(host.held(), 0);
}

#[test]
fn failed_and_refused_calls_change_nothing() {
    let mut host = Host::new();
    host.tell(json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x10", "size": MIB, "result": 2}));
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.tell(json!({"kind": "free", "api": "cuMemFree_v2", "handle": "0x10", "result": 700}));
    assert_eq!(host.held(), 10);
    // On a live host a release is reported when it is entered, and taken back if it fails.
    host.free("cuMemFree_v2", "0x10");
    assert_eq!(host.held(), 0);
    host.tell(
        json!({"kind": "free_refused", "api": "cuMemFree_v2", "handle": "0x10", "size": 10 * MIB, "result": 700}),
    );
    assert_eq!(host.held(), 10);
    assert_eq!(host.end().failed_allocs[&7], 1);
    assert_eq!(host.engine.report().data_quality, DataQuality::Full);
}

#[test]
fn unknown_frees_never_go_below_zero_and_are_told() {
    let mut host = Host::new();
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.free("cuMemFree_v2", "0x99");
    host.free("cuMemFree_v2", "0x0");
    assert_eq!(host.held(), 10);
    assert!(host.raised(Category::InsufficientData));
    assert_eq!(host.engine.report().data_quality, DataQuality::Partial);
}

#[test]
fn an_exec_gives_everything_back() {
    let mut host = Host::new();
    host.alloc("cuMemAlloc_v2", "0x10", 10);
    host.tell(json!({"kind": "exec", "ppid": 1, "cgroup": "/a", "comm": "next"}));
    assert_eq!(host.held(), 0);
    assert_eq!(host.end().peak_bytes_by_tgid[&7], 10 * MIB);
    host.free("cuMemFree_v2", "0x0");
    assert!(!host.raised(Category::InsufficientData));
}

#[test]
fn exact_books_repair_a_loss() {
    let mut host = Host::new();
    for index in 1..6 {
        host.alloc("cuMemAlloc_v2", &format!("0x{index}0"), 10);
    }
    host.tell(json!({"kind": "lost_events", "count": 3}));
    assert_eq!(host.engine.report().data_quality, DataQuality::Degraded);
    let entry =
        |handle: &str| json!({"api": "cuMemAlloc_v2", "handle": handle, "size": 10 * MIB, "device": 0, "ts_ns": 5});
    host.tell(json!({"kind": "resync", "identity": {"tgid": 7, "start_ns": 70}, "complete": false, "live": [entry("0x10"), entry("0x20")],
        "balances": [{"device": 0, "host": false, "bytes": 25 * MIB, "count": 3}]}));
    assert_eq!(host.held(), 25);
    assert_eq!(host.engine.report().data_quality, DataQuality::Partial);
    assert!(host.engine.report().findings.iter().all(|finding| finding.closed_ns.is_some()));
    host.free("cuMemFree_v2", "0x10");
    host.tell(json!({"kind": "free", "api": "cuMemFree_v2", "handle": "0x77", "size": 3 * MIB, "device": 0}));
    assert_eq!(host.held(), 12, "the release of an unlisted block takes its bytes off");
    host.free("cuMemFree_v2", "0x78");
    assert_eq!(host.held(), 12, "one of unknown size is known to be possible");
    assert_eq!(host.engine.report().data_quality, DataQuality::Partial);
}

#[test]
fn a_thread_that_ends_leaves_its_process_as_it_was() {
    let mut host = Host::new();
    host.tell(json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x10", "size": 10 * MIB, "pid": 8}));
    host.tell(json!({"kind": "exit", "pid": 8, "group_dead": false}));
    host.tell(json!({"kind": "exit", "pid": 7, "group_dead": false}));
    assert_eq!(host.held(), 10);
    host.tell(json!({"kind": "exit", "pid": 9, "group_dead": true}));
    assert_eq!(host.held(), 0);
}

#[test]
fn silence_of_nvml_is_noticed_when_time_passes() {
    let mut host = Host::new();
    for _ in 0..3 {
        host.tell(json!({"kind": "nvml_sample", "status": "ok", "used": MIB, "total": 1000 * MIB, "procs": []}));
    }
    for _ in 0..28 {
        host.tell(json!({"kind": "tick"}));
    }
    assert!(!host.raised(Category::MonitorDegraded));
    for _ in 0..4 {
        host.tell(json!({"kind": "tick"}));
    }
    assert!(host.raised(Category::MonitorDegraded));
    host.tell(json!({"kind": "nvml_sample", "status": "ok", "used": MIB, "total": 1000 * MIB, "procs": []}));
    assert!(host.engine.report().findings.iter().all(|finding| finding.closed_ns.is_some()));
}

#[test]
fn processes_that_never_matter_are_forgotten() {
    let mut host = Host::new();
    let known = host.engine.ledger().process_count();
    for pid in 1000..6000 {
        host.tell(json!({"kind": "fork", "pid": pid, "tgid": pid, "start_ns": pid, "ppid": 1, "parent_tgid": 1, "parent_start_ns": 5}));
        host.tell(json!({"kind": "exec", "pid": pid, "tgid": pid, "start_ns": pid}));
        host.tell(json!({"kind": "exit", "pid": pid, "tgid": pid, "start_ns": pid, "group_dead": true}));
    }
    // A chain in which each parent ends after its child was born keeps no more than its depth.
    for pid in 6000..9000 {
        host.tell(json!({"kind": "fork", "pid": pid, "tgid": pid, "start_ns": pid, "parent_tgid": pid - 1, "parent_start_ns": pid - 1}));
        host.tell(json!({"kind": "exit", "pid": pid - 1, "tgid": pid - 1, "start_ns": pid - 1, "group_dead": true}));
    }
    host.tell(json!({"kind": "tick"}));
    assert!(host.engine.ledger().process_count() <= known + 70, "{}", host.engine.ledger().process_count());
}

/// What a live host tells of a container's birth: forks without a control group, and the final one
/// only with the exec. The runtime dies later.
fn container_host(owner_cgroup: &str) -> Host {
    let mut host = Host::new();
    let runtime = json!({"pid": 20, "tgid": 20, "start_ns": 15, "comm": "containerd", "kind": "proc_snapshot", "ppid": 1, "cgroup": "/containerd.service", "state": "S"});
    host.tell(runtime);
    host.tell(json!({"kind": "fork", "pid": 21, "tgid": 21, "start_ns": 30, "comm": "runc", "ppid": 20, "parent_tgid": 20, "parent_start_ns": 15}));
    host.tell(json!({"kind": "exec", "pid": 21, "tgid": 21, "start_ns": 30, "comm": "server", "ppid": 20, "cgroup": owner_cgroup}));
    let of = json!({"pid": 21, "tgid": 21, "start_ns": 30, "comm": "server"});
    for mut call in [
        json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1"}),
        json!({"kind": "alloc", "api": "cuMemAlloc_v2", "handle": "0x1", "size": 4096 * MIB}),
    ] {
        call.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
        host.tell(call);
    }
    host.tell(json!({"kind": "exit", "pid": 20, "tgid": 20, "start_ns": 15, "signal": 9, "group_dead": true}));
    for _ in 0..20 {
        host.tell(json!({"kind": "proc_state", "pid": 21, "tgid": 21, "start_ns": 30, "comm": "server", "state": "S", "ppid": 1, "cgroup": owner_cgroup}));
    }
    host
}

#[test]
fn a_place_passed_through_before_the_gpu_owns_nothing() {
    assert!(!container_host("/kubepods/pod-a/cri-1").raised(Category::OrphanProcess));
    assert!(container_host("/containerd.service").raised(Category::OrphanProcess));
}

#[test]
fn the_engine_asks_for_what_would_settle_a_residue() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1"}));
    host.alloc("cuMemAlloc_v2", "0x1", 4096);
    let sample = json!({"kind": "nvml_sample", "status": "ok", "used": 5000 * MIB, "total": 80_000 * MIB, "procs": [{"pid": 7, "used": 4500 * MIB, "type": "C"}]});
    host.tell(sample.clone());
    host.tell(json!({"kind": "exit", "signal": 9, "group_dead": true}));
    for _ in 0..4 {
        host.tell(sample.clone());
        assert!(!host.engine.wants_open_files());
    }
    host.tell(sample.clone());
    assert!(host.engine.wants_open_files());
    host.tell(json!({"kind": "reap"}));
    host.tell(json!({"kind": "fd_scan", "complete": true, "holders": []}));
    assert!(host.raised(Category::ResidualAfterExit));
    assert!(!host.engine.wants_open_files());
}

#[test]
fn files_of_a_forebear_do_not_hold_the_memory_of_another() {
    let mut host = Host::new();
    let context = |tgid: u32| json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1", "pid": tgid, "tgid": tgid, "start_ns": tgid * 10});
    let child_of = |parent: u32, tgid: u32| json!({"kind": "fork", "ppid": parent, "cgroup": "/a", "parent_tgid": parent, "parent_start_ns": parent * 10, "pid": tgid, "tgid": tgid, "start_ns": tgid * 10});
    host.tell(context(7));
    // One that is forked once its parent has the files, and one before.
    host.tell(child_of(1, 8));
    host.tell(child_of(8, 80));
    host.tell(context(8));
    host.tell(child_of(8, 81));
    host.alloc("cuMemAlloc_v2", "0x10", 1024);
    host.tell(json!({"kind": "nvml_sample", "status": "ok", "used": 1024 * MIB, "total": 8192 * MIB, "procs": [{"pid": 7, "used": 1024 * MIB}]}));
    host.tell(json!({"kind": "exit", "ppid": 1, "code": 0, "signal": 9, "group_dead": true}));
    let files = ["nvidiactl", "nvidia0"];
    let holder = |tgid: u32| json!({"tgid": tgid, "start_ns": tgid * 10, "comm": "app", "files": files});
    host.tell(json!({"kind": "fd_scan", "complete": true, "holders": [holder(80), holder(81)]}));
    let ledger = host.engine.ledger();
    let holders = ledger.teardowns.values().flat_map(|teardown| ledger.search_holders(teardown).holders);
    let tgids: Vec<u32> = holders.map(|holder| holder.id.tgid).collect();
    assert_eq!(tgids, [80]);
}

#[test]
fn what_another_has_open_of_the_dead_is_not_forgotten() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1"}));
    host.alloc("cuMemAlloc_v2", "0x10", 1024);
    host.tell(json!({"kind": "ipc_export", "api": "cuIpcGetMemHandle", "handle": "0x10", "ipc_id": "i"}));
    let importer = json!({"pid": 8, "tgid": 8, "start_ns": 80});
    let by_importer = |mut fields: Value| {
        fields.as_object_mut().unwrap().extend(importer.as_object().unwrap().clone());
        fields
    };
    host.tell(by_importer(json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc2"})));
    host.tell(by_importer(
        json!({"kind": "ipc_import", "api": "cuIpcOpenMemHandle_v2", "ipc_id": "i", "handle": "0xee", "size": 1024 * MIB}),
    ));
    host.tell(json!({"kind": "exit", "ppid": 1, "code": 0, "signal": 9, "group_dead": true}));
    let rows = json!([{"pid": 8, "used": 1500 * MIB}]);
    for _ in 0..1200 {
        host.tell(
            json!({"kind": "nvml_sample", "status": "ok", "used": 1500 * MIB, "total": 8192 * MIB, "procs": rows}),
        );
    }
    let findings = host.engine.report().findings;
    let open: Vec<_> = findings.iter().filter(|finding| finding.closed_ns.is_none()).collect();
    assert!(open.iter().any(|finding| finding.category == Category::IpcPinned), "{findings:#?}");
}

#[test]
fn refused_releases_are_told_with_their_own_bytes() {
    let mut host = Host::new();
    for block in 0..10 {
        let handle = format!("{:#x}", 0x1000 * (block + 1));
        host.tell(json!({"kind": "host_alloc", "api": "cuMemHostAlloc", "handle": handle, "size": 100 * MIB}));
        // One that is refused twice counts once; one that is released at the second try is gone.
        let results: &[i32] = match block {
            0..3 => &[800, 800],
            3 => &[800, 0],
            _ => &[],
        };
        for &result in results {
            host.tell(json!({"kind": "host_free", "api": "cuMemFreeHost", "handle": handle, "result": result}));
        }
    }
    host.tell(json!({"kind": "nvml_sample", "status": "ok", "used": MIB, "total": 8192 * MIB, "procs": []}));
    let findings = host.engine.report().findings;
    let refused = findings.iter().find(|finding| finding.summary.contains("refuses with error 800")).unwrap();
    assert_eq!(refused.bytes, Some(300 * MIB));
}

#[test]
fn a_process_is_on_the_instance_that_bills_it() {
    let mut host = Host::new();
    host.tell(json!({"kind": "ctx_create", "api": "cuDevicePrimaryCtxRetain", "ctx": "0xc1"}));
    let rows = json!([{"pid": 7, "used": 100 * MIB}]);
    host.tell(
        json!({"kind": "nvml_sample", "gi": 2, "status": "ok", "used": 100 * MIB, "total": 800 * MIB, "procs": rows}),
    );
    let process = host.engine.ledger().gpu_users().next().unwrap();
    assert_eq!((process.instance(0), process.instance(1)), (Some(2), None));
}
