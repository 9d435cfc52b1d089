//! Device, managed and pinned host memory.

use crate::code::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::context::{self, current_device};
use crate::driver::{self, Driver};
use crate::pool;
use crate::sharing::Import;
use simgpu::{Export, PAGE, pages};
use std::alloc::{Layout, alloc, dealloc};

/// Allocations up to here share pages; larger ones begin at a page and take whole ones.
const SMALL: u64 = 1 << 20;
/// Addresses and sizes of small allocations are multiples of this.
const SMALL_ALIGNMENT: u64 = 512;
/// Pinned memory is allocated for real, up to here: what a test writes is small.
const PINNED_REAL: u64 = 64 << 20;
/// No host has more.
const PINNED_MOST: u64 = 64 << 40;

/// An allocation.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Bytes asked for, rounded to what is handed out.
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    pub(crate) ordinal: u32,
    /// Owner, unless it is a pool's.
    pub(crate) context: u64,
    /// What other processes open it by.
    pub(crate) exported: Option<Export>,
}

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Whole pages of a device.
    Large,
    /// A part of a page.
    Small,
    /// Managed memory, which NVML does not bill.
    Managed,
    /// A part of a pool.
    Pooled(u64),
    /// Another process's memory.
    Imported(Import),
    /// Pinned host memory.
    Pinned,
}

/// `cuMemAlloc` and `cuMemAllocPitch`.
pub(crate) fn allocate(bytes: u64) -> Outcome<u64> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    driver::with(|driver| {
        let (context, ordinal) = current_device(driver)?;
        let (kind, bytes) = if bytes > SMALL {
            let bytes = bytes.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
            driver.take(ordinal, bytes)?;
            (Kind::Large, bytes)
        } else {
            let bytes = bytes.next_multiple_of(SMALL_ALIGNMENT);
            driver.resize_small(ordinal, |small| small + bytes)?;
            (Kind::Small, bytes)
        };
        let address = driver.address(bytes)?;
        driver.memory.insert(address, Memory { bytes, kind, ordinal, context, exported: None });
        Ok(address)
    })
}

/// `cuMemAllocManaged`.
pub(crate) fn allocate_managed(bytes: u64) -> Outcome<u64> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    driver::with(|driver| {
        let (context, ordinal) = current_device(driver)?;
        let bytes = bytes.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        let address = driver.address(bytes)?;
        driver.memory.insert(address, Memory { bytes, kind: Kind::Managed, ordinal, context, exported: None });
        Ok(address)
    })
}

/// `cuMemFree`: takes pointers of every device allocator.
pub(crate) fn free(address: u64) -> Outcome<()> {
    if address == 0 {
        return Ok(());
    }
    driver::with(|driver| {
        // Imports are closed, not freed.
        if driver.memory.get(&address).is_none_or(|memory| matches!(memory.kind, Kind::Imported(_))) {
            return Err(INVALID_VALUE);
        }
        driver.free_at(address);
        Ok(())
    })
}

/// Free bytes and all bytes of the current device.
pub(crate) fn info() -> Outcome<(u64, u64)> {
    driver::with(|driver| {
        let (_, ordinal) = current_device(driver)?;
        let index = driver.host_index(ordinal)?;
        Ok((driver.client.free_bytes(index), driver.total()))
    })
}

/// `cuMemHostAlloc`, `cuMemAllocHost`. Without a context the primary one of device 0 is made, as the
/// real driver does as a side effect.
pub(crate) fn allocate_host(bytes: u64) -> Outcome<u64> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if context::current().is_none() {
        let primary = context::retain(0)?;
        context::set_current(primary)?;
    }
    driver::with(|driver| {
        let (context, ordinal) = current_device(driver)?;
        if bytes > PINNED_MOST {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: the layout's size is not 0.
        let address = unsafe { alloc(host_layout(bytes)?) } as u64;
        if address == 0 {
            return Err(OUT_OF_MEMORY);
        }
        driver.client.pin(bytes);
        driver.hosts.insert(address, Memory { bytes, kind: Kind::Pinned, ordinal, context, exported: None });
        Ok(address)
    })
}

/// `cuMemFreeHost`.
pub(crate) fn free_host(address: u64) -> Outcome<()> {
    if address == 0 {
        return Ok(());
    }
    driver::with(|driver| driver.free_host_at(address))
}

fn host_layout(bytes: u64) -> Outcome<Layout> {
    Layout::from_size_align(bytes.min(PINNED_REAL) as usize, 4096).map_err(|_| INVALID_VALUE)
}

impl Driver {
    /// Changes the bytes of small allocations on a device, and takes or gives whole pages for them.
    fn resize_small(&mut self, ordinal: u32, change: impl FnOnce(u64) -> u64) -> Outcome<()> {
        let before = self.small.get(&ordinal).copied().unwrap_or_default();
        let after = change(before);
        let (had, needs) = (pages(before), pages(after));
        if needs > had {
            self.take(ordinal, needs - had)?;
        } else {
            self.give(ordinal, had - needs);
        }
        self.small.insert(ordinal, after);
        Ok(())
    }

    /// Frees an allocation, if it is there.
    pub(crate) fn free_at(&mut self, address: u64) {
        let Some(memory) = self.memory.remove(&address) else { return };
        match memory.kind {
            Kind::Large => match memory.exported {
                Some(export) => self.client.give_exported(export),
                None => self.give(memory.ordinal, memory.bytes),
            },
            Kind::Small => {
                // Giving pages back cannot fail.
                let _ = self.resize_small(memory.ordinal, |small| small - memory.bytes);
            }
            Kind::Pooled(pool) => pool::freed(self, pool, memory.bytes),
            Kind::Imported(import) => self.close_import(import),
            Kind::Managed | Kind::Pinned => {}
        }
        self.addresses.give(address, memory.bytes);
    }

    fn free_host_at(&mut self, address: u64) -> Outcome<()> {
        let memory = self.hosts.remove(&address).ok_or(INVALID_VALUE)?;
        self.client.unpin(memory.bytes);
        // SAFETY: it was allocated with this layout and is freed once, since it was in the table.
        unsafe { dealloc(address as *mut u8, host_layout(memory.bytes)?) };
        Ok(())
    }

    /// Frees everything a context owns.
    pub(crate) fn free_memory_of(&mut self, context: u64) {
        let owned = |(address, memory): (&u64, &Memory)| {
            (memory.context == context && !matches!(memory.kind, Kind::Pooled(_))).then_some(*address)
        };
        let device: Vec<u64> = self.memory.iter().filter_map(owned).collect();
        let host: Vec<u64> = self.hosts.iter().filter_map(owned).collect();
        for address in device {
            self.free_at(address);
        }
        for address in host {
            let _ = self.free_host_at(address);
        }
    }
}
