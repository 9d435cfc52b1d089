//! What the kernel and the process's own rights allow.

use super::report::Check;
use crate::proc::ProcRoot;
use caps::Capability::{
    CAP_BPF, CAP_CHECKPOINT_RESTORE, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_PERFMON, CAP_SYS_ADMIN, CAP_SYS_PTRACE,
};
use caps::{CapSet, Capability, CapsHashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Inode of the pid namespace of the host (`PROC_PID_INIT_INO`).
const HOST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Kernels that have what we use: the ring buffer, attach cookies, one link for many uprobes.
const RING_BUFFER: (u32, u32) = (5, 8);
const COOKIES: (u32, u32) = (5, 15);
const UPROBE_MULTI: (u32, u32) = (6, 6);

/// What was found out, before it is judged.
#[derive(Clone, Debug)]
pub(super) struct HostFacts {
    release: String,
    has_btf: bool,
    tracefs: Option<&'static str>,
    has_uprobes: bool,
    /// Effective capabilities; `None` when they cannot be read.
    capabilities: Option<CapsHashSet>,
    lockdown: Option<String>,
    seccomp: Seccomp,
    namespace: PidNamespace,
    processes: Visibility,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seccomp {
    Off,
    Filtered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PidNamespace {
    Host,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visibility {
    All,
    Hidden,
}

impl HostFacts {
    pub(super) fn gather(root: &ProcRoot) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let seccomp = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map(str::trim);
        let namespace = std::fs::metadata("/proc/self/ns/pid").map(|metadata| metadata.ino());
        Self {
            release: rustix::system::uname().release().to_string_lossy().into_owned(),
            has_btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            tracefs: ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"]
                .into_iter()
                .find(|folder| Path::new(folder).join("events/sched/sched_process_exit/id").exists()),
            has_uprobes: Path::new("/sys/bus/event_source/devices/uprobe/type").exists(),
            capabilities: caps::read(None, CapSet::Effective).ok(),
            lockdown: std::fs::read_to_string("/sys/kernel/security/lockdown").ok(),
            seccomp: if seccomp.is_none_or(|mode| mode == "0") { Seccomp::Off } else { Seccomp::Filtered },
            namespace: match namespace {
                Ok(HOST_PID_NAMESPACE) => PidNamespace::Host,
                _ => PidNamespace::Other,
            },
            processes: if root.hides_processes() { Visibility::Hidden } else { Visibility::All },
        }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let mut checks = vec![self.kernel(), self.btf(), self.tracefs_check(), self.uprobes(), self.uprobe_multi()];
        checks.extend(self.return_probes());
        checks.extend(self.capability_checks());
        checks.extend(self.lockdown_check());
        if self.seccomp == Seccomp::Filtered {
            let action =
                "if loading fails, run the container with seccompProfile Unconfined, or allow bpf and perf_event_open";
            checks.push(Check::limited("seccomp", "this process runs under a system call filter", action));
        }
        checks.push(match self.namespace {
            PidNamespace::Host => Check::ok("pid_namespace", "the host's"),
            PidNamespace::Other => Check::missing(
                "pid_namespace",
                "a container's: other processes of the host are not visible, and process numbers differ from the kernel's",
                "set hostPID: true (Kubernetes) or --pid=host (Docker, Podman)",
            ),
        });
        checks.push(match self.processes {
            Visibility::All => Check::ok("procfs", "shows all processes"),
            Visibility::Hidden => Check::missing(
                "procfs",
                "does not show all processes (mount option hidepid?)",
                "run as root, or remount /proc with hidepid=0",
            ),
        });
        checks
    }

    fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    fn kernel(&self) -> Check {
        match self.version() {
            Some(version) if version >= COOKIES => Check::ok("kernel", self.release.clone()),
            Some(version) if version >= RING_BUFFER => Check::limited(
                "kernel",
                format!("{} has no attach cookies (5.15)", self.release),
                "a small program is loaded for each entry point instead",
            ),
            Some(_) => Check::missing(
                "kernel",
                format!("{} has no BPF ring buffer (5.8)", self.release),
                "update the kernel to 5.10 or later",
            ),
            None => Check::limited("kernel", format!("version {} is unknown", self.release), "loading will tell"),
        }
    }

    fn btf(&self) -> Check {
        if self.has_btf {
            Check::ok("btf", "/sys/kernel/btf/vmlinux")
        } else {
            let action = "use a kernel with CONFIG_DEBUG_INFO_BTF; until then process starts come from /proc, and a reused process number may confuse";
            Check::limited("btf", "the kernel does not describe its types", action)
        }
    }

    fn tracefs_check(&self) -> Check {
        match self.tracefs {
            Some(folder) => Check::ok("tracefs", format!("mounted at {folder}")),
            // With the kernel's types nothing is read from it: raw tracepoints need no description.
            None if self.has_btf => Check::ok("tracefs", "not mounted, and not needed on this kernel"),
            None => Check::missing(
                "tracefs",
                "not mounted, or not readable: without BTF process starts and ends cannot be followed",
                "mount -t tracefs tracefs /sys/kernel/tracing (in a container: mount it from the host)",
            ),
        }
    }

    fn uprobes(&self) -> Check {
        if self.has_uprobes {
            Check::ok("uprobes", "supported")
        } else {
            let action = "use a kernel with CONFIG_UPROBE_EVENTS, and mount /sys";
            Check::missing("uprobes", "the kernel offers no uprobes", action)
        }
    }

    fn uprobe_multi(&self) -> Check {
        if self.version().is_some_and(|version| version >= UPROBE_MULTI) {
            Check::ok("uprobe_multi", "supported")
        } else {
            let action = "each entry point is attached by itself, which needs CAP_SYS_ADMIN on some kernels, and stopping takes some seconds";
            Check::limited("uprobe_multi", "not before kernel 6.6", action)
        }
    }

    /// Kernels from 6.11 on use a system call for return probes, which a filter may answer with
    /// death until commit cf6cb56ef244 exempted it.
    fn return_probes(&self) -> Option<Check> {
        let affected = self.version().is_some_and(|version| ((6, 11)..(6, 14)).contains(&version));
        affected.then(|| {
            Check::limited(
                "return_probes",
                "this kernel series had a defect that kills seccomp-filtered processes under return probes",
                "make sure that the kernel contains the fix cf6cb56ef244 before tracing containers",
            )
        })
    }

    fn capability_checks(&self) -> Vec<Check> {
        let Some(held) = &self.capabilities else {
            return vec![Check::limited("capabilities", "cannot be read", "loading will tell")];
        };
        let has = |any: &[Capability]| any.iter().any(|capability| held.contains(capability));
        let needed: [(&'static str, &[Capability], &'static str); 4] = [
            (
                "CAP_BPF",
                &[CAP_BPF, CAP_SYS_ADMIN],
                "add CAP_BPF (or run as root): programs cannot be loaded without it",
            ),
            (
                "CAP_PERFMON",
                &[CAP_PERFMON, CAP_SYS_ADMIN],
                "add CAP_PERFMON (or run as root): probes cannot be attached without it",
            ),
            (
                "CAP_SYS_PTRACE",
                &[CAP_SYS_PTRACE],
                "add CAP_SYS_PTRACE (or run as root): the files and libraries of other users' processes cannot be seen without it",
            ),
            (
                "CAP_DAC_READ_SEARCH",
                &[CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE],
                "add CAP_DAC_READ_SEARCH (or run as root): libraries in other containers cannot be read without it",
            ),
        ];
        let lacking: Vec<Check> = needed
            .iter()
            .filter(|(_, any, _)| !has(any))
            .map(|(name, _, action)| Check::missing("capabilities", format!("{name} is not held"), action))
            .collect();
        let mut checks = lacking;
        if checks.is_empty() {
            checks
                .push(Check::ok("capabilities", "CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH are held"));
        }
        if !has(&[CAP_CHECKPOINT_RESTORE, CAP_SYS_ADMIN]) {
            checks.push(Check::limited(
                "capabilities",
                "CAP_CHECKPOINT_RESTORE is not held",
                "libraries that were replaced on disk while in use cannot be traced without it",
            ));
        }
        checks
    }

    fn lockdown_check(&self) -> Option<Check> {
        // `none [integrity] confidentiality`; the file does not exist where the kernel has no lockdown.
        let mode = self.lockdown.as_deref()?.split_once('[')?.1.split_once(']')?.0;
        Some(if mode == "confidentiality" {
            let action = "boot without lockdown=confidentiality: BPF may not read memory under it";
            Check::missing("lockdown", "the kernel is locked down for confidentiality", action)
        } else {
            Check::ok("lockdown", mode.to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{HostFacts, PidNamespace, Seccomp, Visibility};
    use crate::doctor::Verdict;
    use caps::{Capability, CapsHashSet};

    fn good() -> HostFacts {
        HostFacts {
            release: "6.18.4-generic".into(),
            has_btf: true,
            tracefs: Some("/sys/kernel/tracing"),
            has_uprobes: true,
            capabilities: Some(caps::all()),
            lockdown: Some("[none] integrity confidentiality\n".into()),
            seccomp: Seccomp::Off,
            namespace: PidNamespace::Host,
            processes: Visibility::All,
        }
    }

    fn bad(facts: &HostFacts) -> Vec<(&'static str, Verdict)> {
        let checks = facts.checks();
        assert!(checks.iter().all(|check| (check.verdict == Verdict::Ok) == check.action.is_none()), "{checks:?}");
        checks.iter().filter(|c| c.verdict != Verdict::Ok).map(|c| (c.name, c.verdict)).collect()
    }

    #[test]
    fn a_good_host_has_nothing_to_complain_of() {
        assert_eq!(bad(&good()), []);
    }

    #[test]
    fn kernels_differ_in_what_they_offer() {
        let on = |release: &str| bad(&HostFacts { release: release.into(), ..good() });
        assert_eq!(on("6.6.0"), []);
        assert_eq!(on("6.1.0-40-cloud-amd64"), [("uprobe_multi", Verdict::Limited)]);
        assert_eq!(on("5.10.0"), [("kernel", Verdict::Limited), ("uprobe_multi", Verdict::Limited)]);
        assert_eq!(on("4.18.0-553.el8"), [("kernel", Verdict::Missing), ("uprobe_multi", Verdict::Limited)]);
        assert_eq!(on("6.12.3"), [("return_probes", Verdict::Limited)]);
        assert_eq!(on("odd"), [("kernel", Verdict::Limited), ("uprobe_multi", Verdict::Limited)]);
    }

    #[test]
    fn each_missing_right_is_named() {
        let without = |capability| {
            let mut held: CapsHashSet = caps::all();
            held.remove(&capability);
            held.remove(&Capability::CAP_SYS_ADMIN);
            held.remove(&Capability::CAP_DAC_OVERRIDE);
            let facts = HostFacts { capabilities: Some(held), ..good() };
            let checks = facts.checks();
            checks.into_iter().filter(|c| c.verdict != Verdict::Ok).map(|c| c.detail.into_owned()).collect::<Vec<_>>()
        };
        for capability in [
            Capability::CAP_BPF,
            Capability::CAP_PERFMON,
            Capability::CAP_SYS_PTRACE,
            Capability::CAP_DAC_READ_SEARCH,
            Capability::CAP_CHECKPOINT_RESTORE,
        ] {
            assert_eq!(without(capability), [format!("{capability} is not held")]);
        }
        assert_eq!(bad(&HostFacts { capabilities: Some(CapsHashSet::new()), ..good() }).len(), 5);
    }

    #[test]
    fn containers_and_hardened_kernels() {
        let facts = HostFacts {
            has_btf: false,
            tracefs: None,
            has_uprobes: false,
            lockdown: Some("none integrity [confidentiality]\n".into()),
            seccomp: Seccomp::Filtered,
            namespace: PidNamespace::Other,
            processes: Visibility::Hidden,
            ..good()
        };
        assert_eq!(
            bad(&facts),
            [
                ("btf", Verdict::Limited),
                ("tracefs", Verdict::Missing),
                ("uprobes", Verdict::Missing),
                ("lockdown", Verdict::Missing),
                ("seccomp", Verdict::Limited),
                ("pid_namespace", Verdict::Missing),
                ("procfs", Verdict::Missing),
            ]
        );
    }
}
