//! The contract between vramtrace's eBPF programs and its user side.
//!
//! Everything both sides must agree on is defined here and nowhere else: the layouts of the records
//! in the ring buffers, the keys and values of the maps, the limits, the counters, and (in
//! [`symbols`]) the table of traced driver entry points. All layouts are `repr(C)` without implicit
//! padding, and their sizes are asserted at compile time, so a field that moves fails the build
//! instead of corrupting a balance.
//!
//! Times are nanoseconds on the boot clock (`CLOCK_BOOTTIME`), sizes are bytes.
#![no_std]

mod event;
mod state;
pub mod symbols;

pub use event::{COMM_LEN, CallEvent, EventKind, ProcessEvent};
pub use state::{
    Account, AccountKey, BALANCE_SLOTS, Balance, CONTEXT_DEPTH, Counter, Family, Frame, LiveAllocation, LiveKey,
    NO_CONTEXT, NO_DEVICE, PENDING_DEPTH, PrimaryKey, Process, ProcessKey, Thread,
};

/// Version of every layout in this crate. A user side must refuse pinned maps of another version.
pub const ABI_VERSION: u32 = 1;
