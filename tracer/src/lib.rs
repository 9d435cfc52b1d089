//! vramtrace: who holds GPU memory on this host, and why.
//!
//! The modules follow the path of the data. [`probe`], [`gpu`] and [`proc`] look at the host;
//! [`live`] makes one sequence of [`record`]s of what they see, and [`scenario`] reads recorded
//! ones; [`engine`] turns records into [`finding`]s with the help of its [`ledger`] and
//! [`detect`]ors; [`sink`] writes them out.

pub mod cli;
pub mod command;
pub mod detect;
pub mod doctor;
pub mod engine;
pub mod finding;
pub mod gpu;
pub mod ledger;
pub mod live;
pub mod owner;
pub mod probe;
pub mod proc;
pub mod record;
pub mod replay;
mod robust;
pub mod scenario;
pub mod sink;
pub mod units;
pub mod untrusted;
