//! The command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{gpu, probe::AttachMethod};

/// What `--version` says: also where the kernel side came from.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (eBPF programs ",
    env!("VRAMTRACE_EBPF_ORIGIN"),
    ", sources ",
    env!("VRAMTRACE_EBPF_SOURCES"),
    ")"
);

/// Says who holds GPU memory on this host, and why it is still there.
///
/// vramtrace watches every process call the NVIDIA driver library, watches those processes end,
/// asks the driver what it still bills, and explains the difference. It never touches the services
/// it watches.
///
/// Exit codes: 0 clean, 1 error, 2 wrong usage, 3 findings of severity warning or worse (doctor,
/// and run and replay with --judge).
#[derive(Debug, Parser)]
#[command(name = "vramtrace", version = VERSION, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Trace this host until Ctrl-C and tell what happens to its GPU memory.
    ///
    /// Needs root, or CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH. What cannot be
    /// seen (no privileges, no NVML, no libcuda) is said, and the rest goes on.
    #[command(after_help = "Example: vramtrace run --duration 1h --format json > findings.jsonl")]
    Run(RunArgs),
    /// Judge a recorded incident (a `vramtrace-replay/1` file) with the same engine.
    Replay(ReplayArgs),
    /// Say what this machine offers for tracing, what would be missed, and what to do about it.
    Doctor(DoctorArgs),
    #[command(name = gpu::helper::SUBCOMMAND, hide = true)]
    #[expect(missing_docs, reason = "started by the agent alone; its documentation is the helper's module")]
    NvmlHelper {
        #[arg(long = "nvml-library", required = true)]
        libraries: Vec<OsString>,
    },
}

/// How output looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Whether findings decide the exit code.
#[derive(Clone, Copy, Debug, Args)]
pub struct Judging {
    /// Exit with code 3 when there was a finding of severity warning or worse.
    #[arg(long)]
    pub judge: bool,
}

/// Where the driver's parts are.
#[derive(Clone, Debug, Args)]
pub struct DriverArgs {
    /// Driver library to trace as well as those found on the host and in running processes.
    #[arg(long = "libcuda", value_name = "PATH")]
    pub libcuda: Vec<PathBuf>,
    /// Trace the libraries given with --libcuda and no others.
    #[arg(long, requires = "libcuda")]
    pub named_only: bool,
    /// NVML library to use instead of the loader's `libnvidia-ml.so.1`; the first that loads.
    #[arg(long = "nvml-library", value_name = "PATH")]
    pub nvml: Vec<OsString>,
    /// Folder of the GPU's device files.
    #[arg(long, value_name = "DIR", default_value = "/dev")]
    pub device_folder: PathBuf,
}

/// Options of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Text for people, or one JSON document a line: each finding as it opens, changes and closes,
    /// and a summary at the end.
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// End after this time (such as 90s or 1h) instead of at Ctrl-C.
    #[arg(long, value_parser = humantime::parse_duration, value_name = "TIME")]
    pub duration: Option<Duration>,
    /// Also write the findings document (vramtrace-findings/1) to this file at the end.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented by its type")]
    pub judging: Judging,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented by its type")]
    pub driver: DriverArgs,
    /// How often NVML is asked.
    #[arg(long, value_parser = positive_duration, value_name = "TIME", default_value = "1s")]
    pub sample_interval: Duration,
    /// How long NVML may take to answer before that is itself recorded and its helper replaced.
    #[arg(long, value_parser = positive_duration, value_name = "TIME", default_value = "2s")]
    pub nvml_deadline: Duration,
    /// Ring buffer for driver calls; a power of two of at least one page. What does not fit is
    /// counted, and balances stay exact.
    #[arg(long, value_parser = ring_size, value_name = "SIZE", default_value = "8MiB")]
    pub calls_ring: u32,
    /// Live allocations that can be tracked at once, over all processes; about 100 bytes of kernel
    /// memory each.
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    pub live_entries: u32,
    /// The kernel's type information instead of the running kernel's own, or `none` to do without.
    #[arg(long, value_name = "PATH")]
    pub kernel_types: Option<PathBuf>,
    /// How to attach probes; by default the best this kernel has.
    #[arg(long, value_parser = attach_method, value_name = "multi|perf")]
    pub attach: Option<AttachMethod>,
}

/// Options of `replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// The file to judge.
    pub file: PathBuf,
    /// Text for people, or one findings document.
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented by its type")]
    pub judging: Judging,
}

/// Options of `doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Text for people, or one JSON document.
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented by its type")]
    pub driver: DriverArgs,
}

fn positive_duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if duration < Duration::from_millis(10) { Err("must be at least 10ms".to_owned()) } else { Ok(duration) }
}

/// The kernel takes ring buffers of a power of two of at least a page.
fn ring_size(text: &str) -> Result<u32, String> {
    let size = text.parse::<ByteSize>().map_err(|_| "not a size such as 8MiB".to_owned())?.as_u64();
    let page = rustix::param::page_size() as u64;
    match u32::try_from(size) {
        Ok(bytes) if bytes.is_power_of_two() && size >= page && size <= 1 << 30 => Ok(bytes),
        _ => Err(format!("must be a power of two from {page} bytes to 1GiB")),
    }
}

fn attach_method(text: &str) -> Result<AttachMethod, String> {
    match text {
        "multi" => Ok(AttachMethod::Multi),
        "perf" => Ok(AttachMethod::Perf),
        _ => Err("must be multi or perf".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn ring_sizes_are_what_the_kernel_takes() {
        assert_eq!(ring_size("8MiB"), Ok(8 << 20));
        assert_eq!(ring_size("4KiB"), Ok(4096));
        for refused in ["0", "1KiB", "5000", "2GiB", "6MiB", "many"] {
            assert!(ring_size(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn intervals_of_nothing_are_refused() {
        assert!(positive_duration("0s").is_err());
        assert_eq!(positive_duration("1s 500ms"), Ok(Duration::from_millis(1500)));
    }
}
