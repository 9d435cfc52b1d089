//! NVML, asked at an interval by a task of its own, so that a slow answer delays nothing else.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep},
};

use super::clock::boot_ns;
use crate::{
    gpu::{Devices, Monitor, MonitorConfig},
    record::Event,
};

/// Wait between attempts to find NVML when it is not there: a driver may be installed or loaded
/// later.
const RETRY: Duration = Duration::from_secs(10);
/// Answers that may wait to be read. A reader that is this far behind loses nothing by waiting.
const QUEUE: usize = 16;

/// What the task tells, with the time on the boot clock at which it was complete.
pub(super) enum Sampled {
    /// The devices of the host, when they become known or change.
    Devices(Devices),
    /// A sample of every device.
    Samples(Vec<Event>),
    /// Why NVML cannot be asked as it should, or that it can again. Told when that changes.
    Problem(Option<String>),
}

/// Starts asking. The task ends when the receiver is dropped.
pub(super) fn start(config: MonitorConfig, every: Duration) -> mpsc::Receiver<(u64, Sampled)> {
    let (told, samples) = mpsc::channel(QUEUE);
    tokio::spawn(run(config, every, told));
    samples
}

/// `None` when nobody listens any more.
async fn run(config: MonitorConfig, every: Duration, told: mpsc::Sender<(u64, Sampled)>) -> Option<()> {
    let (mut monitor, mut problem) = open(config, &told).await?;
    let mut devices = Devices::default();
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let samples = monitor.sample().await;
        let ts_ns = boot_ns();
        if *monitor.devices() != devices {
            devices = monitor.devices().clone();
            told.send((ts_ns, Sampled::Devices(devices.clone()))).await.ok()?;
        }
        let now = problem_of(&monitor);
        if now != problem {
            problem.clone_from(&now);
            told.send((ts_ns, Sampled::Problem(now))).await.ok()?;
        }
        told.send((ts_ns, Sampled::Samples(samples))).await.ok()?;
    }
}

fn problem_of(monitor: &Monitor) -> Option<String> {
    let none = || monitor.devices().is_empty().then(|| "the driver lists no GPU".to_owned());
    monitor.problem().map(ToString::to_string).or_else(none)
}

/// The monitor, and the problem last told before there was one.
async fn open(config: MonitorConfig, told: &mpsc::Sender<(u64, Sampled)>) -> Option<(Monitor, Option<String>)> {
    let mut problem = None;
    loop {
        match Monitor::start(config.clone()).await {
            Ok(monitor) => return Some((monitor, problem)),
            Err(error) => {
                let reason = error.to_string();
                if problem.as_ref() != Some(&reason) {
                    told.send((boot_ns(), Sampled::Problem(Some(reason.clone())))).await.ok()?;
                    problem = Some(reason);
                }
            }
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = told.closed() => return None,
        }
    }
}
