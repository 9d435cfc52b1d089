//! What the end-to-end tests share: a simulated host, programs running on it, and the tracer.
//!
//! Everything is real but the GPU: the built `vramtrace` with its eBPF programs, processes that
//! load the simulated driver libraries, kills, forks and execs. Needs root.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::missing_panics_doc, reason = "a test that cannot go on has failed")]

mod lines;
mod program;
mod tracer;

pub use program::{Program, calls, workload};
pub use tracer::{Run, Tracer};

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use simgpu::{Config, Host};
use tempfile::TempDir;

/// Longest that anything here takes; whoever waits longer waits in vain.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// A simulated host in a folder of its own. There is one at a time on a machine: a tracer sees the
/// whole real host, the processes of other tests included.
pub struct Machine {
    host: Host,
    _folder: TempDir,
    _turn: OwnedFd,
}

impl Machine {
    /// A host like this. Contexts are made at once and memory is back 300 ms after a death, unless
    /// the configuration says otherwise.
    pub fn new(config: Config) -> Self {
        assert!(rustix::process::geteuid().is_root(), "the end-to-end tests load eBPF programs: run them as root");
        let turn = turn();
        let folder = tempfile::tempdir().unwrap();
        let host = Host::create(folder.path(), config, &built()).unwrap();
        Self { host, _folder: folder, _turn: turn }
    }

    /// A host with so many devices.
    pub fn with_devices(devices: u32) -> Self {
        Self::new(Config { devices, context_time_ms: 1, release_delay_ms: 300, ..Config::default() })
    }

    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Its driver library.
    pub fn libcuda(&self) -> PathBuf {
        self.host.lib_dir().join("libcuda.so.1")
    }
}

/// Waits until no other test has a machine.
fn turn() -> OwnedFd {
    let path = std::env::temp_dir().join("vramtrace-e2e.lock");
    let file = open(path, OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC, Mode::from_raw_mode(0o600)).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}

/// Folder of the workspace's built programs and libraries.
pub fn built() -> PathBuf {
    // target/<profile>/deps/<test>
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap().to_owned();
    for program in ["vramtrace", "workload", "libsimgpu_cuda.so", "libsimgpu_nvml.so"] {
        assert!(folder.join(program).exists(), "{program} is not built: run `cargo build --workspace` first");
    }
    folder
}

/// The workspace's folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Waits until `done` gives something.
pub fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
