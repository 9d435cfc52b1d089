//! Facts about processes from `/proc`, as [`record::Event`](crate::record::Event)s.

pub mod devices;
pub mod maps;
pub mod process;
pub mod snapshot;
pub mod watch;

pub use devices::{DeviceFiles, FdScan};
pub use maps::{Mapping, Maps};
pub use process::{CudaEnvironment, ProcError, ProcRoot, Process, Stat};
pub use snapshot::{absent, look_up, proc_start, snapshot};
pub use watch::{Presence, Watch};
