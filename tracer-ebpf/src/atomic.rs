//! Atomic arithmetic on map values.
//!
//! `core`'s atomics offer no read-modify-write on this target, since the oldest BPF instruction
//! set has none. These are the instructions themselves.

use core::arch::asm;

/// Adds to the 64-bit field without returning it: `xadd`, which every kernel has.
///
/// # Safety
///
/// `field` must point into a map's value, 8-byte aligned.
#[inline(always)]
pub unsafe fn add(field: *mut u64, n: u64) {
    // SAFETY: as this function's.
    unsafe {
        asm!("lock *(u64 *)({field} + 0) += {n}", field = in(reg) field, n = in(reg) n, options(nostack));
    }
}

/// Subtracts from the 64-bit field. As [`add`].
///
/// # Safety
///
/// As [`add`].
#[inline(always)]
pub unsafe fn sub(field: *mut u64, n: u64) {
    // SAFETY: as this function's.
    unsafe { add(field, n.wrapping_neg()) }
}

/// Adds to the 64-bit field and returns what it was before (Linux 5.12 and later).
///
/// # Safety
///
/// As [`add`].
#[inline(always)]
pub unsafe fn fetch_add(field: *mut u64, n: u64) -> u64 {
    let mut value = n;
    // SAFETY: as this function's.
    unsafe {
        asm!(
            "{value} = atomic_fetch_add((u64 *)({field} + 0), {value})",
            field = in(reg) field,
            value = inout(reg) value,
            options(nostack)
        );
    }
    value
}
