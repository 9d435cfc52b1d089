//! Births and deaths: identities, names, places, and when a process may be forgotten.

use super::process::{Cause, Death, Image, KernelMessage, Process, Seen};
use super::{Effect, Ledger};
use crate::record::{Event, Identity, Life, Record, Task};
use crate::units::SECOND;

/// A dead process whose memory is back is remembered this long, for late records about it.
const REMEMBER_NS: u64 = 600 * SECOND;
/// Dead processes looked at in one go.
const LOOKED_AT: usize = 128;
/// Processes that wait for their parent to become known.
const WAITING: usize = 65_536;

impl Ledger {
    pub(super) fn apply_life(&mut self, record: &Record) {
        let ns = record.happened_ns();
        match &record.event {
            Event::TracerStart { probes_ok, self_tgid, driver } => {
                if driver.is_some() {
                    self.driver.clone_from(driver);
                }
                self.attached_ns.get_or_insert(ns);
                self.probes_ok = Some(*probes_ok);
                self.self_tgid = self_tgid.or(self.self_tgid);
            }
            Event::Unseen { part, reason: Some(reason) } => {
                self.unseen.insert(part.clone(), reason.clone());
            }
            Event::Unseen { part, reason: None } => {
                self.unseen.remove(part);
            }
            Event::ProcSnapshot { life, state, gpu_fds } => {
                let id = self.born(life, Seen::Snapshot, ns);
                let Some(process) = self.processes.get_mut(&id) else { return };
                process.gpu_files |= !gpu_fds.is_empty();
                process.told_state(state, None, ns);
                if process.gpu_files {
                    self.used_gpu(id);
                }
            }
            Event::ProcStart { life } => {
                self.born(life, Seen::Start, ns);
            }
            Event::Fork { life, parent_tgid, parent_start_ns } => {
                let parent =
                    self.ensure(Identity { tgid: *parent_tgid, start_ns: *parent_start_ns }, Seen::Implied, ns);
                let id = self.born(life, Seen::Fork, ns);
                if let Some(process) = self.processes.get_mut(&id) {
                    process.image = Image::Forked { ns };
                    process.forked_ns = Some(ns);
                }
                self.link(id, parent);
                let origin = self.processes.get(&parent);
                let place = origin.and_then(|parent| parent.places.last().cloned());
                let container = origin.and_then(|parent| parent.container.clone());
                let pod = origin.and_then(|parent| parent.pod.clone());
                if let Some(process) = self.processes.get_mut(&id) {
                    process.inherit_place(place, container, pod, ns);
                }
            }
            Event::Exec { life } => {
                let id = self.born(life, Seen::Implied, ns);
                let Some(process) = self.processes.get_mut(&id) else { return };
                process.image = Image::Executed { ns };
                process.comm.clone_from(&life.task.comm);
                process.gpu_files = false;
                process.exited_threads.clear();
                process.checkpoint = None;
                process.driver_maps = None;
                if let Some(books) = process.books.as_mut() {
                    books.replaced(ns);
                }
            }
            Event::Exit { task, code, signal, group_dead, ppid } => {
                let id = self.resolve(task.identity);
                let Some(process) = self.processes.get_mut(&id) else { return };
                if *ppid != 0 && process.ppid == 0 {
                    process.ppid = *ppid;
                }
                // The name it had in the end; other threads have names of their own.
                if task.pid == id.tgid && !task.comm.is_empty() {
                    process.comm.clone_from(&task.comm);
                }
                if *group_dead {
                    let cause = match (*code, *signal) {
                        (None, 0) => Cause::Unknown,
                        (code, signal) => Cause::Exit { code: code.unwrap_or(0), signal },
                    };
                    self.die(id, ns, cause);
                } else {
                    // The first thread's end is no more than another's: the process lives on.
                    process.thread_exited(task.pid);
                }
            }
            Event::Reap { task } | Event::ProcAbsent { task } => self.left(task, ns),
            Event::ProcState { task, state, ppid, wchan, cgroup } => {
                let id = self.resolve(task.identity);
                let Some(process) = self.processes.get_mut(&id) else { return };
                process.told_state(state, wchan.as_ref(), ns);
                let mut left_by = None;
                if process.is_alive() {
                    process.alive_ns = ns;
                    if *ppid != 0 && *ppid != process.ppid {
                        if process.ppid != 0 {
                            process.reparented = Some((process.ppid, ns));
                            left_by = process.parent.filter(|parent| parent.tgid == process.ppid);
                        }
                        process.ppid = *ppid;
                    }
                    if let Some(cgroup) = cgroup {
                        process.moved(cgroup, ns);
                    }
                    if !task.comm.is_empty() {
                        process.comm.clone_from(&task.comm);
                    }
                }
                // The kernel gives a child another parent only when its own has died.
                if let Some(parent) = left_by
                    && self.processes.get(&parent).is_some_and(Process::is_alive)
                {
                    self.die(parent, ns, Cause::Unknown);
                }
            }
            Event::Signal { task, sig } => {
                let id = self.resolve(task.identity);
                if let Some(process) = self.processes.get_mut(&id) {
                    process.signal = Some((*sig, ns));
                }
            }
            Event::CommChange { task, new_comm } => {
                let id = self.resolve(task.identity);
                // A thread's own name is not its process's.
                if task.pid == id.tgid
                    && let Some(process) = self.processes.get_mut(&id)
                {
                    let before = std::mem::replace(&mut process.comm, new_comm.clone());
                    process.renamed = Some((before, ns));
                }
            }
            Event::Kmsg { facility, pid: Some(pid), text, .. } => {
                let id = self.resolve(Identity { tgid: *pid, start_ns: 0 });
                if let Some(process) = self.processes.get_mut(&id) {
                    let text = text.clone().unwrap_or_default();
                    process.told_by_kernel(KernelMessage { ns, facility: facility.clone(), text });
                }
            }
            Event::CgroupMove { task, old, new } => {
                let id = self.resolve(task.identity);
                if let Some(process) = self.processes.get_mut(&id) {
                    if process.places.is_empty() {
                        let since = process.seen_ns;
                        process.moved(old, since);
                    }
                    process.moved(new, ns);
                }
            }
            _ => {}
        }
    }

