//! Many allocations live at once, then all freed.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Run, Waited},
};

/// Arguments of `live`.
#[derive(Args, Debug)]
pub(crate) struct ManyLive {
    /// Allocations
    #[arg(long, default_value_t = 40_000)]
    count: u32,
    /// Size of each
    #[arg(long, default_value = "1MiB", value_parser = quantity::size)]
    size: u64,
    /// Time with all of them live
    #[arg(long, default_value = "1s", value_parser = quantity::duration)]
    pause: Duration,
    /// How long to stay after everything is freed
    #[arg(long, default_value = "0s", value_parser = quantity::duration)]
    duration: Duration,
}

impl ManyLive {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        let blocks = (0..self.count)
            .map(|_| run.allocate(gpu.ordinal, Family::Device, self.size))
            .collect::<Result<Vec<_>>>()?;
        run.ready();
        if run.sleep(self.pause) == Waited::Stopped {
            run.keep(blocks);
            return Ok(());
        }
        blocks.iter().try_for_each(|block| run.free(block))?;
        run.report_calls();
        run.report_live();
        run.sleep(self.duration);
        Ok(())
    }
}
