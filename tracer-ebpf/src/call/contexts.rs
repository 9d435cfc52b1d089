//! Contexts: which one is current, and what ends with one.

use aya_ebpf::bindings::BPF_ANY;
use tracer_ebpf::{
    Account, AccountKey, BALANCE_SLOTS, Balance, CONTEXT_DEPTH, Counter, EventKind, Frame, NO_CONTEXT, NO_DEVICE,
    PrimaryKey, Thread, symbols::Op,
};

use super::{Call, Known, arg};
use crate::{
    atomic, books,
    maps::{ACCOUNTS, PRIMARIES, TRACED_SINCE, count},
    output::Outcome,
    verifier::index_of_8,
};

impl Call {
    #[inline(always)]
    fn context_key(&self, context: u64) -> AccountKey {
        AccountKey { tgid: self.key.tgid, device: NO_DEVICE, start_ns: self.key.start_ns, context }
    }

    #[inline(always)]
    fn primary_key(&self, device: i32) -> PrimaryKey {
        PrimaryKey { tgid: self.key.tgid, device, start_ns: self.key.start_ns }
    }

    /// The context a destroying call is about.
    #[inline(always)]
    fn doomed(&self, frame: &Frame) -> u64 {
        if matches!(self.descriptor.op, Op::CtxDestroy) {
            return self.given_handle(frame);
        }
        let key = self.primary_key(self.device(frame, NO_DEVICE));
        // SAFETY: the table is not preallocated, so an entry being removed is not reused under us.
        unsafe { PRIMARIES.get(&key) }.copied().unwrap_or(NO_CONTEXT)
    }

    /// Whether every call of this process has been seen, so that its reference counts are whole.
    #[inline(always)]
    fn seen_from_the_start(&self) -> bool {
        let since = TRACED_SINCE.get(0).copied().unwrap_or(0);
        since != 0 && self.key.start_ns > since
    }
}

/// The calling thread's context and its device ordinal. A thread that never made one current works
/// in the process's only one, or none that is known.
#[inline(always)]
pub fn current(call: &Call) -> (u64, i32) {
    // SAFETY: a value of the map, which only this thread changes.
    let thread = unsafe { &*call.thread };
    // SAFETY: a value of the map.
    let (last_context, last_device) = unsafe { ((*call.process).last_context, (*call.process).last_device) };
    let depth = thread.depth as usize;
    if depth == 0 || depth > CONTEXT_DEPTH {
        return (last_context, last_device);
    }
    // SAFETY: as above; one of 8.
    let context = unsafe { *slot(call.thread, depth - 1) };
    if context == last_context {
        return (context, last_device);
    }
    // SAFETY: a value of the map.
    let device =
        books::account(&call.context_key(context), call.image_ns).map_or(NO_DEVICE, |a| unsafe { (*a).device });
    (context, device)
}

#[inline(always)]
pub fn create_return(call: &Call, frame: &Frame, result: i32) {
    let device = call.device(frame, NO_DEVICE);
    let context = if result == 0 { call.made_handle(frame) } else { Known::value(NO_CONTEXT) };
    if !context.known {
        return count(Counter::ReadFailed);
    }
    let context = context.value;
    if result == 0 {
        // SAFETY: a value of the map; another thread's context is as good as ours here.
        unsafe {
            (*call.process).last_context = context;
            (*call.process).last_device = device;
        }
        if matches!(call.descriptor.op, Op::PrimaryRetain) {
            retain(call, context, device);
        } else {
            open(call, context, device);
            push(call.thread, context);
        }
    }
    call.emit(frame, &Outcome { kind: EventKind::Call, handle: context, size: 0, context, result, device });
}

/// A new context, even if one was known at this address: that one is gone by a way not traced.
#[inline(always)]
fn open(call: &Call, context: u64, device: i32) {
    let new = Account {
        image_ns: call.image_ns,
        epoch_ns: call.now_ns,
        retains: 0,
        device,
        pad: 0,
        balances: [Balance { bytes: 0, count: 0 }; BALANCE_SLOTS],
    };
    if ACCOUNTS.insert(call.context_key(context), &new, u64::from(BPF_ANY)).is_err() {
        count(Counter::AccountsFull);
    }
}

