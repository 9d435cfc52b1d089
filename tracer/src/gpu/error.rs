//! Why NVML cannot be asked.

use super::protocol::{Failure, UNKNOWN};
use crate::record::Text;
use std::path::PathBuf;
use std::time::Duration;

/// Why NVML cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// The helper process could not be started.
    #[error("cannot start the NVML helper {}: {message}", program.display())]
    Start {
        /// Program that was tried.
        program: PathBuf,
        /// What the system said.
        message: String,
    },
    /// There is no NVML library.
    #[error(
        "no NVML library could be loaded{}: {message}; install the driver, which brings it, or name it with --nvml-library",
        tried_names(tried)
    )]
    NotLoaded {
        /// Names that were tried.
        tried: Vec<String>,
        /// What the loader said of the last.
        message: Text,
    },
    /// A library was loaded that is not NVML.
    #[error("{library} is not NVML: it has no {symbol}; name the driver's libnvidia-ml.so.1 with --nvml-library")]
    NotNvml {
        /// Library.
        library: Text,
        /// Function that is not there.
        symbol: Text,
    },
    /// NVML does not work.
    #[error("NVML ({library}) failed with code {code}: {message}; {}", advice(*code))]
    Refused {
        /// Library.
        library: Text,
        /// NVML's number for the error.
        code: u32,
        /// Its meaning.
        message: Text,
    },
    /// No answer within the deadline.
    #[error("NVML did not answer within {} ms; the driver may hang (look for Xid and hung-task messages in the kernel log)", waited.as_millis())]
    Timeout {
        /// How long was waited.
        waited: Duration,
    },
    /// A helper hangs in the kernel and not even a kill ends it; no other is started until it goes.
    #[error(
        "NVML helper {pid} hangs in the driver and cannot be killed; GPU figures are missing until the driver lets it go"
    )]
    Stuck {
        /// The helper.
        pid: u32,
    },
    /// The helper ended or spoke nonsense.
    #[error("the NVML helper failed: {message}")]
    Helper {
        /// What happened.
        message: String,
    },
}

/// The loader's message names the library if it was only one.
fn tried_names(tried: &[String]) -> String {
    if tried.len() > 1 { format!(" (tried {})", tried.join(", ")) } else { String::new() }
}

fn advice(code: u32) -> &'static str {
    match code {
        4 => "run as root, or allow access to /dev/nvidiactl",
        9 => "load the driver (modprobe nvidia)",
        15 => "a device fell off the bus; see the kernel log for its Xid, and reset or reboot",
        18 => "the driver was upgraded underneath; reload its kernel modules or reboot",
        _ => "see nvidia-smi and the kernel log",
    }
}

impl MonitorError {
    /// As the status of a sample.
    pub(super) fn status(&self) -> Text {
        match self {
            Self::Timeout { .. } | Self::Stuck { .. } => Text::const_new("timeout"),
            Self::Refused { code, .. } => format!("error:{code}").into(),
            _ => format!("error:{UNKNOWN}").into(),
        }
    }
}

impl From<Failure> for MonitorError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotLoaded { tried, message } => {
                Self::NotLoaded { tried: tried.iter().map(ToString::to_string).collect(), message }
            }
            Failure::NotNvml { library, symbol } => Self::NotNvml { library, symbol },
            Failure::Refused { library, code, message } => Self::Refused { library, code, message },
        }
    }
}
