//! Where the running kernel keeps the fields the programs read.
//!
//! Structure layouts differ between kernels and are never baked in: they come from the kernel's own
//! type information (BTF) at load. Without it the programs fall back to what tracepoints carry, and
//! processes are told apart by /proc.

use std::{
    io,
    path::{Path, PathBuf},
};

use btf::btf::{Btf, Struct, Type};

/// Where kernels built with BTF show it.
pub const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";

/// The programs' settings that hold structure offsets, and the field each stands for. Where a field
/// was renamed the names are listed newest first.
const FIELDS: &[(&str, &str, &[&str])] = &[
    ("TASK_GROUP_LEADER", "task_struct", &["group_leader"]),
    // Renamed in 5.5 (cf25e24db61c); both count on the boot clock.
    ("TASK_START_BOOTTIME", "task_struct", &["start_boottime", "real_start_time"]),
    ("TASK_REAL_PARENT", "task_struct", &["real_parent"]),
    ("TASK_TGID", "task_struct", &["tgid"]),
    ("TASK_PID", "task_struct", &["pid"]),
    ("TASK_COMM", "task_struct", &["comm"]),
    ("TASK_EXIT_CODE", "task_struct", &["exit_code"]),
    ("TASK_SIGNAL", "task_struct", &["signal"]),
    ("SIGNAL_LIVE", "signal_struct", &["live"]),
];

/// Why the kernel's types could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TypesError {
    /// The file is missing or is not BTF.
    #[error("cannot read kernel types from {}: {reason}", path.display())]
    Unreadable {
        /// What was read.
        path: PathBuf,
        /// What the reader said.
        reason: String,
    },
    /// A structure or field is not where any known kernel has it.
    #[error("kernel types in {} have no {structure}.{field}", path.display())]
    NoField {
        /// What was read.
        path: PathBuf,
        /// Structure looked in.
        structure: &'static str,
        /// Field looked for.
        field: &'static str,
    },
}

/// Offsets in bytes, by the name of the setting they go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offsets(Vec<(&'static str, u32)>);

impl Offsets {
    /// Reads the offsets of every field the programs need from a BTF file.
    pub fn from_types(path: &Path) -> Result<Self, TypesError> {
        let unreadable = |reason: String| TypesError::Unreadable { path: path.to_owned(), reason };
        let types = Btf::from_file(path).map_err(|error| unreadable(error.to_string()))?;
        let offset_of = |&(setting, structure, names): &(&'static str, &'static str, &[&'static str])| {
            let found = types.get_type_by_name(structure).ok().and_then(|flat| match &flat.base_type {
                Type::Struct(fields) => names.iter().find_map(|name| bit_offset(&types, fields, name)),
                _ => None,
            });
            found.map(|bits| (setting, bits / 8)).ok_or_else(|| TypesError::NoField {
                path: path.to_owned(),
                structure,
                field: names[0],
            })
        };
        FIELDS.iter().map(offset_of).collect::<Result<_, _>>().map(Self)
    }

    /// What is left without BTF: the child's task id in the fork tracepoint's record, whose layout
    /// the tracing file system describes.
    pub fn from_tracepoints(tracefs: &Path) -> io::Result<Self> {
        let description = std::fs::read_to_string(tracefs.join("events/sched/sched_process_fork/format"))?;
        let offset = field_offset(&description, "child_pid")
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "sched_process_fork has no child_pid"))?;
        Ok(Self(vec![("FORK_CHILD_PID", offset)]))
    }

    /// Setting names and offsets.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        self.0.iter().copied()
    }
}

/// Offset in bits of a member, looked for in anonymous members too (structure layout randomisation
/// wraps the fields of `task_struct` in one).
fn bit_offset(types: &Btf, fields: &Struct, name: &str) -> Option<u32> {
    fields.members.iter().find_map(|member| match member.name.as_deref() {
        Some(found) if found == name => Some(member.offset),
        None | Some("") => match &types.get_type_by_id(member.type_id).ok()?.base_type {
            Type::Struct(inner) | Type::Union(inner) => Some(member.offset + bit_offset(types, inner, name)?),
            _ => None,
        },
        Some(_) => None,
    })
}

/// Offset of a field in a tracepoint's `format` file, whose lines are such as
/// `field:pid_t child_pid; offset:44; size:4; signed:1;`, with tabs between.
fn field_offset(description: &str, field: &str) -> Option<u32> {
    description.lines().find_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?.split_whitespace().last()?;
        if declared != field {
            return None;
        }
        parts.find_map(|part| part.strip_prefix("offset:")?.parse().ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracepoint_field_offsets_are_read_from_their_description() {
        let description = "name: sched_process_fork\nID: 316\nformat:\n\
             \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
             \tfield:__data_loc char[] parent_comm;\toffset:8;\tsize:4;\tsigned:0;\n\
             \tfield:pid_t parent_pid;\toffset:12;\tsize:4;\tsigned:1;\n\
             \tfield:pid_t child_pid;\toffset:20;\tsize:4;\tsigned:1;\n";
        assert_eq!(field_offset(description, "child_pid"), Some(20));
        assert_eq!(field_offset(description, "child"), None);
    }

    #[test]
    fn a_file_that_is_not_type_information_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"\x7fELF not types").unwrap();
        let error = Offsets::from_types(file.path()).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }

    #[test]
    fn the_running_kernel_has_every_field_where_it_has_types() {
        let path = Path::new(KERNEL_TYPES);
        if path.exists() {
            let offsets = Offsets::from_types(path).unwrap();
            assert_eq!(offsets.iter().count(), FIELDS.len());
        }
    }
}
