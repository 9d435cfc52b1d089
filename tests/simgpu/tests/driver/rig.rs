//! A host for one test, and the processes on it.

use crate::peer::{ANSWER, CELLS, Figures, LIBRARIES, Row, Sample};
use simgpu::{Config, Host};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// What a context costs on the tests' hosts: no round number, so that it is not mistaken.
pub(crate) const CONTEXT: u64 = 302 * MIB;
/// How long a dead process's memory takes to come back.
pub(crate) const DELAY: Duration = Duration::from_millis(400);

/// A small host: one device of 8 GiB.
pub(crate) fn config() -> Config {
    Config {
        memory: 8 * GIB,
        context_overhead: CONTEXT,
        context_time_ms: 0,
        release_delay_ms: DELAY.as_millis() as u64,
        ..Config::default()
    }
}

/// Folder of the built libraries.
pub(crate) fn libraries() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.ancestors().nth(2).unwrap().to_owned();
    for library in ["libsimgpu_cuda.so", "libsimgpu_nvml.so"] {
        let path = folder.join(library);
        assert!(path.exists(), "{} is missing: run `cargo build --workspace` first", path.display());
    }
    folder
}

/// A host, gone with the test.
pub(crate) struct Rig {
    pub(crate) host: Host,
    _folder: TempDir,
}

impl Rig {
    pub(crate) fn new(config: Config) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { host: Host::create(folder.path(), config, &libraries()).unwrap(), _folder: folder }
    }

    /// A process that has called nothing yet.
    pub(crate) fn peer(&self) -> Peer {
        Peer::start(self.command(&[]))
    }

    /// A process with a context on its first device, which is current.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.peer())
    }

    /// What starts a process on this host, behind `wrapper`.
    pub(crate) fn command(&self, wrapper: &[&str]) -> Command {
        let mut command = peer_command(wrapper, &self.host.lib_dir());
        command.envs(self.host.env());
        command
    }
}

/// What starts a process that loads the libraries of a folder.
pub(crate) fn peer_command(wrapper: &[&str], libraries: &Path) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut words = wrapper.iter().map(AsRef::as_ref).chain([program.as_os_str()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["peer::process", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env_remove(simgpu::DIRECTORY).env_remove("CUDA_VISIBLE_DEVICES").env(LIBRARIES, libraries);
    command
}

/// A running process. Killed when dropped.
pub(crate) struct Peer {
    child: Child,
    /// `None` once it was ended.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// What a call of a `cu*` function came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Called {
    pub(crate) code: i32,
    pub(crate) cells: [u64; CELLS],
}

impl Peer {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, input, output };
        assert_eq!(peer.answer(), "ready");
        peer
    }

    /// Number of the process that was started.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the process ended");
            if let Some(answer) = line.trim_end().strip_prefix(ANSWER) {
                return answer.to_owned();
            }
        }
    }

    /// Has it do something.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
        self.answer()
    }

    /// Calls a function: its name and its arguments.
    pub(crate) fn call(&mut self, call: &str) -> Called {
        let answer = self.ask(&format!("call {call}"));
        let (code, cells) = answer.split_once(' ').unwrap();
        let cells: Vec<u64> = cells.split(' ').map(|cell| cell.parse().unwrap()).collect();
        Called { code: code.parse().unwrap(), cells: cells.try_into().unwrap() }
    }

    /// Calls a function that must succeed, and gives what it wrote to the first cell.
    pub(crate) fn get(&mut self, call: &str) -> u64 {
        let called = self.call(call);
        assert_eq!(called.code, 0, "{call}");
        called.cells[0]
    }

    /// Calls a function and gives its result.
    pub(crate) fn code(&mut self, call: &str) -> i32 {
        self.call(call).code
    }

    /// What NVML tells of all devices.
    pub(crate) fn sample(&mut self) -> Sample {
        serde_json::from_str(&self.ask("nvml")).unwrap()
    }

    /// What NVML tells of one device.
    pub(crate) fn figures(&mut self, device: usize) -> Figures {
        self.sample().swap_remove(device).unwrap()
    }

    /// Bytes in use on device 0.
    pub(crate) fn used(&mut self) -> u64 {
        self.figures(0).memory.used
    }

    /// Process list of device 0: number and bytes.
    pub(crate) fn rows(&mut self) -> Vec<(u32, Option<u64>)> {
        self.figures(0).rows.iter().map(|row: &Row| (row.pid, row.used)).collect()
    }

    /// Ends its input, on which it exits.
    pub(crate) fn exit(&mut self) {
        self.input = None;
        assert!(self.child.wait().unwrap().success());
    }

    /// Ends it as the kernel's out-of-memory killer does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended, which is no failure here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with a context.
pub(crate) struct Client {
    pub(crate) peer: Peer,
    pub(crate) context: u64,
}

impl Client {
    pub(crate) fn new(mut peer: Peer) -> Self {
        peer.get("cuInit 0");
        let context = peer.get("cuCtxCreate_v2 $0 0 0");
        Self { peer, context }
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> u64 {
        self.peer.get(&format!("cuMemAlloc_v2 $0 {bytes}"))
    }

    pub(crate) fn free(&mut self, address: u64) {
        self.peer.get(&format!("cuMemFree_v2 {address}"));
    }

    /// Bytes NVML bills it for, beyond its context.
    pub(crate) fn billed(&mut self) -> u64 {
        let pid = self.peer.pid();
        let used = self.peer.used();
        assert_eq!(self.peer.rows(), [(pid, Some(used))], "the only process");
        used - CONTEXT
    }
}

/// A process a peer forked. Killed when dropped.
pub(crate) struct Forked(pub(crate) u32);

impl Forked {
    pub(crate) fn is_running(&self) -> bool {
        // A zombie has ended.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: sends a signal to the process that was forked for the test.
        unsafe { libc::kill(self.0.cast_signed(), libc::SIGKILL) };
    }
}

/// Waits until `met` is true.
pub(crate) fn wait_until(what: &str, mut met: impl FnMut() -> bool) {
    let start = Instant::now();
    while !met() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}: not within 20 seconds");
        std::thread::sleep(Duration::from_millis(5));
    }
}
