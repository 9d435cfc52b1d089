//! Every threshold of the engine, with its default and where that comes from.

use crate::record::Text;
use crate::units::{GIB, MIB, SECOND};
use serde::Deserialize;

/// A device as a scenario's header describes it. On a live host NVML tells the same.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct DeviceInfo {
    /// NVML index.
    pub device: u32,
    /// Marketing name.
    #[serde(default)]
    pub name: Text,
    /// Total memory; `None` where the device cannot tell.
    #[serde(default)]
    pub total: Option<u64>,
    /// Used bytes without any process, where known beforehand.
    #[serde(default)]
    pub idle_used: Option<u64>,
}

/// What the engine is told before the first record.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Devices known beforehand.
    pub devices: Vec<DeviceInfo>,
    /// Held memory below this is noise. Drivers leave up to about 100 MiB behind for a while and
    /// managed-memory residues of that size were reported as harmless.
    pub held_floor_bytes: u64,
    /// From this size on, memory held for no one is critical.
    pub critical_bytes: u64,
    /// That much, held for no one for this long, is what less of it may cost before it is critical too.
    pub critical_hold_ns: u64,
    /// Teardown without pinned memory takes 0.4 to 0.8 s as measured; several times that is allowed.
    pub exit_grace_ns: u64,
    /// Teardown adds about a second for every 8 to 10 GB of pinned host memory (measured: 25.9 s for 243 GB).
    pub pinned_bytes_per_second: u64,
    /// Without a search of all open files, a residue must outlast this many graces.
    pub unproven_residue_graces: u64,
    /// Without its reaping seen, a dead process must have been without open files this long.
    pub unreaped_ns: u64,
    /// How long a process may outlive its owner before it counts as left over.
    pub owner_grace_ns: u64,
    /// Pods are given 30 s to end by default, and their deletion may be announced first.
    pub pod_grace_ns: u64,
    /// An owner that ended with an error may have been a mere launcher: its process must also have
    /// been silent this long.
    pub failed_owner_silence_ns: u64,
    /// An owner that ended cleanly proves nothing; its process must also have been silent this long.
    pub clean_owner_silence_ns: u64,
    /// Short-lived workers with a context each that make a pool a churning one.
    pub churn_workers: usize,
    /// Workers that live longer than this are not churn.
    pub churn_life_ns: u64,
    /// Share of their lives that workers spend creating contexts, from which on it is a warning.
    pub churn_share: f64,
    /// Without a new worker for this long, the churn has ended (or three usual gaps, if longer).
    pub churn_quiet_ns: u64,
    /// Survivors needed before growth is called a leak, where the threads that made them are gone.
    pub leak_survivors: u64,
    /// Survivors needed where neither threads nor call paths tell them apart from a cache.
    pub leak_survivors_without_stack: u64,
    /// Survivors needed where only their thread is known and neither size nor call path.
    pub leak_survivors_of_thread: u64,
    /// Blocks of one call path needed where each is larger than the one before by half or more.
    pub leak_doublings: usize,
    /// Survivors of one call path needed where each has [`Self::leak_huge_bytes`] or more.
    pub leak_survivors_huge: u64,
    /// Blocks of which a device holds too few to wait for many.
    pub leak_huge_bytes: u64,
    /// Growth must have gone on for this long.
    pub leak_span_ns: u64,
    /// Blocks from this size on may be parts of a model that is being loaded.
    pub leak_shard_bytes: u64,
    /// Growth in such blocks must have gone on for this long.
    pub leak_shard_span_ns: u64,
    /// Bytes a leak must have taken.
    pub leak_bytes: u64,
    /// Rising floors (lowest points between work cycles) needed.
    pub leak_floors: usize,
    /// Rising floors needed where each cycle gives back half of what was held.
    pub leak_floors_of_unloads: usize,
    /// Driver calls of other memory, balanced, that show the workload is past its start.
    pub leak_balanced_frees: u64,
    /// Billed bytes above the ledger that a context, its modules and local memory can explain.
    pub context_ceiling_bytes: u64,
    /// A process that is billed but makes no visible call for this long is out of the probes' sight.
    pub unseen_calls_ns: u64,
    /// Failed NVML answers in a row that make the monitor degraded.
    pub monitor_failures: u32,
    /// An NVML answer that takes longer than this is slow.
    pub monitor_slow_ns: u64,
    /// With time passing and no sample for this long, NVML has gone silent.
    pub monitor_silence_ns: u64,
    /// A task that sleeps uninterruptibly in the driver for this long is stuck; work under load takes
    /// seconds, and the kernel itself complains after 120 s.
    pub stuck_ns: u64,
    /// An importer without a sign of work for this long has probably forgotten its import.
    pub importer_idle_ns: u64,
    /// A pool that nothing was allocated from for this long retains what it holds.
    pub pool_idle_ns: u64,
    /// Memory that has not moved for this long has reached a plateau.
    pub plateau_ns: u64,
    /// A context without memory for this long was not a step on the way.
    pub stray_ns: u64,
    /// Contexts of a lone process that never allocates are left alone for this long.
    pub stray_alone_ns: u64,
    /// Silence that makes a holder idle where something says that it is.
    pub idle_told_ns: u64,
    /// Silence that makes a holder idle where nothing does.
    pub idle_silent_ns: u64,
    /// A process that was locked for a checkpoint and not let go for this long is stuck.
    pub checkpoint_ns: u64,
    /// A refused change of a device matters for this long.
    pub refused_change_ns: u64,
    /// Names (prefixes) of programs that open device files to watch, not to compute.
    pub observers: Vec<Text>,
    /// Dead processes remembered at most.
    pub remembered_dead: usize,
    /// Live processes remembered at most; those without GPU use go first.
    pub remembered_processes: usize,
    /// Closed findings remembered at most.
    pub remembered_findings: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            held_floor_bytes: 128 * MIB,
            critical_bytes: GIB,
            critical_hold_ns: 86_400 * SECOND,
            exit_grace_ns: 5 * SECOND,
            pinned_bytes_per_second: 8_000_000_000,
            unproven_residue_graces: 2,
            unreaped_ns: 60 * SECOND,
            owner_grace_ns: 5 * SECOND,
            pod_grace_ns: 35 * SECOND,
            failed_owner_silence_ns: 20 * SECOND,
            clean_owner_silence_ns: 60 * SECOND,
            churn_workers: 6,
            churn_life_ns: 60 * SECOND,
            churn_share: 0.3,
            churn_quiet_ns: 120 * SECOND,
            leak_survivors: 20,
            leak_survivors_without_stack: 40,
            leak_survivors_of_thread: 100,
            leak_doublings: 8,
            leak_survivors_huge: 12,
            leak_huge_bytes: GIB,
            leak_span_ns: 8 * SECOND,
            leak_shard_bytes: 64 * MIB,
            leak_shard_span_ns: 600 * SECOND,
            leak_bytes: 16 * MIB,
            leak_floors: 24,
            leak_floors_of_unloads: 4,
            leak_balanced_frees: 10,
            context_ceiling_bytes: GIB,
            unseen_calls_ns: 30 * SECOND,
            monitor_failures: 2,
            monitor_slow_ns: 5 * SECOND,
            monitor_silence_ns: 30 * SECOND,
            stuck_ns: 60 * SECOND,
            importer_idle_ns: 300 * SECOND,
            pool_idle_ns: 60 * SECOND,
            plateau_ns: 60 * SECOND,
            stray_ns: 60 * SECOND,
            stray_alone_ns: 300 * SECOND,
            idle_told_ns: 900 * SECOND,
            idle_silent_ns: 1800 * SECOND,
            checkpoint_ns: 60 * SECOND,
            refused_change_ns: 600 * SECOND,
            observers: [
                "nv-hostengine",
                "nvidia-persiste",
                "nvidia-smi",
                "dcgm",
                "nvtop",
                "nvitop",
                "gpustat",
                "nvidia-cuda-mps",
                "nvidia-mps",
                "gpu-feature-disc",
                "nvidia-device-p",
                "vramtrace",
            ]
            .map(Text::from)
            .to_vec(),
            remembered_dead: 4096,
            remembered_processes: 131_072,
            remembered_findings: 4096,
        }
    }
}

impl EngineConfig {
    /// How long a dead process's memory may take to come back.
    pub fn teardown_grace_ns(&self, pinned_bytes: u64) -> u64 {
        let per_second = self.pinned_bytes_per_second.max(1);
        let pinned_ns = u128::from(pinned_bytes) * u128::from(SECOND) / u128::from(per_second);
        self.exit_grace_ns.saturating_add(u64::try_from(pinned_ns).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::EngineConfig;
    use crate::units::SECOND;

    #[test]
    fn grace_follows_pinned_memory() {
        let config = EngineConfig::default();
        assert_eq!(config.teardown_grace_ns(0), 5 * SECOND);
        assert_eq!(config.teardown_grace_ns(240_000_000_000), 35 * SECOND);
        assert_eq!(config.teardown_grace_ns(u64::MAX), 5 * SECOND + 2_305_843_009_213_693_951);
    }
}
