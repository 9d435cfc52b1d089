//! Exact books: processes, accounts by context, live allocations.

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use tracer_ebpf::{
    Account, AccountKey, BALANCE_SLOTS, Balance, Counter, LiveAllocation, LiveKey, NO_CONTEXT, NO_DEVICE, Process,
    ProcessKey,
};

use crate::{
    atomic,
    maps::{ACCOUNTS, LIVE, PROCESSES, count},
    verifier::index_of_8,
};

/// The entry of a process, made at its first driver call.
#[inline(always)]
pub fn process(key: &ProcessKey, now_ns: u64) -> Option<*mut Process> {
    if let Some(process) = PROCESSES.get_ptr_mut(key) {
        return Some(process);
    }
    let new = Process {
        image_ns: now_ns,
        seq: 0,
        lost: 0,
        last_context: NO_CONTEXT,
        failed: 0,
        unknown_frees: 0,
        untracked: 0,
        live_entries: 0,
        window_ns: 0,
        window_events: 0,
        last_device: NO_DEVICE,
        pad: 0,
    };
    // Two threads may get here at once: whoever comes second uses the first one's entry.
    let _ = PROCESSES.insert(key, &new, u64::from(BPF_NOEXIST));
    let process = PROCESSES.get_ptr_mut(key);
    if process.is_none() {
        count(Counter::ProcessesFull);
    }
    process
}

/// The account of a context of this process image, or of a device for memory without a context.
#[inline(always)]
pub fn account(key: &AccountKey, image_ns: u64) -> Option<*mut Account> {
    let account = ACCOUNTS.get_ptr_mut(key)?;
    // SAFETY: a value of the map.
    (unsafe { (*account).image_ns } == image_ns).then_some(account)
}

/// The same, opened if it is not there or belongs to an earlier image.
#[inline(always)]
pub fn open_account(key: &AccountKey, image_ns: u64, device: i32, now_ns: u64) -> Option<*mut Account> {
    if let Some(account) = account(key, image_ns) {
        return Some(account);
    }
    let new = Account {
        image_ns,
        epoch_ns: now_ns,
        retains: 0,
        device,
        pad: 0,
        balances: [Balance { bytes: 0, count: 0 }; BALANCE_SLOTS],
    };
    let flags = if ACCOUNTS.get_ptr(key).is_some() { BPF_ANY } else { BPF_NOEXIST };
    let _ = ACCOUNTS.insert(key, &new, u64::from(flags));
    let account = account(key, image_ns);
    if account.is_none() {
        count(Counter::AccountsFull);
    }
    account
}

/// Books an allocation. `false` when the live table has no room: then it is on no account either,
/// so that its free, which will not find it, leaves the balance right.
#[inline(always)]
pub fn book(
    process: *mut Process,
    account: *mut Account,
    key: &LiveKey,
    allocation: &LiveAllocation,
    flags: u32,
) -> bool {
    if LIVE.insert(key, allocation, u64::from(flags)).is_err() {
        return false;
    }
    // SAFETY: `process` and `account` are values of their maps.
    unsafe {
        atomic::add(&raw mut (*process).live_entries, 1);
        let balance = balance(account, allocation.family);
        atomic::add(&raw mut (*balance).bytes, allocation.size);
        atomic::add(&raw mut (*balance).count, 1);
    }
    true
}

/// Takes an allocation out of the live table and off its account. `None` when it is not there, or
/// when its context is gone and took it along.
#[inline(always)]
pub fn take(process: *mut Process, key: &LiveKey, image_ns: u64) -> Option<LiveAllocation> {
    // SAFETY: the table is not preallocated, so an entry being removed is not reused under us.
    let allocation = *unsafe { LIVE.get(key) }?;
    // Of two threads that free the same handle at once only one succeeds here.
    LIVE.remove(key).ok()?;
    // SAFETY: a value of the map.
    unsafe { atomic::sub(&raw mut (*process).live_entries, 1) };
    let account = account(&account_key(key, &allocation), image_ns)?;
    // SAFETY: `account` is a value of the map.
    unsafe {
        if (*account).epoch_ns != allocation.epoch_ns {
            return None;
        }
        let balance = balance(account, allocation.family);
        atomic::sub(&raw mut (*balance).bytes, allocation.size);
        atomic::sub(&raw mut (*balance).count, 1);
    }
    Some(allocation)
}

/// Puts back what [`take`] took, when the driver refused the free.
#[inline(always)]
pub fn put_back(process: *mut Process, key: &LiveKey, allocation: &LiveAllocation, image_ns: u64) {
    let Some(account) = account(&account_key(key, allocation), image_ns) else { return };
    // SAFETY: `account` is a value of the map.
    if unsafe { (*account).epoch_ns } == allocation.epoch_ns && !book(process, account, key, allocation, BPF_NOEXIST) {
        count(Counter::LiveFull);
    }
}

#[inline(always)]
fn account_key(key: &LiveKey, allocation: &LiveAllocation) -> AccountKey {
    AccountKey {
        tgid: key.tgid,
        device: allocation.account_device,
        start_ns: key.start_ns,
        context: allocation.context,
    }
}

/// The balance of a family.
///
/// # Safety
///
/// `account` must be a value of the map.
#[inline(always)]
unsafe fn balance(account: *mut Account, family: u32) -> *mut Balance {
    let slot = index_of_8(family as usize);
    // SAFETY: there are 8 slots; a raw place, no reference is made.
    unsafe { (&raw mut (*account).balances).cast::<Balance>().add(slot) }
}
