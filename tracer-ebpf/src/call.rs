//! Driver calls: the two programs behind every probe.
//!
//! A call is paired with its return by thread and stack pointer, so nested calls and calls left by
//! `longjmp` cannot be mixed up.

mod contexts;
mod memory;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_get_current_pid_tgid, bpf_probe_read_user},
    programs::{ProbeContext, RetProbeContext},
};
use tracer_ebpf::{
    Counter, EventKind, Frame, LiveAllocation, NO_CONTEXT, NO_DEVICE, Process, ProcessKey, Thread,
    symbols::{DESCRIPTORS, Descriptor, Device, Handle, Op},
};

use crate::{
    atomic, books,
    maps::{THREADS, count},
    output::{self, Outcome, now_ns},
    task::Task,
    verifier::opaque,
};

/// Offset of `location.id` in `CUmemAllocationProp` (cuda.h: type, requestedHandleTypes, location
/// {type, id}; the same in 11.8, 12.9 and 13.5).
const ALLOCATION_PROP_DEVICE: u64 = 12;
/// Width of the return address that `ret` takes off the stack before the return probe looks.
const RETURN_ADDRESS: u64 = 8;

static TABLE: [Descriptor; DESCRIPTORS.len()] = DESCRIPTORS;

/// The line of the table for this symbol.
#[inline(always)]
fn descriptor(symbol: u32) -> Option<&'static Descriptor> {
    TABLE.get(symbol as usize).map(opaque)
}

static NEW_THREAD: Thread = Thread::NEW;

/// One call, with all that is known of its caller.
pub struct Call {
    key: ProcessKey,
    process: *mut Process,
    image_ns: u64,
    thread: *mut Thread,
    tid: u32,
    descriptor: &'static Descriptor,
    now_ns: u64,
}

impl Call {
    #[inline(always)]
    fn new(thread: *mut Thread, pid_tgid: u64, descriptor: &'static Descriptor) -> Option<Self> {
        // SAFETY: a value of the map, which only this thread changes.
        let start_ns = unsafe { (*thread).process_start_ns };
        let key = ProcessKey { tgid: (pid_tgid >> 32) as u32, pad: 0, start_ns };
        let now_ns = now_ns();
        let process = books::process(&key, now_ns)?;
        // SAFETY: a value of the map.
        let image_ns = unsafe { (*process).image_ns };
        Some(Self { key, process, image_ns, thread, tid: pid_tgid as u32, descriptor, now_ns })
    }

    #[inline(always)]
    fn emit(&self, frame: &Frame, outcome: &Outcome) {
        output::call(&self.key, self.process, self.tid, frame, self.now_ns, outcome);
    }

    /// Device ordinal of the call, given the context it works in.
    #[inline(always)]
    fn device(&self, frame: &Frame, context_device: i32) -> i32 {
        match self.descriptor.device {
            Device::Current => context_device,
            Device::Arg(n) => arg(frame, n) as i32,
            Device::AllocationProp(n) => {
                let device = Known::read::<u32>(arg(frame, n) + ALLOCATION_PROP_DEVICE);
                if device.known { device.value as i32 } else { NO_DEVICE }
            }
        }
    }

    /// The handle, if it is an argument.
    #[inline(always)]
    fn given_handle(&self, frame: &Frame) -> u64 {
        match self.descriptor.handle {
            Handle::Arg(n) => arg(frame, n),
            Handle::Arg32(n) => u64::from(arg(frame, n) as u32),
            Handle::None | Handle::Out(_) | Handle::Out32(_) => 0,
        }
    }

    /// The handle the call wrote.
    #[inline(always)]
    fn made_handle(&self, frame: &Frame) -> Known {
        match self.descriptor.handle {
            Handle::Out(n) => Known::read::<u64>(arg(frame, n)),
            Handle::Out32(n) => Known::read::<u32>(arg(frame, n)),
            Handle::None | Handle::Arg(_) | Handle::Arg32(_) => Known::value(0),
        }
    }
}

/// A number that may not be readable. Not an `Option`, whose value is undefined when there is none:
/// the compiler may then save a register that was never written, which the verifier refuses.
#[derive(Clone, Copy)]
struct Known {
    known: bool,
    value: u64,
}

impl Known {
    #[inline(always)]
    fn value(value: u64) -> Self {
        Self { known: true, value }
    }

    /// What the caller's memory holds at this address.
    #[inline(always)]
    fn read<T: Into<u64>>(address: u64) -> Self {
        // SAFETY: the helper checks the address itself and reports a fault as an error.
        unsafe { bpf_probe_read_user(address as *const T) }
            .map_or(Self { known: false, value: 0 }, |value| Self::value(value.into()))
    }

    #[inline(always)]
    fn map(self, change: impl FnOnce(u64) -> u64) -> Self {
        Self { known: self.known, value: change(self.value) }
    }
}

