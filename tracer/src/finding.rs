//! What the engine concludes: findings, and the document `vramtrace-findings/1` that holds them.

use crate::record::{Identity, Text};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The `schema` string of a [`Report`].
pub const SCHEMA: &str = "vramtrace-findings/1";

/// What a finding claims. One detector makes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// A live process holds GPU memory after its owner is gone.
    OrphanProcess,
    /// Children that inherited device files keep a dead process's memory alive.
    InheritedFdHolder,
    /// Memory of a dead process stays although nothing is seen to hold it.
    ResidualAfterExit,
    /// Short-lived workers pay for a context again and again.
    ProcessChurn,
    /// A process allocates and never gives back, and goes on.
    AppLeak,
    /// Memory of a dead process comes back, but late.
    SlowTeardown,
    /// Some process or library is out of sight of the probes.
    CoverageGap,
    /// Part of a history is missing, so figures are bounds.
    InsufficientData,
    /// NVML does not answer as it should.
    MonitorDegraded,
    /// A process hangs inside the driver and cannot be ended.
    StuckInDriver,
    /// Another process keeps memory that its owner is done with.
    IpcPinned,
    /// NVML bills a process more and more that no allocation explains.
    UntrackedGrowth,
    /// An allocator takes more and more for objects that do not grow.
    FragmentationGrowth,
    /// Held memory is a cache: it no longer grows, and its owner can give it back.
    AllocatorCache,
    /// A stream-ordered pool keeps memory that was released to it.
    PoolRetention,
    /// A process pays for a context it does not use.
    StrayContext,
    /// A process holds memory and does nothing.
    IdleHolder,
    /// Used memory that NVML lists for no one is managed memory.
    ManagedMemory,
    /// A process's GPU memory is in a checkpoint.
    Checkpointed,
    /// A checkpointed process does not come back.
    CheckpointStuck,
    /// Only programs that watch keep a device from being changed.
    ObserverHoldsDevice,
}

impl Category {
    /// The name used in documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OrphanProcess => "orphan_process",
            Self::InheritedFdHolder => "inherited_fd_holder",
            Self::ResidualAfterExit => "residual_after_exit",
            Self::ProcessChurn => "process_churn",
            Self::AppLeak => "app_leak",
            Self::SlowTeardown => "slow_teardown",
            Self::CoverageGap => "coverage_gap",
            Self::InsufficientData => "insufficient_data",
            Self::MonitorDegraded => "monitor_degraded",
            Self::StuckInDriver => "stuck_in_driver",
            Self::IpcPinned => "ipc_pinned",
            Self::UntrackedGrowth => "untracked_growth",
            Self::FragmentationGrowth => "fragmentation_growth",
            Self::AllocatorCache => "allocator_cache",
            Self::PoolRetention => "pool_retention",
            Self::StrayContext => "stray_context",
            Self::IdleHolder => "idle_holder",
            Self::ManagedMemory => "managed_memory",
            Self::Checkpointed => "checkpointed",
            Self::CheckpointStuck => "checkpoint_stuck",
            Self::ObserverHoldsDevice => "observer_holds_device",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth knowing; nothing has to be done.
    Info,
    /// Something should be done.
    Warning,
    /// Something should be done now.
    Critical,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Critical => "critical",
        })
    }
}

/// How sure the engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// It fits, but so would something harmless.
    Low,
    /// It fits best; the evidence says what is missing.
    Medium,
    /// Every other explanation that can be seen was ruled out.
    High,
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        })
    }
}

/// What a finding is about. Only the fields that apply are present.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Subject {
    /// Process id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tgid: Option<u32>,
    /// Its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ns: Option<u64>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm: Option<Text>,
    /// NVML index of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// MIG GPU instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// `namespace/name` of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Text>,
    /// Container id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<Text>,
    /// Process id inside its own pid namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nspid: Option<u32>,
    /// Batch job id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Text>,
    /// `device` or `pinned_host`, `driver_mappings` for the address space, or `host` for what concerns
    /// the whole machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<Text>,
    /// The dead ancestor that owned the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lineage_root_tgid: Option<u32>,
    /// The dead process that NVML bills.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub billed_tgid: Option<u32>,
    /// The parent of the processes it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_tgid: Option<u32>,
    /// The process that exported the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporter_tgid: Option<u32>,
    /// Path of a library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<Text>,
}

