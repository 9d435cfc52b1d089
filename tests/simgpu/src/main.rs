//! Makes, shows and breaks simulated hosts.

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use simgpu::{Config, Fault, Host};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A simulated GPU host: a folder with a libcuda.so.1 and a libnvidia-ml.so.1 that real processes
/// load.
#[derive(Parser)]
#[command(max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a host.
    Init(Init),
    /// Print what a process needs in its environment: `eval "$(simgpu env --dir D)"`.
    Env(Place),
    /// Show devices and clients as JSON.
    Show(Place),
    /// Make something go wrong from now on.
    Fault {
        #[command(flatten)]
        place: Place,
        #[command(subcommand)]
        fault: Fault,
    },
    /// Nothing goes wrong any more; what was left behind stays.
    Clear(Place),
    /// Remove a host.
    Destroy(Place),
}

#[derive(Args)]
struct Place {
    /// Folder of the host.
    #[arg(long, env = simgpu::DIRECTORY)]
    dir: PathBuf,
}

#[derive(Args)]
struct Init {
    #[command(flatten)]
    place: Place,
    /// Number of devices.
    #[arg(long, default_value_t = 1)]
    devices: u32,
    /// Memory of each device.
    #[arg(long, value_parser = size, default_value = "80GiB")]
    memory: u64,
    /// Memory of each device that the driver keeps for itself.
    #[arg(long, value_parser = size, default_value = "0")]
    reserved: u64,
    /// Memory a context costs.
    #[arg(long, value_parser = size, default_value = "300MiB")]
    context_overhead: u64,
    /// How long it takes to create one.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "5ms")]
    context_time: std::time::Duration,
    /// How long a dead process's memory takes to come back.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "500ms")]
    release_delay: std::time::Duration,
    /// Driver version.
    #[arg(long, default_value = "550.163.01")]
    driver: String,
    /// Folder with the built libraries; by default that of this program.
    #[arg(long)]
    libraries: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<bytesize::ByteSize>().map(|size| size.as_u64())
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("simgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Init(init) => make(&init),
        Command::Env(place) => {
            for (name, value) in open(&place)?.env() {
                println!("export {name}='{value}'");
            }
            Ok(())
        }
        Command::Show(place) => {
            println!("{}", serde_json::to_string_pretty(&open(&place)?.view())?);
            Ok(())
        }
        Command::Fault { place, fault } => Ok(open(&place)?.fault(fault)?),
        Command::Clear(place) => Ok(open(&place)?.clear_faults()?),
        Command::Destroy(place) => {
            open(&place)?;
            std::fs::remove_dir_all(&place.dir).with_context(|| format!("cannot remove {}", place.dir.display()))
        }
    }
}

fn open(place: &Place) -> anyhow::Result<Host> {
    Host::open(&place.dir).with_context(|| format!("{} is not a simulated host", place.dir.display()))
}

fn make(init: &Init) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    let beside = program.parent().map(Path::to_owned).unwrap_or_default();
    let config = Config {
        devices: init.devices,
        memory: init.memory,
        reserved: init.reserved,
        context_overhead: init.context_overhead,
        context_time_ms: init.context_time.as_millis() as u64,
        release_delay_ms: init.release_delay.as_millis() as u64,
        driver: init.driver.clone(),
        ..Config::default()
    };
    Host::create(&init.place.dir, config, init.libraries.as_deref().unwrap_or(&beside))?;
    Ok(())
}