/// A traced function was entered.
#[inline(always)]
pub fn enter(ctx: &ProbeContext) {
    count(Counter::Entries);
    // SAFETY: the context is this program's own.
    let symbol = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) } as u32;
    let Some(descriptor) = descriptor(symbol) else { return };
    let pid_tgid = bpf_get_current_pid_tgid();
    let Some(thread) = thread(pid_tgid) else {
        count(Counter::PendingFull);
        return;
    };
    // SAFETY: the kernel gives the program its registers.
    let stack_pointer = unsafe { (*ctx.regs).rsp };
    let Some(frame) = free_frame(thread, stack_pointer) else { return };
    let new = Frame {
        stack_pointer,
        begin_ns: now_ns(),
        args: [
            ctx.arg(0).unwrap_or(0),
            ctx.arg(1).unwrap_or(0),
            ctx.arg(2).unwrap_or(0),
            ctx.arg(3).unwrap_or(0),
            ctx.arg(4).unwrap_or(0),
        ],
        taken: LiveAllocation::NONE,
        symbol,
        has_taken: 0,
    };
    // SAFETY: a value of the map, which only this thread changes.
    unsafe { *frame = new };
    // What gives something back takes effect on entry: see `CallEvent`.
    match descriptor.op {
        Op::Free => {
            if let Some(call) = Call::new(thread, pid_tgid, descriptor) {
                memory::free_enter(&call, frame);
            }
        }
        Op::CtxDestroy | Op::PrimaryRelease | Op::PrimaryReset => {
            if let Some(call) = Call::new(thread, pid_tgid, descriptor) {
                contexts::destroy_enter(&call, frame);
            }
        }
        _ => {}
    }
}

/// A traced function returned.
#[inline(always)]
pub fn leave(ctx: &RetProbeContext) {
    count(Counter::Returns);
    let pid_tgid = bpf_get_current_pid_tgid();
    // SAFETY: the kernel gives the program its registers.
    let stack_pointer = unsafe { (*ctx.regs).rsp }.wrapping_sub(RETURN_ADDRESS);
    let Some((thread, slot)) =
        THREADS.get_ptr_mut(pid_tgid).and_then(|thread| Some((thread, find_frame(thread, stack_pointer)?)))
    else {
        count(Counter::ReturnsUnpaired);
        return;
    };
    // SAFETY: a value of the map, which only this thread changes.
    let frame = unsafe { &*slot };
    if let Some(descriptor) = descriptor(frame.symbol)
        && let Some(call) = Call::new(thread, pid_tgid, descriptor)
    {
        returned(&call, frame, ctx.ret::<i32>());
    }
    // SAFETY: as above; freed only now, since the frame is used in place.
    unsafe { (*slot).stack_pointer = 0 };
}

#[inline(always)]
fn returned(call: &Call, frame: &Frame, result: i32) {
    if result != 0 {
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*call.process).failed, 1) };
    }
    match call.descriptor.op {
        Op::Alloc => memory::alloc_return(call, frame, result),
        Op::Free => memory::free_return(call, frame, result),
        Op::CtxCreate | Op::PrimaryRetain => contexts::create_return(call, frame, result),
        Op::CtxDestroy | Op::PrimaryRelease | Op::PrimaryReset => contexts::destroy_return(call, frame, result),
        Op::CtxSetCurrent | Op::CtxPush | Op::CtxPop => {
            if result == 0 {
                contexts::current_return(call, frame);
            }
            count(Counter::Filtered);
        }
        Op::DeviceUuid => {
            let address = arg(frame, 0);
            let (low, high) = if result == 0 {
                (Known::read::<u64>(address), Known::read::<u64>(address + 8))
            } else {
                (Known::value(0), Known::value(0))
            };
            if !low.known || !high.known {
                return count(Counter::ReadFailed);
            }
            let (handle, size) = (low.value, high.value);
            let device = call.device(frame, NO_DEVICE);
            call.emit(frame, &Outcome { kind: EventKind::Call, handle, size, context: NO_CONTEXT, result, device });
        }
        Op::Init => call.emit(
            frame,
            &Outcome { kind: EventKind::Call, handle: 0, size: 0, context: NO_CONTEXT, result, device: NO_DEVICE },
        ),
    }
}

/// What is kept of the running thread, made at its first call.
#[inline(always)]
fn thread(pid_tgid: u64) -> Option<*mut Thread> {
    if let Some(thread) = THREADS.get_ptr_mut(pid_tgid) {
        return Some(thread);
    }
    THREADS.insert(pid_tgid, &NEW_THREAD, 0).ok()?;
    let thread = THREADS.get_ptr_mut(pid_tgid)?;
    // SAFETY: a value of the map, which only this thread changes.
    unsafe { (*thread).process_start_ns = Task::current().process_start_ns() };
    Some(thread)
}

/// A slot for a new call: the one a call left at this very stack position (it can no longer
/// return), a free one, or the oldest.
#[inline(always)]
fn free_frame(thread: *mut Thread, stack_pointer: u64) -> Option<*mut Frame> {
    // SAFETY: a value of the map, which only this thread changes.
    let frames = unsafe { &mut (*thread).frames };
    let mut free = None;
    let mut oldest = 0;
    let mut oldest_ns = u64::MAX;
    for (index, frame) in frames.iter().enumerate() {
        if frame.stack_pointer == stack_pointer {
            count(Counter::PendingEvicted);
            free = Some(index);
            break;
        }
        if frame.stack_pointer == 0 {
            free = Some(index);
        } else if frame.begin_ns < oldest_ns {
            oldest_ns = frame.begin_ns;
            oldest = index;
        }
    }
    let index = free.unwrap_or_else(|| {
        count(Counter::PendingEvicted);
        oldest
    });
    frames.get_mut(index).map(core::ptr::from_mut)
}

#[inline(always)]
fn find_frame(thread: *mut Thread, stack_pointer: u64) -> Option<*mut Frame> {
    // SAFETY: a value of the map, which only this thread changes.
    let frames = unsafe { &mut (*thread).frames };
    frames.iter_mut().find(|frame| frame.stack_pointer == stack_pointer).map(core::ptr::from_mut)
}

#[inline(always)]
fn arg(frame: &Frame, n: u8) -> u64 {
    frame.args.get(n as usize).copied().unwrap_or(0)
}
