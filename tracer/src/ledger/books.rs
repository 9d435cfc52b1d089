//! One process's GPU memory, booked call by call with the driver's semantics.

use super::trend::{Class, ClassKey, Cycles};
use crate::record::{OpaqueId, Text};
use std::collections::{BTreeMap, HashMap};
use tracer_ebpf::Family;

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
    /// Serial number of its context; 0 where no context owns it or it is not known.
    pub(super) context: u32,
    /// Index of its class.
    class: u32,
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
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.count = self.count.saturating_add(1);
        self.peak = self.peak.max(self.bytes);
    }

    fn sub(&mut self, bytes: u64) {
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
}

impl DeviceBooks {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.owned.bytes.saturating_add(self.managed.bytes)
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
    /// Whether it is about pinned host memory.
    pub host: bool,
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
/// Classes kept for one process; further ones share one entry that proves nothing.
const CLASSES: usize = 512;

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
    /// Imports by pointer.
    pub imports: BTreeMap<OpaqueId, Import>,
    classes: Vec<(Option<ClassKey>, Class)>,
    class_index: HashMap<ClassKey, u32>,
    spent: Vec<u32>,
    live: HashMap<Key, Allocation>,
    maps: BTreeMap<OpaqueId, Mapping>,
    /// Bytes of a resync that no listed allocation explains.
    unlisted: BTreeMap<Option<u32>, u64>,
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
}

impl Books {
    pub(super) fn new(ns: u64) -> Self {
        // Class 0 is the one that further classes share.
        Self { first_ns: ns, classes: vec![(None, Class::default())], ..Self::default() }
    }

    /// Classes of allocations that grew, in a stable order.
    pub fn growing_classes(&self, at_least: u64) -> Vec<(&ClassKey, &Class)> {
        let mut found: Vec<_> = self
            .classes
            .iter()
            .filter_map(|(key, class)| key.as_ref().map(|key| (key, class)))
            .filter(|(_, class)| class.live >= at_least)
            .collect();
        found.sort_by(|a, b| a.0.cmp(b.0));
        found
    }

