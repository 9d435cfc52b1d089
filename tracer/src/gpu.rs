//! What NVML says: samples of every device, through a helper process, and which device is which.
//!
//! NVML calls can hang in the kernel for ever. A thread stuck there cannot be stopped and keeps its
//! process alive, so the calls are made by a helper process ([`helper`]) that may be given up
//! ([`monitor`]): no answer is itself a record.

pub mod attribution;
mod conversation;
pub mod devices;
mod error;
pub mod helper;
pub mod monitor;
mod nvml;
mod process_list;
mod protocol;

pub use attribution::{Attribution, DeviceView};
pub use devices::{Devices, GpuDevice, MigInstance};
pub use error::MonitorError;
pub use monitor::{Monitor, MonitorConfig};

/// Name NVML is loaded under when none is configured; the loader knows where it is.
pub const DEFAULT_LIBRARY: &str = "libnvidia-ml.so.1";
