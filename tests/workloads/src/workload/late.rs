//! A service that was running before the tracer: it has memory nobody saw it allocate, frees half of it later and takes
//! blocks of another size in its place.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Run, Waited},
};

/// Arguments of `late`.
#[derive(Args, Debug)]
pub(crate) struct Late {
    /// Blocks allocated at the start
    #[arg(long, default_value_t = 8)]
    blocks: u32,
    /// Size of a block
    #[arg(long, default_value = "32MiB", value_parser = quantity::size)]
    size: u64,
    /// Size of the blocks that replace half of them
    #[arg(long, default_value = "48MiB", value_parser = quantity::size)]
    new_size: u64,
    /// Time without driver calls, for a tracer to start in
    #[arg(long, default_value = "2s", value_parser = quantity::duration)]
    wait: Duration,
    /// Time between replacements, and afterwards between balanced allocations
    #[arg(long, default_value = "100ms", value_parser = quantity::duration)]
    interval: Duration,
    /// How long to go on after the replacements; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl Late {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        let mut blocks = (0..self.blocks)
            .map(|_| run.allocate(gpu.ordinal, Family::Device, self.size))
            .collect::<Result<Vec<_>>>()?;
        run.ready();
        if run.sleep(self.wait) == Waited::Elapsed {
            for block in blocks.iter_mut().step_by(2) {
                run.free(block)?;
                *block = run.allocate(gpu.ordinal, Family::Device, self.new_size)?;
                run.sleep(self.interval);
            }
            run.report_live();
            run.each_interval(self.interval, self.duration, || {
                run.free(&run.allocate(gpu.ordinal, Family::Device, self.new_size)?)
            })?;
        }
        run.keep(blocks);
        Ok(())
    }
}
