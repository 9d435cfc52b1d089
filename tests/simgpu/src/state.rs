//! The memory all processes of a simulated host share.
//!
//! Only atomics: a process may be killed between any two instructions and must leave nothing locked.

use crate::config::{MAX_DEVICES, MAX_INSTANCES};
use memmap2::MmapRaw;
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Clients a host can have at once.
pub(crate) const CLIENTS: usize = 1024;
/// Blocks that can be exported at once.
pub(crate) const EXPORTS: usize = 256;
/// Imports there can be at once.
pub(crate) const IMPORTS: usize = 1024;

/// One device.
#[repr(C)]
#[derive(Debug, Default)]
pub struct DeviceState {
    /// Bytes in use: those of all clients and what was left behind, without the driver's reserve.
    pub used: AtomicU64,
    /// Bytes that dead clients left behind.
    pub left_behind: AtomicU64,
    /// Bytes in use in each GPU instance, by its number.
    pub instances: [AtomicU64; MAX_INSTANCES],
}

impl DeviceState {
    /// Takes memory of the device, and of the GPU instance `gi` if it is not 0. `None` when one of
    /// the two would hold more than its capacity.
    pub(crate) fn take(&self, gi: u32, bytes: u64, device: u64, instance: u64) -> Option<()> {
        let add = |limit: u64| move |used: u64| used.checked_add(bytes).filter(|used| *used <= limit);
        if gi != 0 {
            self.instances[gi as usize].fetch_update(AcqRel, Acquire, add(instance)).ok()?;
        }
        let taken = self.used.fetch_update(AcqRel, Acquire, add(device)).ok();
        if taken.is_none() && gi != 0 {
            self.instances[gi as usize].fetch_sub(bytes, AcqRel);
        }
        taken.map(drop)
    }

    /// Gives it back.
    pub(crate) fn free(&self, gi: u32, bytes: u64) {
        self.used.fetch_sub(bytes, AcqRel);
        if gi != 0 {
            self.instances[gi as usize].fetch_sub(bytes, AcqRel);
        }
    }
}

/// One client of the driver.
#[repr(C)]
#[derive(Debug)]
pub struct ClientState {
    /// 1 while the slot is taken.
    pub taken: AtomicU32,
    /// Its process, in its own pid namespace.
    pub pid: AtomicU32,
    /// Inode of that namespace.
    pub namespace: AtomicU64,
    /// Its process as another namespace saw it, while it could.
    pub seen_pid: AtomicU32,
    /// GPU instance it computes in; 0 for whole devices.
    pub gi: AtomicU32,
    /// Inode of that other namespace.
    pub seen_namespace: AtomicU64,
    /// When it was noticed that it is gone; 0 while it lives.
    pub gone_ns: AtomicU64,
    /// Name of its main thread when it came.
    pub comm: [AtomicU32; 4],
    /// Bytes billed on each device.
    pub billed: [AtomicU64; MAX_DEVICES],
    /// Contexts on each device.
    pub contexts: [AtomicU32; MAX_DEVICES],
    /// Bytes of pinned host memory.
    pub pinned: AtomicU64,
}

/// A block of device memory that its owner exported.
#[repr(C)]
#[derive(Debug)]
pub struct ExportState {
    /// 1 while the block exists.
    pub taken: AtomicU32,
    /// Slot of its owner.
    pub owner: AtomicU32,
    /// 1 once the owner freed it or died: it exists for its importers only.
    pub orphaned: AtomicU32,
    /// Its device.
    pub device: AtomicU32,
    /// GPU instance it is of; 0 for whole devices.
    pub gi: AtomicU32,
    /// Never that of an earlier block in this place.
    pub serial: AtomicU64,
    /// Its bytes.
    pub bytes: AtomicU64,
}

/// An opened export: one each time a client opens one.
#[repr(C)]
#[derive(Debug)]
pub struct ImportState {
    /// 1 while it is open.
    pub taken: AtomicU32,
    /// Slot of the client that opened it.
    pub importer: AtomicU32,
    /// Place of the block among the exports.
    pub export: AtomicU32,
}

/// Everything.
#[repr(C)]
#[derive(Debug)]
pub struct State {
    /// By index.
    pub devices: [DeviceState; MAX_DEVICES],
    /// By slot.
    pub clients: [ClientState; CLIENTS],
    /// Blocks that can be opened by other clients.
    pub exports: [ExportState; EXPORTS],
    /// Those that are.
    pub imports: [ImportState; IMPORTS],
    /// Blocks exported so far.
    pub serials: AtomicU64,
    /// Clients that left something behind so far.
    pub residues: AtomicU64,
    /// Bumped when the faults change.
    pub fault_epoch: AtomicU64,
}

/// The state, mapped.
#[derive(Debug)]
pub(crate) struct Mapped(MmapRaw);

impl Mapped {
    /// Maps the file, which must have been made by [`Mapped::create`].
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        if map.len() < size_of::<State>() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the state file is too short"));
        }
        Ok(Self(map))
    }

    /// Makes the file as large as the state: all zeros, which is the state of an idle host.
    pub(crate) fn create(file: &File) -> io::Result<Self> {
        file.set_len(size_of::<State>() as u64)?;
        Self::open(file)
    }

    #[expect(clippy::cast_ptr_alignment, reason = "mappings are aligned to pages")]
    pub(crate) fn get(&self) -> &State {
        // SAFETY: the mapping is page-aligned, at least as long as the state, and lives as long as
        // `self`; the state consists of atomics, for which any bytes are valid and which other
        // processes may change.
        unsafe { &*self.0.as_ptr().cast::<State>() }
    }
}
