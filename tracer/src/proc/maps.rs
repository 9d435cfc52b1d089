//! What a process has mapped, from `/proc/PID/maps`.

use super::process::{ProcError, Process};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Longest list of mappings that is read; 64 MiB is some 600,000 mappings, ten times what the kernel
/// allows a process unless told otherwise.
const MAPS: usize = 64 << 20;

/// Everything one process had mapped when it was asked.
#[derive(Debug)]
pub struct Maps(Vec<u8>);

/// One mapped file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Path in the process's mount namespace; absolute.
    pub path: PathBuf,
    /// Inode number the kernel reports.
    pub inode: u64,
    /// Whether the name is gone or belongs to another file now.
    pub deleted: bool,
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
}

impl Maps {
    /// Reads the mappings of `process`. A list that is longer than can be read is an error: what is
    /// not in it could not be told from what was not read.
    pub fn read(process: &Process) -> Result<Self, ProcError> {
        let bytes = process.read("maps", MAPS)?;
        if bytes.len() == MAPS {
            return Err(ProcError::TooLong { pid: process.pid(), what: "maps" });
        }
        Ok(Self(bytes))
    }

    /// Mapped files with `part` in their path, in order of address.
    pub fn naming<'a>(&'a self, part: &'a [u8]) -> impl Iterator<Item = Mapping> + 'a {
        let maps = self.0.as_slice();
        let mut position = 0;
        // Nearly all processes have none: search for the name before taking lines apart.
        memchr::memmem::find_iter(maps, part).filter_map(move |hit| {
            if hit < position {
                return None;
            }
            let start = memchr::memrchr(b'\n', &maps[..hit]).map_or(0, |newline| newline + 1);
            let end = memchr::memchr(b'\n', &maps[hit..]).map_or(maps.len(), |length| hit + length);
            position = end;
            Mapping::parse(&maps[start..end])
        })
    }
}

impl Mapping {
    /// `7f00-7f01 r-xp 00000000 08:01 4711    /usr/lib/libcuda.so.1`, a newline in the path as `\012`.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let start = rest.iter().position(|byte| *byte != b' ')?;
            let length = memchr::memchr(b' ', &rest[start..])?;
            let (field, after) = rest[start..].split_at(length);
            rest = after;
            std::str::from_utf8(field).ok()
        };
        let (start, end) = field()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let (_permissions, _offset, _device) = (field()?, field()?, field()?);
        let inode = field()?.parse().ok()?;
        let path = rest.trim_ascii_start();
        let (path, deleted) = match path.strip_suffix(b" (deleted)") {
            Some(path) => (path, true),
            None => (path, false),
        };
        let path = PathBuf::from(OsString::from_vec(unescape_newlines(path)));
        path.is_absolute().then_some(Self { path, inode, deleted, start, end })
    }

    /// Its name in `/proc/PID/map_files`.
    pub fn range(&self) -> String {
        format!("{:x}-{:x}", self.start, self.end)
    }

    /// Bytes of address space.
    pub fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

fn unescape_newlines(path: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(hit) = memchr::memmem::find(rest, b"\\012") {
        plain.extend_from_slice(&rest[..hit]);
        plain.push(b'\n');
        rest = &rest[hit + 4..];
    }
    plain.extend_from_slice(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::{Mapping, Maps};
    use std::path::Path;

    #[test]
    fn a_line_of_maps() {
        let line = b"7f2c00000000-7f2c00a00000 r-xp 00000000 103:02 4711                 /usr/lib/libcuda.so.555.58.02";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.path, Path::new("/usr/lib/libcuda.so.555.58.02"));
        assert_eq!((mapping.inode, mapping.deleted, mapping.bytes()), (4711, false, 10 << 20));
        assert_eq!(mapping.range(), "7f2c00000000-7f2c00a00000");
    }

    #[test]
    fn low_addresses_are_padded_in_the_list_and_not_in_the_folder() {
        assert_eq!(Mapping::parse(b"00400000-00401000 r-xp 0 08:01 9 /bin/a").unwrap().range(), "400000-401000");
    }

    #[test]
    fn deleted_files_spaces_and_newlines() {
        let mapping = Mapping::parse(b"1-2 r--p 0 08:01 9 /a b\\012c/libcuda.so.1 (deleted)").unwrap();
        assert_eq!(mapping.path, Path::new("/a b\nc/libcuda.so.1"));
        assert!(mapping.deleted);
    }

    #[test]
    fn other_lines() {
        let lines: [&[u8]; 6] = [
            b"",
            b"1-2 rw-p 0 00:00 0 [heap]",
            b"1-2 r--p 0 08:01 x /libcuda.so.1",
            b"1-2 r--p 0 00:01 3 libcuda.so.1",
            b"1-2 r--p",
            b"x-2 r--p 0 08:01 9 /libcuda.so.1",
        ];
        for line in lines {
            assert_eq!(Mapping::parse(line), None, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn each_line_that_names_the_part_is_found_once() {
        let maps = Maps(
            b"1-2 r--p 0 0:1 1 /a/nvidia/nvidia0\n2-3 r--p 0 0:1 2 /b\n3-4 r--p 0 0:1 3 /nvidiactl\n4-5 rw-p 0 0:0 0 "
                .to_vec(),
        );
        let found: Vec<u64> = maps.naming(b"/nvidia").map(|mapping| mapping.inode).collect();
        assert_eq!(found, [1, 3]);
    }
}
