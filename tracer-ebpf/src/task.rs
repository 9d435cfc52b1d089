//! Reading the kernel's `task_struct` at the offsets user space found in the kernel's own types.

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, bpf_get_current_task, bpf_probe_read_kernel};
use tracer_ebpf::{COMM_LEN, ProcessKey};

use crate::maps::{Setting, TASK_GROUP_LEADER, TASK_START_BOOTTIME, TASK_TGID, UNKNOWN_OFFSET};

/// A pointer to a `task_struct`.
#[derive(Clone, Copy)]
pub struct Task(u64);

impl Task {
    /// The running task.
    #[inline(always)]
    pub fn current() -> Self {
        // SAFETY: has no preconditions.
        Self(unsafe { bpf_get_current_task() })
    }

    /// A task the kernel handed to a tracepoint.
    #[inline(always)]
    pub fn from_address(address: u64) -> Self {
        Self(address)
    }

    /// Reads a field; `None` where its offset is unknown or the memory cannot be read.
    #[inline(always)]
    pub fn read<T>(self, offset: &Setting) -> Option<T> {
        read_at(self.0, offset)
    }

    /// The task this pointer field points to.
    #[inline(always)]
    pub fn follow(self, offset: &Setting) -> Option<Self> {
        self.read::<u64>(offset).filter(|address| *address != 0).map(Self)
    }

    /// A field of the structure this pointer field points to.
    #[inline(always)]
    pub fn read_through<T>(self, pointer: &Setting, offset: &Setting) -> Option<T> {
        read_at(self.read::<u64>(pointer)?, offset)
    }

    /// When the main thread of this task's process started; 0 when it cannot be told.
    #[inline(always)]
    pub fn process_start_ns(self) -> u64 {
        self.follow(&TASK_GROUP_LEADER).and_then(|leader| leader.read(&TASK_START_BOOTTIME)).unwrap_or(0)
    }

    /// The process of this task, by fields alone (for tasks other than the running one).
    #[inline(always)]
    pub fn process(self) -> Option<ProcessKey> {
        Some(ProcessKey { tgid: self.read(&TASK_TGID)?, pad: 0, start_ns: self.process_start_ns() })
    }

    /// Its name.
    #[inline(always)]
    pub fn comm(self, offset: &Setting) -> [u8; COMM_LEN] {
        self.read(offset).unwrap_or_default()
    }
}

/// The running process.
#[inline(always)]
pub fn current_process() -> ProcessKey {
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    ProcessKey { tgid, pad: 0, start_ns: Task::current().process_start_ns() }
}

#[inline(always)]
fn read_at<T>(base: u64, offset: &Setting) -> Option<T> {
    let offset = offset.get();
    if offset == UNKNOWN_OFFSET {
        return None;
    }
    // SAFETY: the helper checks the address itself and reports a fault as an error.
    unsafe { bpf_probe_read_kernel((base + u64::from(offset)) as *const T) }.ok()
}
