//! Libraries are found in every mount namespace, each once, and what cannot be read is said.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use vramtrace::probe::discover::{DiscoverConfig, DiscoverError, Discovery, Origin, discover};
use vramtrace::probe::library::LibraryError;
use vramtrace::proc::ProcRoot;

const DRIVER: &str =
    "int cuInit(unsigned f) { return 100; } int cuMemAlloc_v2(void **p, unsigned long n) { return 3; }";

fn compile(arguments: &[&str], output: &Path, source: &str) {
    let input = output.with_extension("c");
    fs::write(&input, source).unwrap();
    let status = Command::new("cc").arg("-o").arg(output).arg(&input).args(arguments).status().unwrap();
    assert!(status.success());
}

fn library(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    compile(&["-shared", "-fPIC", "-nostdlib", "-Wl,--build-id"], &path, DRIVER);
    path
}

/// A program that loads the library it is given, says so, and waits for its input to close.
fn loader(folder: &Path) -> PathBuf {
    let path = folder.join("loader");
    let source = "#include <dlfcn.h>\n#include <stdio.h>\n#include <unistd.h>\nint main(int c, char **v) { char b; if (!dlopen(v[1], RTLD_NOW)) { puts(dlerror()); return 1; } write(1, \"+\", 1); return read(0, &b, 1); }";
    compile(&["-ldl"], &path, source);
    path
}

struct Client(Child);

impl Client {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        assert_eq!(&ready, b"+");
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn search(pids: &[u32]) -> Discovery {
    let mut discovery = Discovery::default();
    for pid in pids {
        discovery.search_process(&ProcRoot::default(), *pid);
    }
    discovery
}

#[test]
fn processes_that_share_a_library_are_listed_under_it() {
    let folder = tempfile::tempdir().unwrap();
    let (library, loader) = (library(folder.path(), "libcuda.so.1"), loader(folder.path()));
    let clients = [0, 1].map(|_| Client::start(Command::new(&loader).arg(&library)));
    let pids = clients.each_ref().map(Client::pid);
    let discovery = search(&pids);
    assert_eq!(discovery.found.len(), 1);
    let found = &discovery.found[0];
    assert_eq!(found.library.path, library);
    assert_eq!((found.origin, &found.pids), (Origin::Mapped, &BTreeSet::from(pids)));
    assert_eq!(found.library.identity.inode, fs::metadata(&library).unwrap().ino());
    assert_eq!(discovery.users(), BTreeSet::from(pids));
    assert!(discovery.refused.is_empty() && discovery.unreadable.is_empty());
}

#[test]
fn the_whole_host_is_searched_and_each_library_is_found_once() {
    let folder = tempfile::tempdir().unwrap();
    let (library, loader) = (library(folder.path(), "libcuda.so.1"), loader(folder.path()));
    symlink("libcuda.so.1", folder.path().join("libcuda.so")).unwrap();
    let client = Client::start(Command::new(&loader).arg(&library));
    let config = DiscoverConfig {
        folders: vec![folder.path().to_owned()],
        explicit: vec![folder.path().join("libcuda.so"), "/nonexistent/libcuda.so.1".into()],
        ..DiscoverConfig::default()
    };
    let discovery = discover(&config);
    let ours: Vec<_> = discovery.found.iter().filter(|f| f.library.path.starts_with(folder.path())).collect();
    assert_eq!(ours.len(), 1);
    assert_eq!((ours[0].origin, &ours[0].pids), (Origin::Configured, &BTreeSet::from([client.pid()])));
    let refused = discovery.refused.iter().find(|r| r.path == Path::new("/nonexistent/libcuda.so.1")).unwrap();
    assert!(matches!(refused.reason, DiscoverError::Library(LibraryError::Open { .. })));
}

#[test]
fn a_library_in_another_mount_namespace_is_the_mapped_one() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    let outside = folder.path().join("outside");
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    let hidden = library(&inside, "libcuda.so.1");
    let visible = library(&outside, "libcuda.so.1");
    let loader = loader(folder.path());
    // In its own namespace the client sees the one under the name of the other.
    let script = format!(
        "mount --bind '{}' '{}' && exec '{}' '{}'",
        inside.display(),
        outside.display(),
        loader.display(),
        visible.display()
    );
    let client = Client::start(Command::new("unshare").args(["-m", "sh", "-c", &script]));
    let discovery = search(&[client.pid()]);
    assert_eq!(discovery.found[0].library.path, visible);
    assert_eq!(discovery.found[0].library.identity.inode, fs::metadata(&hidden).unwrap().ino());
    assert_ne!(discovery.found[0].library.identity.inode, fs::metadata(&visible).unwrap().ino());
}

