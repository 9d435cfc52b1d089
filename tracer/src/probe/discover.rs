//! Finds the driver libraries of the host: those that processes have mapped, in whatever mount
//! namespace, and those that lie where drivers are installed.

use super::library::{Library, LibraryError};
use crate::proc::{Mapping, Maps, ProcError, ProcRoot, Process};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What driver libraries are named after.
const NAME_PREFIX: &[u8] = b"libcuda.so";
/// Different driver libraries looked at of one process; a process normally has one.
const MAX_PER_PROCESS: usize = 16;
/// Files looked at in one folder of the host.
const MAX_PER_FOLDER: usize = 16;

/// Folders where drivers are installed on the host or kept for its containers.
pub const DRIVER_FOLDERS: &[&str] = &[
    // Debian and Ubuntu, and their alternatives.
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    // RHEL, Amazon Linux, SUSE.
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    // Bottlerocket.
    "/usr/lib/nvidia",
    // GPU operator.
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    // GKE on Container-Optimized OS.
    "/home/kubernetes/bin/nvidia/lib64",
    // Talos.
    "/usr/local/glibc/usr/lib",
    // WSL.
    "/usr/lib/wsl/lib",
];

/// Where to look.
#[derive(Clone, Debug)]
pub struct DiscoverConfig {
    /// Processes.
    pub proc_root: ProcRoot,
    /// Folders of the host.
    pub folders: Vec<PathBuf>,
    /// Libraries the user named.
    pub explicit: Vec<PathBuf>,
    /// Which of those found are to be traced.
    pub scope: Scope,
}

impl Default for DiscoverConfig {
    fn default() -> Self {
        Self {
            proc_root: ProcRoot::default(),
            folders: DRIVER_FOLDERS.iter().map(PathBuf::from).collect(),
            explicit: Vec::new(),
            scope: Scope::Host,
        }
    }
}

/// Which driver libraries are traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All of the host.
    #[default]
    Host,
    /// Those the user named, and no others.
    Named,
}

/// How a library came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The user named it.
    Configured,
    /// A process has it mapped.
    Mapped,
    /// It lies in a folder for drivers.
    Installed,
}

/// A driver library and who uses it.
#[derive(Debug)]
pub struct Found {
    /// The library.
    pub library: Library,
    /// How it came to be known first.
    pub origin: Origin,
    /// Processes that have it mapped.
    pub pids: BTreeSet<u32>,
}

/// A file that looks like a driver library and cannot be traced.
#[derive(Debug)]
pub struct Refused {
    /// Path it was found under.
    pub path: PathBuf,
    /// Processes that have it mapped: their calls are not seen.
    pub pids: BTreeSet<u32>,
    /// Why.
    pub reason: DiscoverError,
}

/// Result of a search.
#[derive(Debug, Default)]
pub struct Discovery {
    /// Libraries to trace, each once.
    pub found: Vec<Found>,
    /// Files that cannot be traced.
    pub refused: Vec<Refused>,
    /// Processes whose mappings could not be read: whether they use the driver is not known.
    pub unreadable: Vec<ProcError>,
}

/// Why a mapped file could not be examined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoverError {
    /// The file is no usable library.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The mapped file could not be reached.
    #[error("process {pid} has {} mapped, but the file cannot be reached: {source}; CAP_SYS_PTRACE and either CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN are needed", path.display())]
    Unreachable {
        /// Process.
        pid: u32,
        /// Path in its mount namespace.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another file now has the name of the mapped one.
    #[error("process {pid} has {} mapped, which was replaced on disk since; its calls can be traced with CAP_CHECKPOINT_RESTORE, or after it restarts", path.display())]
    Replaced {
        /// Process.
        pid: u32,
        /// Path in its mount namespace.
        path: PathBuf,
    },
}

/// Searches everywhere.
pub fn discover(config: &DiscoverConfig) -> Discovery {
    let mut discovery = Discovery::default();
    for path in &config.explicit {
        discovery.add(Library::open(path).map_err(DiscoverError::from), path, Origin::Configured, None);
    }
    match config.proc_root.pids() {
        Ok(pids) => {
            for pid in pids {
                discovery.search_process(&config.proc_root, pid);
            }
        }
        Err(error) => discovery.unreadable.push(error),
    }
    for folder in &config.folders {
        for path in driver_files(folder) {
            discovery.add(Library::open(&path).map_err(DiscoverError::from), &path, Origin::Installed, None);
        }
    }
    discovery
}

impl Discovery {
    /// Adds what one process has mapped; a process that ends meanwhile has nothing.
    pub fn search_process(&mut self, root: &ProcRoot, pid: u32) {
        let (process, mappings) = match root.process(pid).and_then(|process| Ok((mappings(&process)?, process))) {
            Ok((mappings, process)) => (process, mappings),
            Err(error) if error.is_gone() => return,
            Err(error) => return self.unreadable.push(error),
        };
        for mapping in mappings {
            let result = open_mapped(&process, &mapping);
            let gone = matches!(&result, Err(DiscoverError::Unreachable { source, .. })
                if matches!(Errno::from_io_error(source), Some(Errno::SRCH)));
            if !gone {
                self.add(result, &mapping.path, Origin::Mapped, Some(pid));
            }
        }
    }

