//! Contexts on several devices that several threads use in turn, through cuCtxSetCurrent, push and pop. An allocation
//! belongs to the device of the context that is current in its thread.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Gpu, Run},
};

/// Arguments of `multi-device`.
#[derive(Args, Debug)]
pub(crate) struct MultiDevice {
    /// Devices, from ordinal 0
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(i32).range(1..))]
    devices: i32,
    /// Threads
    #[arg(long, default_value_t = 4)]
    threads: u32,
    /// Rounds of each thread over all devices
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Each thread keeps this much times (ordinal + 1) on each device
    #[arg(long, default_value = "4MiB", value_parser = quantity::size)]
    size: u64,
    /// Time between rounds
    #[arg(long, default_value = "10ms", value_parser = quantity::duration)]
    interval: Duration,
    /// How long to hold what is kept; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl MultiDevice {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        run.init()?;
        let ownership = run.options.ownership();
        let gpus = (0..self.devices).map(|ordinal| run.enter(ordinal, ownership)).collect::<Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(|| self.thread(run, &gpus))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
        })?;
        run.report_calls();
        run.ready();
        run.sleep_for(self.duration);
        Ok(())
    }

    fn thread(&self, run: &Run, gpus: &[Gpu]) -> Result<()> {
        for round in 0..self.rounds {
            for (index, gpu) in gpus.iter().enumerate() {
                let other = gpus[(index + 1) % gpus.len()];
                let kept = self.interleave(run, *gpu, other)?;
                if round == 0 {
                    run.keep([kept]);
                } else {
                    run.free(&kept)?;
                }
            }
            run.sleep(self.interval);
        }
        Ok(())
    }

    /// Allocates on `gpu`, then on `other` with its context pushed, frees that after the pop, and gives the first one.
    fn interleave(&self, run: &Run, gpu: Gpu, other: Gpu) -> Result<crate::memory::Allocation> {
        let driver = run.driver()?;
        let size = |gpu: Gpu| self.size * (u64::from(gpu.ordinal.unsigned_abs()) + 1);
        driver.ctx_set_current(gpu.context)?;
        let kept = run.allocate(gpu.ordinal, Family::Device, size(gpu))?;
        driver.ctx_push_current(other.context)?;
        let passing = run.allocate(other.ordinal, Family::Device, size(other))?;
        let mut popped = 0;
        driver.ctx_pop_current(&mut popped)?;
        anyhow::ensure!(popped == other.context, "cuCtxPopCurrent gave another context than the one pushed");
        run.free(&passing)?;
        Ok(kept)
    }
}