    /// The identity a record means: sources without start times mean whoever has the number now.
    pub(super) fn resolve(&self, id: Identity) -> Identity {
        if id.start_ns != 0 || self.processes.contains_key(&id) {
            return id;
        }
        self.by_tgid.get(&id.tgid).copied().unwrap_or(id)
    }

    /// Makes sure a process is known, and ends whoever had its number before.
    pub(super) fn ensure(&mut self, id: Identity, seen: Seen, ns: u64) -> Identity {
        let id = self.resolve(id);
        if self.processes.contains_key(&id) {
            return id;
        }
        if self.processes.len() >= self.remembered_processes {
            self.make_room();
        }
        let before = self.by_tgid.get(&id.tgid).copied();
        let mut process = Process::new(id, seen, ns);
        match before {
            // A row named the number before anything told its start: it is this process.
            Some(old) if old.start_ns == 0 => {
                if let Some(placeholder) = self.processes.remove(&old) {
                    process.rows = placeholder.rows;
                    process.books = placeholder.books;
                    process.children = placeholder.children;
                    for child in process.children.clone() {
                        if let Some(child) = self.processes.get_mut(&child) {
                            child.parent = Some(id);
                        }
                    }
                    if self.users.remove(&old) {
                        self.users.insert(id);
                    }
                }
            }
            Some(old) if old.start_ns <= id.start_ns => self.die(old, ns, Cause::Unknown),
            // A late record about an earlier owner of the number.
            Some(_) => {
                process.death = Some(Death { ns, cause: Cause::Unknown });
                self.just_died.push(id);
            }
            None => {}
        }
        if process.is_alive() {
            self.by_tgid.insert(id.tgid, id);
        }
        self.processes.insert(id, process);
        if let Some(children) = self.orphaned_parents.remove(&id.tgid) {
            for child in children {
                if child.start_ns >= id.start_ns && child != id {
                    self.link(child, id);
                }
            }
        }
        id
    }

