//! vramtrace: who holds GPU memory on this host, and why.
//!
//! The modules follow the path of the data: [`record`] is the one vocabulary every source speaks,
//! [`engine`] turns records into [`finding`]s with the help of its [`ledger`] and [`detect`]ors,
//! and [`sink`] writes them out.

pub mod detect;
pub mod engine;
pub mod finding;
pub mod ledger;
pub mod record;
pub mod replay;
pub mod scenario;
pub mod sink;
pub mod units;
