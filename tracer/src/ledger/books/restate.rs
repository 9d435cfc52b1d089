//! Books that are replaced as a whole: by an exec, by death, by exact ones after a loss.

use super::entry_points::family_of;
use super::{Books, Classes, Cycles, Gap, Key, Layer, Map, New, Pool, Space};
use crate::record::{DeviceBalance, LiveEntry};
use std::collections::BTreeMap;

impl Books {
    /// The same image no longer runs: the driver gave everything back.
    pub(in crate::ledger) fn replaced(&mut self, ns: u64) {
        let peak = self.peak;
        let failed = self.failed_allocs;
        *self = Self { peak, failed_allocs: failed, ..Self::new(ns) };
    }

    /// The process is dead: its sums stay, its lists go.
    pub(in crate::ledger) fn close(&mut self) {
        self.live = Map::default();
        self.maps = BTreeMap::new();
        self.imports = BTreeMap::new();
        self.pools = Vec::new();
        self.by_size = Classes::default();
        self.by_origin = Classes::default();
        self.unlisted = BTreeMap::new();
        self.unlisted_host = 0;
        self.refused_frees = Vec::new();
        for books in self.devices.values_mut() {
            books.cycles = Cycles::default();
            books.gap = Gap::default();
        }
    }

    /// Replaces the books by exact ones: what is listed, and as much more as the balances say.
    pub(in crate::ledger) fn resync(&mut self, live: &[LiveEntry], balances: &[DeviceBalance], ns: u64) {
        let fresh = Self {
            first_ns: self.first_ns,
            contexts: std::mem::take(&mut self.contexts),
            contexts_created: self.contexts_created,
            context_ns: self.context_ns,
            peak: self.peak,
            failed_allocs: self.failed_allocs,
            unknown_frees: self.unknown_frees,
            reused: self.reused,
            first_reused: self.first_reused.take(),
            lost: self.lost,
            resynced: true,
            frees: self.frees,
            imports: std::mem::take(&mut self.imports),
            modules_loaded: self.modules_loaded,
            modules_unloaded: self.modules_unloaded,
            pools: self.pools.iter().map(Pool::emptied).collect(),
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
                pool: None,
            };
            let key = Key { space: Space::of(family), handle: entry.handle.clone() };
            if !self.live.contains_key(&key) {
                self.insert(key, &new);
            }
        }
        let listed_host = self.host.bytes;
        for balance in balances {
            if balance.host {
                self.host.bytes = balance.bytes;
                self.host.count = balance.count;
                self.host.peak = self.host.peak.max(balance.bytes);
                self.unlisted_host = balance.bytes.saturating_sub(listed_host);
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

    /// A release of a handle that is not listed may be of the bytes a resync could not list. Takes
    /// its bytes off them; `false` where there are none.
    pub(in crate::ledger) fn freed_unlisted(&mut self, space: Space, device: Option<u32>, size: u64, ns: u64) -> bool {
        if space == Space::Host {
            let known = self.unlisted_host > 0;
            let bytes = size.min(self.unlisted_host);
            self.unlisted_host -= bytes;
            self.host.bytes = self.host.bytes.saturating_sub(bytes);
            self.host.count = self.host.count.saturating_sub(u64::from(bytes > 0));
            return known;
        }
        // Without a device it may be of any.
        let unlisted = self.unlisted.get_mut(&device).filter(|bytes| **bytes > 0);
        let Some(unlisted) = unlisted else { return self.unlisted.values().any(|&bytes| bytes > 0) };
        let bytes = size.min(*unlisted);
        *unlisted -= bytes;
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(books) = self.devices.get_mut(&device) {
            books.owned.bytes = books.owned.bytes.saturating_sub(bytes);
            books.last_ns = books.last_ns.max(ns);
        }
        true
    }
}
