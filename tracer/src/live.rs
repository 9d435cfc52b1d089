//! The live host as a source of records.

mod repair;
mod translate;
