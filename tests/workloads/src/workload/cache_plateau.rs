//! A caching allocator: segments of 2 MiB and 20 MiB until the working set is reached, then no driver call any more.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Run, Waited},
};

/// Arguments of `cache-plateau`.
#[derive(Args, Debug)]
pub(crate) struct CachePlateau {
    /// Growth steps; each takes one small and one large segment
    #[arg(long, default_value_t = 10)]
    steps: u32,
    /// Small segment
    #[arg(long, default_value = "2MiB", value_parser = quantity::size)]
    small: u64,
    /// Large segment
    #[arg(long, default_value = "20MiB", value_parser = quantity::size)]
    large: u64,
    /// Time between steps
    #[arg(long, default_value = "100ms", value_parser = quantity::duration)]
    interval: Duration,
    /// How long to stay on the plateau; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl CachePlateau {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        for _ in 0..self.steps {
            for segment in [self.small, self.large] {
                run.keep([run.allocate(gpu.ordinal, Family::Device, segment)?]);
            }
            if run.sleep(self.interval) == Waited::Stopped {
                return Ok(());
            }
        }
        run.ready();
        run.sleep_for(self.duration);
        Ok(())
    }
}
