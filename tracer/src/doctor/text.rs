//! The examination as a person reads it.

use super::report::{Examination, LibraryReport, Verdict};
use crate::record::Text;
use crate::untrusted::printable;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Processes named of one library.
const PIDS_SHOWN: usize = 8;

/// A path as it may be shown.
pub(super) fn path(path: &Path) -> Text {
    printable(path.as_os_str().as_bytes(), 1024)
}

/// A number and what it counts.
pub(super) fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

impl fmt::Display for Examination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let verdict = match check.verdict {
                Verdict::Ok => "ok",
                Verdict::Limited => "limited",
                Verdict::Missing => "MISSING",
            };
            // Details may quote files of other programs.
            let detail = printable(check.detail.as_bytes(), 4096);
            writeln!(f, "{verdict:8} {:20} {detail}", check.name)?;
            if let Some(action) = check.action {
                writeln!(f, "{:8} {:20} -> {action}", "", "")?;
            }
        }
        for library in &self.libraries {
            write_library(f, library)?;
        }
        if let Some(library) = &self.nvml.library {
            let driver = self.nvml.driver.as_deref().unwrap_or("unknown");
            writeln!(f, "\nNVML {library}, driver {driver}")?;
            for device in &self.nvml.devices {
                let name = device.name.as_deref().unwrap_or("unknown");
                let uuid = device.uuid.as_deref().unwrap_or("no UUID");
                let instances = counted(device.instances.len(), "MIG instance", "MIG instances");
                writeln!(f, "  device {} {name} {uuid}, {instances}", device.index)?;
            }
        }
        match (self.count(Verdict::Missing), self.count(Verdict::Limited)) {
            (0, 0) => writeln!(f, "\nEverything is in place."),
            (0, limited) => writeln!(f, "\nTracing works, with {} named above.", counted(limited, "limit", "limits")),
            (missing, _) => {
                let parts = counted(missing, "needed part is", "needed parts are");
                writeln!(f, "\n{parts} missing; the line below each says what to do.")
            }
        }
    }
}

fn write_library(f: &mut fmt::Formatter<'_>, library: &LibraryReport) -> fmt::Result {
    let version = library.version.as_deref().unwrap_or("unknown");
    let build_id = library.build_id.as_deref().unwrap_or("none");
    writeln!(f, "\nlibcuda {}, version {version}, build id {build_id}", library.path)?;
    let all = library.present.len() + library.missing.len();
    writeln!(
        f,
        "  entry points: {} of {all}; {} probed on the stub's branch, {} at entry",
        library.present.len(),
        library.on_stub_branch,
        library.at_entry
    )?;
    if !library.missing.is_empty() {
        writeln!(f, "  not in this version: {}", library.missing.join(", "))?;
    }
    if !library.pids.is_empty() {
        let shown: Vec<String> = library.pids.iter().take(PIDS_SHOWN).map(ToString::to_string).collect();
        let more = library.pids.len().saturating_sub(PIDS_SHOWN);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        writeln!(f, "  used by processes {}{rest}", shown.join(", "))?;
    }
    Ok(())
}
