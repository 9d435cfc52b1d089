//! Keys and values of the maps that hold exact state whatever happens to the event stream.

use core::mem::size_of;

/// `context` of memory that no context owns (VMM handles, stream-ordered pools).
pub const NO_CONTEXT: u64 = 0;
/// `device` of a call whose device could not be told in the kernel.
pub const NO_DEVICE: i32 = -1;
/// Calls a thread may have open at once (nested driver calls, calls made in signal handlers).
pub const PENDING_DEPTH: usize = 4;
/// Slots of [`Account::balances`]: one a [`Family`], rounded up to what the verifier can be shown to
/// be in bounds with a mask.
pub const BALANCE_SLOTS: usize = 8;
/// Contexts remembered of a thread's stack of current contexts; 8 for the same reason.
pub const CONTEXT_DEPTH: usize = 8;

/// What kind of memory an allocation is, which decides what ends it and whether NVML bills it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Device memory of a context (`cuMemAlloc`, `cuMemAllocPitch`).
    Device = 0,
    /// Managed memory of a context. NVML does not bill it.
    Managed = 1,
    /// Stream-ordered memory of a pool: freed logically, given back later.
    Pool = 2,
    /// Physical memory behind a VMM handle (`cuMemCreate`).
    Vmm = 3,
    /// Pinned host memory of a context.
    Host = 4,
}

impl Family {
    /// Number of families.
    pub const COUNT: usize = 5;
    /// Every family, in the order of their discriminants.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Managed, Self::Pool, Self::Vmm, Self::Host];

    /// The family with this discriminant.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Option<Self> {
        if (raw as usize) < Self::COUNT { Some(Self::ALL[raw as usize]) } else { None }
    }
}

/// A process, never its number alone: numbers are reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessKey {
    /// Process (thread group) id in the initial pid namespace.
    pub tgid: u32,
    /// Explicit padding, always 0.
    pub pad: u32,
    /// When its main thread started; 0 without BTF.
    pub start_ns: u64,
}

/// What is kept of a process that has called the driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// When this image's first driver call was seen. Accounts and allocations of an earlier image
    /// of the same process (before an exec) carry an older value and no longer count.
    pub image_ns: u64,
    /// Next event sequence number.
    pub seq: u64,
    /// Events that found no room in the ring.
    pub lost: u64,
    /// Context most recently created, for threads that never made one current explicitly.
    pub last_context: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Frees of handles that are not in the live table (allocated before the tracer came, or invalid).
    pub unknown_frees: u64,
    /// Allocations that did not fit the live table; their frees will look unknown.
    pub untracked: u64,
    /// Entries of this process in the live table, those of contexts that are gone included: whether
    /// there is anything to sweep when it ends.
    pub live_entries: u64,
    /// When the present window of [`Process::window_events`] began.
    pub window_ns: u64,
    /// Events handed over in that window: a process that floods a filling ring loses its own events
    /// and nobody else's.
    pub window_events: u64,
    /// Device ordinal of `last_context`.
    pub last_device: i32,
    /// Explicit padding, always 0.
    pub pad: u32,
}

/// The context (or, for memory without one, the device) an allocation is booked on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccountKey {
    /// Process id.
    pub tgid: u32,
    /// Device ordinal in that process for memory without a context, else [`NO_DEVICE`].
    pub device: i32,
    /// Process start.
    pub start_ns: u64,
    /// Context handle or [`NO_CONTEXT`].
    pub context: u64,
}

/// Live bytes and number of live allocations of one family.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Bytes allocated and not yet given back.
    pub bytes: u64,
    /// Allocations not yet given back.
    pub count: u64,
}

/// Exact books of one context of one process. Removing the entry is what the destruction of a
/// context does: everything booked on it is gone at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// [`Process::image_ns`] when this account was opened.
    pub image_ns: u64,
    /// When this account was opened: tells a context from a later one at the same address.
    pub epoch_ns: u64,
    /// Retain count of a primary context as seen; 0 for others.
    pub retains: u64,
    /// Device ordinal of the context.
    pub device: i32,
    /// Explicit padding, always 0.
    pub pad: u32,
    /// By [`Family`]; slots past the last family are never used.
    pub balances: [Balance; BALANCE_SLOTS],
}

/// A live allocation's handle. Device pointers, host pointers and VMM handles are numbered apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LiveKey {
    /// Process id.
    pub tgid: u32,
    /// Number space of the handle: [`Family::Device`] for all device pointers, else the family.
    pub space: u32,
    /// Process start.
    pub start_ns: u64,
    /// Pointer or handle value.
    pub handle: u64,
}

/// A live allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveAllocation {
    /// Bytes asked for.
    pub size: u64,
    /// [`AccountKey::context`] it is booked on.
    pub context: u64,
    /// [`Account::epoch_ns`] of that account when it was booked.
    pub epoch_ns: u64,
    /// When the allocating call returned.
    pub ts_ns: u64,
    /// [`AccountKey::device`] it is booked on (the account's key, not its value).
    pub account_device: i32,
    /// Device ordinal, or [`NO_DEVICE`].
    pub device: i32,
    /// [`Family`] discriminant.
    pub family: u32,
    /// Index into [`crate::symbols::TABLE`].
    pub symbol: u32,
}

/// Primary contexts are named by device ordinal when they are released or reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrimaryKey {
    /// Process id.
    pub tgid: u32,
    /// Device ordinal in that process.
    pub device: i32,
    /// Process start.
    pub start_ns: u64,
}

