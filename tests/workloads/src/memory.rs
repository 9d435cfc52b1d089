//! Allocations of every family, and how much of each is live.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    driver::{
        CallError, Driver,
        abi::{AllocationProperties, MEM_ATTACH_GLOBAL},
    },
    report::{Event, Held},
};

/// The row length of pitched allocations. A multiple of every pitch alignment in use, so that rows are not padded.
const PITCH_ROW_BYTES: u64 = 4096;
/// Elements of pitched allocations (4, 8 or 16 bytes are allowed).
const PITCH_ELEMENT_BYTES: u32 = 16;
/// Devices that are told apart in the counts.
const MAX_DEVICES: usize = 16;
/// The default stream.
const DEFAULT_STREAM: usize = 0;

/// A way to allocate memory through the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Family {
    /// `cuMemAlloc_v2`
    Device,
    /// `cuMemAllocPitch_v2`
    Pitch,
    /// `cuMemAllocManaged`
    Managed,
    /// `cuMemAllocAsync` on the default stream
    Async,
    /// `cuMemAllocAsync_ptsz` on the per-thread default stream
    AsyncPtsz,
    /// `cuMemHostAlloc`
    Host,
    /// `cuMemAllocHost_v2`
    HostV2,
    /// `cuMemCreate`, not mapped
    Vmm,
    /// `cuMemCreate`, mapped into a reserved address range
    VmmMapped,
}

impl Family {
    /// Every family, in the order of the discriminants.
    pub(crate) const ALL: [Self; 9] = [
        Self::Device,
        Self::Pitch,
        Self::Managed,
        Self::Async,
        Self::AsyncPtsz,
        Self::Host,
        Self::HostV2,
        Self::Vmm,
        Self::VmmMapped,
    ];

    /// The name on the command line, in scripts and in the output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pitch => "pitch",
            Self::Managed => "managed",
            Self::Async => "async",
            Self::AsyncPtsz => "async-ptsz",
            Self::Host => "host",
            Self::HostV2 => "host-v2",
            Self::Vmm => "vmm",
            Self::VmmMapped => "vmm-mapped",
        }
    }
}

/// Memory that the process holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    family: Family,
    device: i32,
    /// Pointer, or the handle for VMM memory.
    address: u64,
    /// Where VMM memory is mapped.
    mapping: u64,
    bytes: u64,
}

impl Allocation {
    /// The pointer or handle.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

#[derive(Default)]
struct Counter {
    bytes: AtomicU64,
    count: AtomicU64,
}

/// Live memory of this process by device and family.
#[derive(Default)]
pub(crate) struct Live {
    counters: [[Counter; Family::ALL.len()]; MAX_DEVICES],
}

impl Live {
    fn counter(&self, allocation: &Allocation) -> &Counter {
        let device = usize::try_from(allocation.device).unwrap_or(0).min(MAX_DEVICES - 1);
        &self.counters[device][allocation.family as usize]
    }

