//! Virtual memory management: physical handles, address ranges, mappings.

use crate::code::{INVALID_VALUE, Outcome};
use crate::driver::{self, Driver};
use simgpu::PAGE;

/// Physical memory. It lives until no reference to its handle and no mapping is left.
#[derive(Debug)]
pub(crate) struct Physical {
    bytes: u64,
    ordinal: u32,
    references: u64,
    mappings: u64,
}

/// `cuMemCreate`.
pub(crate) fn create(ordinal: u32, bytes: u64) -> Outcome<u64> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(INVALID_VALUE);
    }
    driver::with(|driver| {
        driver.take(ordinal, bytes)?;
        let handle = driver.handle();
        driver.physical.insert(handle, Physical { bytes, ordinal, references: 1, mappings: 0 });
        Ok(handle)
    })
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64) -> Outcome<()> {
    driver::with(|driver| {
        let physical = driver.physical.get_mut(&handle).filter(|physical| physical.references > 0);
        physical.ok_or(INVALID_VALUE)?.references -= 1;
        driver.drop_unused(handle);
        Ok(())
    })
}

/// `cuMemRetainAllocationHandle`: one more reference, by an address mapped to it.
pub(crate) fn retain(address: u64) -> Outcome<u64> {
    driver::with(|driver| {
        let (handle, _) = *driver.mappings.get(&address).ok_or(INVALID_VALUE)?;
        driver.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.references += 1;
        Ok(handle)
    })
}

/// `cuMemAddressReserve`: addresses, no memory.
pub(crate) fn reserve(bytes: u64) -> Outcome<u64> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(INVALID_VALUE);
    }
    driver::with(|driver| driver.address(bytes))
}

/// `cuMemAddressFree`.
pub(crate) fn unreserve(address: u64, bytes: u64) -> Outcome<()> {
    driver::with(|driver| {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if driver.mappings.keys().any(|mapped| (address..end).contains(mapped)) {
            return Err(INVALID_VALUE);
        }
        driver.addresses.give(address, bytes);
        Ok(())
    })
}

/// `cuMemMap`.
pub(crate) fn map(address: u64, bytes: u64, handle: u64) -> Outcome<()> {
    driver::with(|driver| {
        let physical = driver.physical.get_mut(&handle).filter(|physical| physical.references > 0);
        let physical = physical.ok_or(INVALID_VALUE)?;
        if bytes == 0 || bytes > physical.bytes || driver.mappings.contains_key(&address) {
            return Err(INVALID_VALUE);
        }
        physical.mappings += 1;
        driver.mappings.insert(address, (handle, bytes));
        Ok(())
    })
}

/// `cuMemUnmap`: every mapping in the range, none of which may be cut.
pub(crate) fn unmap(address: u64, bytes: u64) -> Outcome<()> {
    driver::with(|driver| {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let inside: Vec<(u64, u64, u64)> = driver
            .mappings
            .iter()
            .filter(|(start, _)| (address..end).contains(*start))
            .map(|(start, (handle, bytes))| (*start, *handle, *bytes))
            .collect();
        if inside.is_empty() || inside.iter().any(|(start, _, bytes)| start + bytes > end) {
            return Err(INVALID_VALUE);
        }
        for (start, handle, _) in inside {
            driver.mappings.remove(&start);
            if let Some(physical) = driver.physical.get_mut(&handle) {
                physical.mappings -= 1;
            }
            driver.drop_unused(handle);
        }
        Ok(())
    })
}

impl Driver {
    fn drop_unused(&mut self, handle: u64) {
        let unused = |physical: &&Physical| physical.references == 0 && physical.mappings == 0;
        if let Some(physical) = self.physical.get(&handle).filter(unused) {
            let (ordinal, bytes) = (physical.ordinal, physical.bytes);
            self.physical.remove(&handle);
            self.give(ordinal, bytes);
            self.retire(handle);
        }
    }
}
