//! The driver libraries of the host: which there are, and where their probes go.

pub mod discover;
mod elf;
pub mod library;
pub mod placement;
