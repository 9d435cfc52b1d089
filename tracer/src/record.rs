//! The one vocabulary: everything the engine may know arrives as a [`Record`].
//!
//! Three sources make records (the live host, a journal, a scenario file) and the engine cannot
//! tell them apart. The JSON form is `vramtrace-replay/1`: a flat object with `ts_ns`, `kind` and
//! the fields of that kind. Unknown fields are ignored; an unknown kind reads as
//! [`Event::Unknown`], which the engine counts.
//!
//! Times are nanoseconds on the boot clock, sizes are bytes, `device` is NVML's index.

mod id;

pub use compact_str::CompactString as Text;
pub use id::{Identity, OpaqueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One thing that became known, in order of delivery.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// When it was delivered; never decreases within a source.
    pub ts_ns: u64,
    /// When it happened, where delivery was late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occurred_ns: Option<u64>,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

impl Record {
    /// When the thing happened: `occurred_ns` if delivery was late, else `ts_ns`.
    pub fn happened_ns(&self) -> u64 {
        self.occurred_ns.unwrap_or(self.ts_ns)
    }
}

/// The task a call or a thread's exit came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Kernel task (thread) id.
    pub pid: u32,
    /// Process and its start.
    #[serde(flatten)]
    pub identity: Identity,
    /// Name of the task.
    #[serde(default)]
    pub comm: Text,
}

/// A process as a whole, where it belongs, and who started it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Life {
    /// The process's task.
    #[serde(flatten)]
    pub task: Task,
    /// Parent process at this moment.
    #[serde(default)]
    pub ppid: u32,
    /// Control group path; empty when unknown.
    #[serde(default, deserialize_with = "null_as_default")]
    pub cgroup: Text,
    /// Container id.
    #[serde(default)]
    pub container: Option<Text>,
    /// `namespace/name` of the pod, or its uid while the name is not known.
    #[serde(default)]
    pub pod: Option<Text>,
    /// Process id inside its own pid namespace.
    #[serde(default)]
    pub nspid: Option<u32>,
}

