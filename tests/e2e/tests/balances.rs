//! Exact balances, whatever happens to the stream of events.

use e2e::{Machine, Program, Run, Tracer, calls, workload};
use rustix::process::Signal;
use serde_json::Value;

const CONTEXT_CALLS: [&str; 6] =
    ["cuInit", "cuDevicePrimaryCtxRetain", "cuDeviceGetUuid_v2", "cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemFree_v2"];

/// Calls of traced functions a process made, as it counted them itself.
fn traced_calls(said: &[Value], pid: u32) -> u64 {
    let traced = |symbol: &str| tracer_symbols().any(|traced| traced == symbol);
    calls(said, pid).iter().filter(|(symbol, _)| traced(symbol)).map(|(_, (ok, failed))| ok + failed).sum()
}

fn tracer_symbols() -> impl Iterator<Item = &'static str> {
    tracer_ebpf::symbols::TABLE.iter().map(|symbol| symbol.name)
}

/// Every call must be accounted for: handed over, counted as lost, or known to need no event.
fn assert_conserved(run: &Run, made: u64) {
    assert_eq!(run.counter("entries"), made);
    assert_eq!(run.counter("returns"), made);
    assert_eq!(run.counter("calls_delivered") + run.counter("calls_lost") + run.counter("filtered"), made);
    for never in ["pending_evicted", "pending_full", "returns_unpaired", "live_full", "read_failed"] {
        assert_eq!(run.counter(never), 0, "{never}");
    }
    assert_eq!(run.summary["kernel"]["open_calls"], 0);
    assert_eq!(run.summary["kernel"]["malformed"], 0);
}

/// 8 threads x 100,000 pairs, with these options of the tracer.
fn stress(options: &[&str]) -> Run {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, options);
    let mut program =
        workload(&machine, &["stress", "--threads", "8", "--pairs", "100000", "--size", "4KiB", "--duration", "30s"]);
    let pid = program.pid();
    program.wait_for("ready");
    let run = tracer.stop();
    let said = program.stop();
    assert_eq!(calls(&said, pid)["cuMemAlloc_v2"], (800_000, 0));
    assert_eq!(calls(&said, pid)["cuMemFree_v2"], (800_000, 0));
    assert!(CONTEXT_CALLS.iter().all(|symbol| calls(&said, pid).contains_key(*symbol)));
    assert_conserved(&run, traced_calls(&said, pid));
    assert_eq!(run.balance(pid, Some(0)), (0, 0));
    assert_eq!(run.outstanding(pid), 0, "the engine's own books");
    run
}

#[test]
fn eight_threads_end_at_nothing() {
    stress(&[]);
}

#[test]
fn eight_threads_end_at_nothing_although_most_events_are_lost() {
    let run = stress(&["--calls-ring", "4KiB"]);
    assert!(run.counter("calls_lost") > 0);
    assert_ne!(run.summary["report"]["data_quality"], "full");
    assert!(!run.findings("insufficient_data").is_empty());
    assert!(run.findings("app_leak").is_empty());
}

#[test]
fn forty_thousand_allocations_live_at_once_are_all_known() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let program = workload(&machine, &["live", "--count", "40000", "--size", "1MiB"]);
    let pid = program.pid();
    let said = program.finish();
    assert_eq!(calls(&said, pid)["cuMemAlloc_v2"], (40_000, 0));
    assert_eq!(calls(&said, pid)["cuMemFree_v2"], (40_000, 0));
    // A second one is killed while all are live: its balance is what it held.
    let mut held = workload(&machine, &["live", "--count", "40000", "--size", "1MiB", "--pause", "60s"]);
    held.wait_for("ready");
    let held_pid = held.pid();
    held.signal(Signal::KILL);
    held.finish();
    let run = tracer.stop();
    assert_eq!(run.balance(pid, Some(0)), (0, 0));
    assert_eq!(run.balance(held_pid, Some(0)), (40_000 << 20, 40_000));
    assert_eq!(run.counter("live_full"), 0);
    assert_eq!(run.outstanding(held_pid), 0, "the dead hold nothing");
}

#[test]
fn a_table_that_is_too_small_says_so_and_stays_right() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &["--live-entries", "16"]);
    let mut program = workload(&machine, &["live", "--count", "1000", "--size", "1MiB", "--pause", "60s"]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    assert_eq!(run.counter("live_full"), 984);
    assert_eq!(run.balance(pid, Some(0)), (16 << 20, 16));
    assert_eq!(run.process(pid)["untracked"], 984);
    assert_ne!(run.summary["report"]["data_quality"], "full");
    program.stop();
}

#[test]
fn a_thread_that_allocates_and_exits_leaves_the_balance_as_it_was() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let mut program = workload(&machine, &["thread-exit", "--threads", "4", "--size", "16MiB", "--duration", "30s"]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    assert_eq!(run.balance(pid, Some(0)), (64 << 20, 4));
    assert_eq!(run.outstanding(pid), 64 << 20);
    program.stop();
}

