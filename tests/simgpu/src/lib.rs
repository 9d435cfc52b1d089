//! A simulated host with NVIDIA GPUs.
//!
//! The simulation is a pair of real shared libraries, `libcuda.so.1` and `libnvidia-ml.so.1`, that
//! real processes load, and one folder they share: the memory of all devices is accounted in a
//! mapped file, each client of the driver holds a lock on a file of its own, and `dev/` stands for
//! `/dev`. Whether a client is dead is told by its lock, which the kernel releases when the last
//! copy of the descriptor closes. So a forked child that keeps inherited descriptors keeps a dead
//! process's memory, as with the real driver.

mod client;
mod config;
mod fault;
mod host;
mod sharing;
mod state;

pub use client::{Bill, Client, ClientView};
pub use config::{Config, MAX_DEVICES, MAX_INSTANCES, Mig};
pub use fault::Fault;
pub use host::{DeviceView, Host, HostError, View};
pub use sharing::{Export, NotShared};
pub use state::{DeviceState, State};

/// Environment variable that names the folder of the simulated host.
pub const DIRECTORY: &str = "SIMGPU_DIR";
/// Device memory is handed out in pages of this many bytes (2 MiB since Pascal).
pub const PAGE: u64 = 2 << 20;

/// Rounds up to whole pages.
pub const fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE).saturating_mul(PAGE)
}

/// Nanoseconds on the boot clock.
pub fn boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
