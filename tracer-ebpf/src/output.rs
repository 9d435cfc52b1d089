//! Handing events to user space, and counting those for which there is no room.

use aya_ebpf::{
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::{bpf_get_current_comm, bpf_ktime_get_boot_ns},
};
use tracer_ebpf::{CallEvent, Counter, EventKind, Frame, Process, ProcessEvent, ProcessKey};

use crate::{
    atomic,
    maps::{CALLS, CONTESTED_BYTES, LIVES, WAKEUP_BYTES, WINDOW_EVENTS, count},
};

/// Nanoseconds on the boot clock.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: has no preconditions.
    unsafe { bpf_ktime_get_boot_ns() }
}

/// What a call event says beyond who called what.
pub struct Outcome {
    pub kind: EventKind,
    pub handle: u64,
    pub size: u64,
    pub context: u64,
    pub result: i32,
    pub device: i32,
}

/// Writes a call event. A lost one leaves its number as a gap in the process's sequence.
#[inline(always)]
pub fn call(key: &ProcessKey, process: *mut Process, tid: u32, frame: &Frame, ts_ns: u64, outcome: &Outcome) {
    // SAFETY: `process` is a value of the PROCESSES map.
    let seq = unsafe { atomic::fetch_add(&raw mut (*process).seq, 1) };
    let waiting = CALLS.query(u64::from(BPF_RB_AVAIL_DATA));
    // SAFETY: as above.
    let welcome = unsafe { may_hand_over(process, ts_ns, waiting) };
    let Some(mut entry) = welcome.then(|| CALLS.reserve::<CallEvent>(0)).flatten() else {
        count(Counter::CallsLost);
        // SAFETY: as above.
        unsafe { atomic::add(&raw mut (*process).lost, 1) };
        return;
    };
    entry.write(CallEvent {
        kind: outcome.kind as u32,
        symbol: frame.symbol,
        tgid: key.tgid,
        tid,
        process_start_ns: key.start_ns,
        ts_ns,
        begin_ns: frame.begin_ns,
        seq,
        handle: outcome.handle,
        size: outcome.size,
        context: outcome.context,
        result: outcome.result,
        device: outcome.device,
        comm: bpf_get_current_comm().unwrap_or_default(),
    });
    let wakeup = if waiting >= u64::from(WAKEUP_BYTES.get()) { BPF_RB_FORCE_WAKEUP } else { BPF_RB_NO_WAKEUP };
    entry.submit(u64::from(wakeup));
    count(Counter::CallsDelivered);
}

/// Length of a process's window.
const WINDOW_NS: u64 = 100_000_000;

/// Whether this process may still use the ring. The reader takes longer than a window to fall far
/// behind, so what is left of a contested ring is enough for everybody who calls at a usual rate.
///
/// # Safety
///
/// `process` must be a value of the PROCESSES map. Threads of a process may race here; the count is
/// then a little off, which only moves the limit.
#[inline(always)]
unsafe fn may_hand_over(process: *mut Process, ts_ns: u64, waiting: u64) -> bool {
    // SAFETY: as this function's.
    unsafe {
        if ts_ns.wrapping_sub((*process).window_ns) > WINDOW_NS {
            (*process).window_ns = ts_ns;
            (*process).window_events = 0;
        }
        (*process).window_events += 1;
        waiting < u64::from(CONTESTED_BYTES.get()) || (*process).window_events <= u64::from(WINDOW_EVENTS.get())
    }
}

/// Writes a process event.
#[inline(always)]
pub fn life(event: &ProcessEvent) {
    let Some(mut entry) = LIVES.reserve::<ProcessEvent>(0) else {
        count(Counter::ProcessesLost);
        return;
    };
    entry.write(*event);
    entry.submit(0);
    count(Counter::ProcessesDelivered);
}
