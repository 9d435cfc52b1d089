//! One driver library: what it is, and the points in it that are probed.

pub use super::elf::ElfError;
use super::elf::{Elf, Export};
use super::placement::{Placement, STUB_LEN};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use tracer_ebpf::symbols::TABLE;

/// Exports without which a file is not the driver library, whatever its name.
const MUST_EXPORT: [&str; 2] = ["cuInit", "cuMemAlloc_v2"];
/// Exports that look like allocators and are not in the table are listed up to this many.
const MAX_UNKNOWN: usize = 64;

/// A driver library, kept open so that what was examined is what gets probed.
#[derive(Debug)]
pub struct Library {
    /// Path it was found under.
    pub path: PathBuf,
    /// Which file it is.
    pub identity: LibraryIdentity,
    /// Driver version, where the file's real name tells it.
    pub version: Option<String>,
    /// Where the probes go, in the order of the table.
    pub points: Vec<Point>,
    /// Indexes into [`TABLE`] of the entry points this library does not have.
    pub missing: Vec<usize>,
    /// Exports that look like allocators and are not in the table: memory they hand out is not seen.
    pub unknown_allocators: Vec<String>,
    file: File,
}

/// One probe point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Index into [`TABLE`].
    pub symbol: usize,
    /// Offset in the file.
    pub offset: u64,
    /// Which instruction it is on.
    pub placement: Placement,
}

/// Which file a library is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct LibraryIdentity {
    /// GNU build id in hexadecimal.
    pub build_id: Option<String>,
    /// Inode number.
    pub inode: u64,
    /// Device number of its file system.
    pub device: u64,
    /// Bytes.
    pub size: u64,
}

impl LibraryIdentity {
    /// Whether one attach serves both. Probes sit on the inode below any overlay, and overlay
    /// mounts of one file report different device numbers, so with a build id that is not compared.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.inode == other.inode
            && self.size == other.size
            && self.build_id == other.build_id
            && (self.build_id.is_some() || self.device == other.device)
    }
}

