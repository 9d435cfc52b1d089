//! The monitor against NVML libraries that behave well and badly, in a real helper process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vramtrace::gpu::{Monitor, MonitorConfig, MonitorError};
use vramtrace::record::{Event, NvmlRow};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A library and the folder whose files steer it.
struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    fn new(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(folder.path().join("libnvidia-ml.so.1"))
            .arg(format!("-DCONTROL=\"{}\"", folder.path().display()))
            .args(options)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvml/fake.c"))
            .status()
            .unwrap();
        assert!(status.success());
        Self { folder }
    }

    fn library(&self) -> OsString {
        self.folder.path().join("libnvidia-ml.so.1").into()
    }

    fn set(&self, what: &str) {
        std::fs::write(self.folder.path().join(what), "").unwrap();
    }

    fn clear(&self, what: &str) {
        std::fs::remove_file(self.folder.path().join(what)).unwrap();
    }

    fn config(&self) -> MonitorConfig {
        config(vec![self.library()])
    }

    async fn monitor(&self) -> Monitor {
        Monitor::start(self.config()).await.unwrap()
    }
}

fn config(libraries: Vec<OsString>) -> MonitorConfig {
    MonitorConfig {
        program: env!("CARGO_BIN_EXE_vramtrace").into(),
        libraries,
        deadline: Duration::from_millis(700),
        opening: Duration::from_secs(20),
    }
}

type Sample = (u32, Option<u32>, String, Option<u64>, Option<u64>, Option<u64>, Vec<NvmlRow>);

