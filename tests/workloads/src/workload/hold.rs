//! A context and allocations that are held.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{memory::Family, process, quantity, run::Run};

/// Arguments of `hold`.
#[derive(Args, Debug)]
pub(crate) struct Hold {
    /// Size of the allocation
    #[arg(long, default_value = "64MiB", value_parser = quantity::size)]
    size: u64,
    /// How many allocations of that size
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// How it is allocated
    #[arg(long, value_enum, default_value_t = Family::Device)]
    family: Family,
    /// How long to hold; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
    /// Descriptor to close when ready (the parent waits for it)
    #[arg(long, hide = true)]
    ready_fd: Option<i32>,
}

impl Hold {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        for _ in 0..self.count {
            run.keep([run.allocate(gpu.ordinal, self.family, self.size)?]);
        }
        run.ready();
        if let Some(descriptor) = self.ready_fd {
            process::announce_ready(descriptor);
        }
        run.sleep_for(self.duration);
        Ok(())
    }
}