#[test]
fn failed_calls_change_nothing() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let script = "init\nctx 0\nalloc kept 32MiB\ntry alloc huge 1TiB\nready\nhold\n";
    let mut program = workload(&machine, &["script", "--text", script]);
    program.wait_for("ready");
    let mut failing = workload(&machine, &["failing"]);
    let failing_pid = failing.pid();
    failing.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    let said = failing.stop();
    assert_eq!(run.balance(pid, Some(0)), (32 << 20, 1));
    assert_eq!(run.process(pid)["failed"], 1);
    let failures = run.process(pid)["failures"].as_array().cloned();
    assert_eq!(failures, Some(vec![serde_json::json!({"api": "cuMemAlloc_v2", "result": 2, "count": 1})]));
    let failed: u64 = calls(&said, failing_pid).values().map(|(_, failed)| failed).sum();
    assert_eq!(run.process(failing_pid)["failed"], failed);
    let live = said.iter().rev().find(|line| line["event"] == "live");
    let bytes = live.map(|line| line["bytes"].as_u64().unwrap_or(0));
    assert_eq!(Some(run.balance(failing_pid, Some(0)).0), bytes);
    program.stop();
}

/// Live bytes a workload says it holds, by family.
fn families(live: &Value) -> impl Fn(&str) -> u64 + '_ {
    |family| live["families"][family]["bytes"].as_u64().unwrap_or(0)
}

fn families_are_told_apart(options: &[&str], arguments: &[&str]) {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, options);
    let mut program = workload(&machine, arguments);
    let live = program.wait_for("live");
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    let of = families(&live);
    let host = of("host") + of("host-v2");
    let all = live["bytes"].as_u64().unwrap_or(0);
    assert!(host > 0 && all > host);
    assert_eq!(run.balance(pid, None).0, host);
    assert_eq!(run.balance(pid, Some(0)).0, all - host);
}

#[test]
fn every_family_has_its_exact_size() {
    families_are_told_apart(&[], &["families", "--duration", "30s"]);
}

#[test]
fn functions_found_by_cu_get_proc_address_are_the_same() {
    families_are_told_apart(&[], &["--proc-address", "families", "--duration", "30s"]);
}

#[test]
fn a_kernel_without_types_or_multi_links_gives_the_same() {
    families_are_told_apart(&["--kernel-types", "none"], &["families", "--duration", "30s"]);
    families_are_told_apart(&["--attach", "perf"], &["families", "--duration", "30s"]);
}

#[test]
fn memory_is_booked_on_the_device_of_its_context() {
    let machine = Machine::with_devices(3);
    let tracer = Tracer::start(&machine, &[]);
    let script = "init\nctx 0\nctx 1\nctx 2\nalloc c 3MiB\npush 0\nalloc a 5MiB x2\npop\nalloc c2 7MiB\npush 1\nalloc b 11MiB\nready\nhold\n";
    let mut program = workload(&machine, &["script", "--text", script]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    assert_eq!(run.balance(pid, Some(0)), (10 << 20, 2));
    assert_eq!(run.balance(pid, Some(1)), (11 << 20, 1));
    assert_eq!(run.balance(pid, Some(2)), (10 << 20, 2));
}

#[test]
fn visible_devices_decide_which_device_an_ordinal_is() {
    let machine = Machine::with_devices(3);
    let tracer = Tracer::start(&machine, &[]);
    let mut command = std::process::Command::new(e2e::built().join("workload"));
    command.args(["hold", "--size", "9MiB", "--duration", "30s"]).env("CUDA_VISIBLE_DEVICES", "2,0");
    let mut program = Program::start(&machine, command);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    assert_eq!(run.balance(pid, Some(2)), (9 << 20, 1));
}

#[test]
fn a_destroyed_context_takes_its_memory_along_and_pools_stay() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let script = "init\nctx 0 own\nalloc a 6MiB x3\nasync p 8MiB\nvmm v 4MiB\nrelease 0\nready\nhold\n";
    let mut program = workload(&machine, &["script", "--text", script]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    assert_eq!(run.balance(pid, Some(0)), (12 << 20, 2));
    assert_eq!(run.outstanding(pid), 12 << 20);
}

#[test]
fn an_exec_drops_what_the_old_image_had() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let script = "init\nctx 0\nalloc a 64MiB\nexec {\ninit\nctx 0\nalloc b 10MiB\nready\nhold\n}\n";
    let mut program = workload(&machine, &["script", "--text", script]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    assert_eq!(run.balance(pid, Some(0)), (10 << 20, 1));
    assert_eq!(run.outstanding(pid), 10 << 20);
    assert_eq!(run.summary["kernel"]["open_calls"], 0);
}

#[test]
fn a_kill_in_the_middle_of_calls_leaves_nothing_open() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let script = "init\nctx 0\nthreads 4 {\nrepeat 10000000 {\nalloc a 4KiB\nfree a\n}\n}\n";
    for _ in 0..3 {
        let program = workload(&machine, &["script", "--text", script]);
        std::thread::sleep(std::time::Duration::from_millis(400));
        program.signal(Signal::KILL);
        program.finish();
    }
    let run = tracer.stop();
    assert_eq!(run.summary["kernel"]["open_calls"], 0);
    let open = run.counter("entries") - run.counter("returns");
    assert_eq!(run.counter("pending_abandoned"), open);
    assert_eq!(run.counter("returns_unpaired"), 0);
}
