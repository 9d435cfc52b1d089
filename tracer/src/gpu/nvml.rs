//! NVML itself, as the helper process uses it.

use super::devices::{GpuDevice, MigInstance};
use super::process_list::{self, Layout, ListedProcess, known};
use super::protocol::{
    DeviceReport, FUNCTION_NOT_FOUND, Failure, Memory, NOT_FOUND, NOT_SUPPORTED, Outcome, SampleReport, UNKNOWN,
};
use crate::record::Text;
use crate::untrusted::printable;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

/// MIG devices of one GPU; hardware has at most 7 or 8 GPU instances of as many compute instances.
const MAX_MIG_DEVICES: u32 = 64;
/// `NVML_ERROR_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: u32 = 2;
/// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`.
const VERSION_MISMATCH: u32 = 25;

/// An open NVML.
pub(super) struct Driver {
    nvml: Nvml,
    library: Text,
}

impl Driver {
    /// Opens the first of `libraries` that loads.
    pub(super) fn open(libraries: &[OsString]) -> Result<Self, Failure> {
        let mut message = Text::default();
        for path in libraries {
            let library = printable(path.as_bytes(), 1024);
            match Nvml::builder().lib_path(path).init() {
                // Without this function the wrapper could not even close it.
                Ok(nvml) if nvml.lib().nvmlShutdown.is_err() => {
                    std::mem::forget(nvml);
                    return Err(Failure::NotNvml { library, symbol: "nvmlShutdown".into() });
                }
                Ok(nvml) => return Ok(Self { nvml, library }),
                Err(NvmlError::LibloadingError(error)) => message = printable(error.to_string().as_bytes(), 1024),
                Err(NvmlError::FailedToLoadSymbol(_)) => {
                    return Err(Failure::NotNvml { library, symbol: "nvmlInit_v2".into() });
                }
                Err(error) => return Err(refused(library, error)),
            }
        }
        let tried = libraries.iter().map(|path| printable(path.as_bytes(), 1024)).collect();
        Err(Failure::NotLoaded { tried, message })
    }

    pub(super) fn library(&self) -> &Text {
        &self.library
    }

    pub(super) fn version(&self) -> Option<Text> {
        self.nvml.sys_driver_version().ok().map(|version| printable(version.as_bytes(), 80))
    }

    pub(super) fn device_count(&self) -> Result<u32, Failure> {
        self.nvml.device_count().map_err(|error| refused(self.library.clone(), error))
    }

    /// Samples a device and its MIG instances.
    pub(super) fn sample(&self, index: u32) -> DeviceReport {
        let begin = Instant::now();
        let mut identity = GpuDevice { index, ..GpuDevice::default() };
        let device = match self.nvml.device_by_index(index) {
            Ok(device) => device,
            Err(error) => {
                let sample = failed(None, code_of(error), begin);
                return DeviceReport { device: identity, samples: vec![sample] };
            }
        };
        identity.uuid = device.uuid().ok().map(|uuid| printable(uuid.as_bytes(), 96));
        identity.name = device.name().ok().map(|name| printable(name.as_bytes(), 96));

        let instances = self.mig_devices(&device);
        let mut samples = vec![self.sample_handle(&device, None, !instances.is_empty(), begin)];
        for (gi, instance) in &instances {
            let uuid = instance.uuid().ok().map(|uuid| printable(uuid.as_bytes(), 96));
            identity.instances.push(MigInstance { gi: *gi, uuid });
            let sample = self.sample_handle(instance, Some(*gi), false, Instant::now());
            // Compute instances of one GPU instance share its memory: one sample for all of them.
            match samples.iter_mut().find(|known| known.gi == Some(*gi)) {
                None => samples.push(sample),
                Some(known) => {
                    known.dur_ns += sample.dur_ns;
                    let new = sample.procs.into_iter().filter(|row| !known.procs.iter().any(|k| k.pid == row.pid));
                    let new: Vec<_> = new.collect();
                    known.procs.extend(new);
                    known.procs.sort_unstable_by_key(|row| row.pid);
                }
            }
        }
        DeviceReport { device: identity, samples }
    }