#[test]
fn a_replaced_library_is_still_found_in_the_process_that_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let (path, loader) = (library(folder.path(), "libcuda.so.1"), loader(folder.path()));
    let old = fs::metadata(&path).unwrap().ino();
    let client = Client::start(Command::new(&loader).arg(&path));
    let new = library(folder.path(), "libcuda.so.2");
    fs::rename(&new, &path).unwrap();
    let discovery = search(&[client.pid()]);
    assert_eq!(discovery.found[0].library.identity.inode, old);
    assert_ne!(fs::metadata(&path).unwrap().ino(), old);
    assert_eq!(fs::metadata(discovery.found[0].library.attach_path()).unwrap().ino(), old);
}

/// A made-up process whose root folder we control; it has no `map_files`, so names are followed.
struct Process {
    folder: tempfile::TempDir,
}

impl Process {
    fn new(mapped: &str, inode: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("77");
        fs::create_dir_all(process.join("root/usr/lib")).unwrap();
        fs::write(process.join("maps"), format!("1000-2000 r-xp 00000000 08:01 {inode} {mapped}\n")).unwrap();
        Self { folder }
    }

    fn lib(&self) -> PathBuf {
        self.folder.path().join("77/root/usr/lib")
    }

    fn search(&self) -> Discovery {
        let mut discovery = Discovery::default();
        discovery.search_process(&ProcRoot::new(self.folder.path()), 77);
        discovery
    }
}

#[test]
fn by_name_the_inode_must_match_and_links_stay_inside() {
    let outside = tempfile::tempdir().unwrap();
    let target = library(outside.path(), "libcuda.so.1");
    let inode = fs::metadata(&target).unwrap().ino();

    let honest = Process::new("/usr/lib/libcuda.so.1", inode);
    fs::hard_link(&target, honest.lib().join("libcuda.so.1")).unwrap();
    assert_eq!(honest.search().found[0].pids, BTreeSet::from([77]));

    let escaping = Process::new("/usr/lib/libcuda.so.1", inode);
    symlink(&target, escaping.lib().join("libcuda.so.1")).unwrap();
    let discovery = escaping.search();
    assert!(discovery.found.is_empty());
    assert!(
        matches!(discovery.refused[0].reason, DiscoverError::Unreachable { pid: 77, .. }),
        "the link leads nowhere inside"
    );

    let climbing = Process::new("/usr/lib/libcuda.so.1", inode);
    let up = format!("{}{}", "../".repeat(40), target.strip_prefix("/").unwrap().display());
    symlink(up, climbing.lib().join("libcuda.so.1")).unwrap();
    assert!(climbing.search().found.is_empty());

    let replaced = Process::new("/usr/lib/libcuda.so.1", inode + 1);
    fs::hard_link(&target, replaced.lib().join("libcuda.so.1")).unwrap();
    let discovery = replaced.search();
    assert!(matches!(discovery.refused[0].reason, DiscoverError::Replaced { .. }));
    assert_eq!(discovery.users(), BTreeSet::from([77]), "it uses the driver all the same");

    let deleted = Process::new("/usr/lib/libcuda.so.1 (deleted)", inode);
    fs::hard_link(&target, deleted.lib().join("libcuda.so.1")).unwrap();
    assert!(matches!(deleted.search().refused[0].reason, DiscoverError::Replaced { .. }));
}

#[test]
fn a_pipe_in_place_of_the_library_stops_nobody() {
    let process = Process::new("/usr/lib/libcuda.so.1", 0);
    let pipe = process.lib().join("libcuda.so.1");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let inode = fs::symlink_metadata(&pipe).unwrap().ino();
    let maps = format!("1000-2000 r-xp 00000000 08:01 {inode} /usr/lib/libcuda.so.1\n");
    fs::write(process.folder.path().join("77/maps"), maps).unwrap();
    let reason = &process.search().refused[0].reason;
    assert!(matches!(reason, DiscoverError::Library(LibraryError::NotAFile { found: "named pipe", .. })), "{reason}");
}

#[test]
fn a_process_with_many_mappings_of_one_library_counts_once() {
    let folder = tempfile::tempdir().unwrap();
    let target = library(folder.path(), "libcuda.so.1");
    let inode = fs::metadata(&target).unwrap().ino();
    let process = Process::new("/usr/lib/libcuda.so.1", inode);
    fs::hard_link(&target, process.lib().join("libcuda.so.1")).unwrap();
    let line = format!("1000-2000 r-xp 00000000 08:01 {inode} /usr/lib/libcuda.so.1\n1000-2000 rw-p 0 00:00 0 \n");
    fs::write(process.folder.path().join("77/maps"), line.repeat(5000)).unwrap();
    assert_eq!(process.search().found.len(), 1);
}
