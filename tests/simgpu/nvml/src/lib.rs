//! The simulated `libnvidia-ml.so.1`: what monitoring tools ask, answered from the simulated host.

mod code;
mod exports;
mod processes;
mod session;
