//! A process that takes memory and ends without giving it back, as a process may: the driver has to clean up after it.
//! With a fault of the simulated driver that does not happen.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{memory::Family, quantity, run::Run};

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ending {
    /// Exit code 0, nothing freed
    Exit,
    /// SIGKILL
    Sigkill,
}

/// Arguments of `residue`.
#[derive(Args, Debug)]
pub(crate) struct Residue {
    /// What is allocated
    #[arg(long, default_value = "512MiB", value_parser = quantity::size)]
    size: u64,
    /// How long it is held
    #[arg(long, default_value = "1s", value_parser = quantity::duration)]
    after: Duration,
    /// How the process ends
    #[arg(long, value_enum, default_value_t = Ending::Exit)]
    end: Ending,
}

impl Residue {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.size)?]);
        run.ready();
        run.sleep(self.after);
        match self.end {
            Ending::Exit => Ok(()),
            Ending::Sigkill => run.kill_self(),
        }
    }
}
