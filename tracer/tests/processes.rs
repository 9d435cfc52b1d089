//! Process facts, from made-up `/proc` trees where the case is rare and from real processes where not.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vramtrace::proc::{
    CudaEnvironment, DeviceFiles, Presence, ProcError, ProcRoot, Watch, absent, look_up, proc_start, snapshot,
};
use vramtrace::record::{Event, Identity, Text};

/// A `/proc` of our own.
struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    fn new() -> Self {
        // Memory is where the kernel's own tree is as well, and 10,000 folders on a disk take a while.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let tree = Self { folder: folder.unwrap() };
        tree.process(1, "systemd", 0, 3, "/init.scope");
        tree
    }

    fn root(&self) -> ProcRoot {
        ProcRoot::new(self.folder.path())
    }

    fn path(&self, pid: u32) -> PathBuf {
        self.folder.path().join(pid.to_string())
    }

    fn process(&self, pid: u32, comm: &str, ppid: u32, ticks: u64, cgroup: &str) {
        let path = self.path(pid);
        fs::create_dir_all(path.join("fd")).unwrap();
        let stat = format!("{pid} ({comm}) S {ppid} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0 0\n");
        fs::write(path.join("stat"), stat).unwrap();
        fs::write(path.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
        fs::write(path.join("status"), format!("Name:\t{comm}\nNSpid:\t{pid}\n")).unwrap();
        fs::write(path.join("wchan"), "do_epoll_wait").unwrap();
        fs::write(path.join("maps"), "").unwrap();
    }

    fn open(&self, pid: u32, descriptor: u32, target: &str) {
        symlink(target, self.path(pid).join("fd").join(descriptor.to_string())).unwrap();
    }
}

fn no_devices() -> DeviceFiles {
    DeviceFiles::read(Path::new("/nonexistent/dev"))
}

fn files_of(folder: &Path) -> DeviceFiles {
    DeviceFiles::read(folder)
}

#[test]
fn holders_are_found_with_the_names_of_their_files() {
    let tree = Tree::new();
    let devices = tempfile::tempdir().unwrap();
    for name in ["nvidia0", "nvidiactl", "null"] {
        fs::write(devices.path().join(name), "").unwrap();
    }
    // The same file under another folder, as a container has it.
    let elsewhere = tempfile::tempdir().unwrap();
    fs::hard_link(devices.path().join("nvidia0"), elsewhere.path().join("nvidia0")).unwrap();
    fs::write(elsewhere.path().join("nvidia-notes"), "").unwrap();

    tree.process(50, "python3", 1, 700, "/");
    let folder = devices.path().display();
    for (descriptor, target) in [
        format!("{folder}/nvidiactl"),
        format!("{folder}/nvidia0"),
        format!("{folder}/nvidia0"),
        "socket:[1]".to_owned(),
    ]
    .iter()
    .enumerate()
    {
        tree.open(50, descriptor as u32, target);
    }
    tree.process(60, "in container", 1, 800, "/");
    tree.open(60, 3, elsewhere.path().join("nvidia0").to_str().unwrap());
    tree.process(70, "bystander", 1, 900, "/");
    tree.open(70, 3, elsewhere.path().join("nvidia-notes").to_str().unwrap());
    tree.open(70, 4, &format!("{folder}/null"));
    fs::create_dir(tree.folder.path().join("sys")).unwrap();

    let files = files_of(devices.path());
    assert_eq!(files.len(), 2);
    let scan = files.scan(&tree.root()).unwrap();
    assert!(scan.complete);
    let holders: Vec<_> =
        scan.holders.iter().map(|h| (h.identity.tgid, h.identity.start_ns, h.comm.as_str(), h.files.clone())).collect();
    assert_eq!(
        holders,
        [
            (50, 7_000_000_000, "python3", vec![Text::from("nvidia0"), "nvidiactl".into()]),
            (60, 8_000_000_000, "in container", vec!["nvidia0".into()]),
        ]
    );
    assert!(matches!(scan.into_event(), Event::FdScan { complete: true, holders } if holders.len() == 2));
}

