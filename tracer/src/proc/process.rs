//! One process, read through a handle on its `/proc/PID` directory.
//!
//! The handle belongs to the process, not to its number: once the process is gone, reads through it
//! fail instead of telling about whoever got the number next.

use crate::record::{Identity, Text};
use crate::untrusted::printable;
use rustix::fs::{CWD, Dir, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Longest `stat`, `status`, `wchan` or `cgroup` file that is read.
const SMALL_FILE: usize = 64 << 10;
/// Longest environment that is searched.
const ENVIRONMENT: usize = 4 << 20;
/// Longest value of a variable that is kept.
const VARIABLE: usize = 4096;
/// Longest control group path that is kept; the kernel's own limit.
const CGROUP: usize = 4096;

/// Why something about a process could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcError {
    /// The process ended; no failure, only too late.
    #[error("process {pid} is gone")]
    Gone {
        /// Process.
        pid: u32,
    },
    /// The kernel refused.
    #[error(
        "not permitted to read {what} of process {pid}: {source}; run as root or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
    )]
    Denied {
        /// Process.
        pid: u32,
        /// File in its directory.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Reading failed otherwise.
    #[error("reading {what} of process {pid} failed: {source}")]
    Read {
        /// Process.
        pid: u32,
        /// File in its directory.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The contents are not what the kernel writes.
    #[error("{what} of process {pid} has an unknown form")]
    Malformed {
        /// Process.
        pid: u32,
        /// File in its directory.
        what: &'static str,
    },
    /// There is more of it than is read.
    #[error("{what} of process {pid} is too long to be read")]
    TooLong {
        /// Process.
        pid: u32,
        /// File in its directory.
        what: &'static str,
    },
    /// The directory of all processes cannot be listed.
    #[error("cannot list {}: {source}; is procfs mounted there?", path.display())]
    List {
        /// Directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl ProcError {
    pub(super) fn new(pid: u32, what: &'static str, errno: Errno) -> Self {
        let source = errno.into();
        match errno {
            Errno::NOENT | Errno::SRCH => Self::Gone { pid },
            Errno::ACCESS | Errno::PERM => Self::Denied { pid, what, source },
            _ => Self::Read { pid, what, source },
        }
    }

    /// The process it is about; none when all of them could not be listed.
    pub fn pid(&self) -> Option<u32> {
        match self {
            Self::Gone { pid }
            | Self::Denied { pid, .. }
            | Self::Read { pid, .. }
            | Self::Malformed { pid, .. }
            | Self::TooLong { pid, .. } => Some(*pid),
            Self::List { .. } => None,
        }
    }

    /// Whether the process simply ended.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

/// Where process facts are read from.
#[derive(Clone, Debug)]
pub struct ProcRoot {
    path: PathBuf,
    tick_ns: u64,
}

impl Default for ProcRoot {
    fn default() -> Self {
        Self::new("/proc")
    }
}

impl ProcRoot {
    /// Facts from the procfs mounted at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), tick_ns: 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1) }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A start time as the kernel's events tell it, in the whole clock ticks that `/proc` tells:
    /// both must name a process alike.
    pub fn floor_to_tick(&self, start_ns: u64) -> u64 {
        start_ns - start_ns % self.tick_ns
    }

    /// Every process id, in ascending order.
    pub fn pids(&self) -> Result<Vec<u32>, ProcError> {
        let failed = |errno: Errno| ProcError::List { path: self.path.clone(), source: errno.into() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, &self.path, flags, Mode::empty()).map_err(failed)?;
        let mut pids = Vec::new();
        for entry in Dir::new(directory).map_err(failed)? {
            pids.extend(number(entry.map_err(failed)?.file_name()));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// The threads of a process, each of which can be asked what a process can.
    pub(super) fn threads(&self, pid: u32) -> Self {
        Self { path: self.path.join(pid.to_string()).join("task"), tick_ns: self.tick_ns }
    }

    /// A handle on a process.
    pub fn process(&self, pid: u32) -> Result<Process, ProcError> {
        let path = self.path.join(pid.to_string());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, &path, flags, Mode::empty())
            .map_err(|errno| ProcError::new(pid, "directory", errno))?;
        Ok(Process { pid, tick_ns: self.tick_ns, directory })
    }

    /// The identity of a process.
    pub fn identity(&self, pid: u32) -> Result<Identity, ProcError> {
        Ok(self.process(pid)?.stat()?.identity)
    }

    /// Whether processes of other users may be hidden (mount option `hidepid`): process 1 always
    /// exists, so not seeing it means not seeing everything.
    pub fn hides_processes(&self) -> bool {
        self.process(1).and_then(|init| init.stat()).is_err()
    }
}

/// What `/proc/PID/stat` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Process and its start, in whole clock ticks.
    pub identity: Identity,
    /// Name of its main thread, printable.
    pub comm: Text,
    /// State letter: R, S, D, Z, T, …
    pub state: char,
    /// Parent process.
    pub ppid: u32,
    /// Threads that have not ended, the main thread counted as long as any lives.
    pub threads: u32,
}

/// The variables of a process that decide which devices it sees, in which order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaEnvironment {
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub device_order: Option<String>,
}

/// A handle on a process.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    tick_ns: u64,
    directory: OwnedFd,
}

impl Process {
    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Identity, name, state and parent.
    pub fn stat(&self) -> Result<Stat, ProcError> {
        let bytes = self.read("stat", SMALL_FILE)?;
        parse_stat(self.pid, self.tick_ns, &bytes).ok_or(ProcError::Malformed { pid: self.pid, what: "stat" })
    }

    /// Function of the kernel it sleeps in; `None` when it runs or the kernel does not tell.
    pub fn wchan(&self) -> Result<Option<Text>, ProcError> {
        let bytes = self.read("wchan", SMALL_FILE)?;
        Ok(Some(bytes.trim_ascii()).filter(|name| !matches!(*name, b"" | b"0")).map(|name| printable(name, 128)))
    }

    /// Control group path; may end in ` (deleted)`. Empty when the process has none.
    pub fn cgroup(&self) -> Result<Text, ProcError> {
        let bytes = self.read("cgroup", SMALL_FILE)?;
        Ok(printable(main_cgroup(&bytes), CGROUP))
    }

    /// The process this number belongs to: another one for a thread that is not the main one.
    pub fn tgid(&self) -> Result<u32, ProcError> {
        let bytes = self.read("status", SMALL_FILE)?;
        thread_group(&bytes).ok_or(ProcError::Malformed { pid: self.pid, what: "status" })
    }

    /// Process id in its own pid namespace, where that is not the reader's.
    pub fn nspid(&self) -> Result<Option<u32>, ProcError> {
        let bytes = self.read("status", SMALL_FILE)?;
        Ok(innermost_pid(&bytes))
    }

    /// The two variables that decide its device numbers, as they were when it started.
    pub fn cuda_environment(&self) -> Result<CudaEnvironment, ProcError> {
        let bytes = self.read("environ", ENVIRONMENT)?;
        let mut environment = CudaEnvironment::default();
        for entry in bytes.split(|byte| *byte == 0) {
            let value = |name: &[u8]| {
                let value = entry.strip_prefix(name)?.strip_prefix(b"=")?;
                Some(String::from_utf8_lossy(&value[..value.len().min(VARIABLE)]).into_owned())
            };
            // The first of two equal names is the one getenv finds.
            if environment.visible_devices.is_none() {
                environment.visible_devices = value(b"CUDA_VISIBLE_DEVICES");
            }
            if environment.device_order.is_none() {
                environment.device_order = value(b"CUDA_DEVICE_ORDER");
            }
        }
        Ok(environment)
    }

    /// Reads a file of its directory, at most `limit` bytes.
    pub(crate) fn read(&self, what: &'static str, limit: usize) -> Result<Vec<u8>, ProcError> {
        let failed = |errno| ProcError::new(self.pid, what, errno);
        let file = self.open(what, OFlags::RDONLY)?;
        let mut bytes = Vec::with_capacity(1024);
        while bytes.len() < limit {
            if bytes.len() == bytes.capacity() {
                bytes.reserve(bytes.len().min(limit - bytes.len()));
            }
            match rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes)) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        bytes.truncate(limit);
        Ok(bytes)
    }

    pub(crate) fn open(&self, what: &'static str, flags: OFlags) -> Result<OwnedFd, ProcError> {
        rustix::fs::openat(&self.directory, what, flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| ProcError::new(self.pid, what, errno))
    }
}

