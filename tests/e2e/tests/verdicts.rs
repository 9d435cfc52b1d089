//! Real processes that behave well and badly, and what the tracer says of them.

use std::process::Command;
use std::time::Duration;

use e2e::{Machine, Tracer, built, workload};
use rustix::process::Signal;
use serde_json::Value;
use simgpu::{Config, Fault};

const GIB: u64 = 1 << 30;

fn subject(finding: &Value, name: &str) -> u64 {
    finding["subject"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {finding:#}"))
}

fn bytes(finding: &Value) -> u64 {
    finding["bytes"].as_u64().unwrap_or_else(|| panic!("no bytes in {finding:#}"))
}

/// Categories of findings of severity warning or worse.
fn alarms(findings: &[Value]) -> Vec<&str> {
    let severe = findings.iter().filter(|finding| finding["severity"] != "info");
    severe.filter_map(|finding| finding["category"].as_str()).collect()
}

#[test]
fn a_healthy_service_and_a_clean_exit_are_no_news() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let mut serving = workload(&machine, &["serve", "--duration", "60s"]);
    serving.wait_for("ready");
    workload(&machine, &["residue", "--size", "1GiB", "--after", "500ms"]).finish();
    std::thread::sleep(Duration::from_secs(8));
    let run = tracer.stop();
    serving.stop();
    assert_eq!(run.all_findings(), [] as [Value; 0]);
    assert_eq!(run.summary["report"]["data_quality"], "full");
    assert!(run.stopping < Duration::from_secs(2), "ending took {:?}", run.stopping);
}

#[test]
fn a_library_in_use_is_found_without_being_named() {
    let machine = Machine::with_devices(1);
    let mut before = workload(&machine, &["hold", "--size", "32MiB", "--duration", "60s"]);
    before.wait_for("ready");
    let tracer = Tracer::start_with(&machine, &[]);
    let mut later = workload(&machine, &["hold", "--size", "64MiB", "--duration", "60s"]);
    later.wait_for("ready");
    let (pid, run) = (later.pid(), tracer.stop());
    later.stop();
    before.stop();
    assert_eq!(run.balance(pid, Some(0)), (64 << 20, 1));
}

#[test]
fn a_library_that_first_appears_while_tracing_is_found() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start_with(&machine, &[]);
    let script = "init\nctx 0\nsleep 4s\nalloc a 16MiB\nready\nhold\n";
    let mut program = workload(&machine, &["script", "--text", script]);
    program.wait_for("ready");
    let (pid, run) = (program.pid(), tracer.stop());
    program.stop();
    assert_eq!(run.process(pid)["balances"][0]["bytes"], 16 << 20);
}

#[test]
fn a_named_file_that_is_no_driver_library_is_an_error() {
    let run = Command::new(built().join("vramtrace")).args(["run", "--libcuda", "/bin/sh"]).output();
    let run = run.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(run.status.code(), Some(1));
    let told = String::from_utf8_lossy(&run.stderr);
    assert!(told.starts_with("vramtrace: --libcuda: /bin/sh is not libcuda: it does not export cuInit"), "{told}");
}

#[test]
fn control_c_ends_it_as_well() {
    let machine = Machine::with_devices(1);
    let run = Tracer::start(&machine, &[]).stop_with(Signal::INT);
    assert!(run.stopping < Duration::from_secs(2), "ending took {:?}", run.stopping);
}

#[test]
fn workers_whose_front_end_was_killed_are_orphans() {
    let machine = Machine::with_devices(1);
    let mut tracer = Tracer::start(&machine, &[]);
    let mut front = workload(&machine, &["orphan", "--workers", "1", "--size", "2GiB", "--duration", "40s"]);
    let child = front.wait_for("child")["child_pid"].as_u64().unwrap_or(0);
    let finding = tracer.wait_for_finding("orphan_process");
    assert_eq!(subject(&finding, "tgid"), child);
    assert_eq!(subject(&finding, "lineage_root_tgid"), u64::from(front.pid()));
    assert_eq!(finding["severity"], "critical");
    assert_eq!(finding["confidence"], "high");
    assert_eq!(bytes(&finding), 2 * GIB + (300 << 20));
    let pid = rustix::process::Pid::from_raw(i32::try_from(child).unwrap_or(0));
    rustix::process::kill_process(pid.unwrap_or_else(|| panic!("no worker")), Signal::TERM).unwrap_or_default();
    tracer.wait_for_close("orphan_process");
    let run = tracer.stop();
    assert_eq!(alarms(run.all_findings()), ["orphan_process"]);
    drop(front);
}

