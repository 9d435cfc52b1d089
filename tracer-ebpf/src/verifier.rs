//! Bounds that the verifier sees.
//!
//! The compiler leaves out a bounds check where it knows better (an enum's discriminant cannot be
//! out of range); the verifier knows nothing of enums and refuses the access. These checks are
//! opaque to the compiler.

use core::arch::asm;

/// `index` with all bits above the lowest three cleared: a safe index into an array of 8.
#[inline(always)]
pub fn index_of_8(mut index: usize) -> usize {
    // SAFETY: plain arithmetic on a register.
    unsafe { asm!("{index} &= 7", index = inout(reg) index, options(pure, nomem, nostack)) };
    index
}

/// The same reference, of whose target the compiler knows nothing.
#[inline(always)]
pub fn opaque<T>(reference: &T) -> &T {
    let mut address = core::ptr::from_ref(reference);
    // A move onto itself, since assembly without any instruction leaves two entries at one place in
    // the line information, which the kernel refuses.
    // SAFETY: the address stays what it is.
    unsafe {
        asm!("{address} = {address}", address = inout(reg) address, options(pure, nomem, nostack));
        &*address
    }
}
