//! The detectors, one file each. A new one is a file and a line in [`all`].
//!
//! A detector reads the ledger and keeps, in the book of findings, exactly those claims that hold
//! at the moment. It never does more work for one record than that record gives cause for.

mod allocator_cache;
mod allocators;
mod app_leak;
mod checkpointed;
mod coverage_gap;
mod driver_mappings;
mod forecast;
mod fragmentation_growth;
mod idle_holder;
mod inherited_fd_holder;
mod insufficient_data;
mod ipc_pinned;
mod managed_memory;
mod monitor_degraded;
mod observer_holds_device;
mod orphan_process;
mod pool_retention;
mod process_churn;
mod release;
mod residual_after_exit;
mod slow_teardown;
mod standing;
mod stray_context;
mod stuck_in_driver;
mod untracked_growth;

use crate::engine::{Book, EngineConfig, Moment};
use crate::finding::Severity;
use std::fmt::Debug;

/// One kind of verdict.
pub trait Detector: Debug + Send {
    /// Looks at the state after a record and brings its findings up to date.
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book);
}

/// Every detector. Those that explain memory away come before those that blame.
pub fn all() -> Vec<Box<dyn Detector>> {
    vec![
        Box::<monitor_degraded::MonitorDegraded>::default(),
        Box::<coverage_gap::CoverageGap>::default(),
        Box::<insufficient_data::InsufficientData>::default(),
        checkpointed::checkpointed(),
        checkpointed::stuck(),
        Box::<stuck_in_driver::StuckInDriver>::default(),
        Box::<ipc_pinned::IpcPinned>::default(),
        Box::<orphan_process::OrphanProcess>::default(),
        Box::<inherited_fd_holder::InheritedFdHolder>::default(),
        Box::<residual_after_exit::ResidualAfterExit>::default(),
        Box::<slow_teardown::SlowTeardown>::default(),
        Box::<process_churn::ProcessChurn>::default(),
        managed_memory::detector(),
        pool_retention::detector(),
        fragmentation_growth::detector(),
        untracked_growth::detector(),
        driver_mappings::detector(),
        Box::<app_leak::AppLeak>::default(),
        allocator_cache::detector(),
        stray_context::detector(),
        idle_holder::detector(),
        Box::<observer_holds_device::ObserverHoldsDevice>::default(),
    ]
}

/// How much withheld memory matters: it costs by the byte, and less of it costs as much over time.
fn by_cost(bytes: u64, for_ns: u64, config: &EngineConfig) -> Severity {
    let cost = u128::from(bytes) * u128::from(for_ns);
    let critical = u128::from(config.critical_bytes) * u128::from(config.critical_hold_ns);
    if bytes >= config.critical_bytes || cost >= critical { Severity::Critical } else { Severity::Warning }
}

/// `GPU 0` or `GPU 0 instance 2`.
fn device_name(device: u32, gi: Option<u32>) -> String {
    gi.map_or_else(|| format!("GPU {device}"), |gi| format!("GPU {device} instance {gi}"))
}

/// `pid 7 (python)`.
fn process_name(tgid: u32, comm: &str) -> String {
    if comm.is_empty() { format!("pid {tgid}") } else { format!("pid {tgid} ({})", crate::units::shown(comm, 32)) }
}

#[cfg(test)]
mod tests {
    use super::by_cost;
    use crate::engine::EngineConfig;
    use crate::finding::Severity;
    use crate::units::{GIB, SECOND};

    #[test]
    fn half_the_memory_matters_as_much_after_twice_the_time() {
        let config = EngineConfig::default();
        let day = 86_400 * SECOND;
        assert_eq!(by_cost(GIB, 0, &config), Severity::Critical);
        assert_eq!(by_cost(GIB / 2, day, &config), Severity::Warning);
        assert_eq!(by_cost(GIB / 2, 2 * day, &config), Severity::Critical);
        assert_eq!(by_cost(u64::MAX, u64::MAX, &config), Severity::Critical);
    }
}
