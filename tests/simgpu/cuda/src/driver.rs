//! The state of the driver in this process.

use crate::address::Addresses;
use crate::code::{DEVICE_UNAVAILABLE, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY, Outcome};
use crate::context::{Context, Primary};
use crate::device;
use crate::memory::Memory;
use crate::pool::Pool;
use crate::vmm::Physical;
use simgpu::{Bill, Client, Export, Fault, Host};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Everything the driver knows of this process.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) client: Client,
    /// Host index of each device this process sees, by ordinal.
    pub(crate) visible: Vec<u32>,
    pub(crate) contexts: HashMap<u64, Context>,
    /// Primary context of each ordinal.
    pub(crate) primaries: HashMap<u32, Primary>,
    pub(crate) memory: HashMap<u64, Memory>,
    pub(crate) hosts: HashMap<u64, Memory>,
    pub(crate) physical: HashMap<u64, Physical>,
    /// Physical handle behind each mapped address, with the bytes mapped.
    pub(crate) mappings: HashMap<u64, (u64, u64)>,
    pub(crate) pools: HashMap<u64, Pool>,
    /// Current pool of each ordinal.
    pub(crate) current_pools: HashMap<u32, u64>,
    /// Where each block of another process is open.
    pub(crate) imports: HashMap<Export, u64>,
    /// Bytes of small allocations on each ordinal: they share pages.
    pub(crate) small: HashMap<u32, u64>,
    pub(crate) addresses: Addresses,
    handles: Addresses,
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);
/// Process that initialised the driver: a forked child must not use it.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// `cuInit`.
pub(crate) fn init() -> Outcome<()> {
    let mut driver = lock();
    if driver.is_some() {
        return owned().then_some(()).ok_or(NOT_INITIALIZED);
    }
    let directory = std::env::var_os(simgpu::DIRECTORY).ok_or(NO_DEVICE)?;
    let host = Arc::new(Host::open(Path::new(&directory)).map_err(|_| NO_DEVICE)?);
    let visible = device::visible(host.config());
    if visible.is_empty() {
        return Err(NO_DEVICE);
    }
    let instance = visible.first().and_then(|(_, instance)| *instance);
    let visible = visible.into_iter().map(|(index, _)| index).collect();
    let client = Client::join(host, instance).map_err(|_| NO_DEVICE)?;
    OWNER.store(std::process::id(), Relaxed);
    // SAFETY: the handler only stores to an atomic, which is allowed between fork and exec.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    *driver = Some(Driver {
        client,
        visible,
        contexts: HashMap::new(),
        primaries: HashMap::new(),
        memory: HashMap::new(),
        hosts: HashMap::new(),
        physical: HashMap::new(),
        mappings: HashMap::new(),
        pools: HashMap::new(),
        current_pools: HashMap::new(),
        imports: HashMap::new(),
        small: HashMap::new(),
        addresses: Addresses::new(),
        handles: Addresses::new(),
    });
    Ok(())
}

/// The driver's state does not survive a fork, only its descriptors do.
extern "C" fn forked() {
    OWNER.store(0, Relaxed);
}

fn owned() -> bool {
    OWNER.load(Relaxed) != 0
}

fn lock() -> MutexGuard<'static, Option<Driver>> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `call` on the driver's state.
pub(crate) fn with<T>(call: impl FnOnce(&mut Driver) -> Outcome<T>) -> Outcome<T> {
    if !owned() {
        return Err(NOT_INITIALIZED);
    }
    lock().as_mut().ok_or(NOT_INITIALIZED).and_then(call)
}

impl Driver {
    /// Host index of a device ordinal.
    pub(crate) fn host_index(&self, ordinal: u32) -> Outcome<u32> {
        let index = *self.visible.get(ordinal as usize).ok_or(INVALID_DEVICE)?;
        let lost = |fault: &Fault| matches!(fault, Fault::DeviceLost { device } if *device == index);
        if self.client.host().faults().iter().any(lost) { Err(DEVICE_UNAVAILABLE) } else { Ok(index) }
    }

    /// Takes memory of a device, in whole pages.
    pub(crate) fn take(&self, ordinal: u32, bytes: u64) -> Outcome<()> {
        match self.client.take(self.host_index(ordinal)?, bytes) {
            Bill::Accepted => Ok(()),
            Bill::OutOfMemory => Err(OUT_OF_MEMORY),
        }
    }

    /// Bytes a device has, or the GPU instance of it.
    pub(crate) fn total(&self) -> u64 {
        self.client.host().config().total(self.client.instance())
    }

    /// Gives memory of a device back.
    pub(crate) fn give(&self, ordinal: u32, bytes: u64) {
        if let Some(index) = self.visible.get(ordinal as usize) {
            self.client.give(*index, bytes);
        }
    }

    /// A range of device addresses.
    pub(crate) fn address(&mut self, bytes: u64) -> Outcome<u64> {
        self.addresses.take(bytes).ok_or(OUT_OF_MEMORY)
    }

    /// A value no other object of this process has at present.
    pub(crate) fn handle(&mut self) -> u64 {
        // There are 2^48 of them.
        self.handles.take(256).unwrap_or_default().saturating_sub(0x1000_0000_0000)
    }

    /// The object is gone: its value may be another's.
    pub(crate) fn retire(&mut self, handle: u64) {
        self.handles.give(handle + 0x1000_0000_0000, 256);
    }
}
