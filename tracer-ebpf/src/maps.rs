//! The maps, and the constants user space sets before loading.

use crate::atomic;
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use tracer_ebpf::{Account, AccountKey, Counter, LiveAllocation, LiveKey, PrimaryKey, Process, ProcessKey, Thread};

// Entry counts and ring sizes here are defaults; user space sets them at load from its
// configuration. Tables take memory as they fill (`BPF_F_NO_PREALLOC`), not ahead. None is an LRU:
// a table that silently evicts turns a busy process into a false balance.

/// Driver calls.
#[map]
pub static CALLS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);
/// Lives of processes. A ring of their own: a process that floods the driver cannot hide a death.
#[map]
pub static LIVES: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// Processes that have called the driver.
#[map]
pub static PROCESSES: HashMap<ProcessKey, Process> = HashMap::with_max_entries(16_384, BPF_F_NO_PREALLOC);
/// Books by context.
#[map]
pub static ACCOUNTS: HashMap<AccountKey, Account> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);
/// Primary contexts by device.
#[map]
pub static PRIMARIES: HashMap<PrimaryKey, u64> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);
/// Live allocations.
#[map]
pub static LIVE: HashMap<LiveKey, LiveAllocation> = HashMap::with_max_entries(1 << 20, BPF_F_NO_PREALLOC);
/// Threads that call the driver, by `pid_tgid`.
#[map]
pub static THREADS: HashMap<u64, Thread> = HashMap::with_max_entries(65_536, BPF_F_NO_PREALLOC);
/// [`Counter`]s.
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::COUNT, 0);
/// Slot 0: since when (boot clock) every call of a new process has been seen; 0 until all probes
/// are in place.
#[map]
pub static TRACED_SINCE: Array<u64> = Array::with_max_entries(1, 0);

/// A constant that user space sets before the programs are loaded.
#[repr(transparent)]
pub struct Setting(u32);

impl Setting {
    /// Its value. Volatile, or the compiler would fold the value of build time into the program.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        // SAFETY: a reference is valid to read.
        unsafe { core::ptr::read_volatile(&raw const self.0) }
    }
}

/// Offset that stands for "this kernel has no type information, or not this field".
pub const UNKNOWN_OFFSET: u32 = u32::MAX;

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub static $name: Setting = Setting($value);
    )*};
}

settings! {
    /// Offset of `task_struct.group_leader`.
    TASK_GROUP_LEADER = UNKNOWN_OFFSET;
    /// Offset of `task_struct.start_boottime` (`real_start_time` before 5.5).
    TASK_START_BOOTTIME = UNKNOWN_OFFSET;
    /// Offset of `task_struct.real_parent`.
    TASK_REAL_PARENT = UNKNOWN_OFFSET;
    /// Offset of `task_struct.tgid`.
    TASK_TGID = UNKNOWN_OFFSET;
    /// Offset of `task_struct.pid`.
    TASK_PID = UNKNOWN_OFFSET;
    /// Offset of `task_struct.comm`.
    TASK_COMM = UNKNOWN_OFFSET;
    /// Offset of `task_struct.exit_code`.
    TASK_EXIT_CODE = UNKNOWN_OFFSET;
    /// Offset of `task_struct.signal`.
    TASK_SIGNAL = UNKNOWN_OFFSET;
    /// Offset of `signal_struct.live`.
    SIGNAL_LIVE = UNKNOWN_OFFSET;
    /// Offset of `child_pid` in the record of the `sched_process_fork` tracepoint.
    FORK_CHILD_PID = UNKNOWN_OFFSET;
    /// Unread bytes in the ring of calls above which its reader is woken; below, it looks in by
    /// itself. Waking it at every call would cost more than the call's probe.
    WAKEUP_BYTES = 1 << 20;
    /// Unread bytes above which the ring is kept for processes that make few calls.
    CONTESTED_BYTES = 4 << 20;
    /// Events a process may hand over in a window while the ring is contested.
    WINDOW_EVENTS = 1 << 12;
}

/// Adds one to a counter.
#[inline(always)]
pub fn count(counter: Counter) {
    add(counter, 1);
}

/// Adds to a counter.
#[inline(always)]
pub fn add(counter: Counter, n: u64) {
    if let Some(slot) = COUNTERS.get_ptr_mut(counter as u32) {
        // Atomic although the slot is this CPU's own: a probe may be preempted between load and
        // store by another thread's probe on the same CPU.
        // SAFETY: the map returns a valid, aligned slot.
        unsafe { atomic::add(slot, n) };
    }
}