    /// Processes that have a driver library mapped, traced or not.
    pub fn users(&self) -> BTreeSet<u32> {
        let found = self.found.iter().flat_map(|found| &found.pids);
        found.chain(self.refused.iter().flat_map(|refused| &refused.pids)).copied().collect()
    }

    fn add(&mut self, result: Result<Library, DiscoverError>, path: &Path, origin: Origin, pid: Option<u32>) {
        match result {
            Ok(library) => {
                let known = self.found.iter_mut().find(|f| f.library.identity.is_same_file(&library.identity));
                match known {
                    Some(found) => found.pids.extend(pid),
                    None => self.found.push(Found { library, origin, pids: pid.into_iter().collect() }),
                }
            }
            Err(reason) => {
                let same = |r: &&mut Refused| {
                    r.path == path && std::mem::discriminant(&r.reason) == std::mem::discriminant(&reason)
                };
                match self.refused.iter_mut().find(same) {
                    Some(refused) => refused.pids.extend(pid),
                    None => {
                        self.refused.push(Refused { path: path.to_owned(), pids: pid.into_iter().collect(), reason });
                    }
                }
            }
        }
    }
}

/// The driver libraries `process` has mapped, each file once.
pub fn mappings(process: &Process) -> Result<Vec<Mapping>, ProcError> {
    let maps = Maps::read(process)?;
    let mut found: Vec<Mapping> = Vec::new();
    for mapping in maps.naming(NAME_PREFIX).filter(is_driver) {
        let known = found.iter().any(|other| other.inode == mapping.inode && other.path == mapping.path);
        if !known && found.len() < MAX_PER_PROCESS {
            found.push(mapping);
        }
    }
    Ok(found)
}

fn is_driver(mapping: &Mapping) -> bool {
    mapping.path.file_name().is_some_and(|name| name.as_bytes().starts_with(NAME_PREFIX))
}

/// Opens the very file that is mapped. `map_files` leads to it whatever happened to its name, but
/// needs rights; by name, in the process's own root so that no link escapes it, the inode must match.
fn open_mapped(process: &Process, mapping: &Mapping) -> Result<Library, DiscoverError> {
    let exact = Path::new("map_files").join(mapping.range());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let handle = match rustix::fs::openat(process.directory(), &exact, flags, Mode::empty()) {
        Ok(handle) => handle,
        Err(_) => open_by_name(process, mapping)?,
    };
    Ok(Library::from_handle(&handle, &mapping.path)?)
}

fn open_by_name(process: &Process, mapping: &Mapping) -> Result<OwnedFd, DiscoverError> {
    let pid = process.pid();
    let unreachable =
        |errno: Errno| DiscoverError::Unreachable { pid, path: mapping.path.clone(), source: errno.into() };
    let replaced = || DiscoverError::Replaced { pid, path: mapping.path.clone() };
    if mapping.deleted {
        return Err(replaced());
    }
    let root = process.open("root", OFlags::PATH | OFlags::DIRECTORY).map_err(|error| {
        let errno = match &error {
            ProcError::Denied { source, .. } | ProcError::Read { source, .. } => Errno::from_io_error(source),
            _ => None,
        };
        unreachable(errno.unwrap_or(Errno::SRCH))
    })?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let handle = rustix::fs::openat2(&root, &mapping.path, flags, Mode::empty(), resolve).map_err(unreachable)?;
    let stat = rustix::fs::fstat(&handle).map_err(unreachable)?;
    if stat.st_ino == mapping.inode { Ok(handle) } else { Err(replaced()) }
}

/// Files in `folder` that are named like the driver library, links to one of them left out.
fn driver_files(folder: &Path) -> Vec<PathBuf> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if rustix::fs::openat(CWD, folder, flags, Mode::empty()).is_err() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(NAME_PREFIX)))
        // A link that leads nowhere is left over from a removed package.
        .filter(|path| path.exists())
        .collect();
    files.sort_unstable();
    files.truncate(MAX_PER_FOLDER);
    files
}

#[cfg(test)]
mod tests {
    use super::{Mapping, is_driver};

    #[test]
    fn only_the_file_itself_is_named_so() {
        let named = |path: &str| is_driver(&Mapping { path: path.into(), inode: 1, deleted: false, start: 0, end: 1 });
        assert!(named("/usr/lib/libcuda.so.555.58.02"));
        assert!(!named("/usr/lib/libcudart.so.12"));
        assert!(!named("/usr/lib/libcuda.so.d/x"));
    }
}