#[inline(always)]
fn retain(call: &Call, context: u64, device: i32) {
    if PRIMARIES.insert(call.primary_key(device), &context, u64::from(BPF_ANY)).is_err() {
        count(Counter::AccountsFull);
    }
    if let Some(account) = books::open_account(&call.context_key(context), call.image_ns, device, call.now_ns) {
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*account).retains, 1) };
    }
}

/// Remembers which context this is, so that one made since at the same address is left alone.
#[inline(always)]
pub fn destroy_enter(call: &Call, frame: *mut Frame) {
    // SAFETY: a value of the map, which only this thread changes.
    let frame = unsafe { &mut *frame };
    let context = call.doomed(frame);
    frame.taken.context = context;
    if let Some(account) = books::account(&call.context_key(context), call.image_ns) {
        // SAFETY: a value of the map.
        unsafe {
            frame.taken.epoch_ns = (*account).epoch_ns;
            frame.taken.device = (*account).device;
        }
        frame.has_taken = 1;
    }
}

#[inline(always)]
pub fn destroy_return(call: &Call, frame: &Frame, result: i32) {
    let context = frame.taken.context;
    let device = call.device(frame, frame.taken.device);
    let mut remaining = 0;
    if result == 0 && frame.has_taken == 1 {
        let key = call.context_key(context);
        if let Some(account) = books::account(&key, call.image_ns)
            // SAFETY: a value of the map.
            && unsafe { (*account).epoch_ns } == frame.taken.epoch_ns
        {
            if matches!(call.descriptor.op, Op::PrimaryRelease) {
                remaining = release(call, account);
            }
            if remaining == 0 {
                let _ = ACCOUNTS.remove(&key);
            }
        }
    }
    if result == 0 && matches!(call.descriptor.op, Op::CtxDestroy) {
        pop_if_current(call.thread, context);
    }
    call.emit(frame, &Outcome { kind: EventKind::Call, handle: context, size: remaining, context, result, device });
}

/// Gives one reference back; how many are left. Where some may have been taken unseen, at least one.
#[inline(always)]
fn release(call: &Call, account: *mut Account) -> u64 {
    // SAFETY: a value of the map.
    let before = unsafe { atomic::fetch_add(&raw mut (*account).retains, u64::MAX) };
    let remaining = before.saturating_sub(1);
    if call.seen_from_the_start() { remaining } else { remaining.max(1) }
}

/// The calling thread changed its current context.
#[inline(always)]
pub fn current_return(call: &Call, frame: &Frame) {
    let thread = call.thread;
    match call.descriptor.op {
        Op::CtxPush => push(thread, call.given_handle(frame)),
        Op::CtxPop => pop(thread),
        _ => {
            let context = arg(frame, 0);
            if context == NO_CONTEXT {
                return pop(thread);
            }
            // SAFETY: a value of the map, which only this thread changes.
            unsafe { (*thread).depth = (*thread).depth.saturating_sub(1) };
            push(thread, context);
        }
    }
}

#[inline(always)]
fn push(thread: *mut Thread, context: u64) {
    // SAFETY: a value of the map, which only this thread changes.
    let thread = unsafe { &mut *thread };
    let depth = thread.depth as usize;
    if depth < CONTEXT_DEPTH {
        // SAFETY: as above; one of 8.
        unsafe { *slot(thread, depth) = context };
    }
    thread.depth = thread.depth.saturating_add(1);
}

#[inline(always)]
fn pop(thread: *mut Thread) {
    // SAFETY: a value of the map, which only this thread changes.
    unsafe { (*thread).depth = (*thread).depth.saturating_sub(1) };
}

#[inline(always)]
fn pop_if_current(thread: *mut Thread, context: u64) {
    // SAFETY: a value of the map, which only this thread changes.
    let state = unsafe { &*thread };
    let depth = state.depth as usize;
    // SAFETY: as above; one of 8.
    if depth > 0 && depth <= CONTEXT_DEPTH && unsafe { *slot(thread, depth - 1) } == context {
        pop(thread);
    }
}

/// A place in the thread's stack of contexts; the index is masked to stay in it.
#[inline(always)]
fn slot(thread: *mut Thread, index: usize) -> *mut u64 {
    // SAFETY: there are 8 places; a raw place, no reference is made.
    unsafe { (&raw mut (*thread).contexts).cast::<u64>().add(index_of_8(index)) }
}
