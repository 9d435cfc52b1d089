//! The doctor against a host whose driver is made up.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;
use vramtrace::doctor::{DoctorConfig, SCHEMA, Verdict, examine};

fn compile(output: &Path, arguments: &[&str]) {
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(output).args(arguments).status().unwrap();
    assert!(status.success());
}

fn config(folder: &Path) -> DoctorConfig {
    let mut config = DoctorConfig::default();
    config.discover.folders = Vec::new();
    config.discover.explicit = vec![folder.join("libcuda.so.555.58.02")];
    config.monitor.program = env!("CARGO_BIN_EXE_vramtrace").into();
    config.monitor.libraries = vec![folder.join("libnvidia-ml.so.1").into()];
    config.device_folder = folder.join("dev");
    config
}

#[tokio::test(flavor = "current_thread")]
async fn what_is_there_and_what_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("driver.c");
    let driver =
        "int cuInit(void) { return 0; } int cuMemAlloc_v2(void) { return 0; } int cuMemAllocNew(void) { return 0; }";
    std::fs::write(&source, driver).unwrap();
    compile(&folder.path().join("libcuda.so.555.58.02"), &[source.to_str().unwrap()]);
    compile(&folder.path().join("libnvidia-ml.so.1"), &[concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvml/fake.c")]);
    std::fs::create_dir_all(folder.path().join("dev/nvidia-caps")).unwrap();
    for name in ["nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap1", "null"] {
        std::fs::write(folder.path().join("dev").join(name), "").unwrap();
    }

    let examination = examine(&config(folder.path())).await;
    let verdict = |name: &str| examination.checks.iter().find(|check| check.name == name).map(|check| check.verdict);
    assert_eq!(verdict("libcuda"), Some(Verdict::Ok));
    assert_eq!(verdict("nvml"), Some(Verdict::Ok));
    assert_eq!(verdict("untraced_allocators"), Some(Verdict::Limited));
    assert_eq!(verdict("entry_placement"), Some(Verdict::Limited));
    let files = examination.checks.iter().find(|check| check.name == "device_files").unwrap();
    assert!(files.detail.starts_with("3 device files, open in 0 processes") || files.verdict == Verdict::Missing);

    let json: serde_json::Value = serde_json::from_str(&examination.to_json().unwrap()).unwrap();
    assert_eq!(json["schema"], SCHEMA);
    let library = &json["libraries"][0];
    assert_eq!(library["version"], "555.58.02");
    assert_eq!(library["present"], serde_json::json!(["cuInit", "cuMemAlloc_v2"]));
    assert_eq!(library["unknown_allocators"], serde_json::json!(["cuMemAllocNew"]));
    assert_eq!((&library["at_entry"], &library["on_stub_branch"]), (&2.into(), &0.into()));
    assert_eq!(json["nvml"]["driver"], "555.58.02");
    assert_eq!(json["nvml"]["devices"][1]["index"], 1);

    let text = examination.to_string();
    assert!(text.contains("entry points: 2 of "), "{text}");
    assert!(
        text.contains("  device 1 Fake\\u{1b} 1 GPU-00000000-0000-0000-0000-000000000001, 0 MIG instances"),
        "{text}"
    );
    assert!(!text.contains('\x1b'));
}

#[tokio::test(flavor = "current_thread")]
async fn each_missing_part_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let examination = examine(&config(folder.path())).await;
    assert_eq!(examination.exit_code(), 3);
    for name in ["libcuda_refused", "nvml"] {
        let check = examination.checks.iter().find(|check| check.name == name).unwrap();
        assert_eq!(check.verdict, Verdict::Missing, "{name}");
        assert!(check.action.is_some());
    }
    let text = examination.to_string();
    assert!(text.contains("cannot open ") && text.contains("no NVML library could be loaded"), "{text}");
}