    /// Live allocations.
    pub fn live_count(&self) -> usize {
        self.live.len()
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
        let context = match new.family {
            Family::Pool | Family::Vmm => 0,
            _ => self.context_of(new.ctx, new.device),
        };
        let class = self.class_of(new.size, new.stack, new.device, host);
        if host {
            self.host.add(new.size);
        } else {
            self.add_device(new.device, new.family, new.size, new.ns);
        }
        let frees = self.frees;
        let bytes = if host { self.host.bytes } else { self.bytes };
        if let Some((_, class)) = self.classes.get_mut(class as usize) {
            class.allocated(new.ns, new.tid, frees, bytes);
        }
        self.live.insert(
            key,
            Allocation {
                size: new.size,
                ns: new.ns,
                device: new.device,
                family: new.family,
                layer: new.layer,
                context,
                class,
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

    pub(super) fn mapped(&mut self, va: &OpaqueId, handle: &OpaqueId, size: u64) {
        if let Some(block) = self.live.get_mut(&Key { space: Space::Vmm, handle: handle.clone() }) {
            block.maps = block.maps.saturating_add(1);
            if let Some(old) = self.maps.insert(va.clone(), Mapping { handle: handle.clone(), size }) {
                self.unmapped_block(&old.handle, 0);
            }
        }
    }

    pub(super) fn unmapped(&mut self, va: &OpaqueId, size: u64, ns: u64) {
        let gone: Vec<OpaqueId> = match va {
            // One call may remove many neighbouring mappings.
            OpaqueId::Number(start) => {
                let end = start.saturating_add(size.max(1));
                self.maps
                    .range(OpaqueId::Number(*start)..OpaqueId::Number(end))
                    .filter(|(at, mapping)| match at {
                        OpaqueId::Number(at) => size == 0 || at.saturating_add(mapping.size) <= end || at == start,
                        OpaqueId::Text(_) => false,
                    })
                    .map(|(at, _)| at.clone())
                    .collect()
            }
            OpaqueId::Text(_) => self.maps.get_key_value(va).map(|(at, _)| at.clone()).into_iter().collect(),
        };
        for at in gone {
            if let Some(mapping) = self.maps.remove(&at) {
                self.unmapped_block(&mapping.handle, ns);
            }
        }
    }

    fn unmapped_block(&mut self, handle: &OpaqueId, ns: u64) {
        let key = Key { space: Space::Vmm, handle: handle.clone() };
        if let Some(block) = self.live.get_mut(&key) {
            block.maps = block.maps.saturating_sub(1);
            if block.maps == 0 && block.refs == 0 {
                self.remove(&key, ns);
            }
        }
    }

    fn remove(&mut self, key: &Key, ns: u64) {
        if let Some(gone) = self.live.remove(key) {
            self.settle(&gone, ns);
        }
    }

    fn settle(&mut self, gone: &Allocation, ns: u64) {
        if let Some((_, class)) = self.classes.get_mut(gone.class as usize) {
            class.freed();
            if class.is_spent() && gone.class != 0 {
                self.spent.push(gone.class);
                if self.spent.len() > 2 * CLASSES {
                    self.spent.sort_unstable();
                    self.spent.dedup();
                }
            }
        }
        if gone.family == Family::Host {
            self.host.sub(gone.size);
            return;
        }
        self.bytes = self.bytes.saturating_sub(gone.size);
        let device = self.devices.entry(gone.device).or_default();
        if gone.family == Family::Managed { &mut device.managed } else { &mut device.owned }.sub(gone.size);
        device.cycles.moved(ns, device.owned.bytes.saturating_add(device.managed.bytes));
    }

    fn add_device(&mut self, device: Option<u32>, family: Family, size: u64, ns: u64) {
        self.bytes = self.bytes.saturating_add(size);
        self.peak = self.peak.max(self.bytes);
        let device = self.devices.entry(device).or_default();
        if family == Family::Managed { &mut device.managed } else { &mut device.owned }.add(size);
        device.cycles.moved(ns, device.owned.bytes.saturating_add(device.managed.bytes));
    }

    fn class_of(&mut self, size: u64, stack: Option<&OpaqueId>, device: Option<u32>, host: bool) -> u32 {
        let key = ClassKey { size, stack: stack.cloned(), device: if host { None } else { device }, host };
        if let Some(&index) = self.class_index.get(&key) {
            return index;
        }
        let index = if self.classes.len() < CLASSES {
            self.classes.push((None, Class::default()));
            self.classes.len() - 1
        } else {
            loop {
                let Some(index) = self.spent.pop() else {
                    return 0;
                };
                let index = index as usize;
                let Some((old, class)) = self.classes.get_mut(index).filter(|(_, class)| class.is_spent()) else {
                    continue;
                };
                *class = Class::default();
                if let Some(old) = old.take() {
                    self.class_index.remove(&old);
                    break index;
                }
            }
        };
        if let Some((slot, _)) = self.classes.get_mut(index) {
            *slot = Some(key.clone());
        }
        self.class_index.insert(key, index as u32);
        index as u32
    }

    fn context_of(&self, handle: Option<&OpaqueId>, device: Option<u32>) -> u32 {
        if let Some(handle) = handle {
            return self
                .contexts
                .iter()
                .rev()
                .find(|context| context.handle.as_ref() == Some(handle))
                .map_or(0, |context| context.serial);
        }
        let mut on_device = self.contexts.iter().filter(|context| device.is_none() || context.device == device);
        match (on_device.next(), on_device.next()) {
            (Some(only), None) => only.serial,
            _ => 0,
        }
    }

    pub(super) fn context_created(
        &mut self,
        handle: Option<&OpaqueId>,
        device: Option<u32>,
        primary: bool,
        ns: u64,
        dur_ns: u64,
    ) {
        if primary
            && let Some(context) =
                self.contexts.iter_mut().find(|context| context.primary && context.device == device && device.is_some())
        {
            context.refs = context.refs.saturating_add(1);
            return;
        }
        // A context at the address of an older one: the older one's end was lost.
        if let Some(old) =
            self.contexts.iter().position(|context| handle.is_some() && context.handle.as_ref() == handle)
        {
            self.contexts.remove(old);
        }
        if self.contexts.len() >= CONTEXTS {
            return;
        }
        self.serial = self.serial.wrapping_add(1).max(1);
        self.contexts_created = self.contexts_created.saturating_add(1);
        self.context_ns = self.context_ns.saturating_add(dur_ns);
        self.contexts.push(Context {
            handle: handle.cloned(),
            device,
            primary,
            refs: 1,
            ns,
            dur_ns,
            serial: self.serial,
        });
    }

    /// Ends a context (or gives back a reference) and frees what the driver frees with it.
    pub(super) fn context_destroyed(
        &mut self,
        handle: Option<&OpaqueId>,
        device: Option<u32>,
        end: ContextEnd,
        begin_ns: u64,
        ns: u64,
    ) {
        let position = self.contexts.iter().position(|context| {
            context.ns <= begin_ns
                && match end {
                    ContextEnd::Destroy => handle.is_some() && context.handle.as_ref() == handle,
                    ContextEnd::Release | ContextEnd::Reset => {
                        context.primary
                            && (context.device == device || handle.is_some() && context.handle.as_ref() == handle)
                    }
                }
        });
        let Some(position) = position else {
            return;
        };
        if end == ContextEnd::Release
            && let Some(context) = self.contexts.get_mut(position)
            && context.refs > 1
        {
            context.refs -= 1;
            return;
        }
        let gone = self.contexts.remove(position);
        let last_on_device = !self.contexts.iter().any(|context| context.device == gone.device);
        let last = self.contexts.is_empty();
        let doomed: Vec<Key> = self
            .live
            .iter()
            .filter(|(_, allocation)| {
                let in_context = !matches!(allocation.family, Family::Pool | Family::Vmm);
                let ours = match (allocation.context, allocation.device) {
                    (0, None) => last,
                    (0, device) => last_on_device && device == gone.device,
                    (serial, _) => serial == gone.serial,
                };
                in_context && ours && allocation.ns <= begin_ns
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in doomed {
            self.remove(&key, ns);
        }
    }

    pub(super) fn refused(&mut self, api: &Text, result: i32, ns: u64, host: bool) {
        if let Some(known) = self.refused_frees.iter_mut().find(|known| known.api == *api && known.result == result) {
            known.count = known.count.saturating_add(1);
            known.ns = ns;
        } else if self.refused_frees.len() < REFUSALS {
            self.refused_frees.push(Refusal { api: api.clone(), result, ns, count: 1, host });
        }
    }

    pub(super) fn imported(&mut self, ipc: &OpaqueId, handle: &OpaqueId, size: u64, device: Option<u32>, ns: u64) {
        if let Some(known) = self.imports.get_mut(handle) {
            // The driver counts how often a context opened a block and returns the same pointer.
            known.refs = known.refs.saturating_add(1);
        } else if self.imports.len() < IMPORTS {
            self.imports.insert(handle.clone(), Import { ipc: ipc.clone(), size, device, ns, refs: 1 });
        }
    }

    /// Closes an import once; false if there is none at this pointer.
    pub(super) fn import_closed(&mut self, handle: &OpaqueId) -> bool {
        let Some(known) = self.imports.get_mut(handle) else { return false };
        known.refs = known.refs.saturating_sub(1);
        if known.refs == 0 {
            self.imports.remove(handle);
        }
        true
    }

    /// The process is dead: its sums stay, its lists go.
    pub(super) fn close(&mut self) {
        self.live = HashMap::new();
        self.maps = BTreeMap::new();
        self.imports = BTreeMap::new();
        self.classes = Vec::new();
        self.class_index = HashMap::new();
        self.spent = Vec::new();
        self.unlisted = BTreeMap::new();
        for books in self.devices.values_mut() {
            books.cycles = Cycles::default();
        }
    }

    /// The same image no longer runs: the driver gave everything back.
    pub(super) fn replaced(&mut self, ns: u64) {
        let peak = self.peak;
        let failed = self.failed_allocs;
        *self = Self { peak, failed_allocs: failed, ..Self::new(ns) };
    }

    /// Replaces the books by exact ones.
    pub(super) fn resync(
        &mut self,
        live: &[crate::record::LiveEntry],
        balances: &[crate::record::DeviceBalance],
        ns: u64,
    ) {
        let fresh = Self {
            first_ns: self.first_ns,
            contexts: std::mem::take(&mut self.contexts),
            contexts_created: self.contexts_created,
            context_ns: self.context_ns,
            peak: self.peak,
            failed_allocs: self.failed_allocs,
            refused_frees: std::mem::take(&mut self.refused_frees),
            unknown_frees: self.unknown_frees,
            reused: self.reused,
            first_reused: self.first_reused.take(),
            lost: self.lost,
            resynced: true,
            frees: self.frees,
            imports: std::mem::take(&mut self.imports),
            serial: self.serial,
            ..Self::new(self.first_ns)
        };
        *self = fresh;
        let mut entries: Vec<_> = live.iter().collect();
        entries.sort_by(|a, b| (a.ts_ns, &a.handle).cmp(&(b.ts_ns, &b.handle)));
        for entry in entries {
            let family = family_of(&entry.api);
            let new = New {
                ns: entry.ts_ns.min(ns),
                begin_ns: None,
                tid: 0,
                family,
                layer: Layer::Driver,
                handle: &entry.handle,
                size: entry.size,
                device: entry.device,
                ctx: None,
                stack: None,
            };
            let key = Key { space: Space::of(family), handle: entry.handle.clone() };
            if !self.live.contains_key(&key) {
                self.insert(key, &new);
            }
        }
        for balance in balances {
            if balance.host {
                self.host.bytes = balance.bytes;
                self.host.count = balance.count;
                self.host.peak = self.host.peak.max(balance.bytes);
            } else {
                let device = self.devices.entry(balance.device).or_default();
                let listed = device.owned.bytes.saturating_add(device.managed.bytes);
                let extra = balance.bytes.saturating_sub(listed);
                device.owned.bytes = device.owned.bytes.saturating_add(extra);
                device.owned.peak = device.owned.peak.max(device.owned.bytes);
                self.unlisted.insert(balance.device, extra);
                self.bytes = self.bytes.saturating_add(extra);
                self.peak = self.peak.max(self.bytes);
            }
        }
    }

    /// A release of a handle that is not listed may be one of the bytes a resync could not list.
    pub(super) fn has_unlisted(&self) -> bool {
        self.unlisted.values().any(|&bytes| bytes > 0)
    }
}

/// How a context ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContextEnd {
    Destroy,
    Release,
    Reset,
}

/// What kind of memory an entry point makes, from the table of traced symbols where it is listed
/// and from the naming rules of the driver and runtime otherwise.
pub(super) fn family_of(api: &str) -> Family {
    if api.starts_with("cuMemAlloc_v2") {
        return Family::Device;
    }
    if api.contains("Managed") {
        Family::Managed
    } else if api.contains("Async") {
        Family::Pool
    } else if api.starts_with("cuMemCreate")
        || api.starts_with("cuMemRelease")
        || api.starts_with("cuMemRetainAllocationHandle")
        || api.starts_with("cuMemImport")
    {
        Family::Vmm
    } else if api.contains("Host") {
        Family::Host
    } else {
        Family::Device
    }
}

/// The layer a call was seen in.
pub(super) fn layer_of(lib: &str, api: &str) -> Layer {
    if lib.starts_with("libcudart") || api.starts_with("cuda") { Layer::Runtime } else { Layer::Driver }
}

#[cfg(test)]
mod tests {
    use super::family_of;
    use tracer_ebpf::symbols::{Op, TABLE};

    #[test]
    fn families_agree_with_the_table_of_symbols() {
        for symbol in TABLE.iter().filter(|symbol| symbol.op == Op::Alloc) {
            assert_eq!(family_of(symbol.name), symbol.family, "{}", symbol.name);
        }
    }
}