/// The process number a directory entry names.
fn number(name: &CStr) -> Option<u32> {
    let name = name.to_str().ok()?;
    name.bytes().all(|byte| byte.is_ascii_digit()).then(|| name.parse().ok()).flatten()
}

/// Fields are counted from the last `)`: a process may put anything into its own name.
fn parse_stat(pid: u32, tick_ns: u64, bytes: &[u8]) -> Option<Stat> {
    let open = memchr::memchr(b'(', bytes)?;
    let close = memchr::memrchr(b')', bytes)?;
    let comm = bytes.get(open + 1..close)?;
    let rest = std::str::from_utf8(bytes.get(close + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let ppid = fields.next()?.parse().ok()?;
    // Fields 3 and 4 are taken; the number of threads is field 20, the start time field 22.
    let threads = fields.nth(15)?.parse().ok()?;
    let ticks: u64 = fields.nth(1)?.parse().ok()?;
    let identity = Identity { tgid: pid, start_ns: ticks.checked_mul(tick_ns)? };
    Some(Stat { identity, comm: printable(comm, 64), state, ppid, threads })
}

/// Version 1 names one group for each controller; `memory` and `pids` follow containers, then the
/// service manager's own. On hybrid hosts the version 2 entry is often just `/`.
fn main_cgroup(bytes: &[u8]) -> &[u8] {
    let (mut best, mut best_rank) = (&b""[..], u8::MAX);
    for line in bytes.split(|byte| *byte == b'\n') {
        let mut fields = line.splitn(3, |byte| *byte == b':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let has = |name: &[u8]| controllers.split(|byte| *byte == b',').any(|controller| controller == name);
        let rank = match () {
            () if controllers.is_empty() => 0,
            () if has(b"memory") => 1,
            () if has(b"pids") => 2,
            () if has(b"name=systemd") => 3,
            () => continue,
        };
        let rank = if path == b"/" { rank + 10 } else { rank };
        if rank < best_rank {
            (best, best_rank) = (path, rank);
        }
    }
    best
}

/// Number in the `Tgid:` line.
fn thread_group(bytes: &[u8]) -> Option<u32> {
    let line = bytes.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Tgid:"))?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

/// Last number of the `NSpid:` line, if there is more than one.
fn innermost_pid(bytes: &[u8]) -> Option<u32> {
    let line = bytes.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    let numbers = std::str::from_utf8(line).ok()?.split_ascii_whitespace().skip(1);
    numbers.last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{innermost_pid, main_cgroup, parse_stat};

    const TICK: u64 = 10_000_000;

    #[test]
    fn a_thread_is_told_from_a_process() {
        assert_eq!(super::thread_group(b"Name:\tx\nTgid:\t77\nPid:\t78\n"), Some(77));
        assert_eq!(super::thread_group(b"Name:\tTgid:\t5\n"), None);
    }

    #[test]
    fn a_name_may_look_like_fields() {
        let line = b"77 (a) Z 1 (b) S 42 77 77 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2\n";
        let stat = parse_stat(77, TICK, line).unwrap();
        assert_eq!(stat.comm, "a) Z 1 (b");
        assert_eq!((stat.state, stat.ppid, stat.threads), ('S', 42, 1));
        assert_eq!(stat.identity.start_ns, 9_876_540_000_000);
    }

    #[test]
    fn broken_stat_files_are_refused() {
        let cases: [&[u8]; 7] =
            [b"", b"1", b"1 (", b")(", b"1 (x)", b"1 (x) S", b"1 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x"];
        for bytes in cases {
            assert_eq!(parse_stat(1, TICK, bytes), None, "{}", String::from_utf8_lossy(bytes));
        }
        let overflow = b"1 (x) S 0 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 18446744073709551615 0";
        assert_eq!(parse_stat(1, TICK, overflow), None);
    }

    #[test]
    fn the_group_that_follows_containers_is_chosen() {
        assert_eq!(main_cgroup(b"0::/kubepods.slice/x.scope\n"), b"/kubepods.slice/x.scope");
        let hybrid = b"9:name=systemd:/init.scope\n8:pids:/p\n4:memory,hugetlb:/m\n1:cpu:/\n0::/\n";
        assert_eq!(main_cgroup(hybrid), b"/m");
        assert_eq!(main_cgroup(b"9:name=systemd:/s\n4:memory:/\n0::/\n"), b"/s");
        assert_eq!(main_cgroup(b"4:memory:/\n0::/\n"), b"/");
        assert_eq!(main_cgroup(b"0::/a:b (deleted)\n"), b"/a:b (deleted)");
        assert_eq!(main_cgroup(b""), b"");
    }

    #[test]
    fn only_a_nested_process_has_a_second_number() {
        assert_eq!(innermost_pid(b"Name:\tx\nNSpid:\t4711\t12\t1\n"), Some(1));
        assert_eq!(innermost_pid(b"Name:\tx\nNSpid:\t4711\n"), None);
        assert_eq!(innermost_pid(b"Name:\tx\n"), None);
    }
}
