//! The command line.

use clap::{Args, Parser, Subcommand};

use crate::{driver::Lookup, run::Ownership, script, workload};

/// A program that behaves well or badly on the CUDA driver API.
///
/// It opens libcuda.so.1 by its soname (`LD_LIBRARY_PATH` decides which) and says what it did as one JSON object a line:
/// start, device, ready, child, child-end, outcome, message, calls (by exported symbol: ok, failed), live (requested bytes), end.
/// SIGTERM ends every workload with exit code 0 and without freeing, as most services do. Durations are written 2s,
/// 50ms, 1m30s; sizes 4096, 4KiB, 64MiB.
#[derive(Debug, Parser)]
#[command(name = "workload", version)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(subcommand)]
    pub(crate) workload: Workload,
}

/// Options of every workload.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Device ordinal
    #[arg(long, global = true, default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) device: i32,
    /// Find driver functions through `cuGetProcAddress_v2` instead of by exported name
    #[arg(long, global = true)]
    pub(crate) proc_address: bool,
    /// Use `cuCtxCreate_v2` instead of the primary context
    #[arg(long, global = true)]
    pub(crate) own_context: bool,
    /// Free what is still held before a normal end
    #[arg(long, global = true)]
    pub(crate) free_at_end: bool,
    /// Process name and role in the output; the kernel shows the first 15 bytes
    #[arg(long, global = true)]
    pub(crate) name: Option<String>,
}

impl Options {
    /// How functions are found.
    pub(crate) fn lookup(&self) -> Lookup {
        if self.proc_address { Lookup::ProcAddress } else { Lookup::Symbol }
    }

    /// How contexts are made.
    pub(crate) fn ownership(&self) -> Ownership {
        if self.own_context { Ownership::Own } else { Ownership::Primary }
    }

    /// The arguments that give a child the same options, except the name.
    pub(crate) fn driver_arguments(&self) -> Vec<String> {
        let mut arguments = vec!["--device".to_owned(), self.device.to_string()];
        let flags = [
            (self.proc_address, "--proc-address"),
            (self.own_context, "--own-context"),
            (self.free_at_end, "--free-at-end"),
        ];
        arguments.extend(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| (*flag).to_owned()));
        arguments
    }
}

/// The behaviours.
#[derive(Debug, Subcommand)]
pub(crate) enum Workload {
    /// Run a script: one step a line
    Script(script::Script),
    /// Healthy service: loads a model, reserves a KV pool, then balanced traffic
    Serve(workload::serve::Serve),
    /// Caching allocator: grows in steps, then never calls the driver again
    CachePlateau(workload::cache_plateau::CachePlateau),
    /// Balanced traffic plus one block an interval that is never freed
    Leak(workload::leak::Leak),
    /// Pool that starts short-lived workers one after another
    Churn(workload::churn::Churn),
    /// A short-lived worker of the pool: context, allocate, work, free, exit 0
    ChurnWorker(workload::churn::ChurnWorker),
    /// A front end that is killed while its workers hold memory and live on
    Orphan(workload::orphan::Orphan),
    /// A loader that forks children without exec and is then killed
    ForkedLoader(workload::forked_loader::ForkedLoader),
    /// Allocates, waits (for a tracer to start), then goes on allocating and freeing
    Late(workload::late::Late),
    /// Contexts on several devices, used in turn by several threads
    MultiDevice(workload::multi_device::MultiDevice),
    /// Exact number of alloc/free pairs in several threads
    Stress(workload::stress::Stress),
    /// Many allocations live at once, then all freed
    Live(workload::live::ManyLive),
    /// Threads that allocate and end; the process keeps the memory
    ThreadExit(workload::thread_exit::ThreadExit),
    /// Calls that fail: out of memory, bad pointer, double free, zero size
    Failing(workload::failing::Failing),
    /// Allocates and ends, normally or by SIGKILL
    Residue(workload::residue::Residue),
    /// One allocation of each family with exact, different sizes
    Families(workload::families::Families),
    /// A context and one allocation, held
    Hold(workload::hold::Hold),
}

impl Workload {
    /// The process name and role when `--name` is not given.
    pub(crate) fn default_role(&self) -> &'static str {
        match self {
            Self::Script(_) => "script",
            Self::Serve(_) => "serve",
            Self::CachePlateau(_) => "cache-plateau",
            Self::Leak(_) => "leaky",
            Self::Churn(_) => "churn-pool",
            Self::ChurnWorker(_) => "churn-worker",
            Self::Orphan(_) => "frontend",
            Self::ForkedLoader(_) => "forked-loader",
            Self::Late(_) => "late",
            Self::MultiDevice(_) => "multi-device",
            Self::Stress(_) => "stress",
            Self::Live(_) => "live",
            Self::ThreadExit(_) => "thread-exit",
            Self::Failing(_) => "failing",
            Self::Residue(_) => "residue",
            Self::Families(_) => "families",
            Self::Hold(_) => "hold",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn children_get_the_options_of_their_parent() {
        let parent = ["workload", "--device", "1", "--proc-address", "--free-at-end", "hold"];
        let options = Cli::parse_from(parent).options;
        let child = ["workload".to_owned()].into_iter().chain(options.driver_arguments()).chain(["hold".to_owned()]);
        assert_eq!(Cli::parse_from(child).options, options);
    }

    #[test]
    fn default_roles_fit_a_process_name() {
        let names = ["serve", "cache-plateau", "leak", "churn", "churn-worker", "orphan", "forked-loader", "late"];
        for name in names {
            let role = Cli::parse_from(["workload", name]).workload.default_role();
            assert!(role.len() <= 15, "{role}");
        }
    }
}
