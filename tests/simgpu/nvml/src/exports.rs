//! The exported functions.

use crate::code::{
    ARGUMENT_VERSION_MISMATCH, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Outcome, Return, SUCCESS,
    describe,
};
use crate::processes::{self, List};
use crate::session::{self, Device, Raw, with, with_device};
use simgpu::Host;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Acquire;

/// Version word of `nvmlMemory_v2_t`: 40 bytes, version 2.
const MEMORY_V2: c_uint = 0x0200_0028;

/// `nvmlMemory_t`.
#[repr(C)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub(crate) struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub(crate) struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlUtilization_t`.
#[repr(C)]
pub(crate) struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

fn done(outcome: Outcome<()>) -> Return {
    outcome.err().unwrap_or(SUCCESS)
}

fn put<T>(out: *mut T, outcome: Outcome<T>) -> Return {
    match outcome {
        Ok(_) if out.is_null() => INVALID_ARGUMENT,
        Ok(value) => {
            // SAFETY: the interface requires a valid pointer to such a value.
            unsafe { out.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

fn text(out: *mut c_char, length: c_uint, text: Outcome<String>) -> Return {
    match text {
        Ok(_) if out.is_null() => INVALID_ARGUMENT,
        Ok(text) if text.len() >= length as usize => INSUFFICIENT_SIZE,
        Ok(text) => {
            // SAFETY: the interface requires room for `length` bytes, and the text is shorter.
            unsafe {
                out.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
                out.add(text.len()).write(0);
            }
            SUCCESS
        }
        Err(code) => code,
    }
}

/// Total, reserved and used bytes, the reserve not counted as used.
fn memory(host: &Host, device: Device) -> Outcome<(u64, u64, u64)> {
    let config = host.config();
    match device {
        Device::Whole(index) => {
            host.reap();
            let used = host.state().devices[index as usize].used.load(Acquire);
            Ok((config.memory, config.reserved, used))
        }
        Device::Instance(index, instance) => {
            let mig = config.mig.get(instance as usize).ok_or(NOT_FOUND)?;
            host.reap();
            let used = &host.state().devices[index as usize].instances[mig.gi as usize];
            Ok((mig.memory, 0, used.load(Acquire)))
        }
    }
}

fn uuid(host: &Host, device: Device) -> Outcome<String> {
    let config = host.config();
    match device {
        Device::Whole(index) => Ok(format!("GPU-{}", config.uuid(index))),
        Device::Instance(index, instance) => {
            config.mig.get(instance as usize).map(|mig| config.mig_uuid(index, mig.gi)).ok_or(NOT_FOUND)
        }
    }
}

/// # Safety
///
/// `wanted` must be null or a terminated string.
unsafe fn find(wanted: *const c_char, of: impl Fn(&Host, u32) -> String) -> Outcome<Raw> {
    if wanted.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: as this function's.
    let wanted = unsafe { CStr::from_ptr(wanted) }.to_string_lossy().to_ascii_lowercase();
    with(|host| {
        let matches = |index: &u32| of(host, *index).to_ascii_lowercase() == wanted;
        let index = (0..host.config().devices).find(matches).ok_or(NOT_FOUND)?;
        session::handle(host.config(), index)
    })
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
    out
}

macro_rules! exports {
    ($($name:ident($($arg:ident: $type:ty),*) $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $type),*) -> Return {
            $body
        }
    )*};
}

exports! {
    nvmlInit_v2() done(session::open());
    nvmlInit() done(session::open());
    nvmlInitWithFlags(_flags: c_uint) done(session::open());
    nvmlShutdown() done(session::close());
    nvmlSystemGetDriverVersion(out: *mut c_char, length: c_uint)
        text(out, length, with(|host| Ok(host.config().driver.clone())));
    nvmlSystemGetNVMLVersion(out: *mut c_char, length: c_uint)
        text(out, length, with(|host| Ok(format!("12.{}", host.config().driver))));
    nvmlSystemGetCudaDriverVersion(out: *mut c_int) put(out, with(|host| Ok(host.config().cuda)));
    nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) put(out, with(|host| Ok(host.config().cuda)));

    nvmlDeviceGetCount_v2(out: *mut c_uint) put(out, with(|host| Ok(host.config().devices)));
    nvmlDeviceGetCount(out: *mut c_uint) put(out, with(|host| Ok(host.config().devices)));
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut Raw)
        put(out, with(|host| session::handle(host.config(), index)));
    nvmlDeviceGetHandleByIndex(index: c_uint, out: *mut Raw)
        put(out, with(|host| session::handle(host.config(), index)));
    nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut Raw)
        // SAFETY: the interface requires a terminated string.
        put(out, unsafe { find(uuid, |host, index| format!("GPU-{}", host.config().uuid(index))) });
    nvmlDeviceGetHandleByPciBusId_v2(pci: *const c_char, out: *mut Raw)
        // SAFETY: the interface requires a terminated string.
        put(out, unsafe { find(pci, |host, index| host.config().pci(index)) });
    nvmlDeviceGetIndex(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, device| match device {
        Device::Whole(index) | Device::Instance(_, index) => Ok(index),
    }));
    nvmlDeviceGetMinorNumber(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, device| match device {
        Device::Whole(index) => Ok(index),
        Device::Instance(..) => Err(NOT_SUPPORTED),
    }));
    nvmlDeviceGetUUID(handle: Raw, out: *mut c_char, length: c_uint) text(out, length, with_device(handle, uuid));
    nvmlDeviceGetName(handle: Raw, out: *mut c_char, length: c_uint)
        text(out, length, with_device(handle, |host, _| Ok(host.config().name.clone())));
    nvmlDeviceGetSerial(_handle: Raw, _out: *mut c_char, _length: c_uint) NOT_SUPPORTED;
    nvmlDeviceGetPciInfo_v3(handle: Raw, out: *mut PciInfo) put(out, with_device(handle, |host, device| {
        let (Device::Whole(index) | Device::Instance(index, _)) = device;
        let address = host.config().pci(index);
        Ok(PciInfo {
            bus_id_legacy: chars(&address[4..]),
            domain: 0,
            bus: 0x10 + index,
            device: 0,
            pci_device_id: 0x2335_10de,
            pci_subsystem_id: 0,
            bus_id: chars(&address),
        })
    }));

    nvmlDeviceGetMemoryInfo(handle: Raw, out: *mut Memory) put(out, with_device(handle, |host, device| {
        let (total, reserved, used) = memory(host, device)?;
        Ok(Memory { total, free: total.saturating_sub(reserved + used), used: reserved + used })
    }));
    nvmlDeviceGetMemoryInfo_v2(handle: Raw, out: *mut MemoryV2) {
        // SAFETY: the interface requires a structure whose version is filled in.
        if out.is_null() || unsafe { (*out).version } != MEMORY_V2 {
            return ARGUMENT_VERSION_MISMATCH;
        }
        put(out, with_device(handle, |host, device| {
            let (total, reserved, used) = memory(host, device)?;
            let free = total.saturating_sub(reserved + used);
            Ok(MemoryV2 { version: MEMORY_V2, total, reserved, free, used })
        }))
    };

    nvmlDeviceGetComputeRunningProcesses(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Compute, 1, count, out);
    nvmlDeviceGetComputeRunningProcesses_v2(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Compute, 2, count, out);
    nvmlDeviceGetComputeRunningProcesses_v3(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Compute, 3, count, out);
    nvmlDeviceGetGraphicsRunningProcesses(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 1, count, out);
    nvmlDeviceGetGraphicsRunningProcesses_v2(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 2, count, out);
    nvmlDeviceGetGraphicsRunningProcesses_v3(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 3, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 1, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses_v2(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 2, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(handle: Raw, count: *mut c_uint, out: *mut c_void)
        processes::list(handle, List::Empty, 3, count, out);

    nvmlDeviceGetMigMode(handle: Raw, current: *mut c_uint, pending: *mut c_uint) {
        let mode = with_device(handle, |host, _| Ok(c_uint::from(!host.config().mig.is_empty())));
        match put(current, mode) {
            SUCCESS => put(pending, mode),
            code => code,
        }
    };
    nvmlDeviceGetMaxMigDeviceCount(handle: Raw, out: *mut c_uint)
        put(out, with_device(handle, |host, _| Ok(host.config().mig.len() as c_uint)));
    nvmlDeviceGetMigDeviceHandleByIndex(handle: Raw, instance: c_uint, out: *mut Raw)
        put(out, with_device(handle, |host, device| match device {
            Device::Whole(index) => session::instance_handle(host.config(), index, instance).ok_or(NOT_FOUND),
            Device::Instance(..) => Err(INVALID_ARGUMENT),
        }));
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: Raw, out: *mut Raw)
        put(out, with_device(handle, |host, device| match device {
            Device::Instance(index, _) => session::handle(host.config(), index),
            Device::Whole(_) => Err(INVALID_ARGUMENT),
        }));
    nvmlDeviceIsMigDeviceHandle(handle: Raw, out: *mut c_uint)
        put(out, with_device(handle, |_, device| Ok(c_uint::from(matches!(device, Device::Instance(..))))));
    nvmlDeviceGetGpuInstanceId(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |host, device| match device {
        Device::Instance(_, instance) => {
            host.config().mig.get(instance as usize).map(|mig| mig.gi).ok_or(NOT_FOUND)
        }
        Device::Whole(_) => Err(NOT_SUPPORTED),
    }));
    nvmlDeviceGetComputeInstanceId(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, device| match device {
        Device::Instance(..) => Ok(0),
        Device::Whole(_) => Err(NOT_SUPPORTED),
    }));

    nvmlDeviceGetUtilizationRates(handle: Raw, out: *mut Utilization)
        put(out, with_device(handle, |_, _| Ok(Utilization { gpu: 0, memory: 0 })));
    nvmlDeviceGetTemperature(handle: Raw, _sensor: c_uint, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(35)));
    nvmlDeviceGetPowerUsage(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(70_000)));
    nvmlDeviceGetEnforcedPowerLimit(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(700_000)));
    nvmlDeviceGetProcessUtilization(_handle: Raw, _out: *mut c_void, _count: *mut c_uint, _since: u64) NOT_SUPPORTED;
    nvmlDeviceGetEncoderUtilization(_handle: Raw, _out: *mut c_uint, _period: *mut c_uint) NOT_SUPPORTED;
    nvmlDeviceGetDecoderUtilization(_handle: Raw, _out: *mut c_uint, _period: *mut c_uint) NOT_SUPPORTED;
    nvmlDeviceGetConfComputeMemSizeInfo(_handle: Raw, _out: *mut c_void) NOT_SUPPORTED;
    nvmlDeviceGetFanSpeed(_handle: Raw, _out: *mut c_uint) NOT_SUPPORTED;
    nvmlDeviceGetPersistenceMode(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(1)));
    nvmlDeviceGetComputeMode(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(0)));
    nvmlDeviceGetDisplayActive(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(0)));
    nvmlDeviceGetDisplayMode(handle: Raw, out: *mut c_uint) put(out, with_device(handle, |_, _| Ok(0)));
    nvmlDeviceGetCudaComputeCapability(handle: Raw, major: *mut c_int, minor: *mut c_int) {
        match put(major, with_device(handle, |_, _| Ok(9))) {
            SUCCESS => put(minor, Ok(0)),
            code => code,
        }
    };
}

/// The description of an error.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(code: Return) -> *const c_char {
    describe(code).as_ptr()
}
