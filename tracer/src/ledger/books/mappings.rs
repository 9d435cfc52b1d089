//! Mappings of physical memory, and imports of other processes' memory.

use super::{Books, IMPORTS, Import, Key, Mapping, Space};
use crate::record::OpaqueId;

impl Books {
    pub(in crate::ledger) fn mapped(&mut self, va: &OpaqueId, handle: &OpaqueId, size: u64) {
        if let Some(block) = self.live.get_mut(&Key { space: Space::Vmm, handle: handle.clone() }) {
            block.maps = block.maps.saturating_add(1);
            if let Some(old) = self.maps.insert(va.clone(), Mapping { handle: handle.clone(), size }) {
                self.unmapped_block(&old.handle, 0);
            }
        }
    }

    pub(in crate::ledger) fn unmapped(&mut self, va: &OpaqueId, size: u64, ns: u64) {
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

    pub(in crate::ledger) fn imported(
        &mut self,
        ipc: &OpaqueId,
        handle: &OpaqueId,
        size: u64,
        device: Option<u32>,
        ns: u64,
    ) {
        if let Some(known) = self.imports.get_mut(handle) {
            // The driver counts how often a context opened a block and returns the same pointer.
            known.refs = known.refs.saturating_add(1);
        } else if self.imports.len() < IMPORTS {
            self.imports.insert(handle.clone(), Import { ipc: ipc.clone(), size, device, ns, refs: 1 });
        }
    }

    /// Closes an import once; false if there is none at this pointer.
    pub(in crate::ledger) fn import_closed(&mut self, handle: &OpaqueId) -> bool {
        let Some(known) = self.imports.get_mut(handle) else { return false };
        known.refs = known.refs.saturating_sub(1);
        if known.refs == 0 {
            self.imports.remove(handle);
        }
        true
    }
}