    fn add(&self, allocation: &Allocation) {
        let counter = self.counter(allocation);
        counter.bytes.fetch_add(allocation.bytes, Ordering::Relaxed);
        counter.count.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self, allocation: &Allocation) {
        let counter = self.counter(allocation);
        counter.bytes.fetch_sub(allocation.bytes, Ordering::Relaxed);
        counter.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Forgets everything: after a fork the memory is the parent's.
    pub(crate) fn forget(&self) {
        for counter in self.counters.iter().flatten() {
            counter.bytes.store(0, Ordering::Relaxed);
            counter.count.store(0, Ordering::Relaxed);
        }
    }

    /// The counts as a line of output.
    pub(crate) fn event(&self) -> Event<'static> {
        let mut total = Held::default();
        let (mut families, mut devices) = (BTreeMap::<_, Held>::new(), BTreeMap::<_, Held>::new());
        for (device, counters) in (0..).zip(&self.counters) {
            for (family, counter) in Family::ALL.iter().zip(counters) {
                let held =
                    Held { bytes: counter.bytes.load(Ordering::Relaxed), count: counter.count.load(Ordering::Relaxed) };
                if held.count > 0 {
                    total += held;
                    *families.entry(family.name()).or_default() += held;
                    *devices.entry(device).or_default() += held;
                }
            }
        }
        Event::Live { total, families, devices }
    }
}

/// Allocates `bytes` of `family` in the current context, which is on `device`.
pub(crate) fn allocate(
    driver: &Driver,
    live: &Live,
    device: i32,
    family: Family,
    bytes: u64,
) -> Result<Allocation, CallError> {
    let size = bytes as usize;
    let (mut address, mut host, mut mapping) = (0, 0, 0);
    match family {
        Family::Device => driver.mem_alloc(&mut address, size)?,
        Family::Pitch => {
            let (width, height) = pitch_shape(bytes);
            driver.mem_alloc_pitch(&mut address, &mut 0, width, height, PITCH_ELEMENT_BYTES)?;
        }
        Family::Managed => driver.mem_alloc_managed(&mut address, size, MEM_ATTACH_GLOBAL)?,
        Family::Async => driver.mem_alloc_async(&mut address, size, DEFAULT_STREAM)?,
        Family::AsyncPtsz => driver.mem_alloc_async_ptsz(&mut address, size, DEFAULT_STREAM)?,
        Family::Host => driver.mem_host_alloc(&mut host, size, 0)?,
        Family::HostV2 => driver.mem_alloc_host(&mut host, size)?,
        Family::Vmm => driver.mem_create(&mut address, size, &AllocationProperties::on_device(device), 0)?,
        Family::VmmMapped => {
            driver.mem_create(&mut address, size, &AllocationProperties::on_device(device), 0)?;
            driver.mem_address_reserve(&mut mapping, size, 0, 0, 0)?;
            driver.mem_map(mapping, size, 0, address, 0)?;
        }
    }
    let address = if matches!(family, Family::Host | Family::HostV2) { host as u64 } else { address };
    let allocation = Allocation { family, device, address, mapping, bytes };
    live.add(&allocation);
    Ok(allocation)
}

/// Gives the memory back with the function that belongs to its family.
pub(crate) fn release(driver: &Driver, live: &Live, allocation: &Allocation) -> Result<(), CallError> {
    let size = allocation.bytes as usize;
    match allocation.family {
        Family::Device | Family::Pitch | Family::Managed => driver.mem_free(allocation.address)?,
        Family::Async => driver.mem_free_async(allocation.address, DEFAULT_STREAM)?,
        Family::AsyncPtsz => driver.mem_free_async_ptsz(allocation.address, DEFAULT_STREAM)?,
        Family::Host | Family::HostV2 => driver.mem_free_host(allocation.address as usize)?,
        Family::Vmm => driver.mem_release(allocation.address)?,
        Family::VmmMapped => {
            driver.mem_unmap(allocation.mapping, size)?;
            driver.mem_release(allocation.address)?;
            driver.mem_address_free(allocation.mapping, size)?;
        }
    }
    live.remove(allocation);
    Ok(())
}

/// Width and height whose product is exactly `bytes`.
fn pitch_shape(bytes: u64) -> (usize, usize) {
    if bytes.is_multiple_of(PITCH_ROW_BYTES) && bytes > 0 {
        (PITCH_ROW_BYTES as usize, (bytes / PITCH_ROW_BYTES) as usize)
    } else {
        (bytes as usize, 1)
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn families_have_one_name_everywhere() {
        for (index, family) in Family::ALL.iter().enumerate() {
            assert_eq!(*family as usize, index);
            assert_eq!(family.to_possible_value().unwrap().get_name(), family.name());
        }
    }

    #[test]
    fn a_pitched_allocation_has_exactly_the_bytes_asked_for() {
        for bytes in [0, 1, 100, 4096, 6 << 20, (6 << 20) + 1] {
            let (width, height) = pitch_shape(bytes);
            assert_eq!((width * height) as u64, bytes);
        }
    }

    #[test]
    fn live_counts_by_family_and_device_and_forgets() {
        let live = Live::default();
        let block = Allocation { family: Family::Device, device: 1, address: 1, mapping: 0, bytes: 64 };
        let pinned = Allocation { family: Family::Host, device: 0, bytes: 32, ..block };
        live.add(&block);
        live.add(&block);
        live.add(&pinned);
        live.remove(&block);
        let Event::Live { total, families, devices } = live.event() else { panic!("not a live event") };
        assert_eq!(total, Held { bytes: 96, count: 2 });
        assert_eq!(families["device"], Held { bytes: 64, count: 1 });
        assert_eq!(devices[&0], Held { bytes: 32, count: 1 });
        live.forget();
        let Event::Live { total, .. } = live.event() else { panic!("not a live event") };
        assert_eq!(total, Held::default());
    }
}