/// What happened. Field names are those of the scenario format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the format page documents each field; only what it leaves open is said here")]
pub enum Event {
    /// The tracer began to listen.
    TracerStart {
        #[serde(default)]
        probes_ok: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        self_tgid: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        driver: Option<Text>,
    },
    /// A process that was there before the tracer.
    ProcSnapshot {
        #[serde(flatten)]
        life: Life,
        #[serde(default)]
        state: Text,
        /// Names of open device files, without `/dev/`.
        #[serde(default)]
        gpu_fds: Vec<Text>,
    },
    /// A process whose fork was not seen became known.
    ProcStart {
        #[serde(flatten)]
        life: Life,
    },
    /// A process was forked. Until it executes another image it shares its parent's open files.
    Fork {
        #[serde(flatten)]
        life: Life,
        parent_tgid: u32,
        #[serde(default)]
        parent_start_ns: u64,
    },
    /// A process replaced its image: whatever the driver held for it is gone.
    Exec {
        #[serde(flatten)]
        life: Life,
    },
    /// A thread exited; with `group_dead`, the last one of its process.
    Exit {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        ppid: u32,
        /// `None` when the end was seen and its status was not.
        #[serde(default)]
        code: Option<i32>,
        #[serde(default)]
        signal: i32,
        group_dead: bool,
    },
    /// A dead process left the process table.
    Reap {
        #[serde(flatten)]
        task: Task,
    },
    /// A process was looked for and is not there.
    ProcAbsent {
        #[serde(flatten)]
        task: Task,
    },
    /// State of a process as /proc tells it.
    ProcState {
        #[serde(flatten)]
        task: Task,
        state: Text,
        #[serde(default)]
        ppid: u32,
        #[serde(default)]
        wchan: Option<Text>,
        /// May end in ` (deleted)`.
        #[serde(default)]
        cgroup: Option<Text>,
    },
    /// A signal was sent to a process.
    Signal {
        #[serde(flatten)]
        task: Task,
        sig: i32,
    },
    /// A task renamed itself.
    CommChange {
        #[serde(flatten)]
        task: Task,
        new_comm: Text,
    },
    /// A process was moved to another control group.
    CgroupMove {
        #[serde(flatten)]
        task: Task,
        old: Text,
        new: Text,
    },
    /// A context was created, or a reference taken on a primary one.
    CtxCreate {
        #[serde(flatten)]
        task: Task,
        api: Text,
        ctx: Option<OpaqueId>,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        dur_ns: u64,
        #[serde(default)]
        result: i32,
    },
    /// A context was destroyed, or a reference on a primary one given back.
    CtxDestroy {
        #[serde(flatten)]
        task: Task,
        api: Text,
        #[serde(default)]
        ctx: Option<OpaqueId>,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        dur_ns: u64,
        /// Entry of the call: contexts created since at the same address are other contexts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        begin_ns: Option<u64>,
        #[serde(default)]
        result: i32,
    },
    /// Memory was asked for; `result` 0 means it was granted.
    Alloc {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        lib: Text,
        api: Text,
        handle: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        result: i32,
        /// Context the memory belongs to, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ctx: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stack_id: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pool: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        begin_ns: Option<u64>,
    },
    /// Memory was given back.
    Free {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        lib: Text,
        api: Text,
        handle: Option<OpaqueId>,
        /// Bytes it had; 0 where the source does not know.
        #[serde(default)]
        size: u64,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        result: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        begin_ns: Option<u64>,
    },
    /// A free that was reported when it was entered returned an error: the memory is still there.
    FreeRefused {
        #[serde(flatten)]
        task: Task,
        api: Text,
        handle: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        device: Option<u32>,
        result: i32,
    },
    /// A physical handle was mapped.
    Map {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        va: Option<OpaqueId>,
        #[serde(default)]
        handle: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        result: i32,
    },
    /// A mapping was removed.
    Unmap {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        va: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        result: i32,
    },
    /// Addresses were reserved, which is not memory.
    VaReserve {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        va: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        result: i32,
    },
    /// Pinned host memory was asked for.
    HostAlloc {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        handle: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        result: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ctx: Option<OpaqueId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stack_id: Option<OpaqueId>,
    },
    /// Pinned host memory was given back.
    HostFree {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        handle: Option<OpaqueId>,
        /// Bytes it had; 0 where the source does not know.
        #[serde(default)]
        size: u64,
        #[serde(default)]
        result: i32,
    },
    /// An attribute of a stream-ordered pool was set.
    PoolAttr {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        #[serde(default)]
        pool: Option<OpaqueId>,
        attr: Text,
        value: u64,
        #[serde(default)]
        result: i32,
    },
    /// A pool was asked to give memory back.
    PoolTrim {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        #[serde(default)]
        pool: Option<OpaqueId>,
        #[serde(default)]
        keep: u64,
        #[serde(default)]
        result: i32,
    },
    /// Memory was offered to other processes.
    IpcExport {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        handle: Option<OpaqueId>,
        ipc_id: Option<OpaqueId>,
        #[serde(default)]
        result: i32,
    },
    /// Another process's memory was opened.
    IpcImport {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        ipc_id: Option<OpaqueId>,
        handle: Option<OpaqueId>,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        result: i32,
    },
    /// Another process's memory was closed.
    IpcClose {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        api: Text,
        handle: Option<OpaqueId>,
        #[serde(default)]
        result: i32,
    },
    /// A descriptor went to another process.
    FdTransfer {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        ipc_id: Option<OpaqueId>,
        #[serde(default)]
        to_tgid: Option<u32>,
    },
    /// Code was loaded onto a device.
    ModuleLoad {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        count: u64,
    },
    /// Code was unloaded.
    ModuleUnload {
        #[serde(flatten)]
        task: Task,
        #[serde(default)]
        count: u64,
    },
    /// A checkpoint call, which may act on another process.
    Checkpoint {
        #[serde(flatten)]
        task: Task,
        api: Text,
        target_tgid: u32,
        #[serde(default)]
        result: i32,
    },
    /// A process has a driver library mapped.
    LibraryMap {
        #[serde(flatten)]
        task: Task,
        path: Text,
        #[serde(default)]
        inode: Option<u64>,
        /// `traced`, or why not.
        #[serde(default)]
        status: Option<Text>,
        #[serde(default)]
        reason: Option<Text>,
    },
    /// Whether a library's probes are in place. Without a process it is about the whole host.
    ProbeStatus {
        #[serde(default)]
        tgid: Option<u32>,
        #[serde(default)]
        start_ns: Option<u64>,
        #[serde(default)]
        path: Option<Text>,
        #[serde(default)]
        inode: Option<u64>,
        /// `ok`, `failed`, `partial` or `missing`.
        status: Text,
        #[serde(default)]
        reason: Option<Text>,
    },
    /// What NVML says of a device or MIG instance.
    NvmlSample {
        device: u32,
        #[serde(default)]
        gi: Option<u32>,
        /// `ok`, `mem_not_supported`, `timeout` or `error:N`.
        status: Text,
        #[serde(default)]
        used: Option<u64>,
        #[serde(default)]
        total: Option<u64>,
        #[serde(default)]
        reserved: Option<u64>,
        #[serde(default)]
        procs: Vec<NvmlRow>,
        /// Share of the last sample period in which some kernel ran, in percent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu_util: Option<u32>,
        #[serde(default)]
        dur_ns: u64,
    },
    /// A walk over all processes for device files that are open or mapped.
    FdScan {
        complete: bool,
        #[serde(default)]
        holders: Vec<Holder>,
    },
    /// The device files of the driver in a process's address space.
    DriverMaps {
        #[serde(flatten)]
        task: Task,
        /// Mappings.
        count: u64,
        /// Bytes of address space, which is not memory.
        #[serde(default)]
        bytes: u64,
    },
    /// A kernel message.
    Kmsg {
        facility: Text,
        #[serde(default)]
        code: Option<u32>,
        #[serde(default)]
        pid: Option<u32>,
        #[serde(default)]
        text: Option<Text>,
        #[serde(default)]
        device: Option<u32>,
    },
    /// Events were lost. With an identity, only that process's; else anybody's.
    LostEvents {
        count: u64,
        #[serde(default)]
        cpu: Option<u32>,
        #[serde(default)]
        since_ns: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tgid: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start_ns: Option<u64>,
    },
    /// The exact books of a process, read from the kernel's maps after events were lost. They
    /// replace what the ledger has on it.
    Resync {
        #[serde(flatten)]
        identity: Identity,
        live: Vec<LiveEntry>,
        /// Whether `live` names every allocation; if not, `balances` tell how much it lacks.
        complete: bool,
        balances: Vec<DeviceBalance>,
    },
    /// A metric of the service, as scraped.
    ServiceMetric {
        name: Text,
        value: f64,
        #[serde(default)]
        labels: BTreeMap<String, serde_json::Value>,
    },
    /// A pod changed phase.
    PodEvent { pod: Text, phase: Text },
    /// A container changed phase.
    ContainerEvent { container: Text, phase: Text },
    /// A batch job changed state.
    JobEvent { job: Text, state: Text },
    /// An operator did something.
    AdminEvent {
        action: Text,
        #[serde(default)]
        device: Option<u32>,
        #[serde(default)]
        gi: Option<u32>,
        #[serde(default)]
        result: Option<Text>,
    },
    /// A call the service reported as failed.
    ApiError {
        #[serde(default)]
        api: Option<Text>,
        #[serde(default)]
        result: Option<i32>,
        #[serde(default)]
        text: Option<Text>,
    },
    /// A part of the host cannot be seen, and why; without a reason, it can be again.
    Unseen {
        part: Text,
        #[serde(default)]
        reason: Option<Text>,
    },
    /// Time passed and nothing else happened: lets the engine's deadlines come due.
    Tick,
    /// A kind this version does not know.
    #[serde(other)]
    Unknown,
}

