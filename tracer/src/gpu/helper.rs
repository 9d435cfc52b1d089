//! The helper process: answers requests on its standard input until that closes.

use super::nvml::Driver;
use super::protocol::{Failure, Reply, Request};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, Write};
use std::process::ExitCode;

/// Name of the hidden subcommand that runs the helper.
pub const SUBCOMMAND: &str = "nvml-helper";
/// Its one option, which may be repeated.
pub const LIBRARY_OPTION: &str = "--nvml-library";

/// Runs the helper with the first of `libraries` that loads. Only the monitor calls this, in a
/// process of its own.
pub fn run(libraries: &[OsString]) -> ExitCode {
    // A helper that hangs does not see its input close; if the agent is killed it must go as well.
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    match tied.map_err(std::io::Error::from).and_then(|()| serve(libraries)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(libraries: &[OsString]) -> std::io::Result<()> {
    // The library may print to standard output, which must carry nothing but replies.
    let mut output = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?);
    rustix::stdio::dup2_stdout(File::options().write(true).open("/dev/null")?)?;

    let driver = match Driver::open(libraries) {
        Ok(driver) => driver,
        Err(failure) => return send(&mut output, &Reply::Failed { failure }),
    };
    send(&mut output, &Reply::Hello { library: driver.library().clone(), driver: driver.version() })?;
    for line in std::io::stdin().lock().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        if let Err(failure) = sample(&driver, &request, &mut output)? {
            // A driver that was reloaded needs a process that has not seen the old one.
            return send(&mut output, &Reply::Failed { failure });
        }
    }
    Ok(())
}

fn sample(driver: &Driver, request: &Request, output: &mut File) -> std::io::Result<Result<(), Failure>> {
    let count = match driver.device_count() {
        Ok(count) => count,
        Err(failure) => return Ok(Err(failure)),
    };
    let mut order: Vec<u32> = (0..count).collect();
    order.sort_by_key(|index| request.last.contains(index));
    for index in order {
        send(output, &Reply::Device(driver.sample(index)))?;
    }
    send(output, &Reply::Done)?;
    Ok(Ok(()))
}

fn send(output: &mut File, reply: &Reply) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    output.write_all(&line)
}
