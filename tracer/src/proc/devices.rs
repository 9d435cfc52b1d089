//! Which processes have GPU device files open or mapped.
//!
//! A dead process's memory stays as long as a forked child keeps an inherited device file open, so
//! before the driver is blamed every descriptor of every process is looked at. A mapping keeps a file
//! open after its last descriptor is closed (the kernel releases a file with its last reference), so
//! every mapping is looked at as well.

use super::maps::{Mapping, Maps};
use super::process::{ProcError, ProcRoot, Process};
use crate::record::{Event, Holder, Text};
use crate::untrusted::printable;
use rustix::fs::{AtFlags, Dir, FileType, OFlags, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What device files of NVIDIA's driver are named after, and the folder of its capability files.
const NAME_PREFIX: &[u8] = b"nvidia";
/// What the path of every mapped device file has in it.
const MAPPED_PART: &[u8] = b"/nvidia";
/// Different device files listed of one process.
const MAX_FILES: usize = 256;
/// The system's first process.
const INIT: u32 = 1;
/// Longest target of a descriptor's link.
const LINK: usize = 4096;

/// The device files of this host, by name and by what they are.
#[derive(Clone, Debug)]
pub struct DeviceFiles {
    folder: PathBuf,
    /// Name by device number of each special file, and by inode of each other file.
    known: BTreeMap<FileKey, Text>,
}

/// What makes two names the same device: its number, or for a file that is no device its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FileKey {
    Device(u64),
    Inode { device: u64, inode: u64 },
}

impl FileKey {
    fn of(stat: &Stat) -> Self {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => Self::Device(stat.st_rdev),
            _ => Self::Inode { device: stat.st_dev, inode: stat.st_ino },
        }
    }
}

/// The device files a process has mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MappedFiles {
    /// Their names.
    pub names: BTreeSet<Text>,
    /// How many mappings there are.
    pub count: u64,
    /// Bytes of address space, which is not memory.
    pub bytes: u64,
}

/// Result of a walk over all processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FdScan {
    /// Whether every process that may hold a dead client's file could be looked at. The system's
    /// first process is not one: it descends from no client.
    pub complete: bool,
    /// Processes whose descriptors or mappings could not be read.
    pub unreadable: Vec<u32>,
    /// Processes with device files open or mapped, in ascending order.
    pub holders: Vec<Holder>,
}

impl FdScan {
    /// As the engine reads it.
    pub fn into_event(self) -> Event {
        Event::FdScan { complete: self.complete, holders: self.holders }
    }
}

impl DeviceFiles {
    /// The device files in `folder`, usually `/dev`. A folder that cannot be read has none by
    /// number; files below it are still recognised by name.
    pub fn read(folder: &Path) -> Self {
        let mut known = BTreeMap::new();
        let mut note = |path: &Path, name: &[u8]| {
            // Not followed: a link in a world-writable folder may point anywhere.
            let Ok(metadata) = std::fs::symlink_metadata(path) else { return };
            let key = if metadata.file_type().is_char_device() {
                FileKey::Device(metadata.rdev())
            } else if metadata.file_type().is_file() {
                FileKey::Inode { device: metadata.dev(), inode: metadata.ino() }
            } else {
                return;
            };
            known.entry(key).or_insert_with(|| printable(name, 128));
        };
        for entry in names(folder) {
            let path = folder.join(&entry);
            note(&path, entry.as_bytes());
            if path.is_dir() {
                for inner in names_of_any(&path) {
                    let name = Path::new(&entry).join(&inner);
                    note(&path.join(&inner), name.as_os_str().as_bytes());
                }
            }
        }
        Self { folder: folder.to_owned(), known }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Names of the device files `process` has open or mapped.
    fn held_by(&self, process: &Process) -> Result<BTreeSet<Text>, ProcError> {
        let mut files = self.open_in(process)?;
        files.extend(self.mapped_in(process)?.names);
        Ok(files)
    }

    /// Names of the device files `process` has open.
    fn open_in(&self, process: &Process) -> Result<BTreeSet<Text>, ProcError> {
        let failed = |errno| ProcError::new(process.pid(), "fd", errno);
        let directory = process.open("fd", OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut files = BTreeSet::new();
        let mut buffer = Vec::with_capacity(256);
        for entry in Dir::read_from(&directory).map_err(failed)? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::NOENT | Errno::SRCH) => break,
                Err(errno) => return Err(failed(errno)),
            };
            let name = entry.file_name();
            if !name.to_bytes().first().is_some_and(u8::is_ascii_digit) {
                continue;
            }
            buffer.clear();
            let link = match rustix::fs::readlinkat(&directory, name, std::mem::take(&mut buffer)) {
                Ok(link) => link,
                // A descriptor that was closed in the meantime is no holder.
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            let target = link.to_bytes();
            if target.len() <= LINK && files.len() < MAX_FILES {
                let key = || {
                    let stat = rustix::fs::statat(&directory, name, AtFlags::empty()).ok()?;
                    Some(FileKey::of(&stat))
                };
                files.extend(self.recognise(target, key));
            }
            buffer = link.into_bytes();
        }
        Ok(files)
    }

    /// The device files `process` has mapped.
    pub fn mapped_in(&self, process: &Process) -> Result<MappedFiles, ProcError> {
        let maps = Maps::read(process)?;
        let mut mapped = MappedFiles::default();
        // A file is usually mapped many times in a row.
        let mut last: Option<(Mapping, Option<Text>)> = None;
        for mapping in maps.naming(MAPPED_PART) {
            let same = |(other, _): &(Mapping, _)| other.inode == mapping.inode && other.path == mapping.path;
            let name = if let Some((_, name)) = last.take().filter(same) {
                name
            } else {
                let link = Path::new("map_files").join(mapping.range());
                let key = || {
                    let stat = rustix::fs::statat(process.directory(), &link, AtFlags::empty()).ok()?;
                    Some(FileKey::of(&stat))
                };
                self.recognise(mapping.path.as_os_str().as_bytes(), key)
            };
            if let Some(name) = &name {
                mapped.count += 1;
                mapped.bytes = mapped.bytes.saturating_add(mapping.bytes());
                if mapped.names.len() < MAX_FILES {
                    mapped.names.insert(name.clone());
                }
            }
            last = Some((mapping, name));
        }
        Ok(mapped)
    }