/// One process in NVML's list. It carries no start time: the pid may already be another's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NvmlRow {
    /// Host pid.
    pub pid: u32,
    /// Bytes billed; `None` when NVML says "not available".
    pub used: Option<u64>,
    /// `C`, `G` or `M+C`.
    #[serde(rename = "type", default)]
    pub kind: Text,
    /// MIG GPU instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
}

/// A process that has device files open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// Who.
    #[serde(flatten)]
    pub identity: Identity,
    /// Its name.
    #[serde(default)]
    pub comm: Text,
    /// Device file names, without `/dev/`.
    #[serde(default)]
    pub files: Vec<Text>,
}

/// One live allocation in a [`Event::Resync`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveEntry {
    /// Entry point that made it.
    pub api: Text,
    /// Its handle.
    pub handle: OpaqueId,
    /// Bytes.
    pub size: u64,
    /// NVML index of its device.
    pub device: Option<u32>,
    /// When it was made.
    pub ts_ns: u64,
}

/// Sum of a process's live memory on one device in a [`Event::Resync`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceBalance {
    /// NVML index; `None` when the device could not be told, or for pinned host memory.
    pub device: Option<u32>,
    /// Whether this is pinned host memory.
    pub host: bool,
    /// Live bytes.
    pub bytes: u64,
    /// Live allocations.
    pub count: u64,
}

/// Reads an explicit `null` as the type's default.
fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
