//! Calls that the driver refuses. They must change nothing.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{driver::CallError, memory::Family, quantity, report::Event, run::Run};

/// An address no allocation has.
const BAD_POINTER: u64 = 0xdead_0000;

/// Arguments of `failing`.
#[derive(Args, Debug)]
pub(crate) struct Failing {
    /// What is held throughout
    #[arg(long, default_value = "64MiB", value_parser = quantity::size)]
    size: u64,
    /// A request larger than any device
    #[arg(long, default_value = "16TiB", value_parser = quantity::size)]
    too_large: u64,
    /// How often each case is tried
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// How long to stay afterwards; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl Failing {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        let driver = run.driver()?;
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.size)?]);
        for _ in 0..self.rounds {
            let refused = run.try_allocate(gpu.ordinal, Family::Device, self.too_large)?;
            report(run, "out-of-memory", refused.map(drop))?;
            let zero = run.try_allocate(gpu.ordinal, Family::Device, 0)?;
            report(run, "zero-size", zero.map(drop))?;
            report(run, "bad-pointer", driver.mem_free(BAD_POINTER))?;
            report(run, "null-pointer", driver.mem_free(0))?;
            let block = run.allocate(gpu.ordinal, Family::Device, self.size)?;
            run.free(&block)?;
            report(run, "double-free", driver.mem_free(block.address()))?;
        }
        run.report_calls();
        run.ready();
        run.sleep_for(self.duration);
        Ok(())
    }
}

/// Reports the driver's answer; a function it does not have ends the workload.
pub(crate) fn report(run: &Run, case: &str, answer: Result<(), CallError>) -> Result<()> {
    let code = match answer {
        Ok(()) => 0,
        Err(CallError::Refused { code, .. }) => code,
        Err(missing) => return Err(missing.into()),
    };
    run.report.emit(Event::Outcome { case, code });
    Ok(())
}
