//! The real driver library, which works without a GPU as far as refusing every call.

use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::{Machine, Program, Tracer};
use serde_json::json;

/// Names a libcuda.so.1 to use instead of downloading one.
const GIVEN: &str = "VRAMTRACE_TEST_LIBCUDA";
/// The real library makes this file when root initialises it without a driver.
const CONTROL: &str = "/dev/nvidiactl";

/// Takes away what the real library made.
struct Cleanup(bool);

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !self.0 {
            let _ = std::fs::remove_file(CONTROL);
        }
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed: {}\n(on a machine without Debian's non-free packages set {GIVEN} to a libcuda.so.1)",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Folder with a real `libcuda.so.1`: Debian's, from the mirror this machine uses, kept under
/// `target/`. It is proprietary and never part of the repository.
fn real_library() -> PathBuf {
    if let Some(given) = std::env::var_os(GIVEN) {
        return Path::new(&given).parent().map(Path::to_owned).unwrap_or_default();
    }
    let folder = e2e::root().join("target/real-driver");
    let libraries = folder.join("usr/lib/x86_64-linux-gnu/nvidia/current");
    if libraries.join("libcuda.so.1").exists() {
        return libraries;
    }
    std::fs::create_dir_all(folder.join("lists/partial")).unwrap_or_else(|error| panic!("{error}"));
    // The machine's own mirror and release, with the component that has the driver.
    let targets = run(Command::new("apt-get").args(["indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)"]));
    let main = targets.lines().find(|line| {
        let mut words = line.split(' ');
        words.next().is_some_and(|site| site.contains("debian")) && !line.contains('-') && line.ends_with(" main")
    });
    let main = main.unwrap_or_else(|| panic!("no Debian mirror among {targets}; set {GIVEN} to a libcuda.so.1"));
    let [site, release] = [main.split(' ').next(), main.split(' ').nth(1)].map(Option::unwrap_or_default);
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let source = format!("deb [signed-by={keys}] {site} {release} main contrib non-free\n");
    std::fs::write(folder.join("sources.list"), source).unwrap_or_else(|error| panic!("{error}"));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .current_dir(&folder)
            .arg("-o")
            .arg(format!("Dir::Etc::sourcelist={}", folder.join("sources.list").display()));
        command.args(["-o", "Dir::Etc::sourceparts=-", "-o", "APT::Sandbox::User=root"]);
        command.arg("-o").arg(format!("Dir::State::lists={}", folder.join("lists").display()));
        run(command.args(["-q"]).args(arguments));
    };
    apt(&["update"]);
    apt(&["download", "libcuda1"]);
    let package = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{error}")).filter_map(Result::ok);
    let package = package.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|end| end == "deb"));
    run(Command::new("dpkg").arg("-x").arg(package.unwrap_or_default()).arg(&folder));
    assert!(libraries.join("libcuda.so.1").exists(), "the package has no {}", libraries.display());
    libraries
}

fn refusals_are_traced(options: &[&str]) {
    let machine = Machine::with_devices(1);
    let _cleanup = Cleanup(Path::new(CONTROL).exists());
    let libraries = real_library();
    let library = libraries.join("libcuda.so.1");
    let tracer = Tracer::start(&machine, &["--libcuda", &library.to_string_lossy()]);
    let mut command = Command::new(e2e::built().join("workload"));
    command.args(options).args(["script", "--text", "try init\ntry alloc a 1MiB\nready\n"]);
    let mut program = Program::start_with(command, &[("LD_LIBRARY_PATH".to_owned(), libraries.display().to_string())]);
    program.wait_for("ready");
    let pid = program.pid();
    program.finish();
    let run = tracer.stop();
    let refused = json!([
        {"api": "cuInit", "result": 100, "count": 1},
        {"api": "cuMemAlloc_v2", "result": 3, "count": 1},
    ]);
    assert_eq!(run.process(pid)["failures"], refused);
    assert_eq!(run.process(pid)["failed"], 2);
    assert_eq!(run.process(pid)["balances"], json!([]));
    assert_eq!(run.summary["report"]["findings"], json!([]));
}

#[test]
fn the_real_library_is_traced_through_its_exports() {
    refusals_are_traced(&[]);
}

#[test]
fn the_real_library_is_traced_through_cu_get_proc_address() {
    refusals_are_traced(&["--proc-address"]);
}