/// Why a file cannot be traced as a driver library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It could not be opened.
    #[error("cannot open {}: {source}; check that the path exists and that the tracer may read it", path.display())]
    Open {
        /// Path that was tried.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A directory, pipe, socket or device stands under the name.
    #[error("{} is a {found}, not a regular file; name the libcuda file itself", path.display())]
    NotAFile {
        /// Path that was tried.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The file is not a usable ELF library.
    #[error("{} cannot be traced: {source}", path.display())]
    Elf {
        /// Path that was tried.
        path: PathBuf,
        /// What is wrong with it.
        source: ElfError,
    },
    /// A library, but not the driver's.
    #[error("{} is not libcuda: it does not export {missing}; name the driver's library (libcuda.so.1)", path.display())]
    NotLibcuda {
        /// Path that was tried.
        path: PathBuf,
        /// Export that is not there.
        missing: &'static str,
    },
    /// An entry point lies outside the code of the file.
    #[error("{} cannot be traced: {symbol} does not point into its code; the file is damaged or not a driver library", path.display())]
    OutsideCode {
        /// Path that was tried.
        path: PathBuf,
        /// Entry point.
        symbol: &'static str,
    },
    /// Two entry points are one address: a call could not be told from the other.
    #[error("{} cannot be traced: {first} and {second} are the same code, so each call would count twice", path.display())]
    SharedAddress {
        /// Path that was tried.
        path: PathBuf,
        /// Entry point.
        first: &'static str,
        /// Entry point at the same address.
        second: &'static str,
    },
}

impl Library {
    /// Opens and examines the file at `path`.
    pub fn open(path: &Path) -> Result<Self, LibraryError> {
        // Only a handle on the name: opening a pipe would wait for a writer, a device would act.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| LibraryError::Open { path: path.to_owned(), source: errno.into() })?;
        Self::from_handle(&handle, path)
    }

    /// Examines the file behind an `O_PATH` handle; `path` is what messages call it.
    pub(super) fn from_handle(handle: &OwnedFd, path: &Path) -> Result<Self, LibraryError> {
        let open_error = |errno: Errno| LibraryError::Open { path: path.to_owned(), source: errno.into() };
        let stat = rustix::fs::fstat(handle).map_err(open_error)?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if file_type != FileType::RegularFile {
            return Err(LibraryError::NotAFile { path: path.to_owned(), found: type_name(file_type) });
        }
        let link = format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd());
        let file: File =
            rustix::fs::open(&link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(open_error)?.into();
        let metadata = file.metadata().map_err(|source| LibraryError::Open { path: path.to_owned(), source })?;

        let elf = Elf::read(&file).map_err(|source| LibraryError::Elf { path: path.to_owned(), source })?;
        let exports: HashMap<&str, &Export> =
            elf.exports.iter().rev().map(|export| (export.name.as_str(), export)).collect();
        if let Some(missing) = MUST_EXPORT.into_iter().find(|name| !exports.contains_key(name)) {
            return Err(LibraryError::NotLibcuda { path: path.to_owned(), missing });
        }
        let (points, missing) = place(&elf, &exports, &file, path)?;
        let mut unknown_allocators: Vec<String> = exports
            .keys()
            .filter(|name| looks_like_allocator(name) && !TABLE.iter().any(|symbol| symbol.name == **name))
            .map(|name| (*name).to_owned())
            .collect();
        unknown_allocators.sort_unstable();
        unknown_allocators.truncate(MAX_UNKNOWN);
        Ok(Self {
            path: path.to_owned(),
            identity: LibraryIdentity {
                build_id: elf.build_id.map(|id| hexadecimal(&id)),
                inode: metadata.ino(),
                device: metadata.dev(),
                size: metadata.len(),
            },
            version: version_of(&file, path),
            points,
            missing,
            unknown_allocators,
            file,
        })
    }

    /// A path that leads to the very file that was examined, for as long as this value lives.
    pub fn attach_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// How many points are at `placement`.
    pub fn count(&self, placement: Placement) -> usize {
        self.points.iter().filter(|point| point.placement == placement).count()
    }
}

/// The probe points of the symbols that are there, and the indexes of those that are not.
fn place(
    elf: &Elf,
    exports: &HashMap<&str, &Export>,
    file: &File,
    path: &Path,
) -> Result<(Vec<Point>, Vec<usize>), LibraryError> {
    let (mut points, mut missing) = (Vec::with_capacity(TABLE.len()), Vec::new());
    let mut owners: HashMap<u64, &'static str> = HashMap::new();
    for (index, symbol) in TABLE.iter().enumerate() {
        let Some(export) = exports.get(symbol.name) else {
            missing.push(index);
            continue;
        };
        let outside = || LibraryError::OutsideCode { path: path.to_owned(), symbol: symbol.name };
        let (start, room) = elf.code_offset(export.address).ok_or_else(outside)?;
        if let Some(first) = owners.insert(start, symbol.name) {
            return Err(LibraryError::SharedAddress { path: path.to_owned(), first, second: symbol.name });
        }
        let mut code = [0; STUB_LEN];
        let code = &mut code[..STUB_LEN.min(room as usize)];
        file.read_exact_at(code, start).map_err(|_| outside())?;
        let placement = Placement::of(code);
        points.push(Point { symbol: index, offset: start + placement.offset(), placement });
    }
    Ok((points, missing))
}

/// Names of the driver's allocating functions follow a few patterns.
fn looks_like_allocator(name: &str) -> bool {
    const OBJECTS: [&str; 4] = ["cuMem", "cuArray", "cuMipmappedArray", "cuGraphAddMem"];
    const NOT_MEMORY: [&str; 5] = ["Get", "Set", "Free", "Retain", "Pool"];
    const MAKERS: [&str; 5] = ["Alloc", "Create", "HostRegister", "ImportFromShareableHandle", "OpenMemHandle"];
    let imports = ["cuIpcOpenMemHandle", "cuImportExternalMemory"].iter().any(|prefix| name.starts_with(prefix));
    let allocates = OBJECTS.iter().any(|prefix| name.starts_with(prefix))
        && MAKERS.iter().any(|word| name.contains(word))
        && (name.contains("FromPool") || !NOT_MEMORY.iter().any(|word| name.contains(word)));
    imports || allocates
}

/// The driver's files are named `libcuda.so.<version>`; `libcuda.so.1` is a link to one.
fn version_of(file: &File, path: &Path) -> Option<String> {
    let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
    [real.as_deref(), Some(path)].into_iter().flatten().find_map(version_in_name)
}

fn version_in_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.as_bytes();
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    let version = std::str::from_utf8(name).ok()?.strip_prefix("libcuda.so.")?;
    let numbers = version.split('.').collect::<Vec<_>>();
    let plausible = (2..=4).contains(&numbers.len())
        && numbers.iter().all(|n| (1..=6).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()));
    plausible.then(|| version.to_owned())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn type_name(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Directory => "directory",
        FileType::Fifo => "named pipe",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "character device",
        FileType::BlockDevice => "block device",
        FileType::Symlink => "symbolic link",
        FileType::RegularFile => "regular file",
        FileType::Unknown => "file of unknown type",
    }
}

