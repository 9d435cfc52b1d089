//! What the command line names must be there: a mistyped path is told before tracing begins, and
//! not as a part of the host that cannot be seen.

use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use crate::{
    cli::{DriverArgs, RunArgs},
    probe::{library::Library, types::Offsets},
};

/// Value of `--kernel-types` that asks to do without.
pub(super) const NO_TYPES: &str = "none";

/// Checks every path that was given by name.
pub(super) fn check(args: &RunArgs) -> anyhow::Result<()> {
    let DriverArgs { libcuda, nvml, device_folder, .. } = &args.driver;
    for path in libcuda {
        Library::open(path).map_err(|error| anyhow::anyhow!("--libcuda: {error}"))?;
    }
    // Names without a slash are looked up by the loader.
    let absent = |name: &OsStr| name.as_bytes().contains(&b'/') && !Path::new(name).exists();
    if let Some(first) = nvml.first()
        && nvml.iter().all(|name| absent(name))
    {
        bail!("--nvml-library: {} does not exist; name the driver's libnvidia-ml.so.1", first.display());
    }
    if !device_folder.is_dir() {
        bail!("--device-folder: {} is not a folder; the driver's device files are in /dev", device_folder.display());
    }
    if let Some(types) = args.kernel_types.as_deref().filter(|types| *types != Path::new(NO_TYPES)) {
        Offsets::from_types(types).map_err(|error| {
            anyhow::anyhow!("--kernel-types: {error}; leave it out for the running kernel's, or say {NO_TYPES}")
        })?;
    }
    Ok(())
}

/// The file of the report: opened before tracing, so that hours of it do not end in "permission
/// denied"; what was in it stays until there is something to put in its place.
#[derive(Debug)]
pub(super) struct ReportFile {
    path: PathBuf,
    file: File,
}

impl ReportFile {
    /// Makes the file if it is not there.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("--report: cannot write to {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Replaces what was in it.
    pub(super) fn write(mut self, document: &str) -> anyhow::Result<()> {
        let written = match self.file.metadata() {
            // A pipe or a terminal has no length.
            Ok(metadata) if metadata.is_file() => self.file.set_len(0),
            _ => Ok(()),
        };
        let written = written.and_then(|()| self.file.write_all(document.as_bytes()));
        written.with_context(|| format!("cannot write the report to {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::ReportFile;

    #[test]
    fn an_earlier_report_stays_until_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        std::fs::write(&path, "an earlier and longer report").unwrap();
        let file = ReportFile::open(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "an earlier and longer report");
        file.write("new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn a_report_that_cannot_be_written_is_told_at_once() {
        let error = ReportFile::open(std::path::Path::new("/no/such/folder/report.json")).unwrap_err();
        assert_eq!(error.to_string(), "--report: cannot write to /no/such/folder/report.json");
    }
}