/// One open call of a thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Stack pointer at entry: pairs a return with its call even after a `longjmp`. 0 = free slot.
    pub stack_pointer: u64,
    /// When the call was entered.
    pub begin_ns: u64,
    /// First five arguments as the registers held them.
    pub args: [u64; 5],
    /// For a free: the live allocation taken out at entry, to be put back if the call fails. For the
    /// destruction of a context: only its `epoch_ns`, that of the account at entry.
    pub taken: LiveAllocation,
    /// Index into [`crate::symbols::TABLE`].
    pub symbol: u32,
    /// 1 when `taken` holds an allocation.
    pub has_taken: u32,
}

impl LiveAllocation {
    /// No allocation: the content of [`Frame::taken`] while `has_taken` is 0.
    pub const NONE: Self = Self {
        size: 0,
        context: NO_CONTEXT,
        epoch_ns: 0,
        ts_ns: 0,
        account_device: NO_DEVICE,
        device: NO_DEVICE,
        family: 0,
        symbol: 0,
    };
}

impl Frame {
    /// A free slot.
    pub const FREE: Self =
        Self { stack_pointer: 0, begin_ns: 0, args: [0; 5], taken: LiveAllocation::NONE, symbol: 0, has_taken: 0 };
}

/// What is kept of one thread that calls the driver. Removed when the thread exits or replaces its
/// image; only the thread itself writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// [`ProcessKey::start_ns`] of its process, read once.
    pub process_start_ns: u64,
    /// Number of contexts in `contexts`.
    pub depth: u32,
    /// Explicit padding, always 0.
    pub pad: u32,
    /// The thread's stack of current contexts, the current one last. Deeper pushes are not kept.
    pub contexts: [u64; CONTEXT_DEPTH],
    /// Open calls; a free slot has `stack_pointer` 0.
    pub frames: [Frame; PENDING_DEPTH],
}

impl Thread {
    /// A thread of which nothing is known yet.
    pub const NEW: Self = Self {
        process_start_ns: 0,
        depth: 0,
        pad: 0,
        contexts: [NO_CONTEXT; CONTEXT_DEPTH],
        frames: [Frame::FREE; PENDING_DEPTH],
    };
}

/// Everything the kernel side counts, summed over CPUs by the reader. No failure goes uncounted.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Entries of traced functions.
    Entries = 0,
    /// Returns of traced functions.
    Returns = 1,
    /// Call events handed to user space.
    CallsDelivered = 2,
    /// Call events for which the ring had no room.
    CallsLost = 3,
    /// Process events handed to user space.
    ProcessesDelivered = 4,
    /// Process events for which the ring had no room.
    ProcessesLost = 5,
    /// Open calls given up because their thread called again from the same stack position, or
    /// nested deeper than [`PENDING_DEPTH`].
    PendingEvicted = 6,
    /// Open calls whose thread exited or replaced its image.
    PendingAbandoned = 7,
    /// Threads for which no room was left to remember an open call.
    PendingFull = 8,
    /// Returns whose entry was not seen (calls that were open when the tracer came).
    ReturnsUnpaired = 9,
    /// Allocations that did not fit the live table.
    LiveFull = 10,
    /// Contexts that did not fit the table of accounts.
    AccountsFull = 11,
    /// Processes that did not fit the table of processes.
    ProcessesFull = 12,
    /// Results that could not be read from the caller's memory.
    ReadFailed = 13,
    /// Calls that need no event of their own (a null free, a change of the current context).
    Filtered = 14,
}

impl Counter {
    /// Number of counters.
    pub const COUNT: u32 = 15;
    /// Name of each counter as users see it, by discriminant.
    pub const NAMES: [&'static str; Self::COUNT as usize] = [
        "entries",
        "returns",
        "calls_delivered",
        "calls_lost",
        "processes_delivered",
        "processes_lost",
        "pending_evicted",
        "pending_abandoned",
        "pending_full",
        "returns_unpaired",
        "live_full",
        "accounts_full",
        "processes_full",
        "read_failed",
        "filtered",
    ];
}

const _: () = {
    assert!(size_of::<ProcessKey>() == 16);
    assert!(size_of::<Process>() == 88);
    assert!(size_of::<AccountKey>() == 24);
    assert!(size_of::<Account>() == 32 + 16 * BALANCE_SLOTS);
    assert!(size_of::<LiveKey>() == 24);
    assert!(size_of::<LiveAllocation>() == 48);
    assert!(size_of::<PrimaryKey>() == 16);
    assert!(size_of::<Frame>() == 112);
    assert!(size_of::<Thread>() == 16 + 8 * CONTEXT_DEPTH + 112 * PENDING_DEPTH);
    assert!(CONTEXT_DEPTH == 8 && BALANCE_SLOTS == 8 && Family::COUNT <= BALANCE_SLOTS);
};

/// Lets user space read these layouts out of maps.
#[cfg(feature = "user")]
mod user {
    use super::{Account, AccountKey, LiveAllocation, LiveKey, PrimaryKey, Process, ProcessKey, Thread};

    macro_rules! plain_old_data {
        ($($layout:ty),* $(,)?) => {$(
            // SAFETY: `repr(C)`, `Copy`, only integers, and no padding (sizes are asserted above),
            // so every bit pattern of the kernel's bytes is a valid value.
            unsafe impl aya::Pod for $layout {}
        )*};
    }
    plain_old_data!(Account, AccountKey, LiveAllocation, LiveKey, PrimaryKey, Process, ProcessKey, Thread);
}
