//! The monitor: asks the helper process for samples, and gives it up when it does not answer.

use super::DEFAULT_LIBRARY;
use super::conversation::{Helper, Phase, out_of_turn};
use super::devices::{Devices, GpuDevice};
use super::error::MonitorError;
use super::protocol::{DeviceReport, NOT_FOUND, Reply, Request, SampleReport};
use crate::record::{Event, Text};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use tokio::process::Child;
use tokio::time::{Instant, timeout, timeout_at};

/// How long a killed helper gets to die before it counts as stuck in the kernel.
const DEATH: Duration = Duration::from_millis(200);
/// Wait before the second attempt to open NVML; it doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait between attempts.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// How to sample.
#[derive(Clone, Debug)]
pub struct MonitorConfig {
    /// Program that has the helper's subcommand.
    pub program: PathBuf,
    /// NVML libraries to try, in order.
    pub libraries: Vec<OsString>,
    /// How long all devices together may take to answer.
    pub deadline: Duration,
    /// How long NVML may take to open; without persistence mode the driver initialises each device.
    pub opening: Duration,
}

impl Default for MonitorConfig {
    fn default() -> Self {
        Self {
            // The running program even if its file was replaced.
            program: "/proc/self/exe".into(),
            libraries: vec![DEFAULT_LIBRARY.into()],
            deadline: Duration::from_secs(2),
            opening: Duration::from_secs(30),
        }
    }
}

/// Samples all devices through a helper process. Never blocks; dropping it ends the helper without
/// waiting for it.
#[derive(Debug)]
pub struct Monitor {
    config: MonitorConfig,
    helper: Option<Helper>,
    stuck: Option<Child>,
    devices: Devices,
    library: Text,
    /// Devices that hung when they were asked last.
    late: BTreeSet<u32>,
    problem: Option<MonitorError>,
    pause: Duration,
    retry_at: Instant,
}

impl Monitor {
    /// Opens NVML and samples once, so that the devices are known.
    pub async fn start(config: MonitorConfig) -> Result<Self, MonitorError> {
        let mut monitor = Self {
            helper: None,
            stuck: None,
            devices: Devices::default(),
            library: Text::default(),
            late: BTreeSet::new(),
            problem: None,
            pause: Duration::ZERO,
            retry_at: Instant::now(),
            config,
        };
        let opening = monitor.config.opening;
        let helper = monitor.helper.insert(Helper::start(&monitor.config)?);
        let opened = timeout(opening, helper.hello()).await.unwrap_or(Err(MonitorError::Timeout { waited: opening }));
        match opened {
            Ok((library, driver)) => (monitor.library, monitor.devices.driver) = (library, driver),
            Err(error) => {
                monitor.give_up().await;
                return Err(error);
            }
        }
        monitor.sample().await;
        match (monitor.devices.is_empty(), &monitor.problem) {
            (true, Some(problem)) => Err(problem.clone()),
            _ => Ok(monitor),
        }
    }

    /// What is known of the devices.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// The library that was loaded.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Why the last sample is not complete.
    pub fn problem(&self) -> Option<&MonitorError> {
        self.problem.as_ref()
    }

    /// A helper that hangs in the kernel.
    pub fn stuck_helper(&self) -> Option<u32> {
        self.stuck.as_ref().and_then(Child::id)
    }

    /// Samples every device: [`Event::NvmlSample`]s, in the order of their indexes. A device that
    /// does not answer has one that says so.
    pub async fn sample(&mut self) -> Vec<Event> {
        let begin = Instant::now();
        let mut reports = Vec::new();
        let result = self.collect(begin + self.config.deadline, &mut reports).await;
        let waited = begin.elapsed();
        let missing = match &result {
            // A device that was listed and is not any more.
            Ok(()) => format!("error:{NOT_FOUND}").into(),
            Err(error) => error.status(),
        };
        self.problem = result.err();
        self.events(reports, &missing, waited)
    }

