//! The simulated driver, as real processes see it.
//!
//! Each test makes a host of its own and starts processes on it: this program anew, which loads the
//! built libraries and obeys commands (see [`peer`]).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod contexts;
mod death;
mod devices;
mod faults;
mod full;
mod init;
mod ipc;
mod memory;
mod mig;
mod namespaces;
mod peer;
mod pools;
mod proc_address;
mod rig;
mod stubs;
mod threads;
mod vmm;
