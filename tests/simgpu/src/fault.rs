//! Things that go wrong on demand.

use clap::Subcommand;
use serde::{Deserialize, Serialize};

/// A fault of the simulated driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Subcommand)]
#[serde(tag = "fault", rename_all = "kebab-case")]
pub enum Fault {
    /// The driver does not give everything back when a process ends.
    LeaveBehind {
        /// Bytes that stay in use.
        #[arg(long, value_parser = size)]
        bytes: u64,
        /// Only for processes whose name begins like this.
        #[arg(long)]
        comm: Option<String>,
        /// Only for so many processes; the rest are given back whole.
        #[arg(long)]
        first: Option<u64>,
        /// NVML keeps listing the dead process for them.
        #[arg(long)]
        row: bool,
    },
    /// NVML calls do not return for this long after each is made.
    Hang {
        /// Milliseconds.
        #[arg(long)]
        ms: u64,
    },
    /// NVML calls about devices fail with this error.
    Error {
        /// An `nvmlReturn_t`, such as 999 for an unknown error.
        #[arg(long)]
        code: u32,
    },
    /// NVML says "not available" for the memory of every process.
    NoValues,
    /// A device fell off the bus: NVML and the driver fail for it.
    DeviceLost {
        /// Its index.
        #[arg(long)]
        device: u32,
    },
    /// `nvmlDeviceGetComputeRunningProcesses_v3` writes rows of 32 bytes (early R535).
    WrongStride,
    /// Contexts of processes whose name begins like this never die.
    StickyContext {
        /// Beginning of the name.
        #[arg(long)]
        comm: String,
    },
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<bytesize::ByteSize>().map(|size| size.as_u64())
}
