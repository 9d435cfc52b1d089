//! Watching a process through its end, without any chance of confusing it with another.

use super::process::{ProcError, ProcRoot};
use crate::record::{Event, Identity, Task, Text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// How much of a process is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// At least one thread runs.
    Running,
    /// All threads ended; its parent has not collected it.
    Zombie,
    /// It left the process table.
    Reaped,
}

/// A pidfd on one process. It polls readable when the whole process has ended.
#[derive(Debug)]
pub struct Watch {
    identity: Identity,
    comm: Text,
    pidfd: OwnedFd,
}

impl Watch {
    /// Watches `identity`; [`ProcError::Gone`] when it is not there any more, even if another
    /// process has its number now.
    pub fn open(root: &ProcRoot, identity: Identity) -> Result<Self, ProcError> {
        let pid = identity.tgid;
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProcError::Gone { pid })?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
            // A number that is only a thread's now.
            Errno::INVAL => ProcError::Gone { pid },
            errno => ProcError::new(pid, "pidfd", errno),
        })?;
        // The pidfd was opened first: if the number changed hands before that, the start differs; if
        // it does so after that, the pidfd already tells of the end.
        let stat = root.process(pid)?.stat()?;
        if stat.identity != identity {
            return Err(ProcError::Gone { pid });
        }
        Ok(Self { identity, comm: stat.comm, pidfd })
    }

    /// The process that is watched.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// What is left of it.
    pub fn presence(&self) -> Result<Presence, ProcError> {
        let failed = |errno| ProcError::new(self.identity.tgid, "pidfd", errno);
        let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut polled, Some(&now)) {
            Ok(0) => return Ok(Presence::Running),
            Ok(_) => {}
            Err(errno) => return Err(failed(errno)),
        }
        // Poll does not tell a zombie from a process that was collected; the pidfd's own number does:
        // it is -1 once the process left the table.
        let path = format!("/proc/self/fdinfo/{}", self.pidfd.as_raw_fd());
        let unreadable = |source| ProcError::Read { pid: self.identity.tgid, what: "pidfd", source };
        let info = std::fs::read_to_string(path).map_err(unreadable)?;
        let number = info.lines().find_map(|line| line.strip_prefix("Pid:")).map(str::trim);
        match number {
            Some("-1") => Ok(Presence::Reaped),
            Some(_) => Ok(Presence::Zombie),
            None => Err(ProcError::Malformed { pid: self.identity.tgid, what: "pidfd" }),
        }
    }

    /// The record of its leaving the process table.
    pub fn reaped(&self) -> Event {
        Event::Reap { task: Task { pid: self.identity.tgid, identity: self.identity, comm: self.comm.clone() } }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}
