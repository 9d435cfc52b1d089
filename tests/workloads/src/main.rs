//! Workloads for the CUDA driver API: what healthy and unhealthy GPU services do, on demand and with exact counts.

use std::process::ExitCode;

use clap::Parser;

mod cli;
mod driver;
mod memory;
mod process;
mod quantity;
mod report;
mod run;
mod script;
mod workload;

fn main() -> ExitCode {
    run(cli::Cli::parse()).unwrap_or_else(|error| {
        eprintln!("workload: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: cli::Cli) -> anyhow::Result<ExitCode> {
    let run = run::Run::start(cli.options, cli.workload.default_role())?;
    let played = workload::play(&run, cli.workload);
    let reason = match &played {
        Err(_) => "error",
        Ok(_) if run.stopped() => "signal",
        Ok(_) => "done",
    };
    let finished = run.finish(reason);
    let code = played?;
    finished?;
    Ok(code)
}
