//! The clock every record is told on.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on the boot clock, which the kernel side and /proc count on too.
pub fn boot_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
