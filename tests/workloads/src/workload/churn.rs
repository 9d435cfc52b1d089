//! A pool that replaces its workers all the time: every worker is well-behaved, the pool as a whole is never at rest.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use clap::Args;

use crate::{
    memory::Family,
    process, quantity,
    run::{Run, Waited},
};

/// Arguments of `churn`.
#[derive(Args, Debug)]
pub(crate) struct Churn {
    /// Workers to start in all; without it, until the duration has passed or SIGTERM
    #[arg(long)]
    workers: Option<u64>,
    /// Life of a worker
    #[arg(long, default_value = "300ms", value_parser = quantity::duration)]
    life: Duration,
    /// Workers that are alive at the same time
    #[arg(long, default_value_t = 2)]
    overlap: u32,
    /// What each worker allocates
    #[arg(long, default_value = "64MiB", value_parser = quantity::size)]
    size: u64,
    /// How long to start new workers
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl Churn {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let end = self.duration.and_then(|duration| Instant::now().checked_add(duration));
        let started = AtomicU64::new(0);
        run.ready();
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..self.overlap)
                .map(|lane| {
                    let started = &started;
                    scope.spawn(move || self.lane(run, lane, started, end))
                })
                .collect();
            lanes.into_iter().try_for_each(|lane| lane.join().map_err(|_| anyhow!("a thread of the pool panicked"))?)
        })
    }

    /// Starts one worker after another. Lanes begin apart, so that workers do not come and go all at once.
    fn lane(&self, run: &Run, lane: u32, started: &AtomicU64, end: Option<Instant>) -> Result<()> {
        if run.sleep(self.life * lane / self.overlap) == Waited::Stopped {
            return Ok(());
        }
        while !run.stopped()
            && end.is_none_or(|end| Instant::now() < end)
            && self.workers.is_none_or(|workers| started.fetch_add(1, Ordering::Relaxed) < workers)
        {
            let mut command = process::command(&run.options, "churn-worker")?;
            command.arg("churn-worker").arg("--size").arg(self.size.to_string());
            command.arg("--life").arg(format!("{}us", self.life.as_micros()));
            let worker = process::spawn(run, &mut command, "churn-worker")?;
            process::wait(run, worker)?;
        }
        Ok(())
    }
}

/// Arguments of `churn-worker`.
#[derive(Args, Debug)]
pub(crate) struct ChurnWorker {
    /// How long it works
    #[arg(long, default_value = "300ms", value_parser = quantity::duration)]
    life: Duration,
    /// What it allocates
    #[arg(long, default_value = "64MiB", value_parser = quantity::size)]
    size: u64,
}

impl ChurnWorker {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        let allocation = run.allocate(gpu.ordinal, Family::Device, self.size)?;
        run.ready();
        if run.sleep(self.life) == Waited::Stopped {
            run.keep([allocation]);
            return Ok(());
        }
        run.free(&allocation)?;
        run.leave(gpu)
    }
}
