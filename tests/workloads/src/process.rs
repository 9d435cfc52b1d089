//! Names, children and forks.

use std::{
    ffi::CString,
    io::Read,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};
use rustix::{
    fs::FileType,
    io::FdFlags,
    mm::{MapFlags, ProtFlags, mmap},
};

use crate::{cli::Options, report::Event, run::Run};

/// The kernel keeps this many bytes of a process name.
const COMM_BYTES: usize = 15;

/// Sets the name that `ps` and `/proc/PID/comm` show.
pub(crate) fn set_name(name: &str) -> Result<()> {
    let comm: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(COMM_BYTES).collect();
    let comm = CString::new(comm).context("a process name has no NUL byte")?;
    rustix::thread::set_name(&comm).with_context(|| format!("setting the process name {name:?}"))
}

/// A command that runs this program anew with the driver options of this process.
pub(crate) fn command(options: &Options, role: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
    command.arg("--name").arg(role).args(options.driver_arguments()).stdin(Stdio::null());
    Ok(command)
}

/// Starts a child and reports it. It does not end with this process.
pub(crate) fn spawn(run: &Run, command: &mut Command, role: &str) -> Result<Child> {
    let child = command.spawn().with_context(|| format!("starting the child {role}"))?;
    run.report.emit(Event::Child { child_pid: child.id(), child_role: role });
    Ok(child)
}

/// Waits for a child and reports how it ended.
pub(crate) fn wait(run: &Run, mut child: Child) -> Result<()> {
    let status = child.wait().context("waiting for a child")?;
    run.report.emit(Event::ChildEnd { child_pid: child.id(), code: status.code() });
    Ok(())
}

/// Which side of a fork this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forked {
    /// The parent, with the child's process id.
    Parent(i32),
    /// The child.
    Child,
}

/// `fork` without exec: the child shares the parent's driver state and open device files.
pub(crate) fn fork(run: &Run, role: &str) -> Result<Forked> {
    // SAFETY: callers fork from the main thread while no other thread runs, so no lock is held by a thread that
    // does not exist in the child.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("forking"),
        0 => {
            run.become_child(role);
            Ok(Forked::Child)
        }
        child => {
            run.report.emit(Event::Child { child_pid: child.cast_unsigned(), child_role: role });
            Ok(Forked::Parent(child))
        }
    }
}

/// Maps every regular file that is open and closes it: the kernel keeps a file open while it is mapped.
pub(crate) fn keep_files_only_mapped() -> Result<()> {
    let descriptors = std::fs::read_dir("/proc/self/fd").context("listing descriptors")?;
    let descriptors: Vec<i32> =
        descriptors.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for descriptor in descriptors.into_iter().filter(|descriptor| *descriptor > 2) {
        // SAFETY: nothing else in this process closes descriptors while it is looked at.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let regular =
            rustix::fs::fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        if regular {
            // SAFETY: the kernel chooses the place, and nothing reads or writes there.
            unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, file, 0) }
                .context("mapping a file")?;
            // SAFETY: its owner makes no further call in this process.
            unsafe { rustix::io::close(descriptor) };
        }
    }
    Ok(())
}

/// Waits for a forked child and reports how it ended.
pub(crate) fn wait_forked(run: &Run, child: i32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(child);
    let ended = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).context("waiting for a child")?;
    let code = ended.and_then(|(_, status)| status.exit_status());
    run.report.emit(Event::ChildEnd { child_pid: child.cast_unsigned(), code });
    Ok(())
}

/// Ends a forked child with SIGTERM and waits for it.
pub(crate) fn end_forked(run: &Run, child: i32) -> Result<()> {
    if let Some(pid) = rustix::process::Pid::from_raw(child) {
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("ending a child")?;
    }
    wait_forked(run, child)
}

/// Lets a parent wait until the children it starts have reached their steady state or have ended.
pub(crate) struct ReadyPipe {
    reader: std::fs::File,
    writer: OwnedFd,
}

impl ReadyPipe {
    /// Opens the pipe. Its write end, and only that, is inherited by children started afterwards.
    pub(crate) fn new() -> Result<Self> {
        let (reader, writer) = rustix::pipe::pipe().context("opening a pipe")?;
        rustix::io::fcntl_setfd(reader.as_fd(), FdFlags::CLOEXEC)
            .context("keeping the pipe's read end from children")?;
        Ok(Self { reader: reader.into(), writer })
    }

    /// The descriptor number that a child is told with `--ready-fd`.
    pub(crate) fn child_descriptor(&self) -> i32 {
        self.writer.as_raw_fd()
    }

    /// Returns when every child has closed its write end.
    pub(crate) fn wait(self) -> Result<()> {
        let Self { mut reader, writer } = self;
        drop(writer);
        reader.read_to_end(&mut Vec::new()).map(drop).context("waiting for the children to be ready")
    }
}

/// Tells the parent that waits on `descriptor` that this process is ready.
pub(crate) fn announce_ready(descriptor: i32) {
    // SAFETY: the number comes from the parent's ReadyPipe, which made it for this process; nothing else here owns it.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
}
