//! Threads that allocate and end. Memory belongs to the process, so nothing changes when they do.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::{memory::Family, quantity, run::Run};

/// Arguments of `thread-exit`.
#[derive(Args, Debug)]
pub(crate) struct ThreadExit {
    /// Threads, one after another
    #[arg(long, default_value_t = 4)]
    threads: u32,
    /// What each thread allocates
    #[arg(long, default_value = "16MiB", value_parser = quantity::size)]
    size: u64,
    /// How long the process keeps the memory; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl ThreadExit {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        for _ in 0..self.threads {
            let allocation = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    run.driver()?.ctx_set_current(gpu.context)?;
                    run.allocate(gpu.ordinal, Family::Device, self.size)
                });
                thread.join().map_err(|_| anyhow!("an allocating thread panicked"))?
            })?;
            run.keep([allocation]);
        }
        run.ready();
        run.sleep_for(self.duration);
        Ok(())
    }
}
