//! The memory all processes of a simulated host share.
//!
//! Only atomics: a process may be killed between any two instructions and must leave nothing locked.

use crate::config::MAX_DEVICES;
use memmap2::MmapRaw;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Clients a host can have at once.
pub(crate) const CLIENTS: usize = 1024;

/// One device.
#[repr(C)]
#[derive(Debug, Default)]
pub struct DeviceState {
    /// Bytes in use: those of all clients and what was left behind, without the driver's reserve.
    pub used: AtomicU64,
    /// Bytes that dead clients left behind.
    pub left_behind: AtomicU64,
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

/// Everything.
#[repr(C)]
#[derive(Debug)]
pub struct State {
    /// By index.
    pub devices: [DeviceState; MAX_DEVICES],
    /// By slot.
    pub clients: [ClientState; CLIENTS],
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
