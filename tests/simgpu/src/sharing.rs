//! Device memory that several clients hold: exported by its owner, opened by others.
//!
//! A block lives until its owner has freed it or died and nobody has it open any more (as
//! `RmExportObject` of the open kernel modules duplicates exported objects so that they survive).

use crate::client::Client;
use crate::host::Host;
use crate::state::{ExportState, ImportState, State};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// An exported block, as its handle names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Export {
    /// Its place among the exports of the host.
    pub place: u32,
    /// Tells it from earlier blocks in this place.
    pub serial: u64,
}

/// Why a block cannot be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotShared {
    /// The block is gone, or it is of another device or instance.
    Gone,
    /// The host has no room for another one.
    Full,
}

impl Client {
    /// Makes a block of this client's known to others.
    pub fn export(&self, device: u32, bytes: u64) -> Result<Export, NotShared> {
        let state = self.host().state();
        let _guard = self.host().lock().map_err(|_| NotShared::Full)?;
        let free = |export: &ExportState| export.taken.load(Acquire) == 0;
        let place = state.exports.iter().position(free).ok_or(NotShared::Full)?;
        let (export, serial) = (&state.exports[place], state.serials.fetch_add(1, Relaxed) + 1);
        export.owner.store(self.slot() as u32, Relaxed);
        export.orphaned.store(0, Relaxed);
        export.device.store(device, Relaxed);
        export.gi.store(self.gi(), Relaxed);
        export.serial.store(serial, Relaxed);
        export.bytes.store(bytes, Relaxed);
        export.taken.store(1, Release);
        Ok(Export { place: place as u32, serial })
    }

    /// The owner frees a block it exported.
    pub fn give_exported(&self, block: Export) {
        let Ok(_guard) = self.host().lock() else { return };
        let export = &self.host().state().exports[block.place as usize];
        let (device, bytes) = (export.device.load(Relaxed), export.bytes.load(Relaxed));
        self.state().billed[device as usize].fetch_sub(bytes, Relaxed);
        if is_open(self.host().state(), block.place) {
            export.orphaned.store(1, Relaxed);
        } else {
            destroy(self.host().state(), export);
        }
    }

    /// Opens a block of another client's; answers with what closes it again.
    pub fn import(&self, block: Export, device: u32) -> Result<u32, NotShared> {
        let state = self.host().state();
        let _guard = self.host().lock().map_err(|_| NotShared::Full)?;
        // An owner that died a moment ago may have been noticed by nobody.
        self.host().reap_locked();
        let export = state.exports.get(block.place as usize).ok_or(NotShared::Gone)?;
        let known = export.taken.load(Acquire) != 0 && export.serial.load(Relaxed) == block.serial;
        let here = export.device.load(Relaxed) == device && export.gi.load(Relaxed) == self.gi();
        if !known || !here || export.orphaned.load(Relaxed) != 0 {
            return Err(NotShared::Gone);
        }
        let free = |import: &ImportState| import.taken.load(Acquire) == 0;
        let place = state.imports.iter().position(free).ok_or(NotShared::Full)?;
        let import = &state.imports[place];
        import.importer.store(self.slot() as u32, Relaxed);
        import.export.store(block.place, Relaxed);
        import.taken.store(1, Release);
        if self.host().config().bill_imports {
            self.state().billed[device as usize].fetch_add(export.bytes.load(Relaxed), Relaxed);
        }
        Ok(place as u32)
    }

    /// Closes it.
    pub fn close_import(&self, import: u32) {
        let Ok(_guard) = self.host().lock() else { return };
        close(self.host(), &self.host().state().imports[import as usize]);
    }
}

/// Settles what a dead client shared, so that its bill is what ends with it: what it had open is
/// closed, and blocks others have open are theirs.
pub(crate) fn settle(host: &Host, slot: usize) {
    let state = host.state();
    for import in &state.imports {
        if import.taken.load(Acquire) != 0 && import.importer.load(Relaxed) as usize == slot {
            close(host, import);
        }
    }
    for (place, export) in state.exports.iter().enumerate() {
        let own = export.owner.load(Relaxed) as usize == slot && export.orphaned.load(Relaxed) == 0;
        if export.taken.load(Acquire) == 0 || !own {
            continue;
        }
        if is_open(state, place as u32) {
            let device = export.device.load(Relaxed) as usize;
            state.clients[slot].billed[device].fetch_sub(export.bytes.load(Relaxed), Relaxed);
            export.orphaned.store(1, Relaxed);
        } else {
            export.taken.store(0, Release);
        }
    }
}

fn close(host: &Host, import: &ImportState) {
    let state = host.state();
    let place = import.export.load(Relaxed);
    let export = &state.exports[place as usize];
    if host.config().bill_imports {
        let billed = &state.clients[import.importer.load(Relaxed) as usize].billed;
        billed[export.device.load(Relaxed) as usize].fetch_sub(export.bytes.load(Relaxed), Relaxed);
    }
    import.taken.store(0, Release);
    if export.orphaned.load(Relaxed) != 0 && !is_open(state, place) {
        destroy(state, export);
    }
}

fn is_open(state: &State, export: u32) -> bool {
    let opens = |import: &ImportState| import.taken.load(Acquire) != 0 && import.export.load(Relaxed) == export;
    state.imports.iter().any(opens)
}

/// The block's bytes are free again.
fn destroy(state: &State, export: &ExportState) {
    let device = &state.devices[export.device.load(Relaxed) as usize];
    device.free(export.gi.load(Relaxed), export.bytes.load(Relaxed));
    export.taken.store(0, Release);
}
