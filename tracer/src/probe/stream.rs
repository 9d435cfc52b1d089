//! The two rings, read as one stream in the order things happened.

use std::{collections::HashMap, mem::size_of};

use aya::maps::{MapData, RingBuf};
use tracer_ebpf::{CallEvent, EventKind, ProcessEvent, ProcessKey};

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

/// Calls of one process that the ring had no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The process.
    pub process: ProcessKey,
    /// How many are missing.
    pub missing: u64,
    /// Last event before the gap was noticed.
    pub since_ns: u64,
}

/// Reader of both rings.
pub struct Stream {
    calls: RingBuf<MapData>,
    lives: RingBuf<MapData>,
    held: Vec<KernelEvent>,
    sequences: HashMap<ProcessKey, Sequence>,
    malformed: u64,
}

/// How far a process's numbered events have been followed.
#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    next: u64,
    received: u64,
    reported: u64,
    last_ns: u64,
}

impl Stream {
    /// Reads these rings.
    pub fn new((calls, lives): (RingBuf<MapData>, RingBuf<MapData>)) -> Self {
        Self { calls, lives, held: Vec::new(), sequences: HashMap::new(), malformed: 0 }
    }

    /// The ring of calls, to wait on.
    pub fn calls(&self) -> &RingBuf<MapData> {
        &self.calls
    }

    /// The ring of lives, to wait on.
    pub fn lives(&self) -> &RingBuf<MapData> {
        &self.lives
    }

    /// Records that were not of a known kind and length. There should be none, ever.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// Takes what is in the rings and returns what has settled by `now_ns`, oldest first.
    pub fn read(&mut self, now_ns: u64) -> Vec<KernelEvent> {
        while let Some(item) = self.calls.next() {
            match call_event(&item) {
                Some(event) => self.held.push(KernelEvent::Call(event)),
                None => self.malformed += 1,
            }
        }
        while let Some(item) = self.lives.next() {
            match process_event(&item) {
                Some(event) => self.held.push(KernelEvent::Life(event)),
                None => self.malformed += 1,
            }
        }
        // Stable: events of one ring with equal times keep the ring's order.
        self.held.sort_by_key(KernelEvent::ts_ns);
        let settled = now_ns.saturating_sub(SETTLE_NS);
        let rest = self.held.split_off(self.held.partition_point(|event| event.ts_ns() <= settled));
        let ready = std::mem::replace(&mut self.held, rest);
        for event in &ready {
            if let KernelEvent::Call(event) = event {
                self.follow(event);
            }
        }
        ready
    }

    fn follow(&mut self, event: &CallEvent) {
        let key = ProcessKey { tgid: event.tgid, pad: 0, start_ns: event.process_start_ns };
        let sequence = self.sequences.entry(key).or_default();
        sequence.next = sequence.next.max(event.seq + 1);
        sequence.received += 1;
        sequence.last_ns = event.ts_ns;
    }

    /// Calls known to be missing that have not been told before. Numbers are counted rather than
    /// compared one by one, since threads of a process may be numbered and timed in different order.
    pub fn gaps(&mut self) -> Vec<Gap> {
        let held = self.held.iter().filter_map(|event| match event {
            KernelEvent::Call(event) => Some(ProcessKey { tgid: event.tgid, pad: 0, start_ns: event.process_start_ns }),
            KernelEvent::Life(_) => None,
        });
        let waiting: std::collections::HashSet<ProcessKey> = held.collect();
        let mut gaps: Vec<Gap> = self
            .sequences
            .iter_mut()
            .filter(|(process, _)| !waiting.contains(process))
            .filter_map(|(process, sequence)| {
                let missing = sequence.next - sequence.received - sequence.reported;
                sequence.reported += missing;
                (missing > 0).then_some(Gap { process: *process, missing, since_ns: sequence.last_ns })
            })
            .collect();
        gaps.sort_by_key(|gap| (gap.process.tgid, gap.process.start_ns));
        gaps
    }

    /// Forgets a process that is gone.
    pub fn forget(&mut self, process: &ProcessKey) {
        self.sequences.remove(process);
    }
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