#[test]
fn memory_nobody_holds_is_the_drivers() {
    let machine = Machine::with_devices(1);
    let fault = Fault::LeaveBehind { bytes: GIB, comm: None, first: None, row: false };
    machine.host().fault(fault).unwrap_or_else(|error| panic!("{error}"));
    let mut tracer = Tracer::start(&machine, &[]);
    let program = workload(&machine, &["residue", "--size", "2GiB"]);
    let pid = program.pid();
    program.finish();
    let finding = tracer.wait_for_finding("residual_after_exit");
    assert_eq!(subject(&finding, "tgid"), u64::from(pid));
    assert_eq!(bytes(&finding), GIB);
    assert_eq!(finding["confidence"], "high");
    let run = tracer.stop();
    assert_eq!(alarms(run.all_findings()), ["residual_after_exit"]);
}

#[test]
fn a_dead_process_that_stays_listed_is_the_drivers_too() {
    let machine = Machine::with_devices(1);
    let fault = Fault::LeaveBehind { bytes: GIB, comm: None, first: None, row: true };
    machine.host().fault(fault).unwrap_or_else(|error| panic!("{error}"));
    let mut tracer = Tracer::start(&machine, &[]);
    let program = workload(&machine, &["residue", "--size", "2GiB", "--end", "sigkill"]);
    let pid = program.pid();
    program.finish();
    let finding = tracer.wait_for_finding("residual_after_exit");
    assert_eq!(subject(&finding, "tgid"), u64::from(pid));
    assert_eq!(bytes(&finding), GIB);
    drop(tracer);
}

#[test]
fn a_forked_child_that_keeps_the_files_is_not_the_drivers_fault() {
    let machine = Machine::with_devices(1);
    let mut tracer = Tracer::start(&machine, &[]);
    let mut loader = workload(&machine, &["forked-loader", "--size", "1GiB", "--children", "2", "--duration", "14s"]);
    let child = loader.wait_for("child")["child_pid"].as_u64().unwrap_or(0);
    let finding = tracer.wait_for_finding("inherited_fd_holder");
    assert_eq!(subject(&finding, "tgid"), child);
    assert_eq!(subject(&finding, "billed_tgid"), u64::from(loader.pid()));
    assert_eq!(bytes(&finding), GIB + (300 << 20));
    assert_eq!(finding["confidence"], "high");
    tracer.wait_for_close("inherited_fd_holder");
    let run = tracer.stop();
    assert_eq!(alarms(run.all_findings()), ["inherited_fd_holder"]);
    drop(loader);
}

#[test]
fn a_forked_child_that_only_maps_the_files_is_not_the_drivers_fault_either() {
    let machine = Machine::with_devices(1);
    let mut tracer = Tracer::start(&machine, &[]);
    let options = ["forked-loader", "--size", "1GiB", "--children", "1", "--mapped", "--duration", "14s"];
    let mut loader = workload(&machine, &options);
    let child = loader.wait_for("child")["child_pid"].as_u64().unwrap_or(0);
    let finding = tracer.wait_for_finding("inherited_fd_holder");
    assert_eq!(subject(&finding, "tgid"), child);
    assert_eq!(finding["confidence"], "high", "{finding}");
    tracer.wait_for_close("inherited_fd_holder");
    let run = tracer.stop();
    assert_eq!(alarms(run.all_findings()), ["inherited_fd_holder"]);
    drop(loader);
}

#[test]
fn a_pool_that_replaces_its_workers_is_churn() {
    let machine = Machine::new(Config { context_time_ms: 300, release_delay_ms: 100, ..Config::default() });
    let mut tracer = Tracer::start(&machine, &[]);
    let pool = workload(&machine, &["churn", "--life", "100ms", "--duration", "30s"]);
    let finding = tracer.wait_for_finding("process_churn");
    assert_eq!(subject(&finding, "parent_tgid"), u64::from(pool.pid()));
    pool.stop();
    let run = tracer.stop();
    assert_eq!(alarms(run.all_findings()), ["process_churn"]);
}

