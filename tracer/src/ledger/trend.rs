//! Bounded history of what grows: survivors by kind of allocation, and floors between work cycles.
//!
//! Both are kept in constant time and space for each call, however long the history is.

use crate::record::OpaqueId;
use tracer_ebpf::Family;

/// What makes allocations alike: their size and, where known, the call path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassKey {
    /// Bytes asked for.
    pub size: u64,
    /// Call path.
    pub stack: Option<OpaqueId>,
    /// Device, or `None` where unknown or for host memory.
    pub device: Option<u32>,
    /// Whether it is pinned host memory.
    pub host: bool,
}

/// A point of a [`Class`]'s growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// When.
    pub ns: u64,
    /// Survivors then.
    pub live: u64,
    /// Frees the process had made by then.
    pub frees: u64,
    /// Bytes the process held by then.
    pub bytes: u64,
}

/// Marks kept for one class; beyond that every other one is dropped.
const MARKS: usize = 32;
/// Survivors from which on growth is worth recording.
const MARK_FROM: u64 = 4;
/// Threads remembered for one class.
const THREADS: usize = 32;

/// Allocations that are alike.
#[derive(Clone, Debug, Default)]
pub struct Class {
    /// Allocated and not given back.
    pub live: u64,
    /// Allocated ever.
    pub allocs: u64,
    /// Given back ever.
    pub frees: u64,
    /// First allocation.
    pub first_ns: u64,
    /// Last allocation.
    pub last_ns: u64,
    /// When there were more survivors than ever before.
    pub marks: Vec<Mark>,
    /// Most survivors so far.
    pub most: u64,
    /// Some of the threads that allocated.
    pub threads: Vec<u32>,
    /// Kind of memory of the first one.
    pub family: Option<Family>,
    stride: u64,
}

impl Class {
    pub(super) fn allocated(&mut self, ns: u64, tid: u32, frees: u64, bytes: u64) {
        if self.allocs == 0 {
            self.first_ns = ns;
            self.stride = 1;
        }
        self.allocs = self.allocs.saturating_add(1);
        self.live = self.live.saturating_add(1);
        self.last_ns = ns;
        if self.live <= self.most {
            return;
        }
        self.most = self.live;
        if self.live < MARK_FROM || !self.live.is_multiple_of(self.stride) {
            return;
        }
        if self.marks.len() == MARKS {
            self.stride = self.stride.saturating_mul(2);
            let stride = self.stride;
            self.marks.retain(|mark| mark.live.is_multiple_of(stride));
            if !self.live.is_multiple_of(stride) {
                return;
            }
        }
        self.marks.push(Mark { ns, live: self.live, frees, bytes });
        if self.threads.len() < THREADS && !self.threads.contains(&tid) {
            self.threads.push(tid);
        }
    }

    pub(super) fn freed(&mut self) {
        self.live = self.live.saturating_sub(1);
        self.frees = self.frees.saturating_add(1);
    }

    /// Whether it has nothing left and may make room for another class.
    pub(super) fn is_spent(&self) -> bool {
        self.live == 0
    }
}

/// A lowest point between two work cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// When it was left again.
    pub ns: u64,
    /// Bytes held then.
    pub bytes: u64,
    /// Most bytes held since the floor before.
    pub high: u64,
}

/// Floors kept; beyond that every other one is dropped.
const FLOORS: usize = 64;
/// A swing smaller than this is not a work cycle.
const SWING: u64 = 16 << 20;

/// Work cycles in what is held: those of single requests, and those around them, as loading and
/// unloading a model that serves many.
#[derive(Clone, Debug, Default)]
pub struct Cycles {
    /// The shortest there are.
    pub short: Floors,
    /// Those whose floors are the lowest of the short ones' floors.
    pub long: Floors,
}

impl Cycles {
    pub(super) fn moved(&mut self, ns: u64, bytes: u64) {
        if let Some(floor) = self.short.moved(ns, bytes) {
            self.long.moved(floor.ns, floor.bytes);
        }
    }
}

/// Finds the floors in a series of held bytes.
#[derive(Clone, Debug, Default)]
pub struct Floors {
    /// Floors found, oldest first.
    pub kept: Vec<Floor>,
    /// How many were found, also those that are no longer kept.
    pub count: u64,
    low: u64,
    high: u64,
    falling: bool,
    every: u64,
}

impl Floors {
    /// Follows a movement; the floor, where this shows that one was left.
    fn moved(&mut self, ns: u64, bytes: u64) -> Option<Floor> {
        if self.falling {
            self.low = self.low.min(bytes);
            if bytes < self.low.saturating_add(SWING) {
                return None;
            }
            let floor = Floor { ns, bytes: self.low, high: self.high };
            self.falling = false;
            self.high = bytes;
            self.keep(floor);
            return Some(floor);
        }
        self.high = self.high.max(bytes);
        if bytes.saturating_add(SWING) <= self.high {
            self.falling = true;
            self.low = bytes;
        }
        None
    }

    fn keep(&mut self, floor: Floor) {
        self.every = self.every.max(1);
        self.count += 1;
        if !self.count.is_multiple_of(self.every) {
            return;
        }
        if self.kept.len() == FLOORS {
            self.every = self.every.saturating_mul(2);
            let mut keep = false;
            self.kept.retain(|_| {
                keep = !keep;
                !keep
            });
        }
        self.kept.push(floor);
    }
}

#[cfg(test)]
mod tests {
    use super::{Class, Cycles};

    #[test]
    fn marks_stay_bounded_and_span_the_whole_growth() {
        let mut class = Class::default();
        for index in 1..=100_000 {
            class.allocated(index, 7, 0, 0);
        }
        assert_eq!((class.live, class.most, class.allocs), (100_000, 100_000, 100_000));
        assert!(class.marks.len() <= 32 && class.marks.len() >= 16);
        assert!(class.marks[0].live <= 8192 && class.marks.last().unwrap().live > 90_000);
        assert_eq!(class.threads, [7]);
    }

    #[test]
    fn balanced_traffic_leaves_few_marks() {
        let mut class = Class::default();
        for index in 0..1000 {
            class.allocated(index, 1, 0, 0);
            class.freed();
        }
        assert_eq!((class.live, class.most), (0, 1));
        assert!(class.marks.is_empty());
    }

    #[test]
    fn floors_are_the_lowest_points_between_swings() {
        let mib = 1 << 20;
        let mut cycles = Cycles::default();
        for (ns, bytes) in [0, 100, 40, 120, 50, 130, 60, 61, 59, 140].into_iter().enumerate() {
            cycles.moved(ns as u64, bytes * mib);
        }
        let floors: Vec<u64> = cycles.short.kept.iter().map(|floor| floor.bytes / mib).collect();
        assert_eq!(floors, [40, 50, 59]);
    }

    #[test]
    fn cycles_within_cycles_have_floors_of_their_own() {
        let gib = 1 << 30;
        let mut cycles = Cycles::default();
        let mut ns = 0;
        for load in 0..4 {
            // Loaded, two requests, unloaded.
            for held in [10, 11, 10, 11, 10, 1] {
                ns += 1;
                cycles.moved(ns, (held + load) * gib);
            }
        }
        let floors: Vec<(u64, u64)> =
            cycles.long.kept.iter().map(|floor| (floor.bytes / gib, floor.high / gib)).collect();
        assert_eq!(floors, [(1, 10), (2, 11), (3, 12)]);
        assert_eq!(cycles.short.count, 7);
    }
}
