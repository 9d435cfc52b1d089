//! The driver's device files in a process's address space, over time.

use super::series::Series;
use super::{Ledger, Process};
use crate::record::Identity;

/// What was mapped at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// When.
    pub ns: u64,
    /// Mappings of device files.
    pub count: u64,
    /// Bytes of address space they take, which is not memory.
    pub bytes: u64,
    /// Live allocations in the books then.
    pub live: u64,
}

/// The history of a process's mappings.
pub type DriverMaps = Series<Mapped>;

impl Ledger {
    pub(super) fn mapped(&mut self, id: Identity, count: u64, bytes: u64, ns: u64) {
        let id = self.resolve(id);
        if let Some(process) = self.processes.get_mut(&id).filter(|process| process.is_alive()) {
            let live = process.books.as_ref().map_or(0, |books| books.live_count() as u64);
            process.driver_maps.get_or_insert_default().push(Mapped { ns, count, bytes, live });
        }
    }
}

impl Process {
    /// First and last of what it had mapped of the driver, if that was looked at more than once.
    pub fn mapped_from_to(&self) -> Option<(Mapped, Mapped)> {
        match self.driver_maps.as_ref()?.points() {
            [first, .., last] => Some((*first, *last)),
            _ => None,
        }
    }
}
