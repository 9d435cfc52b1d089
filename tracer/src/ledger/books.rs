//! One process's GPU memory, booked call by call with the driver's semantics.

mod contexts;
mod entry_points;
mod mappings;
mod pools;
mod restate;

pub(super) use contexts::ContextEnd;
pub(super) use entry_points::{family_of, layer_of};
pub use pools::{Pool, RecentPeak};

use super::classes::{ClassKey, Classes, Joining, Likeness};
use super::cycles::Cycles;
use super::series::Series;
use crate::record::{OpaqueId, Text};
use std::collections::BTreeMap;
use tracer_ebpf::Family;

/// Handles are chosen by the traced processes, so the hash is seeded.
pub(super) type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;

/// A handle in its number space: device pointers, host pointers and VMM handles are numbered apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) space: Space,
    pub(super) handle: OpaqueId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Space {
    Device,
    Vmm,
    Host,
}

impl Space {
    pub(super) fn of(family: Family) -> Self {
        match family {
            Family::Device | Family::Managed | Family::Pool => Self::Device,
            Family::Vmm => Self::Vmm,
            Family::Host => Self::Host,
        }
    }
}

/// The layer of the library a call was seen in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    Driver,
    Runtime,
}

#[derive(Clone, Debug)]
pub(super) struct Allocation {
    pub(super) size: u64,
    pub(super) ns: u64,
    pub(super) device: Option<u32>,
    pub(super) family: Family,
    pub(super) layer: Layer,
    /// Serial number of its context, or of its pool; 0 where neither owns it or it is not known.
    pub(super) owner: u32,
    /// Its class among those of its size, and among those of its origin.
    size_class: u32,
    origin_class: u32,
    /// Handle references and mappings that keep a VMM block.
    refs: u32,
    maps: u32,
}

/// A context of one process.
#[derive(Clone, Debug)]
pub struct Context {
    /// Handle; `None` where it was not told.
    pub handle: Option<OpaqueId>,
    /// NVML index of its device.
    pub device: Option<u32>,
    /// Whether it is the device's primary context, which is counted.
    pub primary: bool,
    /// References on a primary one.
    pub refs: u32,
    /// When it came into being.
    pub ns: u64,
    /// How long that took.
    pub dur_ns: u64,
    serial: u32,
}

/// Sums of one kind of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Allocated and not given back.
    pub bytes: u64,
    /// Number of those allocations.
    pub count: u64,
    /// Most bytes so far.
    pub peak: u64,
}

impl Balance {
    pub(super) fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.count = self.count.saturating_add(1);
        self.peak = self.peak.max(self.bytes);
    }

    pub(super) fn sub(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.count = self.count.saturating_sub(1);
    }
}

/// One device's share of a process's books.
#[derive(Clone, Debug, Default)]
pub struct DeviceBooks {
    /// All device memory but managed.
    pub owned: Balance,
    /// Managed memory, which NVML does not bill.
    pub managed: Balance,
    /// Work cycles in the sum of both.
    pub cycles: Cycles,
    /// Last time something was allocated or given back there.
    pub last_ns: u64,
    /// What NVML bills beyond the books.
    pub gap: Gap,
}

/// What NVML bills a process beyond its books: contexts, code, local memory, page rounding, pages a
/// pool keeps, and whatever allocates without a traced call.
#[derive(Clone, Debug, Default)]
pub struct Gap {
    /// Least so far, which is learned as the process's fixed overhead.
    pub least: Option<u64>,
    /// Last.
    pub last: u64,
    /// What nothing in the books can explain, over time.
    pub unexplained: Series<(u64, u64)>,
    /// What the books held, over time.
    pub held: Series<(u64, u64)>,
}

impl DeviceBooks {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.owned.bytes.saturating_add(self.managed.bytes)
    }

    fn moved(&mut self, ns: u64) {
        self.last_ns = ns;
        self.cycles.moved(ns, self.bytes(), self.owned.count.saturating_add(self.managed.count));
    }
}

/// A call that was refused, as it is remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Entry point.
    pub api: Text,
    /// Driver error.
    pub result: i32,
    /// When.
    pub ns: u64,
    /// How often.
    pub count: u64,
    /// Blocks that were to be released and are still there, with their sizes.
    blocks: BTreeMap<OpaqueId, u64>,
    /// Whether it is about pinned host memory.
    pub host: bool,
}

impl Refusal {
    /// Bytes that were to be released and are still there.
    pub fn bytes(&self) -> u64 {
        self.blocks.values().fold(0, |sum, &size| sum.saturating_add(size))
    }
}

/// An imported block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// What the exporter called it.
    pub ipc: OpaqueId,
    /// Bytes.
    pub size: u64,
    /// NVML index.
    pub device: Option<u32>,
    /// When it was opened first.
    pub ns: u64,
    /// How often it is open.
    pub refs: u32,
}

/// Contexts kept for one process: only hostile callers reach it.
const CONTEXTS: usize = 4096;
/// Imports kept for one process.
const IMPORTS: usize = 65_536;
/// Kinds of refusals kept for one process.
const REFUSALS: usize = 16;
/// Blocks kept for one kind of refusal.
const REFUSED_BLOCKS: usize = 4096;

