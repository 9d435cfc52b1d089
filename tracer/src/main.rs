//! The `vramtrace` command.

use std::ffi::OsString;
use std::process::ExitCode;
use vramtrace::doctor::{DoctorConfig, examine};
use vramtrace::gpu::helper;

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == helper::SUBCOMMAND => {
            let libraries: Vec<OsString> =
                rest.iter().filter(|word| *word != helper::LIBRARY_OPTION).cloned().collect();
            Ok(helper::run(&libraries))
        }
        Some((first, rest)) if first == "doctor" => doctor(rest),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn doctor(options: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut config = DoctorConfig::default();
    let mut as_json = false;
    let mut words = options.iter();
    while let Some(word) = words.next() {
        match (word.to_str(), words.next()) {
            (Some("--libcuda"), Some(path)) => config.discover.explicit.push(path.into()),
            (Some("--nvml-library"), Some(path)) => config.monitor.libraries = vec![path.clone()],
            (Some("--format"), Some(format)) => as_json = format == "json",
            _ => anyhow::bail!("unknown option {}", word.display()),
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let examination = runtime.block_on(examine(&config));
    if as_json {
        println!("{}", examination.to_json()?);
    } else {
        print!("{examination}");
    }
    Ok(ExitCode::from(examination.exit_code()))
}
