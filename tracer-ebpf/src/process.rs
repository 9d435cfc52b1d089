//! Lives of processes: fork, exec, exit.

use aya_ebpf::{
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid},
    programs::{RawTracePointContext, TracePointContext},
};
use tracer_ebpf::{Counter, EventKind, ProcessEvent, ProcessKey, Thread};

use crate::{
    maps::{
        FORK_CHILD_PID, PROCESSES, SIGNAL_LIVE, TASK_COMM, TASK_EXIT_CODE, TASK_PID, TASK_REAL_PARENT, TASK_SIGNAL,
        THREADS, UNKNOWN_OFFSET, add,
    },
    output::{life, now_ns},
    task::{Task, current_process},
};

const UNKNOWN_PROCESS: ProcessKey = ProcessKey { tgid: 0, pad: 0, start_ns: 0 };

/// Arguments of the tracepoint: parent, child.
#[inline(always)]
pub fn fork(ctx: &RawTracePointContext) {
    let child = Task::from_address(ctx.arg::<u64>(1));
    let Some(key) = child.process() else { return };
    let Some(pid) = child.read::<u32>(&TASK_PID) else { return };
    if pid != key.tgid {
        return; // a thread
    }
    let parent = current_process();
    life(&ProcessEvent {
        kind: EventKind::Fork as u32,
        exit_code: 0,
        tgid: key.tgid,
        tid: pid,
        process_start_ns: key.start_ns,
        ts_ns: now_ns(),
        parent_tgid: parent.tgid,
        pad: 0,
        parent_start_ns: parent.start_ns,
        comm: child.comm(&TASK_COMM),
    });
}

/// Without the offsets of `task_struct` only the child's task id is known.
#[inline(always)]
pub fn fork_untyped(ctx: &TracePointContext) {
    let offset = FORK_CHILD_PID.get();
    if offset == UNKNOWN_OFFSET {
        return;
    }
    // SAFETY: the offset comes from the kernel's description of this tracepoint's record.
    let Ok(pid) = (unsafe { ctx.read_at::<u32>(offset as usize) }) else { return };
    // Without start times a number is all there is of a process: what an earlier one with this
    // number left must not become the new one's.
    let _ = PROCESSES.remove(ProcessKey { tgid: pid, pad: 0, start_ns: 0 });
    let parent = current_process();
    life(&ProcessEvent {
        kind: EventKind::Fork as u32,
        exit_code: 0,
        tgid: pid,
        tid: pid,
        process_start_ns: 0,
        ts_ns: now_ns(),
        parent_tgid: parent.tgid,
        pad: 0,
        parent_start_ns: parent.start_ns,
        comm: bpf_get_current_comm().unwrap_or_default(),
    });
}

/// Arguments of the tracepoint: task, its task id before the exec, the new image.
#[inline(always)]
pub fn exec(ctx: &RawTracePointContext) {
    let key = current_process();
    let old_pid = ctx.arg::<u32>(1);
    forget_thread((u64::from(key.tgid) << 32) | u64::from(old_pid));
    let now = now_ns();
    if let Some(process) = PROCESSES.get_ptr_mut(&key) {
        // Everything booked so far belongs to an image that is gone.
        // SAFETY: a value of the map.
        unsafe { (*process).image_ns = now };
    }
    announce(EventKind::Exec, key, key.tgid, 0, now);
}

/// `current` is the exiting task. The device files are still open: they close after this.
#[inline(always)]
pub fn exit() {
    let task = Task::current();
    let pid_tgid = bpf_get_current_pid_tgid();
    let (tgid, pid) = ((pid_tgid >> 32) as u32, pid_tgid as u32);
    let called_the_driver = forget_thread(pid_tgid);
    // `do_exit` has taken this thread off `signal->live` already. Two last threads that exit at
    // once may both see 0: the reader takes the first. Without types only the main thread can be
    // recognised, whose exit is not always the process's: the reader looks into /proc.
    let last = task.read_through::<u32>(&TASK_SIGNAL, &SIGNAL_LIVE).map_or(pid == tgid, |live| live == 0);
    if !last && !called_the_driver {
        return;
    }
    let kind = if last { EventKind::Exit } else { EventKind::ThreadExit };
    let code = task.read::<u32>(&TASK_EXIT_CODE).unwrap_or(0);
    announce(kind, current_process(), pid, code, now_ns());
}

#[inline(always)]
fn announce(kind: EventKind, key: ProcessKey, tid: u32, exit_code: u32, ts_ns: u64) {
    let parent = Task::current().follow(&TASK_REAL_PARENT).and_then(Task::process).unwrap_or(UNKNOWN_PROCESS);
    life(&ProcessEvent {
        kind: kind as u32,
        exit_code,
        tgid: key.tgid,
        tid,
        process_start_ns: key.start_ns,
        ts_ns,
        parent_tgid: parent.tgid,
        pad: 0,
        parent_start_ns: parent.start_ns,
        comm: bpf_get_current_comm().unwrap_or_default(),
    });
}

/// Drops what is kept of a thread; whether there was anything.
#[inline(always)]
fn forget_thread(pid_tgid: u64) -> bool {
    let Some(thread) = THREADS.get_ptr(pid_tgid) else { return false };
    // SAFETY: a value of the map, which only this thread changes.
    let open = open_calls(unsafe { &*thread });
    if open > 0 {
        add(Counter::PendingAbandoned, open);
    }
    THREADS.remove(pid_tgid).is_ok()
}

#[inline(always)]
fn open_calls(thread: &Thread) -> u64 {
    thread.frames.iter().filter(|frame| frame.stack_pointer != 0).count() as u64
}
