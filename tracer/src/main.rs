//! The `vramtrace` command.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == vramtrace::gpu::helper::SUBCOMMAND => {
            let libraries: Vec<OsString> =
                rest.iter().filter(|word| *word != vramtrace::gpu::helper::LIBRARY_OPTION).cloned().collect();
            vramtrace::gpu::helper::run(&libraries)
        }
        _ => ExitCode::SUCCESS,
    }
}
