//! Clients nobody here wrote: numba and cuda-bindings allocate through the simulated driver while
//! they are traced; nvitop and gpustat read the simulated NVML.

use std::process::Command;

use e2e::{Machine, Program, Tracer, workload};
use serde_json::{Value, json};

fn python(script: &str, arguments: &[&str]) -> Command {
    let interpreter = e2e::root().join("target/venv/bin/python");
    assert!(interpreter.exists(), "the Python clients are not installed: run `cargo xtask setup`");
    let mut command = Command::new(interpreter);
    command.args(["-W", "ignore"]).arg(e2e::root().join("tests/clients").join(script)).args(arguments);
    command
}

fn client_is_traced(script: &str, refused: u64) {
    let machine = Machine::with_devices(1);
    let tracer = Tracer::start(&machine, &[]);
    let mut program = Program::start(&machine, python(script, &["--hold", "60"]));
    let live = program.wait_for("live");
    program.wait_for("ready");
    let pid = program.pid();
    let run = tracer.stop();
    drop(program);
    let family = |name: &str| live["families"][name].as_u64().unwrap_or(0);
    let all = live["bytes"].as_u64().unwrap_or(0);
    assert!(all > 0, "{live}");
    assert_eq!(run.balance(pid, Some(0)).0, all - family("host"));
    assert_eq!(run.balance(pid, None).0, family("host"));
    assert_eq!(run.outstanding(pid), all - family("host"));
    assert_eq!(run.process(pid)["failed"], refused);
    assert_eq!(run.process(pid)["unknown_frees"], 0);
}

#[test]
fn numba_is_traced_exactly() {
    client_is_traced("numba_alloc.py", 0);
}

#[test]
fn cuda_bindings_are_traced_exactly() {
    client_is_traced("bindings_alloc.py", 1);
}

#[test]
fn nvitop_and_gpustat_list_the_simulated_host() {
    let machine = Machine::with_devices(2);
    let mut program = workload(&machine, &["--device", "1", "hold", "--size", "1GiB", "--duration", "60s"]);
    program.wait_for("ready");
    let mut lister = python("nvml_list.py", &[]);
    let output = lister.envs(machine.host().env()).output().unwrap_or_else(|error| panic!("{error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}"));
    let pid = program.pid().to_string();
    for (tool, unit) in [("nvitop", 1), ("gpustat", 1 << 20)] {
        let devices = listed[tool].as_array().map(Vec::as_slice).unwrap_or_default();
        assert_eq!(devices.len(), 2, "{listed:#}");
        assert_eq!(devices[0]["processes"], json!({}), "{listed:#}");
        // 1 GiB and the 300 MiB of a context.
        assert_eq!(devices[1]["processes"], json!({pid.as_str(): (1324_u64 << 20) / unit}), "{listed:#}");
    }
    program.stop();
}
