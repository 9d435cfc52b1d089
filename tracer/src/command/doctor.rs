//! `vramtrace doctor`.

use std::process::ExitCode;

use super::{discover_config, monitor_config, runtime};
use crate::{
    cli::{DoctorArgs, Format},
    doctor::{DoctorConfig, examine},
};

pub(super) fn doctor(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let config = DoctorConfig {
        discover: discover_config(&args.driver),
        monitor: monitor_config(&args.driver),
        device_folder: args.driver.device_folder.clone(),
    };
    let examination = runtime()?.block_on(examine(&config));
    match args.format {
        Format::Text => print!("{examination}"),
        Format::Json => println!("{}", examination.to_json()?),
    }
    Ok(ExitCode::from(examination.exit_code()))
}
