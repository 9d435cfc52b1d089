//! One allocation of each family. The sizes differ, so that each shows by its size alone.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    memory::Family,
    quantity,
    run::{Run, Waited},
};

/// Arguments of `families`.
#[derive(Args, Debug)]
pub(crate) struct Families {
    /// The first family allocates this much, the second twice as much, and so on (VMM needs multiples of 2 MiB)
    #[arg(long, default_value = "2MiB", value_parser = quantity::size)]
    unit: u64,
    /// Families, in this order
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Family::ALL)]
    only: Vec<Family>,
    /// How long all are held before they are freed; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
    /// How long to stay after everything is freed
    #[arg(long, default_value = "0s", value_parser = quantity::duration)]
    linger: Duration,
}

impl Families {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        let mut allocations = Vec::new();
        for (multiple, family) in (1..).zip(&self.only) {
            allocations.push(run.allocate(gpu.ordinal, *family, self.unit * multiple)?);
        }
        run.ready();
        if run.sleep_for(self.duration) == Waited::Stopped {
            run.keep(allocations);
            return Ok(());
        }
        allocations.iter().try_for_each(|allocation| run.free(allocation))?;
        if self.only.contains(&Family::Async) || self.only.contains(&Family::AsyncPtsz) {
            // A pool gives freed memory back at the next synchronisation.
            run.driver()?.stream_synchronize(0)?;
        }
        run.report_calls();
        run.report_live();
        run.sleep(self.linger);
        Ok(())
    }
}