#[test]
fn a_search_that_missed_somebody_says_so() {
    let tree = Tree::new();
    tree.process(50, "a", 1, 700, "/");
    // A file where the descriptors' folder should be fails as an unreadable folder does.
    fs::remove_dir(tree.path(50).join("fd")).unwrap();
    fs::write(tree.path(50).join("fd"), "").unwrap();
    let scan = no_devices().scan(&tree.root()).unwrap();
    assert!(!scan.complete);
    assert_eq!(scan.unreadable, [50]);

    // A process that is gone is no gap.
    fs::remove_dir_all(tree.path(50)).unwrap();
    assert!(no_devices().scan(&tree.root()).unwrap().complete);

    // Without process 1, others are hidden too.
    fs::remove_dir_all(tree.path(1)).unwrap();
    assert!(!no_devices().scan(&tree.root()).unwrap().complete);

    let missing = ProcRoot::new("/nonexistent/proc");
    assert!(matches!(no_devices().scan(&missing), Err(ProcError::List { .. })));
}

#[test]
fn a_snapshot_has_users_and_all_their_ancestors_parents_first() {
    let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let pod = "/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice";
    let cgroup = format!("{pod}/cri-containerd-{id}.scope");
    let tree = Tree::new();
    tree.process(40, "containerd-shim", 1, 500, "/system.slice/containerd.service");
    tree.process(50, "vllm", 40, 600, &cgroup);
    tree.process(51, "VLLM::EngineCor", 50, 650, &cgroup);
    tree.process(52, "map\x1b[2Jper", 50, 660, &cgroup);
    tree.process(60, "bash", 1, 700, "/user.slice");
    fs::write(tree.path(51).join("status"), "NSpid:\t51\t7\n").unwrap();
    tree.open(51, 9, "/nonexistent/dev/nvidia0");

    let scan = no_devices().scan(&tree.root()).unwrap();
    let events = snapshot(&tree.root(), &scan, &BTreeSet::from([52, 99]));
    let seen: Vec<_> = events
        .iter()
        .map(|event| match event {
            Event::ProcSnapshot { life, state, gpu_fds } => {
                assert_eq!((state.as_str(), life.task.pid), ("S", life.task.identity.tgid));
                (life.task.pid, life.task.comm.as_str(), life.ppid, life.nspid, gpu_fds.len())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        seen,
        [
            (1, "systemd", 0, None, 0),
            (40, "containerd-shim", 1, None, 0),
            (50, "vllm", 40, None, 0),
            (51, "VLLM::EngineCor", 50, Some(7), 1),
            (52, "map\\u{1b}[2Jper", 50, None, 0),
        ]
    );
    let Event::ProcSnapshot { life, .. } = &events[3] else { panic!() };
    assert_eq!(life.cgroup, cgroup);
    assert_eq!(life.container.as_deref(), Some(id));
    assert_eq!(life.pod.as_deref(), Some("11111111-2222-3333-4444-555555555555"));
    let Event::ProcStart { life: later } = proc_start(&tree.root(), 51).unwrap() else { panic!() };
    assert_eq!(&later, life);
}

#[test]
fn a_circle_of_parents_ends() {
    let tree = Tree::new();
    tree.process(50, "a", 51, 600, "/");
    tree.process(51, "b", 50, 600, "/");
    let events = snapshot(&tree.root(), &no_devices().scan(&tree.root()).unwrap(), &BTreeSet::from([50]));
    assert_eq!(events.len(), 2);
}

#[test]
fn looking_up_tells_a_process_from_its_successor() {
    let tree = Tree::new();
    tree.process(50, "worker", 1, 700, "/a (deleted)");
    let root = tree.root();
    let identity = root.identity(50).unwrap();
    assert_eq!(identity, Identity { tgid: 50, start_ns: 7_000_000_000 });
    let comm = Text::from("worker");
    let Event::ProcState { state, ppid, wchan, cgroup, .. } = look_up(&root, identity, &comm).unwrap() else {
        panic!()
    };
    assert_eq!((state.as_str(), ppid), ("S", 1));
    assert_eq!((wchan.as_deref(), cgroup.as_deref()), (Some("do_epoll_wait"), Some("/a (deleted)")));

    let earlier = Identity { start_ns: 6_990_000_000, ..identity };
    assert_eq!(look_up(&root, earlier, &comm).unwrap(), absent(earlier, &comm));
    fs::remove_dir_all(tree.path(50)).unwrap();
    assert_eq!(look_up(&root, identity, &comm).unwrap(), absent(identity, &comm));
}

#[test]
fn kernel_times_are_floored_to_ticks() {
    let root = ProcRoot::default();
    assert_eq!(root.floor_to_tick(1_000_019_999_999), 1_000_010_000_000);
    assert_eq!(root.floor_to_tick(1_000_020_000_000), 1_000_020_000_000);
}

#[test]
fn only_the_two_variables_are_kept_and_the_first_wins() {
    let tree = Tree::new();
    let environment =
        b"A=1\0CUDA_VISIBLE_DEVICES=2,0\0XCUDA_DEVICE_ORDER=no\0CUDA_DEVICE_ORDER=PCI_BUS_ID\0CUDA_VISIBLE_DEVICES=7\0";
    fs::write(tree.path(1).join("environ"), environment).unwrap();
    let expected =
        CudaEnvironment { visible_devices: Some("2,0".to_owned()), device_order: Some("PCI_BUS_ID".to_owned()) };
    assert_eq!(tree.root().process(1).unwrap().cuda_environment().unwrap(), expected);
    fs::write(tree.path(1).join("environ"), vec![b'x'; 8 << 20]).unwrap();
    assert_eq!(tree.root().process(1).unwrap().cuda_environment().unwrap(), CudaEnvironment::default());
}

/// A child that is ended when the test is.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper() -> Guard {
    Guard(Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().unwrap())
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(5), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_watch_sees_the_end_and_the_collection() {
    let root = ProcRoot::default();
    let mut child = sleeper();
    let identity = root.identity(child.0.id()).unwrap();
    let watch = Watch::open(&root, identity).unwrap();
    assert_eq!(watch.presence().unwrap(), Presence::Running);
    assert!(matches!(look_up(&root, identity, &Text::default()).unwrap(), Event::ProcState { .. }));

    child.0.kill().unwrap();
    until("it ends", || watch.presence().unwrap() == Presence::Zombie);
    let Event::ProcState { state, .. } = look_up(&root, identity, &Text::default()).unwrap() else { panic!() };
    assert_eq!(state, "Z");

    child.0.wait().unwrap();
    assert_eq!(watch.presence().unwrap(), Presence::Reaped);
    assert!(matches!(watch.reaped(), Event::Reap { task } if task.identity == identity && task.comm == "sleep"));
    assert!(matches!(look_up(&root, identity, &Text::default()).unwrap(), Event::ProcAbsent { .. }));
    assert!(matches!(Watch::open(&root, identity), Err(ProcError::Gone { .. })));
}

#[test]
fn a_watch_is_never_opened_on_somebody_else() {
    let root = ProcRoot::default();
    let child = sleeper();
    let identity = root.identity(child.0.id()).unwrap();
    let other = Identity { start_ns: identity.start_ns + 10_000_000, ..identity };
    assert!(matches!(Watch::open(&root, other), Err(ProcError::Gone { .. })));
}

#[test]
fn an_inherited_descriptor_of_a_real_process_is_found() {
    let devices = tempfile::tempdir().unwrap();
    let device = devices.path().join("nvidia0");
    fs::write(&device, "").unwrap();
    let file = fs::File::open(&device).unwrap();
    let child = Guard(Command::new("sleep").arg("60").stdin(file).spawn().unwrap());
    let root = ProcRoot::default();
    let files = files_of(devices.path());
    let held = || {
        let scan = files.scan(&root).unwrap();
        let holder = scan.holders.into_iter().find(|holder| holder.identity.tgid == child.0.id());
        holder.map(|holder| holder.files).unwrap_or_default()
    };
    assert_eq!(held(), ["nvidia0"]);
    fs::remove_file(&device).unwrap();
    assert_eq!(held(), ["nvidia0"], "its name is gone, it is not");
}

#[test]
fn one_holder_among_ten_thousand_processes_is_found() {
    let tree = Tree::new();
    for pid in 2..10_002 {
        tree.process(pid, "x", 1, 100, "/");
        tree.open(pid, 0, "/dev/null");
    }
    tree.open(9_999, 9, "/nonexistent/dev/nvidia0");
    let scan = no_devices().scan(&tree.root()).unwrap();
    assert_eq!(scan.holders.iter().map(|holder| holder.identity.tgid).collect::<Vec<_>>(), [9_999]);
}

#[test]
fn a_file_that_is_only_mapped_is_held() {
    let tree = Tree::new();
    tree.process(50, "loader", 1, 700, "/");
    let maps = "00400000-00401000 r-xp 00000000 08:01 9 /bin/loader\n\
        7f0000000000-7f0000001000 rw-s 00000000 00:05 77 /nonexistent/dev/nvidia0\n\
        7f0000002000-7f0000005000 rw-s 00001000 00:05 77 /nonexistent/dev/nvidia0\n\
        7f0000006000-7f0000007000 rw-s 00000000 00:05 78 /nonexistent/dev/nvidia-caps/nvidia-cap1 (deleted)\n\
        7f0000008000-7f0000009000 r--p 00000000 08:01 79 /usr/lib/nvidia/libnvidia-ml.so.1\n";
    fs::write(tree.path(50).join("maps"), maps).unwrap();
    let mapped = no_devices().mapped_in(&tree.root().process(50).unwrap()).unwrap();
    assert_eq!((mapped.count, mapped.bytes), (3, 0x5000));
    let scan = no_devices().scan(&tree.root()).unwrap();
    let holders: Vec<_> = scan.holders.iter().map(|holder| (holder.identity.tgid, holder.files.clone())).collect();
    assert_eq!(holders, [(50, vec![Text::from("nvidia-caps/nvidia-cap1"), "nvidia0".into()])]);
}

#[test]
fn a_mapping_of_a_real_process_outlives_its_descriptor() {
    let devices = tempfile::tempdir().unwrap();
    let device = devices.path().join("nvidia0");
    fs::write(&device, [0; 4096]).unwrap();
    // Under another folder, as a container has it: only a look at the file itself tells.
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("nvidia0");
    fs::hard_link(&device, &link).unwrap();
    let file = fs::File::open(&link).unwrap();
    // SAFETY: the kernel chooses the place of the new mapping, and nothing reads it.
    let address = unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, 0) }.unwrap();
    drop(file);
    let root = ProcRoot::default();
    let files = files_of(devices.path());
    let held = || {
        let holders = files.scan(&root).unwrap().holders;
        holders.into_iter().find(|holder| holder.identity.tgid == std::process::id()).map(|holder| holder.files)
    };
    assert_eq!(held(), Some(vec![Text::from("nvidia0")]));
    // SAFETY: the mapping was made above, and no reference into it exists.
    unsafe { munmap(address, 4096) }.unwrap();
    assert_eq!(held(), None);
}

