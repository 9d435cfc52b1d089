//! When a device is full if a growth goes on as it did.

use super::device_name;
use crate::engine::Moment;
use crate::finding::Severity;
use crate::ledger::Process;
use crate::units::{SECOND, duration, size};

/// Growth that leaves less time than this needs somebody now.
const SOON_NS: u64 = 3600 * SECOND;

/// What is left of a device, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Forecast {
    device: u32,
    gi: Option<u32>,
    free: u64,
    full_in_ns: u64,
}

impl Forecast {
    /// For `gained` bytes in `span_ns` on the device, or the process's instance of it, whose use and
    /// size NVML told last.
    pub(super) fn of(
        moment: &Moment<'_>,
        process: &Process,
        device: Option<u32>,
        gained: u64,
        span_ns: u64,
    ) -> Option<Self> {
        let device = device?;
        let gi = process.instance(device);
        let used = moment.ledger.devices.get(&(device, gi))?.last?.used?;
        let free = moment.ledger.total(device, gi)?.saturating_sub(used);
        let full_in_ns = u128::from(free) * u128::from(span_ns) / u128::from(gained.max(1));
        Some(Self { device, gi, free, full_in_ns: u64::try_from(full_in_ns).unwrap_or(u64::MAX) })
    }

    /// As evidence.
    pub(super) fn told(&self) -> String {
        let on = device_name(self.device, self.gi);
        format!(
            "{on} has {} ({} bytes) free; at this pace it is full in about {}",
            size(self.free),
            self.free,
            duration(self.full_in_ns)
        )
    }

    /// Critical where the device is full soon, else `otherwise`.
    pub(super) fn severity(forecast: Option<&Self>, otherwise: Severity) -> Severity {
        let soon = forecast.is_some_and(|forecast| forecast.full_in_ns < SOON_NS);
        if soon { Severity::Critical } else { otherwise }
    }
}

#[cfg(test)]
mod tests {
    use super::{Forecast, SOON_NS};
    use crate::finding::Severity;

    #[test]
    fn only_a_device_that_is_full_soon_is_critical() {
        let forecast = |full_in_ns| Forecast { device: 0, gi: None, free: 1, full_in_ns };
        assert_eq!(Forecast::severity(Some(&forecast(SOON_NS - 1)), Severity::Warning), Severity::Critical);
        assert_eq!(Forecast::severity(Some(&forecast(SOON_NS)), Severity::Warning), Severity::Warning);
        assert_eq!(Forecast::severity(None, Severity::Warning), Severity::Warning);
    }
}
