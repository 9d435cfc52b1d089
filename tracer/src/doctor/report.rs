//! The result of an examination.

use crate::gpu::{GpuDevice, Monitor, MonitorError};
use crate::probe::discover::{Found, Origin, Refused};
use crate::probe::placement::Placement;
use serde::Serialize;
use std::borrow::Cow;
use tracer_ebpf::symbols::TABLE;

/// Form of the JSON document.
pub const SCHEMA: &str = "vramtrace-doctor/1";

/// Exit code when something needed is missing.
const EXIT_MISSING: u8 = 3;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Tracing works, with less detail or at a higher cost.
    Limited,
    /// Something that is needed is not there.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: &'static str,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub detail: Cow<'static, str>,
    /// What to do, or what follows from it; none where all is well.
    pub action: Option<&'static str>,
}

impl Check {
    pub(super) fn ok(name: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { name, verdict: Verdict::Ok, detail: detail.into(), action: None }
    }

    pub(super) fn limited(name: &'static str, detail: impl Into<Cow<'static, str>>, action: &'static str) -> Self {
        Self { name, verdict: Verdict::Limited, detail: detail.into(), action: Some(action) }
    }

    pub(super) fn missing(name: &'static str, detail: impl Into<Cow<'static, str>>, action: &'static str) -> Self {
        Self { name, verdict: Verdict::Missing, detail: detail.into(), action: Some(action) }
    }
}

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Examination {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// In the order they were made.
    pub checks: Vec<Check>,
    /// Driver libraries that can be traced.
    pub libraries: Vec<LibraryReport>,
    /// Files that look like driver libraries and cannot be traced.
    pub refused: Vec<RefusedReport>,
    /// NVML and its devices.
    pub nvml: NvmlReport,
}

impl Examination {
    /// How many checks came out as `verdict`.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.checks.iter().filter(|check| check.verdict == verdict).count()
    }

    /// 0, or 3 when something needed is missing.
    pub fn exit_code(&self) -> u8 {
        if self.count(Verdict::Missing) == 0 { 0 } else { EXIT_MISSING }
    }

    /// The JSON document.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }
}

/// A driver library.
#[derive(Clone, Debug, Serialize)]
pub struct LibraryReport {
    /// Path it was found under, in the mount namespace of its first user.
    pub path: String,
    /// How it was found.
    pub origin: Origin,
    /// Driver version, where its name tells.
    pub version: Option<String>,
    /// GNU build id.
    pub build_id: Option<String>,
    /// Entry points probed on the branch of the driver's stub.
    pub on_stub_branch: usize,
    /// Entry points probed at their first instruction.
    pub at_entry: usize,
    /// Entry points it has.
    pub present: Vec<&'static str>,
    /// Entry points it does not have, as older drivers lack newer functions.
    pub missing: Vec<&'static str>,
    /// Exports that look like allocators and are not traced.
    pub unknown_allocators: Vec<String>,
    /// Processes that have it mapped.
    pub pids: Vec<u32>,
}

impl LibraryReport {
    pub(super) fn of(found: &Found) -> Self {
        let library = &found.library;
        Self {
            path: super::text::path(&library.path).to_string(),
            origin: found.origin,
            version: library.version.clone(),
            build_id: library.identity.build_id.clone(),
            on_stub_branch: library.count(Placement::StubBranch),
            at_entry: library.count(Placement::Entry),
            present: library.points.iter().map(|point| TABLE[point.symbol].name).collect(),
            missing: library.missing.iter().map(|index| TABLE[*index].name).collect(),
            unknown_allocators: library.unknown_allocators.clone(),
            pids: found.pids.iter().copied().collect(),
        }
    }
}

/// A file that cannot be traced.
#[derive(Clone, Debug, Serialize)]
pub struct RefusedReport {
    /// Path it was found under.
    pub path: String,
    /// Why.
    pub reason: String,
    /// Processes that have it mapped.
    pub pids: Vec<u32>,
}

impl RefusedReport {
    pub(super) fn of(refused: &Refused) -> Self {
        Self {
            path: super::text::path(&refused.path).to_string(),
            reason: refused.reason.to_string(),
            pids: refused.pids.iter().copied().collect(),
        }
    }
}

/// NVML.
#[derive(Clone, Debug, Serialize)]
pub struct NvmlReport {
    /// Library that was loaded.
    pub library: Option<String>,
    /// Driver version.
    pub driver: Option<String>,
    /// Devices.
    pub devices: Vec<GpuDevice>,
    /// Why it does not work.
    pub error: Option<String>,
}

impl NvmlReport {
    pub(super) fn of(monitor: &Monitor) -> Self {
        Self {
            library: Some(monitor.library().to_owned()),
            driver: monitor.devices().driver.as_ref().map(ToString::to_string),
            devices: monitor.devices().iter().cloned().collect(),
            error: monitor.problem().map(ToString::to_string),
        }
    }

    pub(super) fn failed(error: &MonitorError) -> Self {
        Self { library: None, driver: None, devices: Vec::new(), error: Some(error.to_string()) }
    }
}
