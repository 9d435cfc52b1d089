//! Stream-ordered memory: pools whose frees are logical, and whose pages go back later.

use crate::code::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::context::current_device;
use crate::driver::{self, Driver};
use crate::memory::{Kind, Memory};
use simgpu::pages;

/// Pools grow by this much at a time.
const CHUNK: u64 = 32 << 20;
/// Sizes in pools are multiples of this.
const ALIGNMENT: u64 = 512;

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    ordinal: u32,
    /// Bytes of the device it holds.
    reserved: u64,
    /// Bytes handed out.
    used: u64,
    /// Bytes it keeps when its streams are synchronised.
    threshold: u64,
}

/// `cuMemAllocAsync` (the device's current pool) and `cuMemAllocFromPoolAsync`.
pub(crate) fn allocate(bytes: u64, pool: Option<u64>) -> Outcome<u64> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    driver::with(|driver| {
        let pool = if let Some(pool) = pool {
            pool
        } else {
            let (_, ordinal) = current_device(driver)?;
            driver.current_pool(ordinal)
        };
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(OUT_OF_MEMORY)?;
        let known = driver.pools.get(&pool).ok_or(INVALID_VALUE)?;
        let (ordinal, needed) = (known.ordinal, known.used.checked_add(bytes).ok_or(OUT_OF_MEMORY)?);
        if needed > known.reserved {
            let grow = (needed - known.reserved).checked_next_multiple_of(CHUNK).ok_or(OUT_OF_MEMORY)?;
            driver.take(ordinal, grow)?;
            driver.pools.get_mut(&pool).ok_or(INVALID_VALUE)?.reserved += grow;
        }
        driver.pools.get_mut(&pool).ok_or(INVALID_VALUE)?.used += bytes;
        let address = driver.address(bytes)?;
        driver.memory.insert(address, Memory { bytes, kind: Kind::Pooled(pool), ordinal, context: 0, exported: None });
        Ok(address)
    })
}

/// `cuMemFreeAsync`.
pub(crate) fn free(address: u64) -> Outcome<()> {
    crate::memory::free(address)
}

/// Memory of a pool was freed: its pages stay until the next synchronisation.
pub(crate) fn freed(driver: &mut Driver, pool: u64, bytes: u64) {
    if let Some(pool) = driver.pools.get_mut(&pool) {
        pool.used -= bytes;
    }
}

/// A stream, event or context was synchronised: pools give back what they hold beyond their
/// threshold.
pub(crate) fn synchronized() -> Outcome<()> {
    driver::with(|driver| {
        let pools: Vec<(u64, u64)> = driver.pools.iter().map(|(handle, pool)| (*handle, pool.threshold)).collect();
        for (pool, threshold) in pools {
            driver.shrink(pool, threshold);
        }
        Ok(())
    })
}

/// `cuMemPoolTrimTo`.
pub(crate) fn trim(pool: u64, keep: u64) -> Outcome<()> {
    driver::with(|driver| {
        driver.pools.get(&pool).ok_or(INVALID_VALUE)?;
        driver.shrink(pool, keep);
        Ok(())
    })
}

/// `cuMemPoolCreate`.
pub(crate) fn create(ordinal: u32) -> Outcome<u64> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        Ok(driver.new_pool(ordinal))
    })
}

/// `cuMemPoolDestroy`. Memory still handed out keeps it alive in the real driver; here it must be
/// empty.
pub(crate) fn destroy(pool: u64) -> Outcome<()> {
    driver::with(|driver| {
        let known = driver.pools.get(&pool).ok_or(INVALID_VALUE)?;
        if known.used > 0 || driver.current_pools.values().any(|current| *current == pool) {
            return Err(INVALID_VALUE);
        }
        driver.shrink(pool, 0);
        driver.pools.remove(&pool);
        driver.retire(pool);
        Ok(())
    })
}

/// Current pool of a device.
pub(crate) fn current(ordinal: u32) -> Outcome<u64> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        Ok(driver.current_pool(ordinal))
    })
}

/// `cuDeviceSetMemPool`.
pub(crate) fn set_current(ordinal: u32, pool: u64) -> Outcome<()> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        driver.pools.get(&pool).filter(|pool| pool.ordinal == ordinal).ok_or(INVALID_VALUE)?;
        driver.current_pools.insert(ordinal, pool);
        Ok(())
    })
}

/// Attributes of `cuMemPoolSetAttribute`: 4 is the release threshold; 1 to 3 only order reuse.
pub(crate) fn set_attribute(pool: u64, attribute: i32, value: u64) -> Outcome<()> {
    driver::with(|driver| {
        let known = driver.pools.get_mut(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => {}
            4 => known.threshold = value,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })
}

/// Attributes of `cuMemPoolGetAttribute`: 4 release threshold, 5 reserved now, 7 used now.
pub(crate) fn attribute(pool: u64, attribute: i32) -> Outcome<u64> {
    driver::with(|driver| {
        let known = driver.pools.get(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            4 => Ok(known.threshold),
            5 => Ok(known.reserved),
            7 => Ok(known.used),
            _ => Err(INVALID_VALUE),
        }
    })
}

impl Driver {
    fn new_pool(&mut self, ordinal: u32) -> u64 {
        let handle = self.handle();
        self.pools.insert(handle, Pool { ordinal, reserved: 0, used: 0, threshold: 0 });
        handle
    }

    fn current_pool(&mut self, ordinal: u32) -> u64 {
        if let Some(pool) = self.current_pools.get(&ordinal) {
            return *pool;
        }
        let pool = self.new_pool(ordinal);
        self.current_pools.insert(ordinal, pool);
        pool
    }

    fn shrink(&mut self, pool: u64, keep: u64) {
        let Some(known) = self.pools.get_mut(&pool) else { return };
        let wanted = pages(known.used).max(keep.min(known.reserved));
        let (ordinal, excess) = (known.ordinal, known.reserved.saturating_sub(wanted));
        known.reserved -= excess;
        self.give(ordinal, excess);
    }
}
