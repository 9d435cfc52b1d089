//! What a workload does to processes, without a driver: scripts that start, fork, replace and kill processes, and the
//! errors a person meets first.

#![expect(clippy::unwrap_used, reason = "the functions beside the tests are test code too")]

use std::{
    os::unix::process::ExitStatusExt,
    process::{Command, Output},
};

use serde_json::Value;

fn workload(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_workload")).args(arguments).output().unwrap()
}

fn script(text: &str) -> Output {
    workload(&["script", "--text", text])
}

fn events(output: &Output) -> Vec<Value> {
    let text = std::str::from_utf8(&output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn of_role<'a>(events: &'a [Value], role: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["role"] == role).collect()
}

#[test]
fn a_spawned_child_is_another_process_whose_end_is_reported() {
    let output = script("spawn worker {\n  say working\n  exit 7\n}\nwait\n");
    assert!(output.status.success());
    let events = events(&output);
    let child = events.iter().find(|event| event["event"] == "child").unwrap();
    let worker = of_role(&events, "worker");
    assert_eq!(worker.first().unwrap()["event"], "start");
    assert!(worker.iter().all(|event| event["pid"] == child["child_pid"]));
    assert!(worker.iter().any(|event| event["text"] == "working"));
    let end = events.iter().find(|event| event["event"] == "child-end").unwrap();
    assert_eq!((&end["child_pid"], &end["code"]), (&child["child_pid"], &Value::from(7)));
}

#[test]
fn a_forked_child_plays_its_block_and_ends_while_the_parent_goes_on() {
    let output = script("fork helper {\n  say in the child\n}\nwait\nsay in the parent\n");
    assert!(output.status.success());
    let events = events(&output);
    let texts = |role| -> Vec<_> { of_role(&events, role).iter().filter_map(|event| event["text"].as_str()).collect() };
    assert_eq!(texts("helper"), ["in the child"]);
    assert_eq!(texts("script"), ["in the parent"]);
    assert_eq!(of_role(&events, "helper").last().unwrap()["event"], "end");
}

#[test]
fn exec_keeps_the_process_and_changes_what_it_is() {
    let output = script("exec other {\n  say replaced\n}\n");
    assert!(output.status.success());
    let events = events(&output);
    assert!(events.iter().all(|event| event["pid"] == events[0]["pid"]));
    assert_eq!(of_role(&events, "script").last().unwrap()["reason"], "exec");
    assert_eq!(of_role(&events, "other").last().unwrap()["reason"], "done");
}

#[test]
fn a_worker_outlives_the_parent_that_is_killed() {
    // The pipe of the output is open until the worker has ended, so its last lines are here although it was orphaned.
    let output = script("spawn worker {\n  sleep 300ms\n  say alone\n}\nkill-self\n");
    assert_eq!(output.status.signal(), Some(9));
    let events = events(&output);
    assert_eq!(of_role(&events, "script").last().unwrap()["reason"], "sigkill");
    assert!(of_role(&events, "worker").iter().any(|event| event["text"] == "alone"));
}

#[test]
fn the_kernel_sees_the_first_fifteen_bytes_of_the_name() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_workload"))
        .args(["--name", "a-rather-long-service-name", "script", "--text", "hold"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let comm = format!("/proc/{}/comm", child.id());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let mut seen = String::new();
    while seen != "a-rather-long-s\n" && std::time::Instant::now() < deadline {
        seen = std::fs::read_to_string(&comm).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    child.wait().unwrap();
    assert_eq!(seen, "a-rather-long-s\n");
}

#[test]
fn sigterm_ends_a_workload_with_exit_code_0() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_workload"))
        .args(["script", "--text", "ready\nhold\nsay not reached"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.by_ref().any(|line| line.unwrap().contains(r#""event":"ready""#)));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let rest: Vec<_> = lines.map(Result::unwrap).collect();
    assert!(rest.last().unwrap().contains(r#""reason":"signal""#));
    assert!(!rest.iter().any(|line| line.contains("not reached")));
}

#[test]
fn mistakes_end_with_one_clear_line_and_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcuda.so.1"), "not a library").unwrap();
    let broken_driver = Command::new(env!("CARGO_BIN_EXE_workload"))
        .arg("hold")
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let cases = [
        (script("alloc a"), "line 1 of the script"),
        (script("free a"), "nothing has that name"),
        (workload(&["script", "no-such-file"]), "reading the script no-such-file"),
        (broken_driver, "LD_LIBRARY_PATH"),
    ];
    for (output, expected) in cases {
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("workload: ") && error.contains(expected), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
