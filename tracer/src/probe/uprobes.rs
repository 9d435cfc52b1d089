//! Putting the two call programs on the entry points of a library.
//!
//! Kernels from 6.6 on attach a whole library with one link a program (`uprobe_multi`): one
//! descriptor, detached in milliseconds. aya 0.14 does not know that link, so the programs are
//! loaded for it here, from the object aya has already parsed and with the maps it has made.
//! Older kernels get one perf event an entry point, which aya does.

use std::{
    collections::HashSet,
    ffi::CString,
    io, mem,
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

use aya::{
    Ebpf,
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLinkId, UProbeScope},
    },
    util::KernelVersion,
};
use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_prog_type};

use super::{kernel::KernelError, library::Point};

/// `link_create.uprobe_multi.flags`: probe the return instead of the entry (`BPF_F_UPROBE_MULTI_RETURN`).
const RETURN: u32 = 1;
/// The verifier's explanation of a refusal is cut at this length.
const VERIFIER_LOG_BYTES: usize = 16 << 20;

/// How probes are attached on this kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachMethod {
    /// One link a library and program.
    Multi,
    /// One perf event an entry point and program.
    Perf,
}

/// The two call programs, loaded.
pub(super) enum Uprobes {
    Multi { enter: OwnedFd, leave: OwnedFd },
    Perf,
}

/// Probes on one library, to be given back to [`Uprobes::detach`].
pub(super) enum Links {
    Multi { enter: OwnedFd, leave: OwnedFd },
    Perf { enter: Vec<UProbeLinkId>, leave: Vec<UProbeLinkId> },
}

const ENTER: &str = "call_enter";
const LEAVE: &str = "call_return";

impl Uprobes {
    /// Loads the programs for the given method, or for the best this kernel has.
    pub(super) fn load(object: &[u8], ebpf: &mut Ebpf, method: Option<AttachMethod>) -> Result<Self, KernelError> {
        let best = || if kernel_has_multi() { AttachMethod::Multi } else { AttachMethod::Perf };
        if method.unwrap_or_else(best) == AttachMethod::Multi {
            let (enter, leave) = load_multi(object, ebpf)?;
            return Ok(Self::Multi { enter, leave });
        }
        for name in [ENTER, LEAVE] {
            program(ebpf, name)?.load().map_err(|source| KernelError::Load { program: name, source })?;
        }
        Ok(Self::Perf)
    }

    pub(super) fn method(&self) -> AttachMethod {
        match self {
            Self::Multi { .. } => AttachMethod::Multi,
            Self::Perf => AttachMethod::Perf,
        }
    }

    /// Attaches both programs to every point. The return probes come first: a call entered between
    /// the two attachments then has an unpaired return, which is counted, and not an open call that
    /// never ends.
    pub(super) fn attach(&self, ebpf: &mut Ebpf, path: &Path, points: &[Point]) -> Result<Links, KernelError> {
        match self {
            Self::Multi { enter, leave } => {
                let failed = |source| KernelError::Attach { path: path.to_owned(), source };
                let leave = multi_link(leave, path, points, RETURN).map_err(failed)?;
                let enter = multi_link(enter, path, points, 0).map_err(failed)?;
                Ok(Links::Multi { enter, leave })
            }
            Self::Perf => {
                let leave = attach_perf(ebpf, LEAVE, path, points)?;
                let enter = attach_perf(ebpf, ENTER, path, points)?;
                Ok(Links::Perf { enter, leave })
            }
        }
    }