fn flat(events: Vec<Event>) -> Vec<Sample> {
    events
        .into_iter()
        .map(|event| match event {
            Event::NvmlSample { device, gi, status, used, total, reserved, procs, dur_ns, .. } => {
                assert!(dur_ns > 0);
                (device, gi, status.to_string(), used, total, reserved, procs)
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

fn statuses(events: Vec<Event>) -> Vec<(u32, String)> {
    flat(events).into_iter().map(|sample| (sample.0, sample.2)).collect()
}

fn row(pid: u32, used: u64, kind: &str, gi: Option<u32>) -> NvmlRow {
    NvmlRow { pid, used: Some(used), kind: kind.into(), gi }
}

fn rows(device: u32, gi: Option<u32>) -> Vec<NvmlRow> {
    vec![row(1000 + device, 5 * GIB, "C", gi), row(2000, 7 * GIB, "M+C", gi)]
}

fn expected(device: u32, reserved: Option<u64>) -> Sample {
    (device, None, "ok".to_owned(), Some(1624 * MIB), Some(80 * GIB), reserved, rows(device, None))
}

#[tokio::test(flavor = "current_thread")]
async fn every_generation_of_the_interface_gives_the_same_figures() {
    for (options, reserved) in [(&[][..], Some(600 * MIB)), (&["-DSTRIDE=32"], Some(600 * MIB)), (&["-DR470"], None)] {
        let fake = Fake::new(options);
        let mut monitor = fake.monitor().await;
        assert_eq!(flat(monitor.sample().await), [expected(0, reserved), expected(1, reserved)], "{options:?}");
        assert_eq!(monitor.problem(), None);
        let devices = monitor.devices();
        assert_eq!(devices.driver.as_deref(), Some("555.58.02"));
        let names: Vec<_> =
            devices.iter().map(|d| (d.index, d.uuid.clone().unwrap(), d.name.clone().unwrap())).collect();
        assert_eq!(names[1], (1, "GPU-00000000-0000-0000-0000-000000000001".into(), "Fake\\u{1b} 1".into()));
        assert_eq!(monitor.library(), fake.library().to_str().unwrap());
    }
}

#[tokio::test(flavor = "current_thread")]
async fn instances_are_sampled_beside_their_device() {
    let fake = Fake::new(&["-DMIG"]);
    let mut monitor = fake.monitor().await;
    let handles: Vec<_> = flat(monitor.sample().await).into_iter().map(|s| (s.0, s.1, s.2, s.6)).collect();
    assert_eq!(
        handles,
        [
            (0, None, "ok".to_owned(), rows(0, None)),
            (0, Some(1), "ok".to_owned(), rows(0, Some(1))),
            (0, Some(2), "ok".to_owned(), rows(0, Some(2))),
            (1, None, "ok".to_owned(), rows(1, None)),
        ]
    );
    let instances: Vec<_> =
        monitor.devices().iter().flat_map(|d| d.instances.clone()).map(|i| (i.gi, i.uuid.unwrap())).collect();
    assert_eq!(instances[0], (1, "MIG-00000000-0000-0000-0000-000000000001".into()));
    assert_eq!(instances.len(), 2);

    fake.set("hang0");
    let silent: Vec<_> = flat(monitor.sample().await).into_iter().map(|s| (s.0, s.1, s.2)).collect();
    assert_eq!(silent[0], (0, None, "timeout".to_owned()));
    assert_eq!(silent[1], (0, Some(1), "timeout".to_owned()));
    assert_eq!(silent[2], (0, Some(2), "timeout".to_owned()));
    fake.clear("hang0");
}

#[tokio::test(flavor = "current_thread")]
async fn what_is_not_available_is_no_number() {
    let fake = Fake::new(&["-DDEVICES=1"]);
    let mut monitor = fake.monitor().await;
    fake.set("not_available");
    assert_eq!(flat(monitor.sample().await), [(0, None, "ok".to_owned(), None, None, Some(600 * MIB), rows(0, None))]);
    fake.set("memory_not_supported");
    let unsupported = (0, None, "mem_not_supported".to_owned(), None, None, None, rows(0, None));
    assert_eq!(flat(monitor.sample().await), [unsupported]);
    assert_eq!(monitor.problem(), None, "a capability, not a failure");
}

#[tokio::test(flavor = "current_thread")]
async fn a_hanging_device_is_named_and_keeps_no_other_waiting() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    fake.set("hang0");
    let begin = Instant::now();
    let first = monitor.sample().await;
    let took = begin.elapsed();
    assert!((Duration::from_millis(700)..Duration::from_millis(1200)).contains(&took), "{took:?}");
    // Device 0 is asked first, so device 1 had no chance yet.
    assert_eq!(statuses(first), [(0, "timeout".to_owned()), (1, "timeout".to_owned())]);
    assert!(matches!(monitor.problem(), Some(MonitorError::Timeout { .. })));
    assert_eq!(monitor.stuck_helper(), None, "it could be killed");
    let second = [(0, "timeout".to_owned()), (1, "ok".to_owned())];
    assert_eq!(statuses(monitor.sample().await), second, "the one that hung comes last");

    fake.clear("hang0");
    assert_eq!(flat(monitor.sample().await), [expected(0, Some(600 * MIB)), expected(1, Some(600 * MIB))]);
    assert_eq!(monitor.problem(), None);
}

#[tokio::test(flavor = "current_thread")]
async fn devices_that_hang_are_asked_last() {
    let fake = Fake::new(&["-DDEVICES=3"]);
    let mut monitor = fake.monitor().await;
    fake.set("hang1");
    let status = |s: [&str; 3]| (0..).zip(s.map(str::to_owned)).collect::<Vec<_>>();
    assert_eq!(statuses(monitor.sample().await), status(["ok", "timeout", "timeout"]));
    assert_eq!(statuses(monitor.sample().await), status(["ok", "timeout", "ok"]));
    fake.set("hang0");
    assert_eq!(statuses(monitor.sample().await), status(["timeout", "timeout", "timeout"]), "2 was behind 0");
    assert_eq!(statuses(monitor.sample().await), status(["timeout", "timeout", "ok"]));
    fake.clear("hang1");
    assert_eq!(statuses(monitor.sample().await), status(["timeout", "timeout", "ok"]), "1 was behind 0");
    fake.clear("hang0");
    assert_eq!(statuses(monitor.sample().await), status(["ok", "ok", "ok"]));
}

#[tokio::test(flavor = "current_thread")]
async fn errors_have_their_number_and_the_device_its_name() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    fake.set("lost");
    assert_eq!(statuses(monitor.sample().await), [(0, "error:15".to_owned()), (1, "ok".to_owned())]);
    assert_eq!(
        monitor.devices().iter().next().unwrap().uuid.as_deref(),
        Some("GPU-00000000-0000-0000-0000-000000000000")
    );
    fake.clear("lost");
    assert_eq!(statuses(monitor.sample().await), [(0, "ok".to_owned()), (1, "ok".to_owned())]);
}

#[tokio::test(flavor = "current_thread")]
async fn nvml_is_opened_again_after_it_failed() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    for (fault, status) in [("uninitialized", "error:1"), ("crash", "error:999")] {
        fake.set(fault);
        assert_eq!(statuses(monitor.sample().await), [(0, status.to_owned()), (1, status.to_owned())]);
        assert!(monitor.problem().is_some());
        fake.clear(fault);
        assert_eq!(statuses(monitor.sample().await), [(0, status.to_owned()), (1, status.to_owned())], "not at once");
        tokio::time::sleep(Duration::from_millis(1050)).await;
        assert_eq!(statuses(monitor.sample().await), [(0, "ok".to_owned()), (1, "ok".to_owned())], "{fault}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn slow_opening_outlasts_a_sample() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    fake.set("crash");
    monitor.sample().await;
    fake.clear("crash");
    fake.set("slow_init");
    tokio::time::sleep(Duration::from_millis(1050)).await;
    let begin = Instant::now();
    let mut seen = Vec::new();
    while begin.elapsed() < Duration::from_secs(6) {
        let status = statuses(monitor.sample().await)[0].1.clone();
        if seen.last() != Some(&status) {
            seen.push(status);
        }
        if seen.last().unwrap() == "ok" {
            break;
        }
    }
    assert_eq!(seen, ["timeout", "ok"], "one helper opens it, over several samples");
    assert!(begin.elapsed() >= Duration::from_millis(1900));
}

#[tokio::test(flavor = "current_thread")]
async fn a_caller_may_go_away() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    fake.set("hang0");
    assert!(tokio::time::timeout(Duration::from_millis(100), monitor.sample()).await.is_err());
    fake.clear("hang0");
    assert_eq!(flat(monitor.sample().await), [expected(0, Some(600 * MIB)), expected(1, Some(600 * MIB))]);
}

/// Process ids of the helpers that have `library` on their command line.
fn helpers(library: &OsString) -> Vec<u32> {
    let needle = library.as_encoded_bytes();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == needle)
    })
    .collect()
}

