//! Allocations and frees.

use aya_ebpf::bindings::BPF_ANY;
use tracer_ebpf::{
    AccountKey, Counter, EventKind, Family, Frame, LiveAllocation, LiveKey, NO_CONTEXT, NO_DEVICE,
    symbols::{Size, handle_space},
};

use super::{Call, Known, arg, contexts};
use crate::{atomic, books, maps::count, output::Outcome};

impl Call {
    #[inline(always)]
    fn live_key(&self, handle: u64) -> LiveKey {
        LiveKey {
            tgid: self.key.tgid,
            space: handle_space(self.descriptor.family),
            start_ns: self.key.start_ns,
            handle,
        }
    }

    /// Bytes asked for. A pitch is only known once the call has returned.
    #[inline(always)]
    fn size(&self, frame: &Frame, succeeded: bool) -> Known {
        match self.descriptor.size {
            Size::None => Known::value(0),
            Size::Arg(n) => Known::value(arg(frame, n)),
            Size::Arg32(n) => Known::value(u64::from(arg(frame, n) as u32)),
            Size::Pitch(pitch, height) if succeeded => {
                Known::read::<u64>(arg(frame, pitch)).map(|pitch| pitch.wrapping_mul(arg(frame, height)))
            }
            Size::Pitch32(pitch, height) if succeeded => {
                Known::read::<u32>(arg(frame, pitch)).map(|pitch| pitch * u64::from(arg(frame, height) as u32))
            }
            Size::Pitch(..) | Size::Pitch32(..) => Known::value(0),
        }
    }
}

#[inline(always)]
pub fn alloc_return(call: &Call, frame: &Frame, result: i32) {
    let (context, context_device) = contexts::current(call);
    let device = call.device(frame, context_device);
    let handle = if result == 0 { call.made_handle(frame) } else { Known::value(0) };
    let size = call.size(frame, result == 0);
    if !handle.known || !size.known {
        return count(Counter::ReadFailed);
    }
    let (handle, size) = (handle.value, size.value);
    // Stream-ordered pools and VMM handles outlive contexts (cuda.h, cuCtxDestroy).
    let owner = match call.descriptor.family {
        Family::Pool | Family::Vmm => NO_CONTEXT,
        Family::Device | Family::Managed | Family::Host => context,
    };
    if result == 0 && handle != 0 {
        book(call, frame, handle, size, owner, device);
    }
    call.emit(frame, &Outcome { kind: EventKind::Call, handle, size, context: owner, result, device });
}

#[inline(always)]
fn book(call: &Call, frame: &Frame, handle: u64, size: u64, context: u64, device: i32) {
    let key = call.live_key(handle);
    // Whoever held this handle before is gone by a way that is not traced.
    books::take(call.process, &key, call.image_ns);
    let account_device = if context == NO_CONTEXT { device } else { NO_DEVICE };
    let account_key = AccountKey { tgid: call.key.tgid, device: account_device, start_ns: call.key.start_ns, context };
    let booked = books::open_account(&account_key, call.image_ns, device, call.now_ns).is_some_and(|account| {
        let allocation = LiveAllocation {
            size,
            context,
            // SAFETY: a value of the map.
            epoch_ns: unsafe { (*account).epoch_ns },
            ts_ns: call.now_ns,
            account_device,
            device,
            family: call.descriptor.family as u32,
            symbol: frame.symbol,
        };
        let booked = books::book(call.process, account, &key, &allocation, BPF_ANY);
        if !booked {
            count(Counter::LiveFull);
        }
        booked
    });
    if !booked {
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*call.process).untracked, 1) };
    }
}

#[inline(always)]
pub fn free_enter(call: &Call, frame: *mut Frame) {
    // SAFETY: a value of the map, which only this thread changes.
    let frame = unsafe { &mut *frame };
    let handle = call.given_handle(frame);
    if handle == 0 {
        return; // freeing null is allowed and does nothing
    }
    let (mut size, mut context, mut device) = (0, NO_CONTEXT, NO_DEVICE);
    if let Some(allocation) = books::take(call.process, &call.live_key(handle), call.image_ns) {
        (size, context, device) = (allocation.size, allocation.context, allocation.device);
        frame.taken = allocation;
        frame.has_taken = 1;
    }
    call.emit(frame, &Outcome { kind: EventKind::Call, handle, size, context, result: 0, device });
}

#[inline(always)]
pub fn free_return(call: &Call, frame: &Frame, result: i32) {
    let handle = call.given_handle(frame);
    if handle == 0 {
        return count(Counter::Filtered);
    }
    let taken = &frame.taken;
    if result == 0 {
        if frame.has_taken == 0 {
            // SAFETY: a value of the map.
            unsafe { atomic::add(&raw mut (*call.process).unknown_frees, 1) };
        }
        return;
    }
    if frame.has_taken == 1 {
        books::put_back(call.process, &call.live_key(handle), taken, call.image_ns);
    }
    call.emit(
        frame,
        &Outcome {
            kind: EventKind::CallRefused,
            handle,
            size: taken.size,
            context: taken.context,
            result,
            device: taken.device,
        },
    );
}