/// One process's GPU memory.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// First driver call or NVML row.
    pub first_ns: u64,
    /// Contexts alive.
    pub contexts: Vec<Context>,
    /// Contexts created ever, and the time that took.
    pub contexts_created: u64,
    /// Time spent creating them.
    pub context_ns: u64,
    /// By device; `None` where the device could not be told.
    pub devices: BTreeMap<Option<u32>, DeviceBooks>,
    /// Device memory on all devices.
    pub bytes: u64,
    /// Most of it at once.
    pub peak: u64,
    /// Pinned host memory.
    pub host: Balance,
    /// Requests that were refused.
    pub failed_allocs: u64,
    /// Releases that were refused.
    pub refused_frees: Vec<Refusal>,
    /// Releases of handles that are not in the books.
    pub unknown_frees: u64,
    /// Handles that were handed out while the books still held them: proof of lost releases.
    pub reused: u64,
    /// The first of them, and when.
    pub first_reused: Option<(OpaqueId, u64)>,
    /// Events lost that may have been this process's.
    pub lost: u64,
    /// When the first of them were lost, until the books were replaced by exact ones.
    pub unreliable_since_ns: Option<u64>,
    /// Whether the books were replaced by exact ones.
    pub resynced: bool,
    /// Successful releases of device memory.
    pub frees: u64,
    /// Stream-ordered pools, by serial number less one.
    pub pools: Vec<Pool>,
    /// Code modules loaded and unloaded ever.
    pub modules_loaded: u64,
    /// Unloaded.
    pub modules_unloaded: u64,
    /// Imports by pointer.
    pub imports: BTreeMap<OpaqueId, Import>,
    /// Allocations by size and call path.
    pub by_size: Classes,
    /// Allocations of any size by call path or, where it is not known, by thread.
    pub by_origin: Classes,
    live: Map<Key, Allocation>,
    maps: BTreeMap<OpaqueId, Mapping>,
    /// Bytes of a resync that no listed allocation explains.
    unlisted: BTreeMap<Option<u32>, u64>,
    /// The same of pinned host memory.
    unlisted_host: u64,
    serial: u32,
}

#[derive(Clone, Debug)]
struct Mapping {
    handle: OpaqueId,
    size: u64,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Known,
    Unknown,
}

/// A new allocation, as it is booked.
pub(super) struct New<'a> {
    pub(super) ns: u64,
    pub(super) begin_ns: Option<u64>,
    pub(super) tid: u32,
    pub(super) family: Family,
    pub(super) layer: Layer,
    pub(super) handle: &'a OpaqueId,
    pub(super) size: u64,
    pub(super) device: Option<u32>,
    pub(super) ctx: Option<&'a OpaqueId>,
    pub(super) stack: Option<&'a OpaqueId>,
    pub(super) pool: Option<&'a OpaqueId>,
}

impl Books {
    pub(super) fn new(ns: u64) -> Self {
        Self { first_ns: ns, ..Self::default() }
    }

    /// A sample told what NVML bills on a device.
    pub(super) fn billed(&mut self, device: u32, used: u64, ns: u64) {
        if self.unreliable_since_ns.is_some() || !self.devices.contains_key(&Some(device)) {
            return;
        }
        let shared = self.imports.values().filter(|import| import.device == Some(device));
        let shared = shared.fold(0_u64, |sum, import| sum.saturating_add(import.size));
        let kept = self.pools.iter().filter(|pool| pool.device == Some(device));
        let kept = kept.fold(0_u64, |sum, pool| sum.saturating_add(pool.used.peak - pool.used.bytes));
        let Some(books) = self.devices.get_mut(&Some(device)) else { return };
        let gap = used.saturating_sub(books.owned.bytes);
        // Blocks take whole pages of 2 MiB; small ones share them.
        let rounding = books.owned.count.saturating_mul(2 << 20).min(books.owned.bytes / 2 + (64 << 20));
        let unexplained = gap.saturating_sub(shared).saturating_sub(kept).saturating_sub(rounding);
        books.gap.least = Some(books.gap.least.map_or(gap, |least| least.min(gap)));
        books.gap.last = gap;
        books.gap.unexplained.push((ns, unexplained));
        books.gap.held.push((ns, books.owned.bytes));
    }

    /// Live allocations.
    pub fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Size and device of a live allocation.
    pub(super) fn look_up(&self, space: Space, handle: &OpaqueId) -> Option<(u64, Option<u32>)> {
        self.live.get(&Key { space, handle: handle.clone() }).map(|block| (block.size, block.device))
    }

    pub(super) fn holds(&self, space: Space, handle: &OpaqueId) -> bool {
        self.live.contains_key(&Key { space, handle: handle.clone() })
    }

