//! The two rings, read as one stream in the order things happened.

use std::{
    mem::size_of,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use aya::maps::{MapData, RingBuf};
use tracer_ebpf::{CallEvent, EventKind, ProcessEvent};

/// Events younger than this wait for the next reading: one that was made earlier on another CPU may
/// still be on its way into its ring. A program takes microseconds from reading the clock to
/// handing its event over; the margin is for preemption in between.
const SETTLE_NS: u64 = 5_000_000;

/// One event of the kernel side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// A driver call.
    Call(CallEvent),
    /// Something in the life of a process.
    Life(ProcessEvent),
}

impl KernelEvent {
    /// When it was made.
    pub fn ts_ns(&self) -> u64 {
        match self {
            Self::Call(event) => event.ts_ns,
            Self::Life(event) => event.ts_ns,
        }
    }
}

/// Reader of both rings.
pub struct Stream {
    calls: RingBuf<MapData>,
    lives: RingBuf<MapData>,
    held: Vec<KernelEvent>,
    malformed: u64,
}

impl Stream {
    /// Reads these rings.
    pub fn new((calls, lives): (RingBuf<MapData>, RingBuf<MapData>)) -> Self {
        Self { calls, lives, held: Vec::new(), malformed: 0 }
    }

    /// The ring of calls, to wait on.
    pub fn calls_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.calls.as_raw_fd()) }
    }

    /// Records that were not of a known kind and length. There should be none, ever.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// Takes what is in the rings and returns what has settled by `now_ns`, oldest first.
    pub fn read(&mut self, now_ns: u64) -> Vec<KernelEvent> {
        let calls = |bytes: &[u8]| call_event(bytes).map(KernelEvent::Call);
        let lives = |bytes: &[u8]| process_event(bytes).map(KernelEvent::Life);
        self.malformed += drain(&mut self.calls, now_ns, calls, &mut self.held);
        self.malformed += drain(&mut self.lives, now_ns, lives, &mut self.held);
        // Stable: events of one ring with equal times keep the ring's order.
        self.held.sort_by_key(KernelEvent::ts_ns);
        let settled = Self::settled_ns(now_ns);
        let rest = self.held.split_off(self.held.partition_point(|event| event.ts_ns() <= settled));
        std::mem::replace(&mut self.held, rest)
    }

    /// Up to when everything has been returned, for a reading at `now_ns`.
    pub fn settled_ns(now_ns: u64) -> u64 {
        now_ns.saturating_sub(SETTLE_NS)
    }
}

/// Takes events made up to `now_ns` out of a ring, and the first one after, so that a flood cannot
/// keep the reader here for ever. How many were malformed.
fn drain(
    ring: &mut RingBuf<MapData>,
    now_ns: u64,
    decode: impl Fn(&[u8]) -> Option<KernelEvent>,
    held: &mut Vec<KernelEvent>,
) -> u64 {
    let mut malformed = 0;
    while let Some(item) = ring.next() {
        let Some(event) = decode(&item) else {
            malformed += 1;
            continue;
        };
        held.push(event);
        if event.ts_ns() > now_ns {
            break;
        }
    }
    malformed
}

/// Reads a call event; `None` for any other length or kind.
pub fn call_event(bytes: &[u8]) -> Option<CallEvent> {
    if bytes.len() != size_of::<CallEvent>() {
        return None;
    }
    // SAFETY: the length is that of the layout, which has only integers, so any bytes are valid.
    let event = unsafe { bytes.as_ptr().cast::<CallEvent>().read_unaligned() };
    matches!(EventKind::from_raw(event.kind), Some(EventKind::Call | EventKind::CallRefused)).then_some(event)
}

/// Reads a process event; `None` for any other length or kind.
pub fn process_event(bytes: &[u8]) -> Option<ProcessEvent> {
    if bytes.len() != size_of::<ProcessEvent>() {
        return None;
    }
    // SAFETY: as in `call_event`.
    let event = unsafe { bytes.as_ptr().cast::<ProcessEvent>().read_unaligned() };
    let known = matches!(
        EventKind::from_raw(event.kind),
        Some(EventKind::Fork | EventKind::Exec | EventKind::Exit | EventKind::ThreadExit)
    );
    known.then_some(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_another_length_or_kind_are_refused() {
        let mut bytes = [0; size_of::<CallEvent>()];
        assert_eq!(call_event(&bytes), None);
        bytes[0] = EventKind::Call as u8;
        assert_eq!(call_event(&bytes).map(|event| event.kind), Some(1));
        assert_eq!(call_event(&bytes[..95]), None);
        bytes[0] = EventKind::Exit as u8;
        assert_eq!(call_event(&bytes), None);
        assert_eq!(process_event(&bytes[..64]).map(|event| event.kind), Some(5));
        assert_eq!(process_event(&bytes), None);
    }
}
