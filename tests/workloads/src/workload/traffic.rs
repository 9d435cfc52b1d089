//! Balanced traffic: what a serving process allocates for a request it gives back with the request.

use anyhow::Result;
use clap::Args;

use crate::{memory::Family, quantity, run::Run};

/// Size of one request's activations.
#[derive(Args, Clone, Debug)]
pub(crate) struct Traffic {
    /// Activations a request allocates and frees
    #[arg(long, default_value_t = 4)]
    activations: u32,
    /// Size of an activation
    #[arg(long, default_value = "8MiB", value_parser = quantity::size)]
    activation_size: u64,
}

impl Traffic {
    /// Handles one request: everything allocated is freed.
    pub(crate) fn request(&self, run: &Run, device: i32) -> Result<()> {
        let activations = (0..self.activations)
            .map(|_| run.allocate(device, Family::Device, self.activation_size))
            .collect::<Result<Vec<_>>>()?;
        activations.iter().try_for_each(|activation| run.free(activation))
    }
}
