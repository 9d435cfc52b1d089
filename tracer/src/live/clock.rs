//! The clock every record is told on.

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on the boot clock, which the kernel side and /proc count on too.
pub fn boot_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// The boot clock beside the calendar, for people: records know only the former.
#[derive(Clone, Copy, Debug)]
pub struct Calendar {
    boot: SystemTime,
}

impl Calendar {
    /// As the host's calendar clock is set now.
    pub fn now() -> Self {
        Self { boot: SystemTime::now() - Duration::from_nanos(boot_ns()) }
    }

    /// When the host started, in UTC: `2026-12-04T10:00:00Z`.
    pub fn boot_time(&self) -> String {
        self.time(0)
    }

    /// A moment on the boot clock in UTC: `2026-12-04T12:10:07Z`.
    pub fn time(&self, ns: u64) -> String {
        humantime::format_rfc3339_seconds(self.boot + Duration::from_nanos(ns)).to_string()
    }
}
