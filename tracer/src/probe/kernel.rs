//! The kernel side, loaded: its programs, its maps, its counters.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Array, HashMap, MapData, MapError, PerCpuArray, RingBuf},
    programs::{ProgramError, RawTracePoint, TracePoint},
};
use tracer_ebpf::{Account, AccountKey, Counter, LiveAllocation, LiveKey, PrimaryKey, Process, ProcessKey};

use super::{
    library::Point,
    types::{Offsets, TypesError},
    uprobes::{AttachMethod, Links, Uprobes},
};

/// The compiled programs, embedded in this binary.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/vramtrace.bpf.o"));

/// Sizes and sources the kernel side is loaded with.
#[derive(Clone, Debug)]
pub struct KernelConfig {
    /// Bytes of the ring of driver calls; a power of two, at least a page.
    pub calls_ring_bytes: u32,
    /// Bytes of the ring of process lives; a power of two, at least a page.
    pub lives_ring_bytes: u32,
    /// Live allocations that can be tracked at once, all processes together.
    pub live_entries: u32,
    /// Processes that can be tracked at once.
    pub process_entries: u32,
    /// How to attach probes; `None` for the best this kernel has.
    pub attach_method: Option<AttachMethod>,
    /// The kernel's type information; `None` to do without.
    pub types: Option<PathBuf>,
    /// Where the tracing file system is mounted, if it is.
    pub tracefs: Option<PathBuf>,
}

impl Default for KernelConfig {
    fn default() -> Self {
        Self {
            calls_ring_bytes: 8 << 20,
            lives_ring_bytes: 1 << 20,
            live_entries: 1 << 20,
            process_entries: 16_384,
            attach_method: None,
            types: Some(PathBuf::from(super::types::KERNEL_TYPES)),
            tracefs: Some(PathBuf::from("/sys/kernel/tracing")),
        }
    }
}

/// Why the kernel side could not be put in place.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The maps could not be made or the object was refused.
    #[error("cannot load the eBPF maps: {} ({})", reason(.0), maps_advice(.0))]
    Maps(#[source] EbpfError),
    /// The embedded object lacks something: a build error.
    #[error("the embedded eBPF object has no {missing}: this binary was built wrongly")]
    Object {
        /// What is missing.
        missing: &'static str,
    },
    /// The embedded object cannot be linked to its maps: a build error.
    #[error("the embedded eBPF object cannot be linked: {reason}")]
    Relocate {
        /// What the linker said.
        reason: String,
    },
    /// The kernel refused a program.
    #[error("the kernel refused the program {program}: {source}")]
    Load {
        /// Its name.
        program: &'static str,
        /// Why.
        source: ProgramError,
    },
    /// The kernel refused a program, and the verifier says why.
    #[error("the kernel refused the program {program}: {source} (needs root, or CAP_BPF and CAP_PERFMON)\n{log}")]
    Verifier {
        /// Its name.
        program: &'static str,
        /// The system call's error.
        source: io::Error,
        /// End of the verifier's log; empty when it was not asked.
        log: String,
    },
    /// Probes could not be put on a library.
    #[error("cannot attach to {}: {source}", path.display())]
    Attach {
        /// The library.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The same, through perf events.
    #[error("cannot attach to {}: {source}", path.display())]
    AttachPerf {
        /// The library.
        path: PathBuf,
        /// Why.
        source: ProgramError,
    },
    /// Process events cannot be had at all.
    #[error(
        "this kernel shows neither its types ({types}) nor its tracepoints ({tracepoints}): mount tracefs with `mount -t tracefs nodev /sys/kernel/tracing`"
    )]
    NoProcessEvents {
        /// Why not types.
        types: String,
        /// Why not tracepoints.
        tracepoints: String,
    },
    /// The rings cannot be waited on.
    #[error("cannot wait for kernel events: {source}")]
    Wait {
        /// Why.
        source: io::Error,
    },
    /// A map could not be read.
    #[error("cannot read the map {map}: {source}")]
    Read {
        /// Its name.
        map: &'static str,
        /// Why.
        source: MapError,
    },
}

/// The innermost cause, which tells more than the layers around it.
fn reason(error: &EbpfError) -> String {
    let mut told = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let inner_told = inner.to_string();
        if !told.contains(&inner_told) {
            told = format!("{told}: {inner_told}");
        }
        cause = inner.source();
    }
    told
}

fn maps_advice(error: &EbpfError) -> &'static str {
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        if let Some(error) = inner.downcast_ref::<io::Error>()
            && error.kind() != io::ErrorKind::PermissionDenied
        {
            return "check the free memory, or ask for less with --live-entries or --calls-ring";
        }
        cause = inner.source();
    }
    "needs root, or CAP_BPF and CAP_PERFMON"
}

/// How process identities are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessEvents {
    /// From the kernel's own structures.
    Typed,
    /// From tracepoints and /proc, for the given reason.
    Untyped(String),
}

/// Whether ended processes left allocations in the live table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// They did.
    Some,
    /// They freed everything.
    None,
}

