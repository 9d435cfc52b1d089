//! Clients of the driver: how they come, what they are billed for, how they go.

use crate::fault::Fault;
use crate::host::{Host, HostError};
use crate::sharing;
use crate::state::{ClientState, State};
use crate::{boot_ns, config::MAX_DEVICES};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const NS_PER_MS: u64 = 1_000_000;
/// Time of death of a client whose row stays until the host is destroyed.
const KEPT: u64 = u64::MAX;

/// This process as a client. Never dropped while the process lives: dropping it is what the death
/// of the process does.
#[derive(Debug)]
pub struct Client {
    host: Arc<Host>,
    slot: usize,
    _lock: OwnedFd,
    _devices: Vec<OwnedFd>,
}

/// Whether memory could be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bill {
    /// It is billed to the client.
    Accepted,
    /// The device is full.
    OutOfMemory,
}

/// A client as NVML lists it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ClientView {
    /// Its process, as the reader's pid namespace sees it.
    pub pid: u32,
    /// Name when it came.
    pub comm: String,
    /// GPU instance it computes in; 0 for whole devices.
    pub gi: u32,
    /// Whether its last descriptor is closed.
    pub gone: bool,
    /// Bytes billed on each device it has a context on or memory of.
    pub billed: Vec<(u32, u64)>,
}

impl Client {
    /// Joins the host as a new client: takes a slot, its lock, and opens the device files.
    /// `gi` is the GPU instance it computes in.
    pub fn join(host: Arc<Host>, gi: Option<u32>) -> Result<Self, HostError> {
        let guard = host.lock()?;
        host.reap_locked();
        let slot = host.state().clients.iter().position(|client| client.taken.load(Acquire) == 0);
        let slot = slot.ok_or(HostError::Full)?;
        // Closed by an exec and inherited by a fork, like the real driver's descriptors.
        let path = host.client_file(slot);
        let lock = open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
            .map_err(|errno| HostError::io(&path, errno))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|errno| HostError::io(&path, errno))?;
        let client = &host.state().clients[slot];
        client.reset();
        client.pid.store(std::process::id(), Relaxed);
        client.namespace.store(pid_namespace(), Relaxed);
        client.gi.store(gi.unwrap_or(0), Relaxed);
        client.set_comm(&own_comm());
        client.taken.store(1, Release);
        drop(guard);
        let files = ["nvidiactl".to_owned(), "nvidia-uvm".to_owned()].into_iter();
        let files = files.chain((0..host.config().devices).map(|device| format!("nvidia{device}")));
        let open_device = |name: String| {
            let path = host.device_dir().join(name);
            open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| HostError::io(&path, errno))
        };
        let devices = files.map(open_device).collect::<Result<_, _>>()?;
        Ok(Self { host, slot, _lock: lock, _devices: devices })
    }

    /// The host.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// GPU instance it computes in; 0 for whole devices.
    pub(crate) fn gi(&self) -> u32 {
        self.state().gi.load(Relaxed)
    }

    pub(crate) fn state(&self) -> &ClientState {
        &self.host.state().clients[self.slot]
    }

    /// Takes device memory, in bytes as the device counts them (whole pages).
    pub fn take(&self, device: u32, bytes: u64) -> Bill {
        if self.try_take(device, bytes) {
            return Bill::Accepted;
        }
        // Perhaps somebody's memory has come back and nobody has looked.
        self.host.reap();
        if self.try_take(device, bytes) { Bill::Accepted } else { Bill::OutOfMemory }
    }

    fn try_take(&self, device: u32, bytes: u64) -> bool {
        let (config, gi) = (self.host.config(), self.gi());
        let state = &self.host.state().devices[device as usize];
        let taken = state.take(gi, bytes, config.capacity(None), config.capacity(Some(gi)));
        if taken.is_some() {
            self.state().billed[device as usize].fetch_add(bytes, Relaxed);
        }
        taken.is_some()
    }

    /// Gives device memory back.
    pub fn give(&self, device: u32, bytes: u64) {
        self.state().billed[device as usize].fetch_sub(bytes, Relaxed);
        self.host.state().devices[device as usize].free(self.gi(), bytes);
    }

    /// Bytes that can still be had of a device.
    pub fn free_bytes(&self, device: u32) -> u64 {
        let (config, gi) = (self.host.config(), self.instance());
        let state = &self.host.state().devices[device as usize];
        let used = gi.map_or(&state.used, |gi| &state.instances[gi as usize]).load(Acquire);
        config.capacity(gi).saturating_sub(used)
    }

    /// GPU instance it computes in.
    pub fn instance(&self) -> Option<u32> {
        Some(self.gi()).filter(|gi| *gi != 0)
    }

    /// Counts a context on a device.
    pub fn context_opened(&self, device: u32) {
        self.state().contexts[device as usize].fetch_add(1, Relaxed);
    }

    /// Counts one less.
    pub fn context_closed(&self, device: u32) {
        self.state().contexts[device as usize].fetch_sub(1, Relaxed);
    }

    /// Counts pinned host memory.
    pub fn pin(&self, bytes: u64) {
        self.state().pinned.fetch_add(bytes, Relaxed);
    }

    /// Counts less of it.
    pub fn unpin(&self, bytes: u64) {
        self.state().pinned.fetch_sub(bytes, Relaxed);
    }
}

