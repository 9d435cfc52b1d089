//! What the monitor and its helper say to each other, a JSON line each.

use super::devices::GpuDevice;
use crate::record::{NvmlRow, Text};
use serde::{Deserialize, Serialize};

/// `NVML_ERROR_NOT_SUPPORTED`.
pub(super) const NOT_SUPPORTED: u32 = 3;
/// `NVML_ERROR_NOT_FOUND`.
pub(super) const NOT_FOUND: u32 = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(super) const INSUFFICIENT_SIZE: u32 = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
pub(super) const FUNCTION_NOT_FOUND: u32 = 13;
/// `NVML_ERROR_UNKNOWN`.
pub(super) const UNKNOWN: u32 = 999;

/// Asks for a sample of every device.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Request {
    /// Devices that hung come last, so that they keep nobody else waiting.
    pub(super) last: Vec<u32>,
}

/// What the helper says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(super) enum Reply {
    /// NVML is open.
    Hello { library: Text, driver: Option<Text> },
    /// One device, as soon as it has answered.
    Device(DeviceReport),
    /// Every device has answered.
    Done,
    /// NVML as a whole does not work. The helper ends.
    Failed { failure: Failure },
}

/// Why NVML does not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "failure", rename_all = "snake_case")]
pub(super) enum Failure {
    /// No library could be loaded.
    NotLoaded { tried: Vec<Text>, message: Text },
    /// A library was loaded that is not NVML.
    NotNvml { library: Text, symbol: Text },
    /// NVML refused.
    Refused { library: Text, code: u32, message: Text },
}

/// What a device answered.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DeviceReport {
    pub(super) device: GpuDevice,
    pub(super) samples: Vec<SampleReport>,
}

/// What a device or MIG instance answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SampleReport {
    pub(super) gi: Option<u32>,
    pub(super) outcome: Outcome,
    pub(super) memory: Option<Memory>,
    pub(super) procs: Vec<NvmlRow>,
    pub(super) gpu_util: Option<u32>,
    pub(super) dur_ns: u64,
}

/// Whether the calls worked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    Ok,
    MemoryNotSupported,
    Error(u32),
}

impl Outcome {
    /// As records name it.
    pub(super) fn status(self) -> Text {
        match self {
            Self::Ok => "ok".into(),
            Self::MemoryNotSupported => "mem_not_supported".into(),
            Self::Error(code) => format!("error:{code}").into(),
        }
    }
}

/// Memory of a device. `used` includes what the driver reserves for itself: that is what NVML's
/// older call and every tool based on it show, and what is left is `total - used` on any driver.
/// Where the newer call tells the reserve, it is told as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) used: Option<u64>,
    pub(super) total: Option<u64>,
    pub(super) reserved: Option<u64>,
}