#[test]
fn steady_growth_beside_balanced_work_is_a_leak() {
    let machine = Machine::with_devices(1);
    let mut tracer = Tracer::start(&machine, &[]);
    let leak = workload(&machine, &["leak", "--duration", "60s"]);
    let finding = tracer.wait_for_finding("app_leak");
    assert_eq!(subject(&finding, "tgid"), u64::from(leak.pid()));
    let run = tracer.stop();
    leak.stop();
    assert_eq!(alarms(run.all_findings()), ["app_leak"]);
}

#[test]
fn a_cache_that_grew_and_stays_is_none() {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let mut cache = workload(&machine, &["cache-plateau", "--duration", "60s"]);
    cache.wait_for("ready");
    std::thread::sleep(Duration::from_secs(10));
    let run = tracer.stop();
    cache.stop();
    assert_eq!(run.all_findings(), [] as [Value; 0]);
}

#[test]
fn a_process_older_than_the_tracer_is_known_to_be_known_in_part() {
    let machine = Machine::with_devices(1);
    let mut late = workload(&machine, &["late", "--duration", "60s"]);
    late.wait_for("ready");
    let tracer = Tracer::start(&machine, &[]);
    std::thread::sleep(Duration::from_secs(3));
    let run = tracer.stop();
    let pid = late.pid();
    late.stop();
    assert_eq!(run.summary["report"]["data_quality"], "partial");
    assert!(alarms(run.all_findings()).is_empty());
    let preattach = &run.summary["report"]["end_state"]["preattach_bytes_by_tgid"][pid.to_string()];
    assert!(preattach.as_u64().is_some_and(|bytes| bytes > 0), "{preattach}");
}

#[test]
fn an_nvml_that_hangs_is_told_and_holds_nothing_up() {
    let machine = Machine::with_devices(1);
    let mut tracer = Tracer::start(&machine, &["--nvml-deadline", "300ms"]);
    let mut program = workload(&machine, &["hold", "--size", "64MiB", "--duration", "60s"]);
    program.wait_for("ready");
    std::thread::sleep(Duration::from_secs(2));
    machine.host().fault(Fault::Hang { ms: 600_000 }).unwrap_or_else(|error| panic!("{error}"));
    tracer.wait_for_finding("monitor_degraded");
    machine.host().clear_faults().unwrap_or_else(|error| panic!("{error}"));
    tracer.wait_for_close("monitor_degraded");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    assert_eq!(run.balance(pid, Some(0)), (64 << 20, 1));
    assert!(run.stopping < Duration::from_secs(2), "ending took {:?}", run.stopping);
}

#[test]
fn without_nvml_the_calls_are_still_traced() {
    let machine = Machine::with_devices(1);
    // A path that is named and not there is refused at start: here it is there, and no library.
    let library = machine.host().lib_dir().join("libnvidia-ml.so.1");
    std::fs::remove_file(&library).unwrap_or_else(|error| panic!("{error}"));
    std::fs::write(&library, "no library").unwrap_or_else(|error| panic!("{error}"));
    let mut tracer = Tracer::start(&machine, &[]);
    let problem = tracer.wait_for("problem", |line| line["part"] == "NVML");
    assert!(problem["reason"].as_str().is_some_and(|reason| reason.contains("--nvml-library")), "{problem}");
    let mut program = workload(&machine, &["hold", "--size", "64MiB", "--duration", "60s"]);
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    program.stop();
    // Without NVML nothing says which device an ordinal is.
    assert_eq!(run.balance(pid, None), (0, 0));
    assert_eq!(run.process(pid)["balances"][0]["bytes"], 64 << 20);
}

#[test]
fn without_privileges_it_says_what_is_missing_and_goes_on() {
    let machine = Machine::with_devices(1);
    let run = |format| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]);
        command.arg(built().join("vramtrace"));
        command.args(["run", "--duration", "1s", "--format", format, "--nvml-library"]);
        command.arg(machine.host().lib_dir().join("libnvidia-ml.so.1"));
        command.env(simgpu::DIRECTORY, machine.host().directory());
        let output = command.output().unwrap_or_else(|error| panic!("cannot start setpriv: {error}"));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let text = run("text");
    assert!(text.starts_with("No driver call can be traced; what NVML and /proc show is still judged.\n"), "{text}");
    let text = run("json");
    let problem = text.lines().find(|line| line.contains("eBPF probes")).unwrap_or_else(|| panic!("{text}"));
    assert!(problem.contains("CAP_BPF"), "{problem}");
}
