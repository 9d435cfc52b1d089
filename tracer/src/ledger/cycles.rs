//! Work cycles in what a process holds, and the floors between them.
//!
//! They are kept in constant time and space for each call, however long the history is.

/// A lowest point between two work cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// When it was left again.
    pub ns: u64,
    /// Bytes held then.
    pub bytes: u64,
    /// Most bytes held since the floor before.
    pub high: u64,
    /// Live allocations then.
    pub blocks: u64,
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
    pub(super) fn moved(&mut self, ns: u64, bytes: u64, blocks: u64) {
        if let Some(floor) = self.short.moved(ns, bytes, blocks) {
            self.long.moved(floor.ns, floor.bytes, floor.blocks);
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
    low_blocks: u64,
    high: u64,
    falling: bool,
    every: u64,
}

impl Floors {
    /// Follows a movement; the floor, where this shows that one was left.
    fn moved(&mut self, ns: u64, bytes: u64, blocks: u64) -> Option<Floor> {
        if self.falling {
            if bytes <= self.low {
                self.low = bytes;
                self.low_blocks = blocks;
            }
            if bytes < self.low.saturating_add(SWING) {
                return None;
            }
            let floor = Floor { ns, bytes: self.low, high: self.high, blocks: self.low_blocks };
            self.falling = false;
            self.high = bytes;
            self.keep(floor);
            return Some(floor);
        }
        self.high = self.high.max(bytes);
        if bytes.saturating_add(SWING) <= self.high {
            self.falling = true;
            self.low = bytes;
            self.low_blocks = blocks;
        }
        None
    }

    /// Cycles from one floor that is kept to the next.
    pub fn stride(&self) -> u64 {
        self.every.max(1)
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
    use super::Cycles;

    #[test]
    fn floors_are_the_lowest_points_between_swings() {
        let mib = 1 << 20;
        let mut cycles = Cycles::default();
        for (ns, bytes) in [0, 100, 40, 120, 50, 130, 60, 61, 59, 140].into_iter().enumerate() {
            cycles.moved(ns as u64, bytes * mib, bytes);
        }
        let floors: Vec<_> = cycles.short.kept.iter().map(|floor| (floor.bytes / mib, floor.blocks)).collect();
        assert_eq!(floors, [(40, 40), (50, 50), (59, 59)]);
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
                cycles.moved(ns, (held + load) * gib, 1);
            }
        }
        let floors: Vec<(u64, u64)> =
            cycles.long.kept.iter().map(|floor| (floor.bytes / gib, floor.high / gib)).collect();
        assert_eq!(floors, [(1, 10), (2, 11), (3, 12)]);
        assert_eq!(cycles.short.count, 7);
    }
}
