//! The monitor: asks the helper process for samples, and gives it up when it does not answer.

use super::devices::{Devices, GpuDevice};
use super::protocol::{DeviceReport, Failure, NOT_FOUND, Reply, Request, SampleReport, UNKNOWN};
use super::{DEFAULT_LIBRARY, helper};
use crate::record::{Event, Text};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, timeout, timeout_at};

/// Longest reply that is read: 65,536 rows of some 60 bytes on each of a device's instances.
const MAX_REPLY: u64 = 64 << 20;
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

/// Why NVML cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// The helper process could not be started.
    #[error("cannot start the NVML helper {}: {message}", program.display())]
    Start {
        /// Program that was tried.
        program: PathBuf,
        /// What the system said.
        message: String,
    },
    /// There is no NVML library.
    #[error("no NVML library could be loaded (tried {}): {message}; install the driver's libnvidia-ml.so.1 or name it with --nvml-library", tried.join(", "))]
    NotLoaded {
        /// Names that were tried.
        tried: Vec<String>,
        /// What the loader said of the last.
        message: Text,
    },
    /// A library was loaded that is not NVML.
    #[error("{library} is not NVML: it has no {symbol}; name the driver's libnvidia-ml.so.1 with --nvml-library")]
    NotNvml {
        /// Library.
        library: Text,
        /// Function that is not there.
        symbol: Text,
    },
    /// NVML does not work.
    #[error("NVML ({library}) failed with code {code}: {message}; {}", advice(*code))]
    Refused {
        /// Library.
        library: Text,
        /// NVML's number for the error.
        code: u32,
        /// Its meaning.
        message: Text,
    },
    /// No answer within the deadline.
    #[error("NVML did not answer within {} ms; the driver may hang (look for Xid and hung-task messages in the kernel log)", waited.as_millis())]
    Timeout {
        /// How long was waited.
        waited: Duration,
    },
    /// A helper hangs in the kernel and not even a kill ends it; no other is started until it goes.
    #[error(
        "NVML helper {pid} hangs in the driver and cannot be killed; GPU figures are missing until the driver lets it go"
    )]
    Stuck {
        /// The helper.
        pid: u32,
    },
    /// The helper ended or spoke nonsense.
    #[error("the NVML helper failed: {message}")]
    Helper {
        /// What happened.
        message: String,
    },
}

fn advice(code: u32) -> &'static str {
    match code {
        4 => "run as root, or allow access to /dev/nvidiactl",
        9 => "load the driver (modprobe nvidia)",
        15 => "a device fell off the bus; see the kernel log for its Xid, and reset or reboot",
        18 => "the driver was upgraded underneath; reload its kernel modules or reboot",
        _ => "see nvidia-smi and the kernel log",
    }
}

impl MonitorError {
    /// As the status of a sample.
    fn status(&self) -> Text {
        match self {
            Self::Timeout { .. } | Self::Stuck { .. } => Text::const_new("timeout"),
            Self::Refused { code, .. } => format!("error:{code}").into(),
            _ => format!("error:{UNKNOWN}").into(),
        }
    }
}

impl From<Failure> for MonitorError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotLoaded { tried, message } => {
                Self::NotLoaded { tried: tried.iter().map(ToString::to_string).collect(), message }
            }
            Failure::NotNvml { library, symbol } => Self::NotNvml { library, symbol },
            Failure::Refused { library, code, message } => Self::Refused { library, code, message },
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

#[derive(Debug)]
struct Helper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// What was read of the next reply.
    partial: Vec<u8>,
    started: Instant,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// NVML is being opened.
    Opening,
    /// It waits for a request.
    Ready,
    /// A request is being answered. If its asker went away, the rest of the answer is still to come.
    Answering,
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

impl Helper {
    fn start(config: &MonitorConfig) -> Result<Self, MonitorError> {
        let failed = |message: String| MonitorError::Start { program: config.program.clone(), message };
        let mut command = Command::new(&config.program);
        command.arg(helper::SUBCOMMAND);
        for library in &config.libraries {
            command.arg(helper::LIBRARY_OPTION).arg(library);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A Ctrl-C at the terminal is for the agent, which ends its helper in good order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or_else(|| failed("it has no pipes".to_owned()))?;
        let output = BufReader::new(output);
        Ok(Self { child, input, output, partial: Vec::new(), started: Instant::now(), phase: Phase::Opening })
    }

    async fn hello(&mut self) -> Result<(Text, Option<Text>), MonitorError> {
        match self.reply().await? {
            Reply::Hello { library, driver } => {
                self.phase = Phase::Ready;
                Ok((library, driver))
            }
            Reply::Failed { failure } => Err(failure.into()),
            Reply::Device(_) | Reply::Done => Err(out_of_turn()),
        }
    }

    async fn ask(&mut self, request: &Request) -> Result<(), MonitorError> {
        let failed = |message: String| MonitorError::Helper { message };
        let mut line = serde_json::to_vec(request).map_err(|error| failed(error.to_string()))?;
        line.push(b'\n');
        self.phase = Phase::Answering;
        self.input.write_all(&line).await.map_err(|error| failed(format!("it takes no requests ({error})")))
    }

    /// The next reply. What was read of it survives when the future is dropped.
    async fn reply(&mut self) -> Result<Reply, MonitorError> {
        let failed = |message: String| MonitorError::Helper { message };
        let room = MAX_REPLY.saturating_sub(self.partial.len() as u64);
        let read = (&mut self.output).take(room).read_until(b'\n', &mut self.partial).await;
        read.map_err(|error| failed(format!("reading its answer failed ({error})")))?;
        if self.partial.last() != Some(&b'\n') {
            return Err(failed("it ended in the middle of a call".to_owned()));
        }
        let line = std::mem::take(&mut self.partial);
        serde_json::from_slice(&line).map_err(|error| failed(format!("its answer has an unknown form ({error})")))
    }
}

fn out_of_turn() -> MonitorError {
    MonitorError::Helper { message: "it answered out of turn".to_owned() }
}

fn into_event(device: u32, sample: SampleReport) -> Event {
    let SampleReport { gi, outcome, memory, procs, dur_ns } = sample;
    let memory = memory.unwrap_or_default();
    Event::NvmlSample {
        device,
        gi,
        status: outcome.status(),
        used: memory.used,
        total: memory.total,
        reserved: memory.reserved,
        procs,
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
        dur_ns: u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX),
    }
}