/// Probes on one library; give it back to [`Kernel::detach`].
pub struct LibraryProbes(Links);

/// The loaded kernel side. Dropping it takes everything off again.
pub struct Kernel {
    // Before `ebpf`: fields drop in order, and links go before programs.
    uprobes: Uprobes,
    ebpf: Ebpf,
    process_events: ProcessEvents,
}

impl Kernel {
    /// Creates the maps, loads every program, and starts listening to process lives. No library is
    /// probed yet.
    pub fn load(config: &KernelConfig) -> Result<Self, KernelError> {
        let (offsets, process_events) = offsets(config)?;
        let offsets: Vec<(&str, u32)> = offsets.iter().collect();
        // Woken early enough that three quarters of the ring are still free.
        let wakeup_bytes = config.calls_ring_bytes / 4;
        // The upper half is for those who call seldom, each of whom may take a sixteenth of it.
        let contested_bytes = config.calls_ring_bytes / 2;
        let window_events = (contested_bytes / 16 / size_of::<tracer_ebpf::CallEvent>() as u32).max(1);
        let mut loader = EbpfLoader::new();
        for (setting, offset) in &offsets {
            loader.override_global(setting, offset, true);
        }
        loader
            .override_global("WAKEUP_BYTES", &wakeup_bytes, true)
            .override_global("CONTESTED_BYTES", &contested_bytes, true)
            .override_global("WINDOW_EVENTS", &window_events, true)
            .map_max_entries("CALLS", config.calls_ring_bytes)
            .map_max_entries("LIVES", config.lives_ring_bytes)
            .map_max_entries("LIVE", config.live_entries)
            .map_max_entries("PROCESSES", config.process_entries)
            .map_max_entries("ACCOUNTS", config.process_entries.saturating_mul(4))
            .map_max_entries("PRIMARIES", config.process_entries.saturating_mul(4))
            .map_max_entries("THREADS", config.process_entries.saturating_mul(4));
        let mut ebpf = loader.load(OBJECT).map_err(KernelError::Maps)?;
        let uprobes = Uprobes::load(OBJECT, &mut ebpf, config.attach_method)?;
        let mut kernel = Self { uprobes, ebpf, process_events };
        kernel.attach_process_events()?;
        Ok(kernel)
    }

    fn attach_process_events(&mut self) -> Result<(), KernelError> {
        let typed = self.process_events == ProcessEvents::Typed;
        if typed {
            self.attach_raw_tracepoint("fork", "sched_process_fork")?;
        } else {
            let name = "fork_untyped";
            let failed = |source| KernelError::Load { program: name, source };
            let program = self.ebpf.program_mut(name).ok_or(KernelError::Object { missing: name })?;
            let program: &mut TracePoint = program.try_into().map_err(failed)?;
            program.load().map_err(failed)?;
            program.attach("sched", "sched_process_fork").map_err(failed)?;
        }
        self.attach_raw_tracepoint("exec", "sched_process_exec")?;
        self.attach_raw_tracepoint("exit", "sched_process_exit")
    }

    fn attach_raw_tracepoint(&mut self, name: &'static str, tracepoint: &str) -> Result<(), KernelError> {
        let failed = |source| KernelError::Load { program: name, source };
        let program = self.ebpf.program_mut(name).ok_or(KernelError::Object { missing: name })?;
        let program: &mut RawTracePoint = program.try_into().map_err(failed)?;
        program.load().map_err(failed)?;
        program.attach(tracepoint).map_err(failed)?;
        Ok(())
    }

    /// How probes are attached.
    pub fn attach_method(&self) -> AttachMethod {
        self.uprobes.method()
    }

    /// How process identities are known.
    pub fn process_events(&self) -> &ProcessEvents {
        &self.process_events
    }

    /// Probes every given entry point of the library behind `path`, for all processes.
    pub fn attach(&mut self, path: &Path, points: &[Point]) -> Result<LibraryProbes, KernelError> {
        self.uprobes.attach(&mut self.ebpf, path, points).map(LibraryProbes)
    }

    /// Takes the probes of a library off.
    pub fn detach(&mut self, probes: LibraryProbes) -> Result<(), KernelError> {
        Uprobes::detach(&mut self.ebpf, probes.0)
    }

    /// Says that from `now_ns` (boot clock) on every call is seen: reference counts of processes
    /// that start later can be trusted.
    pub fn set_traced_since(&mut self, now_ns: u64) -> Result<(), KernelError> {
        let name = "TRACED_SINCE";
        let map = self.ebpf.map_mut(name).ok_or(KernelError::Object { missing: name })?;
        let read = |source| KernelError::Read { map: name, source };
        let mut since = Array::<_, u64>::try_from(map).map_err(read)?;
        since.set(0, now_ns, 0).map_err(read)
    }

    /// The rings of driver calls and of process lives. Only once.
    pub fn take_rings(&mut self) -> Result<(RingBuf<MapData>, RingBuf<MapData>), KernelError> {
        Ok((self.take_ring("CALLS")?, self.take_ring("LIVES")?))
    }

