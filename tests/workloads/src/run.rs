//! One process of a workload: its options, its driver, what it holds and how it waits.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::thread::Timespec;

use crate::{
    cli::Options,
    driver::{CallError, Driver},
    memory::{self, Allocation, Family, Live},
    process,
    report::{Event, Report},
};

/// The longest sleep without a look at the termination flag. A signal cuts the sleep of the thread it is delivered to;
/// other threads notice within this time.
const SLEEP_SLICE: Duration = Duration::from_millis(20);

/// How a context comes to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// `cuDevicePrimaryCtxRetain` and `cuCtxSetCurrent`, as cudart does.
    Primary,
    /// `cuCtxCreate_v2`.
    Own,
}

/// A device with the context that was made on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu {
    /// Ordinal in this process.
    pub(crate) ordinal: i32,
    /// Context handle.
    pub(crate) context: usize,
    ownership: Ownership,
}

/// Whether a wait went its full length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// The time has passed.
    Elapsed,
    /// SIGTERM or SIGINT arrived.
    Stopped,
}

/// One process of a workload.
pub(crate) struct Run {
    /// Options that apply to every workload and are handed to children.
    pub(crate) options: Options,
    /// Output.
    pub(crate) report: Report,
    stop: Arc<AtomicBool>,
    driver: OnceLock<Driver>,
    live: Live,
    kept: Mutex<Vec<Allocation>>,
}