impl Subject {
    /// What findings of one incident have in common: the owner that ended, the parent of the
    /// processes, or the process itself.
    pub(crate) fn cause(&self, category: Category) -> String {
        let number = |what: &str, tgid: Option<u32>| tgid.map(|tgid| format!("{what} {tgid}"));
        let text = |what: &str, id: Option<&Text>| id.map(|id| format!("{what} {id}"));
        // A container may hold many processes that have nothing else in common.
        let place = text("container", self.container.as_ref()).filter(|_| category == Category::OrphanProcess);
        let process = || self.tgid.map(|tgid| format!("process {tgid}@{}", self.start_ns.unwrap_or(0)));
        text("job", self.job.as_ref())
            .or_else(|| number("owner", self.lineage_root_tgid))
            .or(place)
            .or_else(|| number("parent", self.parent_tgid))
            .or_else(|| number("exporter", self.exporter_tgid))
            .or_else(|| number("billed", self.billed_tgid))
            .or_else(process)
            .unwrap_or_else(|| format!("device {:?} {:?}", self.device, self.gi))
    }

    /// A subject that is a process.
    pub fn process(id: Identity, comm: &Text) -> Self {
        Self { tgid: Some(id.tgid), start_ns: Some(id.start_ns), comm: Some(comm.clone()), ..Self::default() }
    }

    /// The same, on a device.
    #[must_use]
    pub fn on_device(self, device: Option<u32>) -> Self {
        Self { device, ..self }
    }
}

/// One conclusion and its life.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Stable across replays of the same input.
    pub id: String,
    /// The first open finding with the same cause, such as the death of one owner; its own id when
    /// it is the first.
    pub incident: String,
    /// What it claims.
    pub category: Category,
    /// How much it matters.
    pub severity: Severity,
    /// How sure the engine is.
    pub confidence: Confidence,
    /// What it is about.
    pub subject: Subject,
    /// GPU (or pinned host) memory concerned.
    pub bytes: Option<u64>,
    /// When it was first raised, in the time of the records.
    pub opened_ns: u64,
    /// When its condition ended.
    pub closed_ns: Option<u64>,
    /// Why its condition ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub close_reason: Option<String>,
    /// One line a person can act on.
    pub summary: String,
    /// Facts, each with its time, number or id.
    pub evidence: Vec<String>,
    /// Exact pids and steps; nothing that could hurt another process.
    pub advice: String,
}

/// What happened to a finding.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// It is new.
    Opened(Finding),
    /// Its severity, confidence, subject or size changed noticeably.
    Updated(Finding),
    /// Its condition ended.
    Closed(Finding),
}

impl Change {
    /// The finding, as it is after the change.
    pub fn finding(&self) -> &Finding {
        match self {
            Self::Opened(finding) | Self::Updated(finding) | Self::Closed(finding) => finding,
        }
    }
}

/// How much of the truth could be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DataQuality {
    /// All of it.
    Full,
    /// Some history or some source is missing; figures are bounds.
    Partial,
    /// A source that verdicts depend on is failing.
    Degraded,
}

impl fmt::Display for DataQuality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Partial => "partial",
            Self::Degraded => "degraded",
        })
    }
}

/// The ledger's facts at one moment. Only live processes have outstanding bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EndState {
    /// Device memory allocated and not given back, by process id.
    pub outstanding_bytes_by_tgid: BTreeMap<u32, u64>,
    /// Pinned host memory likewise.
    pub outstanding_host_bytes_by_tgid: BTreeMap<u32, u64>,
    /// Device memory by `tgid@start_ns`.
    pub outstanding_bytes_by_identity: BTreeMap<String, u64>,
    /// Most device memory a process ever had at once.
    pub peak_bytes_by_tgid: BTreeMap<u32, u64>,
    /// Billed bytes that were there before the tracer and that no event explains.
    pub preattach_bytes_by_tgid: BTreeMap<u32, u64>,
    /// Requests for device memory that were refused.
    pub failed_allocs: BTreeMap<u32, u64>,
    /// Billed bytes of live processes by pod.
    pub bytes_by_pod: BTreeMap<Text, u64>,
    /// Billed bytes of processes by `device/gi`.
    pub bytes_by_mig_instance: BTreeMap<String, u64>,
    /// Used bytes of a device without processes.
    pub idle_floor_bytes: BTreeMap<u32, u64>,
    /// Used bytes at the last sample that had them, as `deviceN_used`.
    #[serde(flatten)]
    pub device_used: BTreeMap<String, u64>,
}

/// The findings document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// How much of the truth could be seen.
    pub data_quality: DataQuality,
    /// What is missing, in words; empty when the quality is full.
    pub data_quality_reasons: Vec<String>,
    /// All findings, open and closed, in the order in which they were opened.
    pub findings: Vec<Finding>,
    /// The ledger's facts.
    pub end_state: EndState,
    /// What could not be read, such as records of an unknown kind.
    pub warnings: Vec<String>,
}