#[test]
fn mappings_that_cannot_be_read_are_a_gap() {
    let tree = Tree::new();
    tree.process(50, "a", 1, 700, "/");
    fs::remove_file(tree.path(50).join("maps")).unwrap();
    fs::create_dir(tree.path(50).join("maps")).unwrap();
    let scan = no_devices().scan(&tree.root()).unwrap();
    assert_eq!((scan.complete, scan.unreadable), (false, vec![50]));
}

#[test]
fn a_process_whose_first_thread_ended_is_looked_at_through_the_others() {
    let tree = Tree::new();
    tree.process(50, "leader", 1, 700, "/");
    let stat = "50 (leader) Z 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 2 0 700 0 0\n";
    fs::write(tree.path(50).join("stat"), stat).unwrap();
    let thread = tree.path(50).join("task/51");
    fs::create_dir_all(thread.join("fd")).unwrap();
    fs::write(thread.join("maps"), "").unwrap();
    symlink("/nonexistent/dev/nvidia0", thread.join("fd/3")).unwrap();
    let scan = no_devices().scan(&tree.root()).unwrap();
    let holders: Vec<_> = scan.holders.iter().map(|holder| (holder.identity.tgid, holder.comm.as_str())).collect();
    assert_eq!((holders, scan.complete), (vec![(50, "leader")], true));
}