    fn born(&mut self, life: &Life, seen: Seen, ns: u64) -> Identity {
        let known = self.processes.contains_key(&self.resolve(life.task.identity));
        let id = self.ensure(life.task.identity, seen, ns);
        let Some(process) = self.processes.get_mut(&id) else { return id };
        if process.is_alive() {
            process.alive_ns = ns;
        }
        if seen != Seen::Implied && process.seen == Seen::Implied {
            process.seen = seen;
        }
        if process.comm.is_empty() {
            process.comm.clone_from(&life.task.comm);
        }
        if life.ppid != 0 {
            process.ppid = life.ppid;
        }
        process.moved(&life.cgroup, ns);
        if life.container.is_some() {
            process.container.clone_from(&life.container);
        }
        if life.pod.is_some() {
            process.pod.clone_from(&life.pod);
        }
        process.nspid = life.nspid.or(process.nspid);
        if !known && seen != Seen::Fork && process.parent.is_none() {
            self.find_parent(id, life.ppid);
        }
        id
    }

    /// Links a process to the parent it has when it becomes known; later parents adopted it.
    fn find_parent(&mut self, id: Identity, ppid: u32) {
        if ppid == 0 || ppid == id.tgid {
            return;
        }
        match self.by_tgid.get(&ppid).copied() {
            Some(parent) if parent.start_ns <= id.start_ns => self.link(id, parent),
            Some(_) => {}
            None => {
                if self.orphaned_parents.len() < WAITING {
                    let waiting = self.orphaned_parents.entry(ppid).or_default();
                    if waiting.len() < 4096 {
                        waiting.push(id);
                    }
                }
            }
        }
    }

    fn left(&mut self, task: &Task, ns: u64) {
        let mut id = self.resolve(task.identity);
        if !self.processes.contains_key(&id) {
            // NVML may have named a number whose process nobody ever saw.
            let nameless = Identity { tgid: id.tgid, start_ns: 0 };
            if !self.processes.contains_key(&nameless) {
                return;
            }
            id = nameless;
        }
        self.die(id, ns, Cause::Unknown);
        if let Some(process) = self.processes.get_mut(&id) {
            process.gone_ns.get_or_insert(ns);
            if process.comm.is_empty() {
                process.comm.clone_from(&task.comm);
            }
        }
    }

