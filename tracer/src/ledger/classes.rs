//! Bounded history of what grows: allocations that are alike, counted as classes.
//!
//! A class is kept in constant time and space for each call, however long the history is.

use super::books::{Balance, Map};
use crate::record::OpaqueId;
use tracer_ebpf::Family;

/// What the allocations of a class have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Likeness {
    /// Their size and, where known, the call path.
    Size {
        /// Bytes asked for.
        size: u64,
        /// Call path.
        stack: Option<OpaqueId>,
    },
    /// The call path, whatever their size.
    Path(OpaqueId),
    /// The thread that asked, whatever their size, where call paths are not known.
    Thread(u32),
}

/// Which allocations a class counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassKey {
    /// What they have in common.
    pub likeness: Likeness,
    /// Device, or `None` where unknown or for host memory.
    pub device: Option<u32>,
    /// Whether it is pinned host memory.
    pub host: bool,
}

impl ClassKey {
    fn is_path(&self) -> bool {
        matches!(self.likeness, Likeness::Path(_))
    }
}

/// A point of a [`Class`]'s growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// When.
    pub ns: u64,
    /// Survivors then.
    pub live: u64,
    /// Their bytes.
    pub held: u64,
    /// Frees the process had made by then.
    pub frees: u64,
    /// Bytes the process held by then.
    pub bytes: u64,
}

/// Marks kept for one class; beyond that every other one is dropped.
const MARKS: usize = 32;
/// Survivors from which on growth is worth recording: of a call path, each; of others, which are
/// many and mostly small, not the first ones.
const MARK_FROM: u64 = 4;
/// Threads remembered for one class.
const THREADS: usize = 32;

/// Allocations that are alike.
#[derive(Clone, Debug, Default)]
pub struct Class {
    /// Allocated and not given back.
    pub live: Balance,
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

/// An allocation that joins its classes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joining {
    pub(super) ns: u64,
    pub(super) tid: u32,
    pub(super) family: Family,
    pub(super) size: u64,
    /// Frees the process has made.
    pub(super) frees: u64,
    /// Bytes the process holds, with these.
    pub(super) bytes: u64,
}

impl Class {
    fn joined(&mut self, new: Joining, mark_from: u64) {
        if self.allocs == 0 {
            self.first_ns = new.ns;
            self.stride = 1;
            self.family = Some(new.family);
        }
        self.allocs = self.allocs.saturating_add(1);
        self.live.add(new.size);
        self.last_ns = new.ns;
        let live = self.live.count;
        if live <= self.most {
            return;
        }
        self.most = live;
        if live < mark_from || !live.is_multiple_of(self.stride) {
            return;
        }
        if self.marks.len() == MARKS {
            self.stride = self.stride.saturating_mul(2);
            let stride = self.stride;
            self.marks.retain(|mark| mark.live.is_multiple_of(stride));
            if !live.is_multiple_of(stride) {
                return;
            }
        }
        self.marks.push(Mark { ns: new.ns, live, held: self.live.bytes, frees: new.frees, bytes: new.bytes });
        if self.threads.len() < THREADS && !self.threads.contains(&new.tid) {
            self.threads.push(new.tid);
        }
    }

    fn left(&mut self, size: u64) {
        self.live.sub(size);
        self.frees = self.frees.saturating_add(1);
    }

    /// Whether it has nothing left and may make room for another class.
    fn is_spent(&self) -> bool {
        self.live.count == 0
    }
}

/// Classes kept of one sort for one process; further allocations share one entry that proves nothing.
const CLASSES: usize = 512;
/// Index of the entry that is shared.
const SHARED: u32 = 0;

/// The classes of one sort; each allocation is in one of them at most.
#[derive(Clone, Debug, Default)]
pub struct Classes {
    list: Vec<(Option<ClassKey>, Class)>,
    index: Map<ClassKey, u32>,
    /// Those that may make room.
    spent: Vec<u32>,
}

