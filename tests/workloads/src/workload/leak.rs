//! A service that forgets one block of each request.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use super::traffic::Traffic;
use crate::{
    memory::Family,
    quantity,
    run::{Gpu, Run},
};

/// Arguments of `leak`.
#[derive(Args, Debug)]
pub(crate) struct Leak {
    /// Memory loaded at the start
    #[arg(long, default_value = "256MiB", value_parser = quantity::size)]
    base: u64,
    /// The block that is forgotten at each interval
    #[arg(long, default_value = "4MiB", value_parser = quantity::size)]
    block: u64,
    #[command(flatten)]
    traffic: Traffic,
    /// Time between requests
    #[arg(long, default_value = "100ms", value_parser = quantity::duration)]
    interval: Duration,
    /// Handle each request in a thread of its own
    #[arg(long)]
    thread_per_request: bool,
    /// How long to run; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl Leak {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.base)?]);
        run.ready();
        run.each_interval(self.interval, self.duration, || {
            if !self.thread_per_request {
                return self.request(run, gpu);
            }
            std::thread::scope(|scope| {
                let request = scope.spawn(|| {
                    run.driver()?.ctx_set_current(gpu.context)?;
                    self.request(run, gpu)
                });
                request.join().map_err(|_| anyhow!("the thread of a request panicked"))?
            })
        })
    }

    fn request(&self, run: &Run, gpu: Gpu) -> Result<()> {
        self.traffic.request(run, gpu.ordinal)?;
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.block)?]);
        Ok(())
    }
}