    /// Ends a process.
    pub(super) fn die(&mut self, id: Identity, ns: u64, cause: Cause) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        if let Some(death) = &mut process.death {
            // The exit may be delivered after its consequences.
            if death.cause == Cause::Unknown && cause != Cause::Unknown {
                *death = Death { ns: ns.min(death.ns), cause };
                let exit_ns = death.ns;
                for (_, teardown) in self.teardowns.range_mut((id, 0, None)..=(id, u32::MAX, Some(u32::MAX))) {
                    teardown.exit_ns = exit_ns;
                }
                self.effects.push(Effect::Died(id));
            }
            return;
        }
        process.death = Some(Death { ns, cause });
        if process.outstanding() > 0 || process.books.as_ref().is_some_and(|books| books.peak > 0) {
            let peak = process.books.as_ref().map_or(0, |books| books.peak);
            if let Some(known) = Self::tally(&mut self.peaks, id.tgid) {
                *known = (*known).max(peak);
            }
        }
        self.users.remove(&id);
        if let Some(scan) = &mut self.scan
            && scan.ids.remove(&id)
        {
            scan.holders.retain(|holder| holder.identity != id);
        }
        self.open_teardowns(id, ns);
        self.effects.push(Effect::Died(id));
        if let Some(books) = self.processes.get_mut(&id).and_then(|process| process.books.as_mut()) {
            books.close();
        }
        self.just_died.push(id);
    }

    pub(super) fn used_gpu(&mut self, id: Identity) {
        if self.processes.get(&id).is_some_and(Process::is_alive) && self.users.insert(id) {
            self.effects.push(Effect::GpuUser(id));
        }
    }

    /// Most processes of a host never touch a GPU: they are forgotten once their end has been looked at.
    pub(super) fn forget_the_idle(&mut self) {
        while let Some(id) = self.just_died.pop() {
            let idle =
                self.processes.get(&id).is_some_and(|process| !process.uses_gpu() && process.children.is_empty());
            if idle {
                self.forget(id, false);
            } else {
                self.dead.push_back(id);
            }
        }
    }

    /// Forgets the dead that no longer matter.
    pub(crate) fn forget_the_old(&mut self) {
        let now = self.now;
        for _ in 0..self.dead.len().min(LOOKED_AT + self.dead.len().saturating_sub(self.remembered_dead)) {
            let Some(id) = self.dead.pop_front() else { break };
            let Some(process) = self.processes.get(&id) else { continue };
            let Some(death) = process.death else { continue };
            let full = self.dead.len() >= self.remembered_dead;
            let old = death.ns.saturating_add(REMEMBER_NS) < now;
            let open = self.has_open_teardown(id);
            // What others have open of it goes on being its memory.
            let pins = || !process.exports.is_empty() && !self.importers_of(id).is_empty();
            if full || old && !open && process.children.is_empty() && !pins() {
                self.forget(id, full);
                continue;
            }
            self.dead.push_back(id);
        }
        let stale =
            |teardown: &super::Teardown| teardown.returned_ns.is_some_and(|ns| ns.saturating_add(60 * SECOND) < now);
        self.teardowns.retain(|_, teardown| !stale(teardown));
    }

    fn has_open_teardown(&self, id: Identity) -> bool {
        self.teardowns
            .range((id, 0, None)..=(id, u32::MAX, Some(u32::MAX)))
            .any(|(_, teardown)| teardown.returned_ns.is_none())
    }

    fn forget(&mut self, id: Identity, force: bool) {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let Some(process) = self.processes.remove(&id) else { break };
            if self.by_tgid.get(&id.tgid) == Some(&id) {
                self.by_tgid.remove(&id.tgid);
            }
            self.users.remove(&id);
            if force {
                self.losses.dropped = self.losses.dropped.saturating_add(1);
                let gone: Vec<_> =
                    self.teardowns.range((id, 0, None)..=(id, u32::MAX, Some(u32::MAX))).map(|(key, _)| *key).collect();
                for key in gone {
                    self.teardowns.remove(&key);
                }
            }
            for child in &process.children {
                if let Some(child) = self.processes.get_mut(child) {
                    child.parent = None;
                }
            }
            if let Some(parent) = process.parent
                && let Some(parent_process) = self.processes.get_mut(&parent)
            {
                parent_process.children.remove(&id);
                if !parent_process.is_alive() && parent_process.children.is_empty() && !parent_process.uses_gpu() {
                    next = Some(parent);
                }
            }
        }
    }

    /// Too many live processes: those that never used a GPU and made no one go first.
    fn make_room(&mut self) {
        let mut idle: Vec<Identity> = self
            .processes
            .values()
            .filter(|process| !process.uses_gpu() && process.children.is_empty())
            .map(|process| process.id)
            .collect();
        if idle.is_empty() {
            idle = self.processes.keys().copied().collect();
        }
        idle.sort_unstable_by_key(|id| (id.start_ns, id.tgid));
        idle.truncate(idle.len() / 2 + 1);
        for id in idle {
            self.forget(id, true);
        }
    }
}