    pub(super) fn allocated(&mut self, new: &New<'_>) {
        let key = Key { space: Space::of(new.family), handle: new.handle.clone() };
        if let Some(old) = self.live.get_mut(&key) {
            // The runtime's call and the driver's call inside it report one block.
            let nested =
                old.layer != new.layer && old.size == new.size && new.begin_ns.is_none_or(|begin| old.ns >= begin);
            if nested {
                return;
            }
            if new.family == Family::Vmm && old.size == new.size {
                // A retained handle: another reference on the same block.
                old.refs = old.refs.saturating_add(1);
                return;
            }
            self.reused = self.reused.saturating_add(1);
            self.first_reused.get_or_insert_with(|| (new.handle.clone(), new.ns));
            self.remove(&key, new.ns);
        }
        self.insert(key, new);
    }

    fn insert(&mut self, key: Key, new: &New<'_>) {
        let host = new.family == Family::Host;
        let owner = match new.family {
            Family::Pool => self.pool_allocated(new),
            Family::Vmm => 0,
            _ => self.context_of(new.ctx, new.device),
        };
        if host {
            self.host.add(new.size);
        } else {
            self.add_device(new.device, new.family, new.size, new.ns);
        }
        let (size_class, origin_class) = self.classify(new, host);
        self.live.insert(
            key,
            Allocation {
                size: new.size,
                ns: new.ns,
                device: new.device,
                family: new.family,
                layer: new.layer,
                owner,
                size_class,
                origin_class,
                refs: 1,
                maps: 0,
            },
        );
    }

    pub(super) fn freed(&mut self, space: Space, handle: &OpaqueId, ns: u64) -> Freed {
        let key = Key { space, handle: handle.clone() };
        let Some(allocation) = self.live.get_mut(&key) else {
            return Freed::Unknown;
        };
        self.frees = self.frees.saturating_add(1);
        if space == Space::Vmm {
            allocation.refs = allocation.refs.saturating_sub(1);
            if allocation.refs > 0 || allocation.maps > 0 {
                return Freed::Known;
            }
        }
        self.remove(&key, ns);
        Freed::Known
    }

    fn remove(&mut self, key: &Key, ns: u64) {
        if let Some(gone) = self.live.remove(key) {
            for refusal in self.refused_frees.iter_mut().filter(|refusal| refusal.host == (key.space == Space::Host)) {
                refusal.blocks.remove(&key.handle);
            }
            self.settle(&gone, ns);
        }
    }

    fn settle(&mut self, gone: &Allocation, ns: u64) {
        self.by_size.left(gone.size_class, gone.size);
        self.by_origin.left(gone.origin_class, gone.size);
        if gone.family == Family::Host {
            self.host.sub(gone.size);
            return;
        }
        if gone.family == Family::Pool {
            self.pool_freed(gone, ns);
        }
        self.bytes = self.bytes.saturating_sub(gone.size);
        let device = self.devices.entry(gone.device).or_default();
        if gone.family == Family::Managed { &mut device.managed } else { &mut device.owned }.sub(gone.size);
        device.moved(ns);
    }

    fn add_device(&mut self, device: Option<u32>, family: Family, size: u64, ns: u64) {
        self.bytes = self.bytes.saturating_add(size);
        self.peak = self.peak.max(self.bytes);
        let device = self.devices.entry(device).or_default();
        if family == Family::Managed { &mut device.managed } else { &mut device.owned }.add(size);
        device.moved(ns);
    }

    fn classify(&mut self, new: &New<'_>, host: bool) -> (u32, u32) {
        let device = if host { None } else { new.device };
        let key = |likeness| ClassKey { likeness, device, host };
        let by_size = key(Likeness::Size { size: new.size, stack: new.stack.cloned() });
        // Exact books after a loss name neither path nor thread.
        let by_origin = match new.stack {
            Some(stack) => Some(key(Likeness::Path(stack.clone()))),
            None => (new.tid != 0).then(|| key(Likeness::Thread(new.tid))),
        };
        let joining = Joining {
            ns: new.ns,
            tid: new.tid,
            family: new.family,
            size: new.size,
            frees: self.frees,
            bytes: if host { self.host.bytes } else { self.bytes },
        };
        (self.by_size.joined(Some(by_size), joining), self.by_origin.joined(by_origin, joining))
    }

    pub(super) fn refused(&mut self, api: &Text, result: i32, ns: u64, space: Space, handle: &OpaqueId) {
        let known = self.refused_frees.iter().position(|known| known.api == *api && known.result == result);
        if known.is_none() {
            if self.refused_frees.len() >= REFUSALS {
                return;
            }
            let (api, host) = (api.clone(), space == Space::Host);
            self.refused_frees.push(Refusal { api, result, ns, count: 0, blocks: BTreeMap::new(), host });
        }
        let index = known.unwrap_or(self.refused_frees.len() - 1);
        let Some(refusal) = self.refused_frees.get_mut(index) else { return };
        refusal.count = refusal.count.saturating_add(1);
        refusal.ns = ns;
        let block = self.live.get(&Key { space, handle: handle.clone() });
        if let Some(block) = block.filter(|_| refusal.blocks.len() < REFUSED_BLOCKS) {
            refusal.blocks.insert(handle.clone(), block.size);
        }
    }
}
