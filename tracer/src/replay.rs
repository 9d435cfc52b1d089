//! Runs a file of records through the engine.

use crate::engine::{Engine, EngineConfig};
use crate::finding::Report;
use crate::scenario::{Scenario, ScenarioError};
use std::path::Path;

/// Replays a scenario file and gives the report at its end.
pub fn replay(path: &Path, config: EngineConfig) -> Result<Report, ScenarioError> {
    let mut scenario = Scenario::open(path)?;
    let mut config = config;
    config.devices.clone_from(&scenario.header().devices);
    let mut engine = Engine::new(config);
    while let Some(record) = scenario.next_record()? {
        engine.push(&record);
    }
    engine.finish();
    Ok(engine.report())
}