impl ClientState {
    fn reset(&self) {
        self.gone_ns.store(0, Relaxed);
        self.seen_pid.store(0, Relaxed);
        self.seen_namespace.store(0, Relaxed);
        self.pinned.store(0, Relaxed);
        for device in 0..MAX_DEVICES {
            self.billed[device].store(0, Relaxed);
            self.contexts[device].store(0, Relaxed);
        }
    }

    fn set_comm(&self, comm: &str) {
        let mut bytes = [0; 16];
        let length = comm.len().min(15);
        bytes[..length].copy_from_slice(&comm.as_bytes()[..length]);
        for (word, four) in self.comm.iter().zip(bytes.chunks_exact(4)) {
            word.store(u32::from_ne_bytes([four[0], four[1], four[2], four[3]]), Relaxed);
        }
    }

    pub(crate) fn comm(&self) -> String {
        let bytes: Vec<u8> = self.comm.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
    }

    /// Its process as this process's namespace sees it; remembered, since a dead one cannot be
    /// looked up any more. `None` when it is not visible.
    pub(crate) fn visible_pid(&self) -> Option<u32> {
        let (own, home) = (pid_namespace(), self.namespace.load(Relaxed));
        let pid = self.pid.load(Relaxed);
        if own == home {
            return Some(pid);
        }
        if self.seen_namespace.load(Relaxed) == own {
            return Some(self.seen_pid.load(Relaxed)).filter(|pid| *pid != 0);
        }
        let seen = find_in_proc(pid, home)?;
        self.seen_pid.store(seen, Relaxed);
        self.seen_namespace.store(own, Relaxed);
        Some(seen)
    }

    /// Bytes on each device, and the devices on which it only has a context.
    pub(crate) fn bills(&self) -> Vec<(u32, u64)> {
        let bill = |device: usize| {
            let bytes = self.billed[device].load(Relaxed);
            (bytes > 0 || self.contexts[device].load(Relaxed) > 0).then_some((device as u32, bytes))
        };
        (0..MAX_DEVICES).filter_map(bill).collect()
    }
}

/// Looks for clients whose last descriptor is closed, and gives back the memory of those that have
/// been gone long enough: all at once, as the real driver does.
pub(crate) fn reap(host: &Host, state: &State) {
    let now = boot_ns();
    for (slot, client) in state.clients.iter().enumerate() {
        if client.taken.load(Acquire) == 0 || !is_gone(host, slot) {
            continue;
        }
        // A reader in another namespace cannot look a dead process up: do it while we can.
        client.visible_pid();
        match client.gone_ns.load(Relaxed) {
            0 => client.gone_ns.store(now, Relaxed),
            KEPT => {}
            gone if now.saturating_sub(gone) >= delay_ns(host, client) => release(host, state, slot),
            _ => {}
        }
    }
}

/// How long the memory of a dead client takes to come back.
fn delay_ns(host: &Host, client: &ClientState) -> u64 {
    let config = host.config();
    let pinned_gib = client.pinned.load(Relaxed) >> 30;
    (config.release_delay_ms + pinned_gib * config.release_per_pinned_gib_ms) * NS_PER_MS
}

/// Whether nobody holds the client's lock any more.
fn is_gone(host: &Host, slot: usize) -> bool {
    let Ok(file) = open(host.client_file(slot), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else { return true };
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

fn release(host: &Host, state: &State, slot: usize) {
    let client = &state.clients[slot];
    let comm = client.comm();
    let faults = host.faults();
    // First of all: one that stays must not count among those that left something behind.
    if faults.iter().any(|fault| matches!(fault, Fault::StickyContext { comm: prefix } if comm.starts_with(prefix))) {
        return;
    }
    sharing::settle(host, slot);
    let mut keeps_row = false;
    let mut residue = 0;
    for fault in faults {
        if let Fault::LeaveBehind { bytes, comm: only, first, row } = fault {
            let matches = only.is_none_or(|prefix| comm.starts_with(&prefix));
            let held = client.bills().iter().any(|(_, bytes)| *bytes > 0);
            if matches && held && first.is_none_or(|first| state.residues.load(Relaxed) < first) {
                state.residues.fetch_add(1, Relaxed);
                residue = bytes;
                keeps_row = row;
            }
        }
    }
    let mut keep = residue;
    for (device, bytes) in client.bills() {
        let device = device as usize;
        let stays = keep.min(bytes);
        keep -= stays;
        state.devices[device].free(client.gi.load(Relaxed), bytes - stays);
        if keeps_row && stays > 0 {
            client.billed[device].store(stays, Relaxed);
        } else {
            state.devices[device].left_behind.fetch_add(stays, Relaxed);
            client.billed[device].store(0, Relaxed);
        }
        client.contexts[device].store(0, Relaxed);
    }
    client.pinned.store(0, Relaxed);
    if keeps_row && residue > 0 {
        client.gone_ns.store(KEPT, Relaxed);
    } else {
        client.taken.store(0, Release);
    }
}

/// Inode of this process's pid namespace.
fn pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

fn own_comm() -> String {
    std::fs::read_to_string("/proc/self/comm").map(|comm| comm.trim_end().to_owned()).unwrap_or_default()
}

/// The number of a process of another namespace in this one.
fn find_in_proc(inner: u32, namespace: u64) -> Option<u32> {
    std::fs::read_dir("/proc").ok()?.filter_map(Result::ok).find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = rustix::fs::stat(entry.path().join("ns/pid")).ok()?;
        if stat.st_ino != namespace {
            return None;
        }
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        (line.split_ascii_whitespace().last()?.parse() == Ok(inner)).then_some(pid)
    })
}
