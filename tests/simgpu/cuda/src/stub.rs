//! Exports with the real library's first instructions.
//!
//! Every `cu*` export of the real library is a trampoline: compare a word with a marker that says
//! the driver was shut down, branch over the jump if it is, else jump through a slot of a table in
//! writable memory. Tracers place probes by these bytes, so they must be the same here:
//! `81 3d ?? ?? ?? ?? 00 ba 1c 32 74 ?? ff 25`.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU32};

/// Holds the marker's value once the driver is shut down, which never happens here.
pub(crate) static SHUT_DOWN: AtomicU32 = AtomicU32::new(0);

/// Where a trampoline goes.
pub(crate) type Slot = AtomicPtr<c_void>;

/// One export a line: its name and the function behind it.
macro_rules! stubs {
    ($($name:ident => $function:expr;)*) => {
        #[expect(non_upper_case_globals, reason = "named after the exports")]
        mod slots {
            use super::*;
            $(pub(super) static $name: $crate::stub::Slot = $crate::stub::Slot::new($function as *mut std::ffi::c_void);)*
        }

        mod trampolines {
            $(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                pub(super) extern "C" fn $name() {
                    std::arch::naked_asm!(
                        "cmp dword ptr [rip + {shut_down}], 0x321cba00",
                        "je 2f",
                        "jmp qword ptr [rip + {slot}]",
                        "2:",
                        "mov eax, 4",
                        "ret",
                        shut_down = sym $crate::stub::SHUT_DOWN,
                        slot = sym super::slots::$name,
                    )
                }
            )*
        }

        /// Every export and its address, for `cuGetProcAddress`.
        pub(crate) const EXPORTS: &[(&str, extern "C" fn())] = &[$((stringify!($name), trampolines::$name),)*];
    };
}
pub(crate) use stubs;
