//! The one entry point for developers: `cargo xtask --help`.

fn main() {}
