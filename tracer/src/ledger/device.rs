//! What NVML said of one device or MIG instance.

use crate::record::{NvmlRow, Text};

/// Highest process id a 64-bit kernel hands out (`PID_MAX_LIMIT`).
const PID_MAX: u32 = 4 << 20;

/// A sample that could be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub ns: u64,
    /// Used bytes; `None` where the device cannot tell.
    pub used: Option<u64>,
    /// Total bytes.
    pub total: Option<u64>,
    /// Sum of the processes' rows.
    pub rows: u64,
    /// Number of rows.
    pub count: usize,
    /// Whether every row had a size.
    pub sized: bool,
}

impl Sample {
    /// Used bytes that no row explains; `None` where they cannot be told, as when rows count
    /// shared memory twice and add up to more than is used.
    pub fn unattributed(&self) -> Option<u64> {
        if self.sized { self.used?.checked_sub(self.rows) } else { None }
    }
}

/// Answers in a row that were none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failing {
    /// First of them.
    pub since_ns: u64,
    /// How many.
    pub count: u32,
    /// Longest a call took.
    pub longest_ns: u64,
    /// Last status.
    pub status: Text,
}

/// What a status says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// An answer.
    Ok,
    /// This device cannot tell its memory; rows are still told.
    NoTotals,
    /// There is no NVML, or it does not know the question: a capability, not a failure.
    Unavailable,
    /// No answer, or an error.
    Failing,
}

impl Health {
    /// Reads a status. `error:3` is `NVML_ERROR_NOT_SUPPORTED`.
    pub fn of(status: &str) -> Self {
        match status {
            "ok" => Self::Ok,
            "mem_not_supported" => Self::NoTotals,
            "unavailable" | "absent" | "error:3" => Self::Unavailable,
            _ => Self::Failing,
        }
    }
}

/// The series of one device or MIG instance.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Last usable sample.
    pub last: Option<Sample>,
    /// Used bytes at the last sample that had them.
    pub used: Option<u64>,
    /// Total bytes, once told.
    pub total: Option<u64>,
    /// Least used bytes while no process was listed.
    pub idle_floor: Option<u64>,
    /// Used bytes that no row explained, at the last sample where that could be told.
    pub unattributed: Option<u64>,
    /// Consecutive failures, while they last.
    pub failing: Option<Failing>,
    /// Good samples since the last failure.
    pub good: u32,
    /// Good samples ever.
    pub samples: u64,
    /// Failures ever.
    pub failures: u64,
    /// Last answer of any kind.
    pub answered_ns: Option<u64>,
    /// Time between the last two answers.
    pub interval_ns: u64,
    /// How long the last call took.
    pub dur_ns: u64,
    /// Usual length of a call: a slow moving average.
    pub usual_ns: u64,
    /// Since when every sample said that no kernel ran; `None` where that is not told.
    pub quiet_since_ns: Option<u64>,
    /// Last sample that said that some did.
    pub busy_ns: Option<u64>,
    /// Whether totals are not supported.
    pub no_totals: bool,
    /// Whether rows came without sizes although they are not an instance's.
    pub unsized_rows: bool,
    /// Whether rows named MIG instances.
    pub names_instances: bool,
    /// Samples whose rows cannot be true, and the last such process id.
    pub implausible: u64,
    /// The process id of such a row.
    pub implausible_pid: Option<u32>,
}

/// Whether these rows can be true. Early R535 drivers wrote rows with a longer stride than they
/// declared, so that sizes were read as process ids.
pub(super) fn implausible(rows: &[NvmlRow], total: Option<u64>) -> Option<u32> {
    rows.iter()
        .find(|row| {
            row.pid == 0
                || row.pid > PID_MAX
                || matches!((row.used, total), (Some(used), Some(total)) if total > 0 && used > total)
        })
        .map(|row| row.pid)
}

impl Device {
    pub(super) fn failed(&mut self, ns: u64, status: &Text, dur_ns: u64) {
        self.failures += 1;
        self.good = 0;
        self.dur_ns = dur_ns;
        let failing = self.failing.get_or_insert_with(|| Failing {
            since_ns: ns,
            count: 0,
            longest_ns: 0,
            status: status.clone(),
        });
        failing.count = failing.count.saturating_add(1);
        failing.longest_ns = failing.longest_ns.max(dur_ns);
        failing.status.clone_from(status);
    }

    pub(super) fn answered(&mut self, ns: u64, dur_ns: u64) {
        self.good = self.good.saturating_add(1);
        self.failing = None;
        self.interval_ns = self.answered_ns.map_or(0, |last| ns.saturating_sub(last)).max(self.interval_ns / 2);
        self.answered_ns = Some(ns);
        self.dur_ns = dur_ns;
        self.usual_ns = if self.samples == 0 { dur_ns } else { self.usual_ns - self.usual_ns / 8 + dur_ns / 8 };
        self.samples += 1;
    }

    pub(super) fn utilized(&mut self, ns: u64, percent: Option<u32>) {
        match percent {
            None => self.quiet_since_ns = None,
            Some(0) => {
                self.quiet_since_ns.get_or_insert(ns);
            }
            Some(_) => {
                self.quiet_since_ns = None;
                self.busy_ns = Some(ns);
            }
        }
    }

    pub(super) fn sampled(&mut self, sample: Sample) {
        if let Some(used) = sample.used {
            self.used = Some(used);
            if sample.count == 0 {
                self.idle_floor = Some(self.idle_floor.map_or(used, |floor| floor.min(used)));
            }
        }
        if sample.total.is_some() {
            self.total = sample.total;
        }
        if let Some(unattributed) = sample.unattributed() {
            self.unattributed = Some(unattributed);
        }
        self.last = Some(sample);
    }
}

#[cfg(test)]
mod tests {
    use super::{Device, Health, Sample, implausible};
    use crate::record::{NvmlRow, Text};

    fn row(pid: u32, used: Option<u64>) -> NvmlRow {
        NvmlRow { pid, used, kind: Text::from("C"), gi: None }
    }

    #[test]
    fn shifted_rows_are_recognised() {
        assert_eq!(implausible(&[row(10, Some(5))], Some(100)), None);
        assert_eq!(implausible(&[row(528_482_304, Some(77))], None), Some(528_482_304));
        assert_eq!(implausible(&[row(10, Some(500))], Some(100)), Some(10));
        assert_eq!(implausible(&[row(10, None)], Some(100)), None);
    }

    #[test]
    fn shared_memory_makes_unattributed_unknown() {
        let sample = Sample { ns: 1, used: Some(10), total: None, rows: 15, count: 2, sized: true };
        assert_eq!(sample.unattributed(), None);
    }

    #[test]
    fn the_idle_floor_is_learned_only_without_processes() {
        let mut device = Device::default();
        device.sampled(Sample { ns: 1, used: Some(50), total: Some(100), rows: 40, count: 1, sized: true });
        assert_eq!((device.idle_floor, device.unattributed), (None, Some(10)));
        device.sampled(Sample { ns: 2, used: Some(12), total: None, rows: 0, count: 0, sized: true });
        assert_eq!((device.idle_floor, device.total), (Some(12), Some(100)));
    }

    #[test]
    fn not_supported_is_no_failure() {
        assert_eq!(Health::of("error:3"), Health::Unavailable);
        assert_eq!(Health::of("error:15"), Health::Failing);
        assert_eq!(Health::of("timeout"), Health::Failing);
    }
}
