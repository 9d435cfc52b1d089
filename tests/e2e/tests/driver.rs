//! The simulated driver itself: what it does with memory, seen from outside, without a tracer.

use std::process::Command;
use std::time::{Duration, Instant};

use e2e::{Machine, Program, eventually, workload};
use rustix::process::Signal;
use simgpu::{Config, Fault};
use tracer_ebpf::symbols::TABLE;
use vramtrace::probe::{library::Library, placement::Placement};

const MIB: u64 = 1 << 20;
const CONTEXT: u64 = 300 * MIB;

/// Bytes in use on a device.
fn used(machine: &Machine, device: usize) -> u64 {
    machine.host().view().devices[device].used
}

/// Plays a script up to its `ready`, and leaves it running.
fn at_ready(machine: &Machine, script: &str) -> Program {
    let mut program = workload(machine, &["script", "--text", script]);
    program.wait_for("ready");
    program
}

/// What a script has in use on device 0 when it says that it is ready.
fn use_of(script: &str) -> u64 {
    let machine = Machine::with_devices(1);
    let program = at_ready(&machine, &format!("init\n{script}\nready\nhold\n"));
    let used = used(&machine, 0);
    program.stop();
    used
}

#[test]
fn every_traced_export_begins_like_the_real_librarys() {
    let machine = Machine::with_devices(1);
    let library = Library::open(&machine.libcuda()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(library.missing, [] as [usize; 0]);
    assert_eq!(library.count(Placement::StubBranch), TABLE.len());
}

#[test]
fn large_allocations_take_whole_pages_and_small_ones_share_them() {
    assert_eq!(use_of("ctx 0"), CONTEXT);
    assert_eq!(use_of("ctx 0\nalloc a 3MiB"), CONTEXT + 4 * MIB);
    assert_eq!(use_of("ctx 0\nalloc a 1MiB x2"), CONTEXT + 2 * MIB);
    assert_eq!(use_of("ctx 0\nalloc a 1KiB x2049"), CONTEXT + 4 * MIB);
    assert_eq!(use_of("ctx 0\nalloc a 3MiB\nfree a"), CONTEXT);
    assert_eq!(use_of("ctx 0\nmanaged m 64MiB\nhost h 8MiB"), CONTEXT);
}

#[test]
fn a_context_takes_its_memory_along_but_not_pools_and_handles() {
    assert_eq!(use_of("ctx 0 own\nalloc a 8MiB\nrelease 0"), 0);
    assert_eq!(use_of("ctx 0 own\nvmm v 4MiB\nrelease 0"), 4 * MIB);
    // The pool holds a chunk of 32 MiB.
    assert_eq!(use_of("ctx 0 own\nasync p 8MiB\nrelease 0"), 32 * MIB);
    assert_eq!(use_of("ctx 0\nalloc a 8MiB\nrelease 0"), 0);
}

#[test]
fn pools_give_back_when_they_are_waited_for() {
    assert_eq!(use_of("ctx 0\nasync p 8MiB\nfree p"), CONTEXT + 32 * MIB);
    assert_eq!(use_of("ctx 0\nasync p 8MiB\nfree p\nsync"), CONTEXT);
}

#[test]
fn a_full_device_refuses_and_changes_nothing() {
    let machine = Machine::new(Config { memory: 1 << 30, context_time_ms: 1, ..Config::default() });
    let first = at_ready(&machine, "init\nctx 0\nalloc a 300MiB\nready\nhold\n");
    let mut second = workload(&machine, &["script", "--text", "init\nctx 0\ntry alloc a 300MiB\nready\nhold\n"]);
    assert_eq!(second.wait_for("outcome")["code"], 2);
    second.wait_for("ready");
    assert_eq!(used(&machine, 0), 2 * CONTEXT + 300 * MIB);
    first.stop();
    second.stop();
}

#[test]
fn a_killed_process_gives_everything_back_in_one_step_after_a_while() {
    let machine = Machine::new(Config { context_time_ms: 1, release_delay_ms: 700, ..Config::default() });
    let program = at_ready(&machine, "init\nctx 0\nalloc a 1GiB\nready\nhold\n");
    let pid = program.pid();
    program.signal(Signal::KILL);
    program.finish();
    let start = Instant::now();
    let mut seen = Vec::new();
    eventually("the memory's return", || {
        let view = machine.host().view();
        let rows: Vec<u32> = view.clients.iter().map(|client| client.pid).collect();
        seen.push((view.devices[0].used, rows));
        (view.devices[0].used == 0).then_some(())
    });
    assert!(start.elapsed() >= Duration::from_millis(700));
    seen.dedup();
    assert_eq!(seen, [(CONTEXT + 1024 * MIB, vec![pid]), (0, vec![])]);
}

#[test]
fn a_forked_child_keeps_a_dead_processes_memory_and_an_executed_one_does_not() {
    let machine = Machine::with_devices(1);
    let mut loader = workload(&machine, &["forked-loader", "--size", "64MiB", "--children", "1", "--duration", "4s"]);
    loader.wait_for("child");
    let pid = loader.pid();
    eventually("the parent's death", || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        state.contains(") Z ").then_some(())
    });
    std::thread::sleep(Duration::from_secs(1));
    let view = machine.host().view();
    assert_eq!((view.devices[0].used, view.clients[0].pid), (CONTEXT + 64 * MIB, pid));
    eventually("the child's end", || (used(&machine, 0) == 0).then_some(()));
    loader.finish();

    let parent = at_ready(&machine, "init\nctx 0\nspawn {\nsleep 60s\n}\nready\nkill-self\n");
    eventually("the memory's return", || (used(&machine, 0) == 0).then_some(()));
    drop(parent);
}

