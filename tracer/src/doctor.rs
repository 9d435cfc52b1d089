//! `vramtrace doctor`: what this host offers, what tracing it would miss, and what to do about it.

mod host;
mod report;
mod text;

pub use report::{Check, Examination, LibraryReport, NvmlReport, RefusedReport, SCHEMA, Verdict};

use crate::gpu::{Monitor, MonitorConfig};
use crate::probe::discover::{DiscoverConfig, Discovery, discover};
use crate::proc::DeviceFiles;
use host::HostFacts;
use std::path::PathBuf;

/// What to examine.
#[derive(Clone, Debug)]
pub struct DoctorConfig {
    /// Where driver libraries are looked for.
    pub discover: DiscoverConfig,
    /// How NVML is opened.
    pub monitor: MonitorConfig,
    /// Folder of the device files.
    pub device_folder: PathBuf,
}

impl Default for DoctorConfig {
    fn default() -> Self {
        Self { discover: DiscoverConfig::default(), monitor: MonitorConfig::default(), device_folder: "/dev".into() }
    }
}

/// Looks at everything once. Changes nothing, apart from what opening NVML does: run by root
/// without a driver, NVIDIA's library makes `/dev/nvidiactl`.
pub async fn examine(config: &DoctorConfig) -> Examination {
    let mut checks = HostFacts::gather(&config.discover.proc_root).checks();
    let discovery = discover(&config.discover);
    checks.push(libraries_check(&discovery));
    checks.extend(unreadable_check(&discovery));
    checks.extend(discovery.found.iter().filter_map(untraced_allocators_check));
    checks.extend(discovery.found.iter().filter_map(entry_placement_check));
    checks.extend(discovery.refused.iter().map(|refused| {
        let users = refused.pids.len();
        let name = "libcuda_refused";
        let detail = format!("{} (used by {})", refused.reason, processes(users));
        let action =
            "calls through it are not seen; if it should be the driver's library, put the installed driver's in its place";
        // A file nobody uses, or one the user did not name, costs nothing.
        if users > 0 || config.discover.explicit.contains(&refused.path) {
            Check::missing(name, detail, action)
        } else {
            Check::limited(name, detail, action)
        }
    }));

    let nvml = match Monitor::start(config.monitor.clone()).await {
        Ok(monitor) => {
            checks.push(devices_check(&monitor));
            NvmlReport::of(&monitor)
        }
        Err(error) => {
            let action = "until then nothing is known of what the driver bills; traced calls are still shown";
            checks.push(Check::missing("nvml", error.to_string(), action));
            NvmlReport::failed(&error)
        }
    };
    checks.push(device_files_check(config));
    Examination {
        schema: SCHEMA,
        checks,
        libraries: discovery.found.iter().map(LibraryReport::of).collect(),
        refused: discovery.refused.iter().map(RefusedReport::of).collect(),
        nvml,
    }
}

fn processes(count: usize) -> String {
    text::counted(count, "process", "processes")
}

fn libraries_check(discovery: &Discovery) -> Check {
    let users = discovery.found.iter().map(|found| found.pids.len()).sum::<usize>();
    if discovery.found.is_empty() && !discovery.refused.is_empty() {
        Check::limited("libcuda", "none of the driver libraries found can be traced", "see libcuda_refused below")
    } else if discovery.found.is_empty() {
        Check::missing(
            "libcuda",
            "no driver library was found, neither in use nor installed",
            "install the NVIDIA driver, or name its library with --libcuda PATH",
        )
    } else {
        Check::ok("libcuda", format!("{} found, used by {}", discovery.found.len(), processes(users)))
    }
}

fn unreadable_check(discovery: &Discovery) -> Option<Check> {
    let first = discovery.unreadable.first()?;
    let count = discovery.unreadable.len();
    // The system's first process is no user of the driver; a sandbox often hides it.
    Some(if discovery.unreadable.iter().all(|error| error.pid() == Some(1)) {
        let action = "nothing to do, unless process 1 itself uses the GPU";
        Check::limited("process_maps", "the mappings of process 1 cannot be read", action)
    } else {
        let detail = format!("{} cannot be searched for driver libraries; the first: {first}", processes(count));
        Check::missing("process_maps", detail, "run as root in the host's pid namespace, or with CAP_SYS_PTRACE")
    })
}

fn untraced_allocators_check(found: &crate::probe::discover::Found) -> Option<Check> {
    let names = &found.library.unknown_allocators;
    (!names.is_empty()).then(|| {
        let shown = crate::untrusted::printable(names.join(", ").as_bytes(), 300);
        Check::limited(
            "untraced_allocators",
            format!(
                "{} exports {} allocating functions that are not traced: {shown}",
                text::path(&found.library.path),
                names.len()
            ),
            "memory from them shows in NVML's figures only",
        )
    })
}

fn entry_placement_check(found: &crate::probe::discover::Found) -> Option<Check> {
    let count = found.library.count(crate::probe::placement::Placement::Entry);
    (count > 0).then(|| {
        Check::limited(
            "entry_placement",
            format!("{count} functions of {} do not begin as the driver's stubs do", text::path(&found.library.path)),
            "their probes sit on the first instruction, which may cost up to 30 times more a call",
        )
    })
}

fn devices_check(monitor: &Monitor) -> Check {
    let devices = monitor.devices();
    let driver = devices.driver.as_deref().unwrap_or("of unknown version");
    match (devices.is_empty(), monitor.problem()) {
        (_, Some(problem)) => Check::limited("nvml", problem.to_string(), "samples will be missing until this is over"),
        (true, None) => Check::missing(
            "nvml",
            format!("driver {driver} lists no device"),
            "check that a GPU is present (lspci) and that this process may use it",
        ),
        (false, None) => {
            Check::ok("nvml", format!("driver {driver}, {}", text::counted(devices.len(), "device", "devices")))
        }
    }
}

fn device_files_check(config: &DoctorConfig) -> Check {
    let files = DeviceFiles::read(&config.device_folder);
    match files.scan(&config.discover.proc_root) {
        Ok(scan) if scan.complete => Check::ok(
            "device_files",
            format!(
                "{}, open in {}",
                text::counted(files.len(), "device file", "device files"),
                processes(scan.holders.len())
            ),
        ),
        Ok(_) => Check::missing(
            "device_files",
            "the open files of some processes cannot be read",
            "run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH: without a complete search no memory can be blamed on the driver",
        ),
        Err(error) => Check::missing("device_files", error.to_string(), "mount procfs"),
    }
}