impl Run {
    /// Names the process after its role, catches SIGTERM and SIGINT, and reports the start.
    pub(crate) fn start(options: Options, default_role: &str) -> Result<Self> {
        let role = options.name.clone().unwrap_or_else(|| default_role.to_owned());
        process::set_name(&role)?;
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [libc::SIGTERM, libc::SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(&stop)).context("catching SIGTERM and SIGINT")?;
        }
        let report = Report::new(role);
        report.emit(Event::Start);
        Ok(Self { options, report, stop, driver: OnceLock::new(), live: Live::default(), kept: Mutex::new(Vec::new()) })
    }

    /// The driver, opened at first use.
    pub(crate) fn driver(&self) -> Result<&Driver> {
        if let Some(driver) = self.driver.get() {
            return Ok(driver);
        }
        let driver = Driver::open(self.options.lookup())
            .context("opening the CUDA driver; point LD_LIBRARY_PATH at a folder with libcuda.so.1")?;
        Ok(self.driver.get_or_init(|| driver))
    }

    /// `cuInit`.
    pub(crate) fn init(&self) -> Result<()> {
        Ok(self.driver()?.init(0)?)
    }

    /// Makes a context on `ordinal` and makes it current in this thread.
    pub(crate) fn enter(&self, ordinal: i32, ownership: Ownership) -> Result<Gpu> {
        let driver = self.driver()?;
        let (mut device, mut uuid, mut context) = (0, [0; 16], 0);
        driver.device_get(&mut device, ordinal)?;
        driver.device_get_uuid(&mut uuid, device)?;
        self.report.emit(Event::Device { device: ordinal, uuid: format_uuid(&uuid) });
        match ownership {
            Ownership::Primary => {
                driver.primary_ctx_retain(&mut context, device)?;
                driver.ctx_set_current(context)?;
            }
            Ownership::Own => driver.ctx_create(&mut context, 0, device)?,
        }
        Ok(Gpu { ordinal, context, ownership })
    }

    /// `cuInit` and a context on the device of the options, as they say.
    pub(crate) fn open_gpu(&self) -> Result<Gpu> {
        self.init()?;
        self.enter(self.options.device, self.options.ownership())
    }

    /// Gives the context up.
    pub(crate) fn leave(&self, gpu: Gpu) -> Result<()> {
        match gpu.ownership {
            Ownership::Primary => self.driver()?.primary_ctx_release(gpu.ordinal)?,
            Ownership::Own => self.driver()?.ctx_destroy(gpu.context)?,
        }
        Ok(())
    }

    /// Allocates in the current context, which is on `device`.
    pub(crate) fn allocate(&self, device: i32, family: Family, bytes: u64) -> Result<Allocation> {
        self.try_allocate(device, family, bytes)?
            .with_context(|| format!("allocating {bytes} bytes ({})", family.name()))
    }

    /// Like [`Run::allocate`], with the driver's answer for the caller to judge.
    pub(crate) fn try_allocate(
        &self,
        device: i32,
        family: Family,
        bytes: u64,
    ) -> Result<Result<Allocation, CallError>> {
        Ok(memory::allocate(self.driver()?, &self.live, device, family, bytes))
    }

    /// Frees.
    pub(crate) fn free(&self, allocation: &Allocation) -> Result<()> {
        Ok(memory::release(self.driver()?, &self.live, allocation)?)
    }

    /// Keeps memory until the end of the process, where `--free-at-end` gives it back.
    pub(crate) fn keep(&self, allocations: impl IntoIterator<Item = Allocation>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).extend(allocations);
    }

    /// Reports what is held, and that the steady state is reached.
    pub(crate) fn ready(&self) {
        self.report_live();
        self.report.emit(Event::Ready);
    }

    /// Reports what is held.
    pub(crate) fn report_live(&self) {
        self.report.emit(self.live.event());
    }

    /// Reports the calls so far.
    pub(crate) fn report_calls(&self) {
        let calls = self.driver.get().map(|driver| driver.outcomes().collect()).unwrap_or_default();
        self.report.emit(Event::Calls { calls });
    }

    /// Whether the process was asked to end.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sleeps, unless and until the process is asked to end.
    pub(crate) fn sleep(&self, duration: Duration) -> Waited {
        self.sleep_for(Some(duration))
    }

    /// Sleeps for `duration`; without one, until the process is asked to end.
    pub(crate) fn sleep_for(&self, duration: Option<Duration>) -> Waited {
        self.sleep_until(duration.and_then(|duration| Instant::now().checked_add(duration)))
    }

    /// Sleeps until `deadline`; without one, until the process is asked to end.
    pub(crate) fn sleep_until(&self, deadline: Option<Instant>) -> Waited {
        while !self.stopped() {
            let left = deadline.map_or(SLEEP_SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Waited::Elapsed;
            }
            let slice = left.min(SLEEP_SLICE);
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() });
        }
        Waited::Stopped
    }

    /// Repeats `step` every `interval` until `duration` has passed or the process is asked to end.
    pub(crate) fn each_interval(
        &self,
        interval: Duration,
        duration: Option<Duration>,
        mut step: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let end = duration.and_then(|duration| Instant::now().checked_add(duration));
        let mut next = Instant::now();
        while !self.stopped() && end.is_none_or(|end| Instant::now() < end) {
            step()?;
            next = (next + interval).max(Instant::now());
            let until = end.map_or(next, |end| next.min(end));
            self.sleep_until(Some(until));
        }
        Ok(())
    }

    /// In a forked child: calls and memory so far are the parent's.
    pub(crate) fn become_child(&self, role: &str) {
        if let Some(driver) = self.driver.get() {
            driver.forget_outcomes();
        }
        self.live.forget();
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.report.rename(role);
        let _ = process::set_name(role);
        self.report.emit(Event::Start);
    }

    /// Reports the final counts, after freeing what was kept if the options say so.
    pub(crate) fn finish(&self, reason: &str) -> Result<()> {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        let freed = if self.options.free_at_end {
            kept.iter().try_for_each(|allocation| self.free(allocation))
        } else {
            Ok(())
        };
        self.report_calls();
        self.report_live();
        self.report.emit(Event::End { reason });
        freed
    }

    /// Ends this process by SIGKILL, after the final counts.
    pub(crate) fn kill_self(&self) -> Result<()> {
        self.report_calls();
        self.report_live();
        self.report.emit(Event::End { reason: "sigkill" });
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            .context("sending SIGKILL to this process")
    }
}

/// The form NVML shows: `GPU-` and the bytes in groups of 4, 2, 2, 2 and 6.
fn format_uuid(bytes: &[u8; 16]) -> String {
    let digits: String = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(hex_digit).collect();
    format!("GPU-{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

fn hex_digit(value: u8) -> char {
    char::from(b"0123456789abcdef"[usize::from(value & 15)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_have_the_form_nvml_shows() {
        let bytes = std::array::from_fn(|index| index as u8);
        assert_eq!(format_uuid(&bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
