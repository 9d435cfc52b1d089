//! A healthy service: the model's shards in a burst, one KV pool, then requests that give back what they take.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::traffic::Traffic;
use crate::{memory::Family, quantity, run::Run};

/// Arguments of `serve`.
#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// Number of model shards
    #[arg(long, default_value_t = 8)]
    shards: u32,
    /// Size of each shard
    #[arg(long, default_value = "256MiB", value_parser = quantity::size)]
    shard_size: u64,
    /// Size of the KV pool
    #[arg(long, default_value = "1GiB", value_parser = quantity::size)]
    kv_pool: u64,
    #[command(flatten)]
    traffic: Traffic,
    /// Time between requests
    #[arg(long, default_value = "100ms", value_parser = quantity::duration)]
    interval: Duration,
    /// How long to serve; without it, until SIGTERM
    #[arg(long, value_parser = quantity::duration)]
    duration: Option<Duration>,
}

impl Serve {
    pub(crate) fn play(&self, run: &Run) -> Result<()> {
        let gpu = run.open_gpu()?;
        for _ in 0..self.shards {
            run.keep([run.allocate(gpu.ordinal, Family::Device, self.shard_size)?]);
        }
        run.keep([run.allocate(gpu.ordinal, Family::Device, self.kv_pool)?]);
        run.ready();
        run.each_interval(self.interval, self.duration, || self.traffic.request(run, gpu.ordinal))
    }
}