    /// Takes the probes of one library off, the entries first: releases are told when they are
    /// entered and allocations when they return, and telling only the former would look like frees
    /// of memory nobody had.
    pub(super) fn detach(ebpf: &mut Ebpf, links: Links) -> Result<(), KernelError> {
        match links {
            Links::Multi { enter, leave } => {
                drop(enter);
                drop(leave);
            }
            Links::Perf { enter, leave } => {
                for (name, ids) in [(ENTER, enter), (LEAVE, leave)] {
                    let program = program(ebpf, name)?;
                    for id in ids {
                        program.detach(id).map_err(|source| KernelError::Load { program: name, source })?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut UProbe, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Object { missing: name })?;
    program.try_into().map_err(|source| KernelError::Load { program: name, source })
}

fn attach_perf(
    ebpf: &mut Ebpf,
    name: &'static str,
    path: &Path,
    points: &[Point],
) -> Result<Vec<UProbeLinkId>, KernelError> {
    let program = program(ebpf, name)?;
    let attach = |point: &Point| {
        let location = UProbeAttachLocation::AbsoluteOffset(point.offset);
        program
            .attach(UProbeAttachPoint { location, cookie: Some(point.symbol as u64) }, path, UProbeScope::AllProcesses)
            .map_err(|source| KernelError::AttachPerf { path: path.to_owned(), source })
    };
    points.iter().map(attach).collect()
}

/// Whether the kernel knows `uprobe_multi` links. It does not say so other than by its version:
/// older ones load the program without a complaint and refuse only the link.
fn kernel_has_multi() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

fn load_multi(object: &[u8], ebpf: &Ebpf) -> Result<(OwnedFd, OwnedFd), KernelError> {
    let invalid = |reason: String| KernelError::Relocate { reason };
    let mut parsed = aya_obj::Object::parse(object).map_err(|error| invalid(error.to_string()))?;
    let maps: Vec<(String, RawFd)> =
        ebpf.maps().map(|(name, map)| Ok((name.to_owned(), map_fd(map)?))).collect::<Result<_, KernelError>>()?;
    let definitions = mem::take(&mut parsed.maps);
    let text_sections: HashSet<usize> = parsed.functions.keys().map(|(section, _)| *section).collect();
    let known = maps.iter().filter_map(|(name, fd)| Some((name.as_str(), *fd, definitions.get(name)?)));
    parsed.relocate_maps(known, &text_sections).map_err(|error| invalid(error.to_string()))?;
    parsed.relocate_calls(&text_sections).map_err(|error| invalid(error.to_string()))?;
    let load = |name: &'static str| {
        let program = parsed.programs.get(name).ok_or(KernelError::Object { missing: name })?;
        let function = parsed.functions.get(&program.function_key()).ok_or(KernelError::Object { missing: name })?;
        load_program(name, &program.license, &function.instructions)
    };
    Ok((load(ENTER)?, load(LEAVE)?))
}

fn map_fd(map: &aya::maps::Map) -> Result<RawFd, KernelError> {
    use aya::maps::Map;
    match map {
        Map::Array(data) | Map::HashMap(data) | Map::PerCpuArray(data) | Map::RingBuf(data) => {
            Ok(data.fd().as_fd().as_raw_fd())
        }
        _ => Err(KernelError::Object { missing: "a map of a kind the loader knows" }),
    }
}

fn load_program(
    name: &'static str,
    license: &CString,
    instructions: &[aya_obj::generated::bpf_insn],
) -> Result<OwnedFd, KernelError> {
    let load = |log: &mut [u8]| {
        // SAFETY: all-zero is the documented empty value of this union of plain structures.
        let mut attr = unsafe { mem::zeroed::<bpf_attr>() };
        // SAFETY: the program-load member of the union is the one this command reads.
        let request = unsafe { &mut attr.__bindgen_anon_3 };
        request.prog_type = bpf_prog_type::BPF_PROG_TYPE_KPROBE as u32;
        request.expected_attach_type = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;
        request.insns = instructions.as_ptr() as u64;
        request.insn_cnt = instructions.len() as u32;
        request.license = license.as_ptr() as u64;
        for (to, from) in request.prog_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        if !log.is_empty() {
            request.log_level = 1;
            request.log_buf = log.as_mut_ptr() as u64;
            request.log_size = log.len() as u32;
        }
        bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr)
    };
    load(&mut []).or_else(|source| {
        // Once more for the verifier's reasons; the log slows a load down too much to keep it on.
        let mut log = vec![0; VERIFIER_LOG_BYTES];
        load(&mut log).map_err(|_| {
            // Behind the terminating zero lie remains of what the kernel has rotated out.
            let text = String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default());
            let text = text.trim_end();
            let tail = text.char_indices().rev().nth(2000).map_or(text, |(start, _)| &text[start..]);
            KernelError::Verifier { program: name, source, log: tail.to_owned() }
        })
    })
}

fn multi_link(program: &OwnedFd, path: &Path, points: &[Point], flags: u32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let offsets: Vec<u64> = points.iter().map(|point| point.offset).collect();
    let cookies: Vec<u64> = points.iter().map(|point| point.symbol as u64).collect();
    // SAFETY: all-zero is the documented empty value of this union of plain structures.
    let mut attr = unsafe { mem::zeroed::<bpf_attr>() };
    // SAFETY: the link-create member of the union is the one this command reads.
    unsafe {
        attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
        attr.link_create.attach_type = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;
        let multi = &mut attr.link_create.__bindgen_anon_3.uprobe_multi;
        multi.path = path.as_ptr() as u64;
        multi.offsets = offsets.as_ptr() as u64;
        multi.cookies = cookies.as_ptr() as u64;
        multi.cnt = points.len() as u32;
        multi.flags = flags;
    }
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// `bpf(2)` for commands that return a descriptor.
fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: `attr` is a valid attribute block of the given size; the pointers in it outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_int, &raw mut *attr, size_of::<bpf_attr>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