    async fn collect(&mut self, deadline: Instant, reports: &mut Vec<DeviceReport>) -> Result<(), MonitorError> {
        self.ready_helper().await?;
        let Self { helper: Some(helper), library, devices, late, config, .. } = self else {
            return Err(MonitorError::Helper { message: "there is none".to_owned() });
        };
        let asked = Instant::now();
        let conversation = async {
            if helper.phase == Phase::Opening {
                (*library, devices.driver) = helper.hello().await?;
            }
            helper.ask(&Request { last: late.iter().copied().collect() }).await?;
            loop {
                match helper.reply().await? {
                    Reply::Device(report) => reports.push(report),
                    Reply::Done => return Ok(()),
                    Reply::Failed { failure } => return Err(failure.into()),
                    Reply::Hello { .. } => return Err(out_of_turn()),
                }
            }
        };
        let outcome = timeout_at(deadline, conversation).await;
        match outcome {
            Ok(Ok(())) => {
                helper.phase = Phase::Ready;
                self.pause = Duration::ZERO;
                Ok(())
            }
            Ok(Err(error)) => {
                self.pause = (self.pause * 2).clamp(MIN_PAUSE, MAX_PAUSE);
                self.retry_at = Instant::now() + self.pause;
                self.give_up().await;
                Err(error)
            }
            Err(_) => {
                // Opening may take longer than a sample: it goes on until the next one.
                let opens = helper.phase == Phase::Opening && helper.started.elapsed() < config.opening;
                if !opens {
                    self.give_up().await;
                }
                Err(MonitorError::Timeout { waited: asked.elapsed() })
            }
        }
    }

    /// Sees to it that there is a helper to ask.
    async fn ready_helper(&mut self) -> Result<(), MonitorError> {
        // The caller of an earlier sample may have gone away before its end.
        if self.helper.as_ref().is_some_and(|helper| helper.phase == Phase::Answering) {
            self.give_up().await;
        }
        if let Some(stuck) = &mut self.stuck {
            match stuck.try_wait() {
                Ok(Some(_)) => self.stuck = None,
                _ => return Err(MonitorError::Stuck { pid: stuck.id().unwrap_or_default() }),
            }
        }
        if self.helper.is_some() {
            return Ok(());
        }
        if let Some(problem) = self.problem.clone().filter(|_| Instant::now() < self.retry_at) {
            return Err(problem);
        }
        self.helper = Some(Helper::start(&self.config)?);
        Ok(())
    }

    /// Kills the helper. One that does not die hangs in the kernel and is left behind.
    async fn give_up(&mut self) {
        let Some(Helper { mut child, .. }) = self.helper.take() else { return };
        // It fails only for a process that ended already.
        let _ = child.start_kill();
        let dying = self.stuck.insert(child);
        if timeout(DEATH, dying.wait()).await.is_ok() {
            self.stuck = None;
        }
    }

    fn events(&mut self, reports: Vec<DeviceReport>, missing: &Text, waited: Duration) -> Vec<Event> {
        let answered: BTreeSet<u32> = reports.iter().map(|report| report.device.index).collect();
        let mut events = Vec::new();
        for device in self.devices.iter().filter(|device| !answered.contains(&device.index)) {
            let instances = device.instances.iter().map(|instance| Some(instance.gi));
            let handles: BTreeSet<Option<u32>> = std::iter::once(None).chain(instances).collect();
            events.extend(handles.into_iter().map(|gi| no_answer(device.index, gi, missing, waited)));
        }
        // The first that owed its answer kept the others waiting; they are not to blame.
        let order = |index: &u32| (self.late.contains(index), *index);
        let silent = self.devices.iter().map(|device| device.index).filter(|index| !answered.contains(index));
        let culprit = silent.min_by_key(order);
        self.late.extend(culprit);
        self.late.retain(|index| !answered.contains(index));
        for DeviceReport { device, samples } in reports {
            events.extend(samples.into_iter().map(|sample| into_event(device.index, sample)));
            self.remember(device);
        }
        events.sort_by_key(|event| match event {
            Event::NvmlSample { device, gi, .. } => (*device, *gi),
            _ => (u32::MAX, None),
        });
        events
    }

    /// A device that answers with an error does not tell its name; it keeps the one it had.
    fn remember(&mut self, device: GpuDevice) {
        let known = self.devices.iter().any(|known| known.index == device.index);
        if device.uuid.is_some() || !known {
            self.devices.insert(device);
        }
    }
}

fn into_event(device: u32, sample: SampleReport) -> Event {
    let SampleReport { gi, outcome, memory, procs, gpu_util, dur_ns } = sample;
    let memory = memory.unwrap_or_default();
    Event::NvmlSample {
        device,
        gi,
        status: outcome.status(),
        used: memory.used,
        total: memory.total,
        reserved: memory.reserved,
        procs,
        gpu_util,
        dur_ns,
    }
}

fn no_answer(device: u32, gi: Option<u32>, status: &Text, waited: Duration) -> Event {
    Event::NvmlSample {
        device,
        gi,
        status: status.clone(),
        used: None,
        total: None,
        reserved: None,
        procs: Vec::new(),
        gpu_util: None,
        dur_ns: u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX),
    }
}
