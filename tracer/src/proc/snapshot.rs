//! Records about processes: who was there before the tracer, and what became of whom.

use super::devices::FdScan;
use super::process::{ProcError, ProcRoot, Process, Stat};
use crate::owner::Owner;
use crate::record::{Event, Identity, Life, Task, Text};
use std::collections::{BTreeMap, BTreeSet};

/// Every process that holds GPU device files or is in `users` (those that map a driver library),
/// and all their ancestors, each parent before its children: lineage decides who is an orphan.
pub fn snapshot(root: &ProcRoot, scan: &FdScan, users: &BTreeSet<u32>) -> Vec<Event> {
    let files: BTreeMap<Identity, &[Text]> =
        scan.holders.iter().map(|holder| (holder.identity, holder.files.as_slice())).collect();
    let wanted = scan.holders.iter().map(|holder| holder.identity.tgid).chain(users.iter().copied());

    let mut seen = BTreeSet::new();
    let mut events = Vec::new();
    for pid in wanted {
        let mut line = Vec::new();
        let mut next = pid;
        // Process 0 is the kernel; a number met before ends the walk, whatever numbers were reused.
        while next != 0 && seen.insert(next) {
            let Ok((stat, life)) = root.process(next).and_then(|process| describe(&process)) else { break };
            let gpu_fds = files.get(&stat.identity).map(|files| files.to_vec()).unwrap_or_default();
            line.push(Event::ProcSnapshot { life, state: letter(stat.state), gpu_fds });
            next = stat.ppid;
        }
        events.extend(line.into_iter().rev());
    }
    events
}

/// A process whose start was not seen, now that it matters.
pub fn proc_start(root: &ProcRoot, pid: u32) -> Result<Event, ProcError> {
    let (_, life) = describe(&root.process(pid)?)?;
    Ok(Event::ProcStart { life })
}

/// What `/proc` says of `identity` now: its state, or that it is not there. A process that got the
/// number later is somebody else.
pub fn look_up(root: &ProcRoot, identity: Identity, comm: &Text) -> Result<Event, ProcError> {
    let looked = root.process(identity.tgid).and_then(|process| {
        let stat = process.stat()?;
        Ok((stat, optional(process.wchan())?, optional(process.cgroup())?))
    });
    match looked {
        Ok((stat, wchan, cgroup)) if stat.identity == identity => Ok(Event::ProcState {
            task: Task { pid: identity.tgid, identity, comm: stat.comm },
            state: letter(stat.state),
            ppid: stat.ppid,
            wchan: wchan.flatten(),
            cgroup: cgroup.filter(|path| !path.is_empty()),
        }),
        Ok(_) => Ok(absent(identity, comm)),
        Err(error) if error.is_gone() => Ok(absent(identity, comm)),
        Err(error) => Err(error),
    }
}

/// The record of a process that was looked for and is not there.
pub fn absent(identity: Identity, comm: &Text) -> Event {
    Event::ProcAbsent { task: Task { pid: identity.tgid, identity, comm: comm.clone() } }
}

fn describe(process: &Process) -> Result<(Stat, Life), ProcError> {
    let stat = process.stat()?;
    let cgroup = optional(process.cgroup())?.unwrap_or_default();
    let owner = Owner::of_cgroup(&cgroup);
    let life = Life {
        task: Task { pid: process.pid(), identity: stat.identity, comm: stat.comm.clone() },
        ppid: stat.ppid,
        cgroup,
        container: owner.container,
        pod: owner.pod_uid,
        nspid: optional(process.nspid())?.flatten(),
    };
    Ok((stat, life))
}

/// What may be withheld without the rest losing its worth: `wchan` needs ptrace rights, `cgroup` is
/// empty for a process that is being torn down.
fn optional<T>(result: Result<T, ProcError>) -> Result<Option<T>, ProcError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_gone() => Err(error),
        Err(_) => Ok(None),
    }
}

fn letter(state: char) -> Text {
    let mut text = Text::default();
    text.push(state);
    text
}
