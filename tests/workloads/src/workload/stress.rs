//! An exact number of alloc/free pairs in several threads.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Gpu, Run},
};

/// Arguments of `stress`.
#[derive(Args, Debug)]
pub(crate) struct Stress {
    /// Threads
    #[arg(long, default_value_t = 8)]
    threads: u32,
    /// Pairs in each thread
    #[arg(long, default_value_t = 100_000)]
    pairs: u64,
    /// Size of each allocation
    #[arg(long, default_value = "4KiB", value_parser = quantity::size)]
    size: u64,
    /// Time between context and first pair, for a tracer to see the process
    #[arg(long, default_value = "0s", value_parser = quantity::duration)]
    wait: Duration,
    /// How long to stay after the last pair
    #[arg(long, default_value = "0s", value_parser = quantity::duration)]
    duration: Duration,
}

impl Stress {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        run.sleep(self.wait);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(|| self.thread(run, gpu))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
        })?;
        run.report_calls();
        run.ready();
        run.sleep(self.duration);
        Ok(())
    }

    fn thread(&self, run: &Run, gpu: Gpu) -> Result<()> {
        run.driver()?.ctx_set_current(gpu.context)?;
        for _ in 0..self.pairs {
            if run.stopped() {
                break;
            }
            run.free(&run.allocate(gpu.ordinal, Family::Device, self.size)?)?;
        }
        Ok(())
    }
}