    /// The name of the device file that a descriptor's link target or a mapping names, if it is one.
    ///
    /// A container may have its device files in another folder, so a file named like one is compared
    /// by what it is. Others are not even looked at: a look at a file of a dead network share hangs.
    fn recognise(&self, target: &[u8], key: impl FnOnce() -> Option<FileKey>) -> Option<Text> {
        let target = target.strip_suffix(b" (deleted)").unwrap_or(target);
        let below = target.strip_prefix(self.folder.as_os_str().as_bytes()).and_then(|rest| rest.strip_prefix(b"/"));
        if let Some(name) = below.filter(|name| name.starts_with(NAME_PREFIX)) {
            return Some(printable(name, 128));
        }
        let mut parts = target.rsplit(|byte| *byte == b'/');
        let named_alike = parts.next()?.starts_with(NAME_PREFIX)
            || parts.next().is_some_and(|folder| folder.starts_with(NAME_PREFIX));
        if !named_alike || !target.starts_with(b"/") {
            return None;
        }
        self.known.get(&key()?).cloned()
    }

    /// Looks at every descriptor and every mapping of every process.
    pub fn scan(&self, root: &ProcRoot) -> Result<FdScan, ProcError> {
        let mut scan = FdScan::default();
        for pid in root.pids()? {
            match self.holder(root, pid) {
                Ok(holder) => scan.holders.extend(holder),
                Err(error) if error.is_gone() => {}
                Err(_) => scan.unreadable.push(pid),
            }
        }
        scan.complete = !root.hides_processes() && scan.unreadable.iter().all(|pid| *pid == INIT);
        Ok(scan)
    }

    fn holder(&self, root: &ProcRoot, pid: u32) -> Result<Option<Holder>, ProcError> {
        let process = root.process(pid)?;
        let stat = process.stat()?;
        // Once its first thread has ended, what a process has is only seen through the others.
        let files = if stat.state == 'Z' && stat.threads > 1 {
            self.held_by_threads(&root.threads(pid))?
        } else {
            self.held_by(&process)?
        };
        let files: Vec<Text> = files.into_iter().take(MAX_FILES).collect();
        Ok((!files.is_empty()).then_some(Holder { identity: stat.identity, comm: stat.comm, files }))
    }

    fn held_by_threads(&self, threads: &ProcRoot) -> Result<BTreeSet<Text>, ProcError> {
        let mut files = BTreeSet::new();
        for tid in threads.pids()? {
            match threads.process(tid).and_then(|thread| self.held_by(&thread)) {
                Ok(held) => files.extend(held),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(files)
    }
}

/// Entries of `folder` that are named like device files of the driver.
fn names(folder: &Path) -> impl Iterator<Item = std::ffi::OsString> {
    names_of_any(folder).filter(|name| name.as_bytes().starts_with(NAME_PREFIX))
}

fn names_of_any(folder: &Path) -> impl Iterator<Item = std::ffi::OsString> {
    // A host has some tens of these; the limit keeps a hostile folder from costing more.
    std::fs::read_dir(folder).into_iter().flatten().take(100_000).flatten().map(|entry| entry.file_name())
}

#[cfg(test)]
mod tests {
    use super::{DeviceFiles, FileKey};
    use std::collections::BTreeMap;

    fn files() -> DeviceFiles {
        let known = BTreeMap::from([(FileKey::Device(0xc3_00), "nvidia0".into())]);
        DeviceFiles { folder: "/dev".into(), known }
    }

    fn recognise(target: &str, key: Option<FileKey>) -> Option<String> {
        files().recognise(target.as_bytes(), || key).map(|name| name.to_string())
    }

    #[test]
    fn names_below_the_folder_count_and_are_relative_to_it() {
        for (target, name) in [
            ("/dev/nvidiactl", "nvidiactl"),
            ("/dev/nvidia-uvm", "nvidia-uvm"),
            ("/dev/nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap21"),
            ("/dev/nvidia0 (deleted)", "nvidia0"),
        ] {
            assert_eq!(recognise(target, None).as_deref(), Some(name));
        }
    }

    #[test]
    fn elsewhere_it_must_be_the_same_device() {
        assert_eq!(recognise("/run/c1/dev/nvidia0", Some(FileKey::Device(0xc3_00))).as_deref(), Some("nvidia0"));
        assert_eq!(recognise("/run/c1/dev/nvidia0", Some(FileKey::Device(0xc3_01))), None);
        assert_eq!(recognise("/home/u/nvidia-notes.txt", Some(FileKey::Inode { device: 1, inode: 2 })), None);
        assert_eq!(recognise("/run/c1/dev/nvidia0", None), None);
    }

    #[test]
    fn other_targets_are_never_looked_at() {
        for target in ["socket:[123]", "/dev/null", "/devices/nvidia", "pipe:[1]", "anon_inode:nvidia", "/mnt/nfs/data"]
        {
            let looked = std::cell::Cell::new(false);
            let name = files().recognise(target.as_bytes(), || {
                looked.set(true);
                None
            });
            assert_eq!(name, None, "{target}");
            assert!(!looked.get() || target == "/devices/nvidia", "{target}");
        }
    }
}
