//! Records the kernel side writes to its ring buffers.

use core::mem::{offset_of, size_of};

/// Length of a task's name in the kernel (`TASK_COMM_LEN`), including the terminating zero.
pub const COMM_LEN: usize = 16;

/// What an event says. The discriminant is the first field of each record.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A traced driver call returned (or, for operations that give memory back, was entered).
    Call = 1,
    /// A call that had been reported on entry as giving memory back returned an error: undo it.
    CallRefused = 2,
    /// A process was forked; `peer` is the parent.
    Fork = 3,
    /// A process replaced its image.
    Exec = 4,
    /// The last thread of a process is exiting. Its device files are still open at this moment.
    Exit = 5,
    /// A thread that had called the driver is exiting; its process lives on.
    ThreadExit = 6,
}

impl EventKind {
    /// The kind with this discriminant, or `None` for a value no version of this crate has written.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            1 => Self::Call,
            2 => Self::CallRefused,
            3 => Self::Fork,
            4 => Self::Exec,
            5 => Self::Exit,
            6 => Self::ThreadExit,
            _ => return None,
        })
    }
}

/// One call into the driver library.
///
/// Operations that create something are reported when they return, because only then are handle
/// and result known. Operations that give something back are reported when they are entered: once
/// the driver has run, another thread may already have been handed the same address, and its
/// creation would then precede the release in the stream. If such a call fails, a second event of
/// kind [`EventKind::CallRefused`] takes it back.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallEvent {
    /// [`EventKind::Call`] or [`EventKind::CallRefused`].
    pub kind: u32,
    /// Index into [`crate::symbols::TABLE`].
    pub symbol: u32,
    /// Process (thread group) id in the initial pid namespace.
    pub tgid: u32,
    /// Task (thread) id.
    pub tid: u32,
    /// When the process's main thread started; 0 where the kernel has no type information (BTF).
    pub process_start_ns: u64,
    /// When this event was made.
    pub ts_ns: u64,
    /// When the call was entered.
    pub begin_ns: u64,
    /// Per-process sequence number, from 0, without gaps at the source: a missing one was lost.
    pub seq: u64,
    /// Handle of the object made or given back: device pointer, host pointer, context, VMM handle.
    pub handle: u64,
    /// Bytes asked for (creation) or found in the live table (release, 0 when unknown). For
    /// `cuDeviceGetUuid`, `handle` and `size` hold the sixteen bytes in memory order.
    pub size: u64,
    /// Context the object belongs to, or [`crate::NO_CONTEXT`].
    pub context: u64,
    /// `CUresult` of the call; 0 is success.
    pub result: i32,
    /// Device ordinal as this process numbers devices, or [`crate::NO_DEVICE`].
    pub device: i32,
    /// Name of the calling thread.
    pub comm: [u8; COMM_LEN],
}

/// Something that happened to a process as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessEvent {
    /// [`EventKind::Fork`], [`EventKind::Exec`], [`EventKind::Exit`] or [`EventKind::ThreadExit`].
    pub kind: u32,
    /// Raw wait status (`task->exit_code`): low 7 bits signal, next 8 bits code. Exit only.
    pub exit_code: u32,
    /// Process id; for a fork, the child's.
    pub tgid: u32,
    /// Task id.
    pub tid: u32,
    /// Start of that process; 0 without BTF.
    pub process_start_ns: u64,
    /// When this event was made.
    pub ts_ns: u64,
    /// The parent's process id: the forking process for a fork, `real_parent` otherwise, 0 unknown.
    pub parent_tgid: u32,
    /// Explicit padding, always 0.
    pub pad: u32,
    /// Start of the parent; 0 when unknown.
    pub parent_start_ns: u64,
    /// Name of the task.
    pub comm: [u8; COMM_LEN],
}

const _: () = {
    assert!(size_of::<CallEvent>() == 96);
    assert!(offset_of!(CallEvent, process_start_ns) == 16);
    assert!(offset_of!(CallEvent, handle) == 48);
    assert!(offset_of!(CallEvent, result) == 72);
    assert!(offset_of!(CallEvent, comm) == 80);
    assert!(size_of::<ProcessEvent>() == 64);
    assert!(offset_of!(ProcessEvent, parent_tgid) == 32);
    assert!(offset_of!(ProcessEvent, comm) == 48);
};