#[tokio::test(flavor = "current_thread")]
async fn dropping_it_in_the_middle_of_a_hang_takes_no_time_and_leaves_nobody() {
    let fake = Fake::new(&[]);
    let mut monitor = fake.monitor().await;
    fake.set("hang0");
    let _ = tokio::time::timeout(Duration::from_millis(100), monitor.sample()).await;
    assert_eq!(helpers(&fake.library()).len(), 1);
    let begin = Instant::now();
    drop(monitor);
    assert!(begin.elapsed() < Duration::from_millis(50));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(helpers(&fake.library()), [0; 0]);
}

#[test]
fn a_hanging_helper_dies_with_an_agent_that_is_killed() {
    let fake = Fake::new(&[]);
    fake.set("hang0");
    // A shell stands for the agent: it is the helper's parent. The request pipe stays open.
    let mut agent = Command::new("sh")
        .args(["-c", "\"$0\" nvml-helper --nvml-library \"$1\"; true", env!("CARGO_BIN_EXE_vramtrace")])
        .arg(fake.library())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut requests = agent.stdin.take().unwrap();
    requests.write_all(b"{\"last\":[]}\n").unwrap();
    let begin = Instant::now();
    while helpers(&fake.library()).len() < 2 && begin.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(helpers(&fake.library()).len(), 2, "the shell and the helper");
    std::thread::sleep(Duration::from_millis(200));
    agent.kill().unwrap();
    agent.wait().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(helpers(&fake.library()), [0; 0]);
}

#[tokio::test(flavor = "current_thread")]
async fn what_is_missing_is_said() {
    let error = Monitor::start(config(vec!["/nonexistent/libnvidia-ml.so.1".into()])).await.unwrap_err();
    assert!(matches!(&error, MonitorError::NotLoaded { tried, .. } if tried == &["/nonexistent/libnvidia-ml.so.1"]));
    assert!(
        error.to_string().starts_with("no NVML library could be loaded: /nonexistent/libnvidia-ml.so.1: "),
        "{error}"
    );

    let error = Monitor::start(config(vec!["libc.so.6".into()])).await.unwrap_err();
    let expected = MonitorError::NotNvml { library: "libc.so.6".into(), symbol: "nvmlInit_v2".into() };
    assert_eq!(error, expected);

    let no_driver = Fake::new(&["-DINIT=9"]);
    let error = Monitor::start(no_driver.config()).await.unwrap_err();
    assert!(matches!(&error, MonitorError::Refused { code: 9, .. }), "{error}");
    assert!(error.to_string().ends_with("load the driver (modprobe nvidia)"), "{error}");

    let second = Fake::new(&[]);
    let libraries = vec!["/nonexistent/libnvidia-ml.so.1".into(), second.library()];
    assert_eq!(Monitor::start(config(libraries)).await.unwrap().devices().len(), 2, "the next one is tried");

    let mut wrong = second.config();
    wrong.program = PathBuf::from("/nonexistent/vramtrace");
    assert!(matches!(Monitor::start(wrong).await, Err(MonitorError::Start { .. })));
    let mut wrong = second.config();
    wrong.program = PathBuf::from("/bin/echo");
    assert!(matches!(Monitor::start(wrong).await, Err(MonitorError::Helper { .. })));
}
