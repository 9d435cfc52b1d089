//! The behaviours, one file each.

use std::process::ExitCode;

use anyhow::Result;

use crate::{cli::Workload, run::Run};

pub(crate) mod cache_plateau;
pub(crate) mod churn;
pub(crate) mod failing;
pub(crate) mod families;
pub(crate) mod forked_loader;
pub(crate) mod hold;
pub(crate) mod late;
pub(crate) mod leak;
pub(crate) mod live;
pub(crate) mod multi_device;
pub(crate) mod orphan;
pub(crate) mod residue;
pub(crate) mod serve;
pub(crate) mod stress;
pub(crate) mod thread_exit;
pub(crate) mod traffic;

/// Plays one behaviour to its end.
pub(crate) fn play(run: &Run, workload: Workload) -> Result<ExitCode> {
    match workload {
        Workload::Script(script) => return script.play(run),
        Workload::Serve(serve) => serve.play(run),
        Workload::CachePlateau(plateau) => plateau.play(run),
        Workload::Leak(leak) => leak.play(run),
        Workload::Churn(churn) => churn.play(run),
        Workload::ChurnWorker(worker) => worker.play(run),
        Workload::Orphan(orphan) => orphan.play(run),
        Workload::ForkedLoader(loader) => loader.play(run),
        Workload::Late(late) => late.play(run),
        Workload::MultiDevice(multi) => multi.play(run),
        Workload::Stress(stress) => stress.play(run),
        Workload::Live(live) => live.play(run),
        Workload::ThreadExit(thread_exit) => thread_exit.play(run),
        Workload::Failing(failing) => failing.play(run),
        Workload::Residue(residue) => residue.play(run),
        Workload::Families(families) => families.play(run),
        Workload::Hold(hold) => hold.play(run),
    }?;
    Ok(ExitCode::SUCCESS)
}
