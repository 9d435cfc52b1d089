//! Stream-ordered pools: a release to a pool is logical; the pool decides when pages go back.

use super::{Allocation, Balance, Books, New};
use crate::record::OpaqueId;
use crate::units::SECOND;

/// Pools kept for one process: only hostile callers reach it.
const POOLS: usize = 256;

/// A peak is remembered for one to two of these.
const WINDOW_NS: u64 = 300 * SECOND;

/// A pool of one process.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Its handle; `None` for the device's current pool where calls do not name it.
    pub handle: Option<OpaqueId>,
    /// NVML index of its device, once told.
    pub device: Option<u32>,
    /// Bytes it keeps when its streams are waited for (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`), if it
    /// was set; the driver's default is 0.
    pub threshold: Option<u64>,
    /// What is allocated from it.
    pub used: Balance,
    /// What its work has needed of late.
    pub recent: RecentPeak,
    /// Allocations ever.
    pub allocs: u64,
    /// Releases ever.
    pub frees: u64,
    /// Last allocation.
    pub last_alloc_ns: u64,
    /// Last release.
    pub last_free_ns: u64,
    /// Last trim, and the bytes it was told to keep.
    pub trimmed: Option<(u64, u64)>,
}

/// The most that was allocated within the last minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentPeak {
    since_ns: u64,
    current: u64,
    before: Option<u64>,
}

impl RecentPeak {
    fn note(&mut self, ns: u64, earlier: u64, bytes: u64) {
        let passed = ns.saturating_sub(self.since_ns);
        if self.since_ns == 0 {
            self.since_ns = ns;
        } else if passed >= WINDOW_NS {
            // Nothing happened in a window that was skipped: what was allocated stayed so.
            self.before = Some(if passed < 2 * WINDOW_NS { self.current } else { earlier });
            self.current = earlier;
            self.since_ns = ns;
        }
        self.current = self.current.max(bytes);
    }

    /// The peak; `None` while it has not been watched for five minutes.
    pub fn bytes(&self) -> Option<u64> {
        self.before.map(|before| before.max(self.current))
    }
}

impl Pool {
    /// The same pool before anything was allocated from it.
    pub(super) fn emptied(&self) -> Self {
        Self { handle: self.handle.clone(), device: self.device, threshold: self.threshold, ..Self::default() }
    }
}

impl Books {
    fn pool(&mut self, handle: Option<&OpaqueId>, device: Option<u32>) -> usize {
        let known = self.pools.iter().position(|pool| match handle {
            Some(handle) => pool.handle.as_ref() == Some(handle),
            None => pool.handle.is_none() && pool.device == device,
        });
        if let Some(index) = known {
            return index;
        }
        if self.pools.len() == POOLS {
            // One that is empty makes room; if none is, the last stands for all further ones.
            let empty = self.pools.iter().position(|pool| pool.used.count == 0);
            let index = empty.unwrap_or(POOLS - 1);
            if empty.is_some()
                && let Some(pool) = self.pools.get_mut(index)
            {
                *pool = Pool { handle: handle.cloned(), device, ..Pool::default() };
            }
            return index;
        }
        self.pools.push(Pool { handle: handle.cloned(), device, ..Pool::default() });
        self.pools.len() - 1
    }

    /// Books an allocation on its pool and gives the pool's serial number.
    pub(super) fn pool_allocated(&mut self, new: &New<'_>) -> u32 {
        let index = self.pool(new.pool, new.device);
        if let Some(pool) = self.pools.get_mut(index) {
            pool.device = new.device.or(pool.device);
            let earlier = pool.used.bytes;
            pool.used.add(new.size);
            pool.recent.note(new.ns, earlier, pool.used.bytes);
            pool.allocs += 1;
            pool.last_alloc_ns = new.ns;
        }
        index as u32 + 1
    }

    pub(super) fn pool_freed(&mut self, gone: &Allocation, ns: u64) {
        let pool = (gone.owner as usize).checked_sub(1).and_then(|index| self.pools.get_mut(index));
        if let Some(pool) = pool {
            pool.used.sub(gone.size);
            pool.frees += 1;
            pool.last_free_ns = ns;
        }
    }

    pub(in crate::ledger) fn pool_threshold(&mut self, handle: Option<&OpaqueId>, bytes: u64) {
        let index = self.pool(handle, None);
        if let Some(pool) = self.pools.get_mut(index) {
            pool.threshold = Some(bytes);
        }
    }

    pub(in crate::ledger) fn pool_trimmed(&mut self, handle: Option<&OpaqueId>, keep: u64, ns: u64) {
        let index = self.pool(handle, None);
        if let Some(pool) = self.pools.get_mut(index) {
            pool.trimmed = Some((ns, keep));
        }
    }
}