    fn mig_devices<'a>(&'a self, device: &Device<'a>) -> Vec<(u32, Device<'a>)> {
        // Mode 1 is "enabled"; drivers or devices without MIG give an error.
        if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
            return Vec::new();
        }
        let count = device.mig_device_count().unwrap_or(0).min(MAX_MIG_DEVICES);
        (0..count)
            .filter_map(|index| {
                let instance = device.mig_device_by_index(index).ok()?;
                let call = self.nvml.lib().nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
                let mut gi = u32::MAX;
                // SAFETY: the handle comes from NVML and lives as long as `self.nvml`; the function
                // writes one unsigned int.
                let code = unsafe { call(instance.handle(), &raw mut gi) };
                (code == 0 && gi != u32::MAX).then_some((gi, instance))
            })
            .collect()
    }

    fn sample_handle(&self, device: &Device<'_>, gi: Option<u32>, is_split: bool, begin: Instant) -> SampleReport {
        let (memory, memory_outcome) = match self.memory(device) {
            Ok(memory) => (Some(memory), Outcome::Ok),
            Err(NOT_SUPPORTED) => (None, Outcome::MemoryNotSupported),
            Err(code) => return failed(gi, code, begin),
        };
        // Which lists a device has depends on its kind: one that is not supported is empty. The
        // compute list is the exception, for without it nothing is known of processes; but a split
        // device may leave that to its instances.
        let optional = |list: Result<Vec<ListedProcess>, u32>| match list {
            Err(NOT_SUPPORTED | FUNCTION_NOT_FOUND) => Ok(Vec::new()),
            other => other,
        };
        let compute = self.compute(device);
        let lists = (|| {
            let compute = if is_split { optional(compute)? } else { compute? };
            Ok((compute, optional(self.graphics(device))?, optional(self.mps(device))?))
        })();
        let (mut procs, outcome) = match lists {
            Ok((compute, graphics, mps)) => (process_list::merge(&compute, &graphics, &mps), memory_outcome),
            Err(code) => (Vec::new(), Outcome::Error(code)),
        };
        for row in &mut procs {
            row.gi = row.gi.or(gi);
        }
        if gi.is_none() && !is_split {
            // Drivers fill in instance 0 where there are none.
            for row in &mut procs {
                row.gi = None;
            }
        }
        // Instances have no figure of their own, and neither have some devices.
        let gpu_util = device.utilization_rates().ok().map(|rates| rates.gpu).filter(|_| gi.is_none());
        SampleReport { gi, outcome, memory, procs, gpu_util, dur_ns: elapsed(begin) }
    }

    fn memory(&self, device: &Device<'_>) -> Result<Memory, u32> {
        match device.memory_info() {
            Ok(info) => {
                let (used, reserved) = (known(info.used), known(info.reserved));
                let with_reserve = used.map(|used| used.saturating_add(reserved.unwrap_or(0)));
                return Ok(Memory { used: with_reserve, total: known(info.total), reserved });
            }
            Err(error) => match code_of(error) {
                // Drivers before R510 have only the older call; some later ones refuse the newer one.
                FUNCTION_NOT_FOUND | INVALID_ARGUMENT | VERSION_MISMATCH => {}
                code => return Err(code),
            },
        }
        let call = self.nvml.lib().nvmlDeviceGetMemoryInfo.as_ref().map_err(|_| FUNCTION_NOT_FOUND)?;
        // `{total, free, used}`, all 64 bits; `used` includes the reserve.
        let mut memory = [u64::MAX; 3];
        // SAFETY: the handle comes from NVML and lives as long as `self.nvml`; the function writes
        // three unsigned long longs.
        match unsafe { call(device.handle(), memory.as_mut_ptr().cast()) } {
            0 => Ok(Memory { used: known(memory[2]), total: known(memory[0]), reserved: None }),
            code => Err(code),
        }
    }
}

/// Calls the newest version of a process list that the library has.
macro_rules! newest_list {
    ($driver:expr, $device:expr, $third:ident, $second:ident, $first:ident) => {{
        let lib = $driver.nvml.lib();
        macro_rules! list {
            ($call:expr, $layout:expr) => {
                process_list::read($layout, |rows, buffer| {
                    // SAFETY: the handle comes from NVML and lives as long as the library; the
                    // buffer has room for `rows` rows of the largest known size and is aligned for
                    // their 64-bit fields.
                    unsafe { $call($device.handle(), rows, buffer.as_mut_ptr().cast()) }
                })
            };
        }
        if let Ok(call) = lib.$third.as_ref() {
            list!(call, Layout::WithInstances)
        } else if let Ok(call) = lib.$second.as_ref() {
            list!(call, Layout::WithInstances)
        } else if let Ok(call) = lib.$first.as_ref() {
            list!(call, Layout::First)
        } else {
            Err(FUNCTION_NOT_FOUND)
        }
    }};
}

impl Driver {
    fn compute(&self, device: &Device<'_>) -> Result<Vec<ListedProcess>, u32> {
        newest_list!(
            self,
            device,
            nvmlDeviceGetComputeRunningProcesses_v3,
            nvmlDeviceGetComputeRunningProcesses_v2,
            nvmlDeviceGetComputeRunningProcesses
        )
    }

    fn graphics(&self, device: &Device<'_>) -> Result<Vec<ListedProcess>, u32> {
        newest_list!(
            self,
            device,
            nvmlDeviceGetGraphicsRunningProcesses_v3,
            nvmlDeviceGetGraphicsRunningProcesses_v2,
            nvmlDeviceGetGraphicsRunningProcesses
        )
    }

    fn mps(&self, device: &Device<'_>) -> Result<Vec<ListedProcess>, u32> {
        newest_list!(
            self,
            device,
            nvmlDeviceGetMPSComputeRunningProcesses_v3,
            nvmlDeviceGetMPSComputeRunningProcesses_v2,
            nvmlDeviceGetMPSComputeRunningProcesses
        )
    }
}

fn failed(gi: Option<u32>, code: u32, begin: Instant) -> SampleReport {
    SampleReport {
        gi,
        outcome: Outcome::Error(code),
        memory: None,
        procs: Vec::new(),
        gpu_util: None,
        dur_ns: elapsed(begin),
    }
}

fn refused(library: Text, error: NvmlError) -> Failure {
    let message = printable(error.to_string().as_bytes(), 512);
    Failure::Refused { library, code: code_of(error), message }
}

/// NVML's number for an error.
fn code_of(error: NvmlError) -> u32 {
    match error {
        NvmlError::FailedToLoadSymbol(_) => FUNCTION_NOT_FOUND,
        NvmlError::NotFound => NOT_FOUND,
        NvmlError::Utf8Error(_) | NvmlError::LibloadingError(_) => UNKNOWN,
        error => error.into(),
    }
}

fn elapsed(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
