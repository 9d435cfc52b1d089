//! An initialised NVML, and its handles.

use crate::code::{DRIVER_NOT_LOADED, GPU_IS_LOST, INVALID_ARGUMENT, Outcome, UNINITIALIZED};
use simgpu::{Config, Fault, Host};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A handle as programs hold it: never null, never looked behind.
pub(crate) type Raw = usize;

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A whole device.
    Whole(u32),
    /// A GPU instance of one: its index among them.
    Instance(u32, u32),
}

/// Handles of whole devices count from here, those of instances from a multiple of it.
const FIRST: Raw = 0x1000;

static SESSION: Mutex<Option<(Arc<Host>, u32)>> = Mutex::new(None);

/// `nvmlInit`: counted, as the real one is.
pub(crate) fn open() -> Outcome<()> {
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, count)) = session.as_mut() {
        *count += 1;
        return Ok(());
    }
    let directory = std::env::var_os(simgpu::DIRECTORY).ok_or(DRIVER_NOT_LOADED)?;
    let host = Host::open(Path::new(&directory)).map_err(|_| DRIVER_NOT_LOADED)?;
    *session = Some((Arc::new(host), 1));
    Ok(())
}

/// `nvmlShutdown`.
pub(crate) fn close() -> Outcome<()> {
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, count) = session.as_mut().ok_or(UNINITIALIZED)?;
    *count -= 1;
    if *count == 0 {
        *session = None;
    }
    Ok(())
}

/// Runs a call that concerns no device.
pub(crate) fn with<T>(call: impl FnOnce(&Host) -> Outcome<T>) -> Outcome<T> {
    let session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    let host = session.as_ref().map(|(host, _)| Arc::clone(host)).ok_or(UNINITIALIZED)?;
    // Not held during the call: a hanging call must not hang other threads.
    drop(session);
    call(&host)
}

/// Runs a call about a device, if no fault is in its way.
pub(crate) fn with_device<T>(handle: Raw, call: impl FnOnce(&Host, Device) -> Outcome<T>) -> Outcome<T> {
    with(|host| {
        let device = device(host.config(), handle)?;
        let (Device::Whole(index) | Device::Instance(index, _)) = device;
        for fault in host.faults() {
            match fault {
                Fault::Hang { ms } => std::thread::sleep(Duration::from_millis(ms)),
                Fault::Error { code } => return Err(code),
                Fault::DeviceLost { device } if device == index => return Err(GPU_IS_LOST),
                _ => {}
            }
        }
        call(host, device)
    })
}

/// The handle of a whole device.
pub(crate) fn handle(config: &Config, index: u32) -> Outcome<Raw> {
    if index < config.devices { Ok(FIRST + index as usize) } else { Err(INVALID_ARGUMENT) }
}

/// The handle of an instance of a device.
pub(crate) fn instance_handle(config: &Config, index: u32, instance: u32) -> Option<Raw> {
    ((instance as usize) < config.mig.len()).then_some((2 + instance as usize) * FIRST + index as usize)
}

fn device(config: &Config, handle: Raw) -> Outcome<Device> {
    let index = (handle % FIRST) as u32;
    if index >= config.devices {
        return Err(INVALID_ARGUMENT);
    }
    match handle / FIRST {
        1 => Ok(Device::Whole(index)),
        other if other >= 2 && other - 2 < config.mig.len() => Ok(Device::Instance(index, other as u32 - 2)),
        _ => Err(INVALID_ARGUMENT),
    }
}
