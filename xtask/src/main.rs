//! The one entry point for developers: `cargo xtask --help`.

mod demo;
#[path = "../../tracer/build/ebpf.rs"]
mod ebpf;
mod fuzz;
mod object;
mod setup;
mod shell;
mod tests;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Everything a developer does with vramtrace.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what building the eBPF programs and running the tests need. Instant the second time.
    ///
    /// Changes nothing outside this repository except packages (apt-get); programs built from
    /// source go to target/tools.
    Setup,
    /// Set up, build, and trace: the real GPU where there is one, else a simulated host with a mix
    /// of healthy and faulty workloads.
    Run,
    /// Set up, then run every check and test.
    Test,
    /// Build the eBPF object from source.
    BuildEbpf {
        /// Put it, with the hash of its sources, where builds without a toolchain find it.
        #[arg(long, conflicts_with = "check")]
        ship: bool,
        /// Fail when the shipped object was not made from the present sources.
        #[arg(long)]
        check: bool,
    },
    /// Feed what is read from others with made-up input: no panic, bounded memory.
    Fuzz {
        /// What; everything in turn if it is not given.
        target: Option<fuzz::Target>,
        /// How long, each.
        // The fuzzer takes 0 for "without end".
        #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
    },
    /// Time the engine: records a second over a host day of 10,000,000, and memory.
    Bench {
        /// Which; all if it is not given.
        name: Option<String>,
    },
    /// Score `vramtrace replay` with the scorer and scenarios in ../shared, where they are there.
    Score,
}

fn main() -> ExitCode {
    match run(&Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> anyhow::Result<()> {
    match task {
        Task::Setup => setup::setup(setup::Purpose::Test),
        Task::Run => demo::run(),
        Task::Test => tests::test(),
        Task::BuildEbpf { ship: true, .. } => object::ship(),
        Task::BuildEbpf { check: true, .. } => object::check(),
        Task::BuildEbpf { .. } => object::build().map(|path| println!("{}", path.display())),
        Task::Fuzz { target, seconds } => fuzz::fuzz(*target, *seconds),
        Task::Bench { name } => tests::bench(name.as_deref()),
        Task::Score => tests::score(),
    }
}
