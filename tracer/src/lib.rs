//! vramtrace: who holds GPU memory on this host, and why.
//!
//! The modules follow the path of the data: [`record`] is the one vocabulary every source speaks.

pub mod cli;
pub mod doctor;
pub mod gpu;
pub mod live;
pub mod owner;
pub mod probe;
pub mod proc;
pub mod record;
pub mod untrusted;
