//! Memory of other processes: `cuIpc*`.

use crate::code::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome};
use crate::context::current_device;
use crate::driver::{self, Driver};
use crate::memory::{Kind, Memory};
use simgpu::{Export, NotShared};

/// An open block of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Import {
    block: Export,
    /// What closes it.
    place: u32,
    /// How often it was opened.
    opens: u64,
}

/// `cuIpcGetMemHandle`: the words that travel in the handle. Small allocations share their page
/// with others, whose end this model does not know: they cannot be exported.
pub(crate) fn export(address: u64) -> Outcome<[u64; 4]> {
    driver::with(|driver| {
        let memory = driver.memory.get(&address).ok_or(INVALID_VALUE)?;
        let (kind, bytes, ordinal) = (memory.kind, memory.bytes, memory.ordinal);
        match kind {
            Kind::Large => {}
            Kind::Small => return Err(NOT_SUPPORTED),
            _ => return Err(INVALID_VALUE),
        }
        let block = match memory.exported {
            Some(block) => block,
            None => driver.client.export(driver.host_index(ordinal)?, bytes).map_err(code)?,
        };
        driver.memory.get_mut(&address).ok_or(INVALID_VALUE)?.exported = Some(block);
        Ok([u64::from(std::process::id()), u64::from(block.place), block.serial, bytes])
    })
}

/// `cuIpcOpenMemHandle`: an address for another process's memory, the same one while it is open.
pub(crate) fn open([pid, place, serial, bytes]: [u64; 4]) -> Outcome<u64> {
    driver::with(|driver| {
        let (context, ordinal) = current_device(driver)?;
        let block = Export { place: u32::try_from(place).map_err(|_| INVALID_VALUE)?, serial };
        if pid == u64::from(std::process::id()) || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if let Some(address) = driver.imports.get(&block).copied() {
            let memory = driver.memory.get_mut(&address).ok_or(INVALID_VALUE)?;
            if let Kind::Imported(import) = &mut memory.kind {
                import.opens += 1;
            }
            return Ok(address);
        }
        let place = driver.client.import(block, driver.host_index(ordinal)?).map_err(code)?;
        let address = driver.address(bytes)?;
        let kind = Kind::Imported(Import { block, place, opens: 1 });
        driver.memory.insert(address, Memory { bytes, kind, ordinal, context, exported: None });
        driver.imports.insert(block, address);
        Ok(address)
    })
}

/// `cuIpcCloseMemHandle`: as often as it was opened.
pub(crate) fn close(address: u64) -> Outcome<()> {
    driver::with(|driver| {
        let memory = driver.memory.get_mut(&address).ok_or(INVALID_VALUE)?;
        let Kind::Imported(import) = &mut memory.kind else { return Err(INVALID_VALUE) };
        import.opens -= 1;
        if import.opens == 0 {
            driver.free_at(address);
        }
        Ok(())
    })
}

fn code(why: NotShared) -> i32 {
    match why {
        NotShared::Gone => INVALID_VALUE,
        NotShared::Full => OUT_OF_MEMORY,
    }
}

impl Driver {
    /// A block is not open any more.
    pub(crate) fn close_import(&mut self, import: Import) {
        self.imports.remove(&import.block);
        self.client.close_import(import.place);
    }
}
