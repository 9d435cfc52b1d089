//! Memory that processes share: who offered what, who has it open, who was handed a descriptor.

use super::books::Space;
use super::{Ledger, Process};
use crate::record::{Event, Identity, OpaqueId, Record};
use std::collections::BTreeMap;

/// Exports remembered for one process.
const EXPORTS: usize = 65_536;
/// Exports whose maker is remembered, over all processes.
const EXPORTERS: usize = 262_144;
/// Receivers of a descriptor remembered for one export.
const RECEIVERS: usize = 16;

/// A block of memory that its process offered to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// When it was offered first.
    pub ns: u64,
    /// The block.
    pub handle: OpaqueId,
    /// Its bytes; 0 where the allocation was not seen.
    pub size: u64,
    /// NVML index of its device.
    pub device: Option<u32>,
    /// Processes that were handed a descriptor of it.
    pub receivers: Vec<Identity>,
}

/// How a process keeps a block of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// It has the block open.
    Import,
    /// It was handed a descriptor and has not been seen to open or close it.
    Descriptor,
}

/// A block that is kept by another process than the one that made it, which is done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Who made it.
    pub exporter: Identity,
    /// Who keeps it.
    pub holder: Identity,
    /// What the exporter called it.
    pub ipc: OpaqueId,
    /// Its bytes.
    pub bytes: u64,
    /// NVML index.
    pub device: Option<u32>,
    /// When the holder opened or received it.
    pub since_ns: u64,
    /// How it is kept.
    pub how: Hold,
    /// When the exporter died; `None` while it lives and has only freed the block.
    pub exporter_died_ns: Option<u64>,
}

impl Ledger {
    pub(super) fn exported(&mut self, id: Identity, ipc: &OpaqueId, handle: Option<&OpaqueId>, ns: u64) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        if process.exports.len() >= EXPORTS && !process.exports.contains_key(ipc) {
            return;
        }
        let block = handle.and_then(|handle| process.books.as_ref()?.block(handle));
        process.exports.entry(ipc.clone()).or_insert_with(|| Export {
            ns,
            handle: handle.cloned().unwrap_or(OpaqueId::Number(0)),
            size: block.map_or(0, |(size, _)| size),
            device: block.and_then(|(_, device)| device),
            receivers: Vec::new(),
        });
        if self.exporters.len() >= EXPORTERS && !self.exporters.contains_key(ipc) {
            self.exporters.pop_first();
        }
        self.exporters.insert(ipc.clone(), id);
    }

    /// A descriptor went to another process.
    pub(super) fn transferred(&mut self, record: &Record) {
        let Event::FdTransfer { task, ipc_id: Some(ipc), to_tgid: Some(to) } = &record.event else { return };
        let to = self.resolve(Identity { tgid: *to, start_ns: 0 });
        // A descriptor may be handed on by whoever received it: the block is its maker's.
        let from = self.exporters.get(ipc).copied().unwrap_or_else(|| self.resolve(task.identity));
        if let Some(export) = self.processes.get_mut(&from).and_then(|process| process.exports.get_mut(ipc))
            && export.receivers.len() < RECEIVERS
            && !export.receivers.contains(&to)
        {
            export.receivers.push(to);
        }
    }

    /// Live processes that keep memory of a dead one, with the bytes, where they are known.
    pub fn importers_of(&self, dead: Identity) -> Vec<(Identity, u64)> {
        let Some(process) = self.process(&dead) else { return Vec::new() };
        let mut found: BTreeMap<Identity, u64> = BTreeMap::new();
        if process.exports.is_empty() {
            return Vec::new();
        }
        for user in self.gpu_users() {
            let Some(books) = &user.books else { continue };
            for import in books.imports.values().filter(|import| process.exports.contains_key(&import.ipc)) {
                let bytes = found.entry(user.id).or_default();
                *bytes = bytes.saturating_add(import.size);
            }
        }
        for export in process.exports.values() {
            for receiver in export.receivers.iter().filter(|id| self.process(id).is_some_and(Process::is_alive)) {
                found.entry(*receiver).or_insert(export.size);
            }
        }
        found.into_iter().collect()
    }

    /// Every block that outlives its maker's use of it in another process.
    pub fn pins(&self) -> Vec<Pin> {
        if self.exporters.is_empty() {
            return Vec::new();
        }
        let mut pins = Vec::new();
        for user in self.gpu_users() {
            for import in user.books.iter().flat_map(|books| books.imports.values()) {
                let Some(exporter) = self.exporters.get(&import.ipc).and_then(|id| self.process(id)) else { continue };
                let Some(export) = exporter.exports.get(&import.ipc).filter(|_| exporter.id != user.id) else {
                    continue;
                };
                let freed = || {
                    let books = exporter.books.as_ref();
                    let known = books.is_some_and(|books| books.unreliable_since_ns.is_none());
                    known && export.size > 0 && books.is_some_and(|books| books.block(&export.handle).is_none())
                };
                if exporter.is_alive() && !freed() {
                    continue;
                }
                pins.push(Pin {
                    exporter: exporter.id,
                    holder: user.id,
                    ipc: import.ipc.clone(),
                    bytes: if import.size > 0 { import.size } else { export.size },
                    device: import.device.or(export.device),
                    since_ns: import.ns,
                    how: Hold::Import,
                    exporter_died_ns: exporter.death.map(|death| death.ns),
                });
            }
        }
        // Descriptors matter only while the dead one's memory has not come back.
        for teardown in self.teardowns.values().filter(|teardown| teardown.returned_ns.is_none()) {
            let Some(exporter) = self.process(&teardown.id) else { continue };
            for (ipc, export) in exporter.exports.iter().filter(|(_, export)| !export.receivers.is_empty()) {
                let receivers = export.receivers.iter().filter_map(|id| self.process(id));
                for receiver in receivers.filter(|receiver| receiver.is_alive()) {
                    let open = pins.iter().any(|pin| pin.ipc == *ipc && pin.holder == receiver.id);
                    if !open && export.device.is_none_or(|device| device == teardown.device) {
                        pins.push(Pin {
                            exporter: exporter.id,
                            holder: receiver.id,
                            ipc: ipc.clone(),
                            bytes: export.size,
                            device: Some(teardown.device),
                            since_ns: export.ns,
                            how: Hold::Descriptor,
                            exporter_died_ns: exporter.death.map(|death| death.ns),
                        });
                    }
                }
            }
        }
        pins
    }
}

impl super::books::Books {
    /// Size and device of a live block, by its pointer or physical handle.
    pub(super) fn block(&self, handle: &OpaqueId) -> Option<(u64, Option<u32>)> {
        self.look_up(Space::Device, handle).or_else(|| self.look_up(Space::Vmm, handle))
    }
}
