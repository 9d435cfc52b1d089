//! A loader that opens the driver, allocates, and forks helpers without exec. When it is killed, the helpers still have
//! its device files open, or only mapped, and the driver keeps its memory.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    memory::Family,
    process::{self, Forked},
    quantity,
    run::{Run, Waited},
};

/// Arguments of `forked-loader`.
#[derive(Args, Debug)]
pub(crate) struct ForkedLoader {
    /// Forked children
    #[arg(long, default_value_t = 2)]
    children: u32,
    /// What the parent allocates
    #[arg(long, default_value = "1GiB", value_parser = quantity::size)]
    size: u64,
    /// When the parent dies, counted from the last fork
    #[arg(long, default_value = "1s", value_parser = quantity::duration)]
    kill_after: Duration,
    /// How long the children live, unless SIGTERM comes first
    #[arg(long, default_value = "60s", value_parser = quantity::duration)]
    duration: Duration,
    /// The children map the device files and close them
    #[arg(long)]
    mapped: bool,
}

impl ForkedLoader {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.size)?]);
        let mut children = Vec::new();
        for _ in 0..self.children {
            match process::fork(run, "loader-helper")? {
                Forked::Child => {
                    if self.mapped {
                        process::keep_files_only_mapped()?;
                    }
                    run.sleep(self.duration);
                    return Ok(());
                }
                Forked::Parent(child) => children.push(child),
            }
        }
        run.ready();
        if run.sleep(self.kill_after) == Waited::Elapsed {
            run.kill_self()?;
        }
        children.into_iter().try_for_each(|child| process::end_forked(run, child))
    }
}