    fn take_ring(&mut self, name: &'static str) -> Result<RingBuf<MapData>, KernelError> {
        let map = self.ebpf.take_map(name).ok_or(KernelError::Object { missing: name })?;
        RingBuf::try_from(map).map_err(|source| KernelError::Read { map: name, source })
    }

    /// Every counter, summed over CPUs, in the order of [`Counter::NAMES`].
    pub fn counters(&self) -> Result<[u64; Counter::COUNT as usize], KernelError> {
        let name = "COUNTERS";
        let read = |source| KernelError::Read { map: name, source };
        let map = self.ebpf.map(name).ok_or(KernelError::Object { missing: name })?;
        let counters = PerCpuArray::<_, u64>::try_from(map).map_err(read)?;
        let mut sums = [0; Counter::COUNT as usize];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = counters.get(&(index as u32), 0).map_err(read)?.iter().sum();
        }
        Ok(sums)
    }

    /// Processes that called the driver and have not been forgotten.
    pub fn processes(&self) -> Result<Vec<(ProcessKey, Process)>, KernelError> {
        self.entries("PROCESSES")
    }

    /// Books of every context, those of earlier images of a process included: compare `image_ns`.
    pub fn accounts(&self) -> Result<Vec<(AccountKey, Account)>, KernelError> {
        self.entries("ACCOUNTS")
    }

    /// Live allocations, stale ones (of contexts that are gone) included: compare `epoch_ns`.
    pub fn live(&self) -> Result<Vec<(LiveKey, LiveAllocation)>, KernelError> {
        self.entries("LIVE")
    }

    /// Calls that threads have open right now.
    pub fn open_calls(&self) -> Result<usize, KernelError> {
        let threads = self.entries::<u64, tracer_ebpf::Thread>("THREADS")?;
        Ok(threads.iter().flat_map(|(_, thread)| &thread.frames).filter(|frame| frame.stack_pointer != 0).count())
    }

    /// Drops all state of processes that are gone. They can make no more calls, so nothing races.
    /// The live table is walked only if they left something in it: it may be large.
    pub fn forget(&mut self, gone: &HashSet<ProcessKey>, remains: Remains) -> Result<(), KernelError> {
        let key = |tgid, start_ns| ProcessKey { tgid, pad: 0, start_ns };
        if remains == Remains::Some {
            self.remove_where::<LiveKey, LiveAllocation>("LIVE", |k| gone.contains(&key(k.tgid, k.start_ns)))?;
        }
        self.remove_where::<AccountKey, Account>("ACCOUNTS", |k| gone.contains(&key(k.tgid, k.start_ns)))?;
        self.remove_where::<PrimaryKey, u64>("PRIMARIES", |k| gone.contains(&key(k.tgid, k.start_ns)))?;
        self.remove_where::<ProcessKey, Process>("PROCESSES", |k| gone.contains(k))
    }

    fn entries<K: aya::Pod, V: aya::Pod>(&self, name: &'static str) -> Result<Vec<(K, V)>, KernelError> {
        let read = |source| KernelError::Read { map: name, source };
        let map = self.ebpf.map(name).ok_or(KernelError::Object { missing: name })?;
        let map = HashMap::<_, K, V>::try_from(map).map_err(read)?;
        // An entry that goes while the table is walked is skipped, which is what its going means.
        Ok(map.iter().filter_map(Result::ok).collect())
    }

    fn remove_where<K: aya::Pod, V: aya::Pod>(
        &mut self,
        name: &'static str,
        doomed: impl Fn(&K) -> bool,
    ) -> Result<(), KernelError> {
        let read = |source| KernelError::Read { map: name, source };
        let map = self.ebpf.map_mut(name).ok_or(KernelError::Object { missing: name })?;
        let mut map = HashMap::<_, K, V>::try_from(map).map_err(read)?;
        let keys: Vec<K> = map.keys().filter_map(Result::ok).filter(|key| doomed(key)).collect();
        for key in keys {
            match map.remove(&key) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(source) => return Err(read(source)),
            }
        }
        Ok(())
    }
}

fn offsets(config: &KernelConfig) -> Result<(Offsets, ProcessEvents), KernelError> {
    let reason = match &config.types {
        Some(path) => match Offsets::from_types(path) {
            Ok(offsets) => return Ok((offsets, ProcessEvents::Typed)),
            Err(error @ (TypesError::Unreadable { .. } | TypesError::NoField { .. })) => error.to_string(),
        },
        None => "not used, as configured".to_owned(),
    };
    let tracepoints = match &config.tracefs {
        Some(path) => Offsets::from_tracepoints(path).map_err(|error| format!("{}: {error}", path.display())),
        None => Err("no tracefs is mounted".to_owned()),
    };
    match tracepoints {
        Ok(offsets) => Ok((offsets, ProcessEvents::Untyped(reason))),
        Err(tracepoints) => Err(KernelError::NoProcessEvents { types: reason, tracepoints }),
    }
}
