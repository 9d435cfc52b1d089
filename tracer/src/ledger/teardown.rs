//! What remains billed after a process died, followed until it has come back.

use crate::record::Identity;

/// How the remaining bytes are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Billed {
    /// NVML still lists the dead process.
    ByRow,
    /// The device uses more than its floor and its rows explain.
    Unattributed,
}

/// One dead process's memory on one device or MIG instance.
#[derive(Clone, Debug)]
pub struct Teardown {
    /// Who died.
    pub id: Identity,
    /// NVML index.
    pub device: u32,
    /// MIG GPU instance.
    pub gi: Option<u32>,
    /// When it died.
    pub exit_ns: u64,
    /// Bytes it held, by its last row or else by its ledger.
    pub expected: u64,
    /// Pinned host memory it held.
    pub pinned: u64,
    /// Whether it was an MPS client.
    pub mps: bool,
    /// Used bytes that no row explained before it died.
    pub baseline: u64,
    /// Ledger bytes of the other processes on the device when it died, for devices without rows.
    pub others: u64,
    /// Used bytes of the device before it died, where told.
    pub used_before: Option<u64>,
    /// Samples since it died.
    pub samples: u32,
    /// Last sample that still showed its memory.
    pub billed_ns: Option<u64>,
    /// Bytes that remain, as of the last sample.
    pub billed: u64,
    /// How they are seen.
    pub by: Billed,
    /// First sample that no longer showed it.
    pub returned_ns: Option<u64>,
}

impl Teardown {
    pub(super) fn still(&mut self, ns: u64, bytes: u64, by: Billed) {
        self.samples = self.samples.saturating_add(1);
        self.billed_ns = Some(ns);
        self.billed = bytes;
        self.by = by;
    }

    pub(super) fn returned(&mut self, ns: u64) {
        self.samples = self.samples.saturating_add(1);
        self.billed = 0;
        self.returned_ns = Some(ns);
    }

    /// How long it is known to have stayed after the exit.
    pub fn stayed_ns(&self) -> u64 {
        self.billed_ns.unwrap_or(self.exit_ns).saturating_sub(self.exit_ns)
    }
}
