//! The simulated `libcuda.so.1`.
//!
//! Exports look to a probe as the real library's do (see [`stub`]); behind them is a model of what
//! the driver does with memory and contexts. Nothing is computed: copies and launches succeed
//! without effect.

mod address;
mod code;
mod context;
mod device;
mod driver;
mod exports;
mod memory;
mod pool;
mod proc_address;
mod sharing;
mod stub;
mod vmm;
