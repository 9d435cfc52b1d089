//! From the driver library to a stream of events: find libraries, place and attach probes, read
//! what the kernel side writes.

pub mod discover;
mod elf;
pub mod kernel;
pub mod library;
pub mod placement;
pub mod stream;
pub mod types;
mod uprobes;

pub use kernel::{Kernel, KernelConfig, KernelError};
pub use uprobes::AttachMethod;