#[cfg(test)]
mod tests {
    use super::{LibraryIdentity, looks_like_allocator, version_in_name};
    use std::path::Path;

    #[test]
    fn versions_come_from_real_names_only() {
        let version = |name: &str| version_in_name(Path::new(name));
        assert_eq!(version("/usr/lib/x86_64-linux-gnu/libcuda.so.555.58.02").as_deref(), Some("555.58.02"));
        assert_eq!(version("/x/libcuda.so.535.261.03 (deleted)").as_deref(), Some("535.261.03"));
        for name in
            ["/x/libcuda.so.1", "/x/libcuda.so", "/x/libcudart.so.12.9", "/x/libcuda.so.5a.2", "/x/libcuda.so.1..2"]
        {
            assert_eq!(version(name), None, "{name}");
        }
    }

    #[test]
    fn allocators_are_told_from_their_neighbours() {
        for name in [
            "cuMemAllocFancy_v7",
            "cuMemCreate_v2",
            "cuArrayCreate_v2",
            "cuArray3DCreate_v2",
            "cuMipmappedArrayCreate",
            "cuMemHostRegister_v2",
            "cuMemImportFromShareableHandle",
            "cuIpcOpenMemHandle_v2",
            "cuImportExternalMemory",
            "cuGraphAddMemAllocNode",
            "cuMemAllocFromPoolAsync_v2",
        ] {
            assert!(looks_like_allocator(name), "{name}");
        }
        for name in [
            "cuMemGetAllocationGranularity",
            "cuMemGetAllocationPropertiesFromHandle",
            "cuMemRetainAllocationHandle",
            "cuMemPoolCreate",
            "cuGraphMemAllocNodeGetParams",
            "cuMemFree_v2",
            "cuStreamCreate",
            "cuMemcpyDtoH_v2",
            "malloc",
        ] {
            assert!(!looks_like_allocator(name), "{name}");
        }
    }

    #[test]
    fn overlay_mounts_of_one_file_are_one_library() {
        let id = |build_id: Option<&str>, inode, device| LibraryIdentity {
            build_id: build_id.map(str::to_owned),
            inode,
            device,
            size: 100,
        };
        assert!(id(Some("ab"), 7, 1).is_same_file(&id(Some("ab"), 7, 2)), "another overlay");
        assert!(!id(Some("ab"), 7, 1).is_same_file(&id(Some("ab"), 8, 1)), "a copy");
        assert!(!id(Some("ab"), 7, 1).is_same_file(&id(Some("cd"), 7, 1)), "a reused inode");
        assert!(!id(None, 7, 1).is_same_file(&id(None, 7, 2)), "nothing but the device tells them apart");
        assert!(id(None, 7, 1).is_same_file(&id(None, 7, 1)));
    }
}
