//! A front end that dies by SIGKILL while its workers hold memory: they go on, with nobody left who would end them.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{
    process::{self, ReadyPipe},
    quantity,
    run::{Run, Waited},
};

/// Arguments of `orphan`.
#[derive(Args, Debug)]
pub(crate) struct Orphan {
    /// Workers
    #[arg(long, default_value_t = 2)]
    workers: u32,
    /// What each worker holds
    #[arg(long, default_value = "512MiB", value_parser = quantity::size)]
    size: u64,
    /// When the front end dies, counted from when every worker holds its memory
    #[arg(long, default_value = "1s", value_parser = quantity::duration)]
    kill_after: Duration,
    /// How long a worker holds its memory, unless SIGTERM comes first
    #[arg(long, default_value = "60s", value_parser = quantity::duration)]
    duration: Duration,
}

impl Orphan {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let ready = ReadyPipe::new()?;
        let mut workers = Vec::new();
        for _ in 0..self.workers {
            let mut command = process::command(&run.options, "orphan-worker")?;
            command.arg("hold").arg("--size").arg(self.size.to_string());
            command.arg("--ready-fd").arg(ready.child_descriptor().to_string());
            command.arg("--duration").arg(format!("{}us", self.duration.as_micros()));
            workers.push(process::spawn(run, &mut command, "orphan-worker")?);
        }
        ready.wait()?;
        run.ready();
        if run.sleep(self.kill_after) == Waited::Elapsed {
            run.kill_self()?;
        }
        // Asked to end before its time: the front end is a good parent and takes its workers with it.
        for mut worker in workers {
            worker.kill()?;
            process::wait(run, worker)?;
        }
        Ok(())
    }
}