impl Classes {
    /// Those with survivors, in a stable order.
    pub fn with_survivors(&self, at_least: u64) -> Vec<(&ClassKey, &Class)> {
        let mut found: Vec<_> = self
            .list
            .iter()
            .filter_map(|(key, class)| key.as_ref().map(|key| (key, class)))
            .filter(|(_, class)| class.live.count >= at_least)
            .collect();
        found.sort_by(|a, b| a.0.cmp(b.0));
        found
    }

    /// Counts an allocation in; without a key, in none. Gives what [`Classes::left`] takes.
    pub(super) fn joined(&mut self, key: Option<ClassKey>, new: Joining) -> u32 {
        let mark_from = if key.as_ref().is_some_and(ClassKey::is_path) { 1 } else { MARK_FROM };
        let index = key.map_or(SHARED, |key| self.find(key));
        if let Some((_, class)) = self.list.get_mut(index as usize) {
            class.joined(new, mark_from);
        }
        index
    }

    /// Counts an allocation of this size out.
    pub(super) fn left(&mut self, index: u32, size: u64) {
        let Some((_, class)) = self.list.get_mut(index as usize) else { return };
        class.left(size);
        if class.is_spent() && index != SHARED {
            self.spent.push(index);
            if self.spent.len() > 2 * CLASSES {
                self.spent.sort_unstable();
                self.spent.dedup();
            }
        }
    }

    fn find(&mut self, key: ClassKey) -> u32 {
        if let Some(&index) = self.index.get(&key) {
            return index;
        }
        if self.list.is_empty() {
            self.list.push((None, Class::default()));
        }
        let index = if self.list.len() < CLASSES {
            self.list.push((None, Class::default()));
            self.list.len() - 1
        } else {
            loop {
                let Some(index) = self.spent.pop() else {
                    return SHARED;
                };
                let index = index as usize;
                let Some((old, class)) = self.list.get_mut(index).filter(|(_, class)| class.is_spent()) else {
                    continue;
                };
                *class = Class::default();
                if let Some(old) = old.take() {
                    self.index.remove(&old);
                    break index;
                }
            }
        };
        if let Some((slot, _)) = self.list.get_mut(index) {
            *slot = Some(key.clone());
        }
        self.index.insert(key, index as u32);
        index as u32
    }
}

#[cfg(test)]
mod tests {
    use super::{Class, ClassKey, Classes, Joining, Likeness};
    use tracer_ebpf::Family;

    fn new(ns: u64) -> Joining {
        Joining { ns, tid: 7, family: Family::Device, size: 10, frees: 0, bytes: 0 }
    }

    fn key(size: u64) -> ClassKey {
        ClassKey { likeness: Likeness::Size { size, stack: None }, device: Some(0), host: false }
    }

    #[test]
    fn marks_stay_bounded_and_span_the_whole_growth() {
        let mut class = Class::default();
        for index in 1..=100_000 {
            class.joined(new(index), 4);
        }
        assert_eq!((class.live.count, class.live.bytes, class.allocs), (100_000, 1_000_000, 100_000));
        assert!(class.marks.len() <= 32 && class.marks.len() >= 16);
        assert!(class.marks[0].live <= 8192 && class.marks.last().unwrap().live > 90_000);
        assert!(class.marks.iter().all(|mark| mark.held == mark.live * 10));
        assert_eq!(class.threads, [7]);
    }

    #[test]
    fn balanced_traffic_leaves_few_marks() {
        let mut class = Class::default();
        for index in 0..1000 {
            class.joined(new(index), 4);
            class.left(10);
        }
        assert_eq!((class.live.count, class.live.bytes, class.most), (0, 0, 1));
        assert!(class.marks.is_empty());
    }

    #[test]
    fn a_spent_class_makes_room_and_what_finds_none_proves_nothing() {
        let mut classes = Classes::default();
        let first = classes.joined(Some(key(1)), new(1));
        for size in 2..512 {
            classes.joined(Some(key(size)), new(1));
        }
        assert_eq!(classes.joined(Some(key(600)), new(1)), super::SHARED, "all have survivors");
        classes.left(first, 10);
        assert_eq!(classes.joined(Some(key(601)), new(1)), first);
        assert_eq!(classes.with_survivors(1).len(), 511);
        assert_eq!(classes.joined(None, new(1)), super::SHARED);
    }
}