#[test]
fn faults_leave_what_they_say_and_no_more_often() {
    let machine = Machine::with_devices(1);
    let fault = Fault::LeaveBehind { bytes: 10 * MIB, comm: Some("bad".to_owned()), first: Some(2), row: false };
    machine.host().fault(fault).unwrap_or_else(|error| panic!("{error}"));
    for name in ["bad-job", "good-job", "bad-job", "bad-job"] {
        workload(&machine, &["--name", name, "residue", "--size", "64MiB", "--after", "10ms"]).finish();
        eventually("the client's end", || machine.host().view().clients.is_empty().then_some(()));
    }
    let device = machine.host().view().devices[0].clone();
    assert_eq!((device.used, device.left_behind), (20 * MIB, 20 * MIB));
}

#[test]
fn a_lost_device_fails() {
    let machine = Machine::with_devices(2);
    machine.host().fault(Fault::DeviceLost { device: 1 }).unwrap_or_else(|error| panic!("{error}"));
    let mut program = workload(&machine, &["script", "--text", "init\ntry ctx 1\nctx 0\nready\n"]);
    assert_ne!(program.wait_for("outcome")["code"], 0);
    program.wait_for("ready");
    program.finish();
}

#[test]
fn visible_devices_are_selected_and_reordered() {
    let machine = Machine::with_devices(3);
    let uuid = machine.host().config().uuid(1);
    for (visible, device) in [("2,0", 2), ("1", 1), (&format!("GPU-{uuid}"), 1)] {
        let mut command = Command::new(e2e::built().join("workload"));
        command.args(["hold", "--size", "64MiB"]).env("CUDA_VISIBLE_DEVICES", visible);
        let mut program = Program::start(&machine, command);
        program.wait_for("ready");
        assert_eq!(used(&machine, device), CONTEXT + 64 * MIB, "{visible}");
        program.stop();
        eventually("the memory's return", || (used(&machine, device) == 0).then_some(()));
    }
}

#[test]
fn nvml_tells_what_the_host_has() {
    let machine =
        Machine::new(Config { devices: 2, reserved: 512 * MIB, driver: "535.261.03".to_owned(), ..Config::default() });
    let mut doctor = Command::new(e2e::built().join("vramtrace"));
    doctor
        .args(["doctor", "--format", "json", "--nvml-library"])
        .arg(machine.host().lib_dir().join("libnvidia-ml.so.1"));
    let output = doctor.env(simgpu::DIRECTORY, machine.host().directory()).output();
    let output = output.unwrap_or_else(|error| panic!("{error}"));
    let examination: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}"));
    let nvml = &examination["nvml"];
    assert_eq!(nvml["driver"], "535.261.03");
    let uuids: Vec<&str> =
        nvml["devices"].as_array().into_iter().flatten().filter_map(|device| device["uuid"].as_str()).collect();
    let config = machine.host().config();
    assert_eq!(uuids, [format!("GPU-{}", config.uuid(0)), format!("GPU-{}", config.uuid(1))]);
}
