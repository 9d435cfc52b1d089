//! Driver calls, booked on the process that made them.

use super::books::{Books, ContextEnd, Freed, Layer, New, Space, family_of, layer_of};
use super::process::Seen;
use super::{Effect, Ledger, REFUSALS, Refused};
use crate::record::{DeviceBalance, Event, Identity, LiveEntry, OpaqueId, Record, Task, Text};
use crate::units::SECOND;
use tracer_ebpf::Family;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

/// Whether a call asks for something or only gives back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Intent {
    Demand,
    Release,
}

/// A call that gives memory back.
struct Release<'a> {
    api: &'a Text,
    layer: Layer,
    space: Space,
    /// Bytes, where the source knows them.
    size: u64,
    device: Option<u32>,
}

impl Ledger {
    pub(super) fn apply_call(&mut self, record: &Record) {
        let ns = record.ts_ns;
        match &record.event {
            Event::Alloc { task, lib, api, handle, size, device, result, ctx, stack_id, pool, begin_ns, .. } => {
                let family = family_of(api);
                self.alloc(
                    task,
                    *result,
                    handle.as_ref(),
                    &New {
                        ns,
                        begin_ns: *begin_ns,
                        tid: task.pid,
                        family,
                        layer: layer_of(lib, api),
                        handle: handle.as_ref().unwrap_or(&OpaqueId::Number(0)),
                        size: *size,
                        device: *device,
                        ctx: ctx.as_ref(),
                        stack: stack_id.as_ref(),
                        pool: pool.as_ref(),
                    },
                );
            }
            Event::HostAlloc { task, api, handle, size, result, ctx, stack_id } => self.alloc(
                task,
                *result,
                handle.as_ref(),
                &New {
                    ns,
                    begin_ns: None,
                    tid: task.pid,
                    family: Family::Host,
                    layer: layer_of("", api),
                    handle: handle.as_ref().unwrap_or(&OpaqueId::Number(0)),
                    size: *size,
                    device: None,
                    ctx: ctx.as_ref(),
                    stack: stack_id.as_ref(),
                    pool: None,
                },
            ),
            Event::Free { task, lib, api, handle, size, device, result, .. } => {
                let space = Space::of(family_of(api));
                let release = Release { api, layer: layer_of(lib, api), space, size: *size, device: *device };
                self.free(task, &release, handle.as_ref(), *result, ns);
            }
            Event::HostFree { task, api, handle, size, result } => {
                let layer = layer_of("", api);
                let release = Release { api, layer, space: Space::Host, size: *size, device: None };
                self.free(task, &release, handle.as_ref(), *result, ns);
            }
            Event::FreeRefused { task, api, handle, size, device, result } => {
                self.free_refused(task, api, handle.as_ref(), *size, *device, *result, ns);
            }
            Event::CtxCreate { task, api, ctx, device, dur_ns, result } => {
                let primary = api.contains("Primary");
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                if *result == 0 {
                    if let Some(books) = self.books(id, ns) {
                        books.context_created(ctx.as_ref(), *device, primary, ns, *dur_ns);
                    }
                    self.effects.push(Effect::Context(id));
                }
            }
            Event::CtxDestroy { task, api, ctx, device, begin_ns, result, .. } => {
                let Some(id) = self.caller(task, ns, Intent::Release) else { return };
                let end = if api.contains("Reset") {
                    ContextEnd::Reset
                } else if api.contains("Release") {
                    ContextEnd::Release
                } else {
                    ContextEnd::Destroy
                };
                if *result == 0
                    && let Some(books) = self.books(id, ns)
                {
                    books.context_destroyed(ctx.as_ref(), *device, end, begin_ns.unwrap_or(ns), ns);
                }
            }
            Event::Map { task, va: Some(va), handle: Some(handle), size, result: 0 } => {
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.mapped(va, handle, *size);
                }
            }
            Event::Unmap { task, va: Some(va), size, result: 0 } => {
                let Some(id) = self.caller(task, ns, Intent::Release) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.unmapped(va, *size, ns);
                }
            }
            Event::IpcExport { task, ipc_id: Some(ipc), handle, result: 0, .. } => {
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                self.exported(id, ipc, handle.as_ref(), ns);
            }
            Event::IpcImport { task, ipc_id: Some(ipc), handle: Some(handle), size, device, result: 0, .. } => {
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.imported(ipc, handle, *size, *device, ns);
                }
            }
            Event::IpcClose { task, handle: Some(handle), result: 0, .. } => {
                let Some(id) = self.caller(task, ns, Intent::Release) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.import_closed(handle);
                }
            }
            Event::PoolAttr { task, pool, attr, value, result: 0, .. } if attr == "release_threshold" => {
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.pool_threshold(pool.as_ref(), *value);
                }
            }
            Event::PoolTrim { task, pool, keep, result: 0, .. } => {
                let Some(id) = self.caller(task, ns, Intent::Release) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.pool_trimmed(pool.as_ref(), *keep, ns);
                }
            }
            Event::ModuleLoad { task, count } => {
                let Some(id) = self.caller(task, ns, Intent::Demand) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.modules_loaded = books.modules_loaded.saturating_add(*count);
                }
            }
            Event::ModuleUnload { task, count } => {
                let Some(id) = self.caller(task, ns, Intent::Release) else { return };
                if let Some(books) = self.books(id, ns) {
                    books.modules_unloaded = books.modules_unloaded.saturating_add(*count);
                }
            }
            Event::Checkpoint { task, api, target_tgid, result } => {
                self.caller(task, ns, Intent::Release);
                self.checkpoint(api, *target_tgid, *result, ns);
            }
            Event::PoolAttr { task, .. }
            | Event::Map { task, .. }
            | Event::VaReserve { task, .. }
            | Event::IpcExport { task, .. }
            | Event::IpcImport { task, .. } => {
                self.caller(task, ns, Intent::Demand);
            }
            Event::PoolTrim { task, .. } | Event::Unmap { task, .. } | Event::IpcClose { task, .. } => {
                self.caller(task, ns, Intent::Release);
            }
            _ => {}
        }
    }

    /// The live process that made a call; a call delivered after its caller died changes nothing.
    fn caller(&mut self, task: &Task, ns: u64, intent: Intent) -> Option<Identity> {
        let id = self.ensure(task.identity, Seen::Implied, ns);
        let process = self.processes.get_mut(&id)?;
        if !process.is_alive() {
            return None;
        }
        if process.comm.is_empty() {
            process.comm.clone_from(&task.comm);
        }
        if !process.exited_threads.is_empty() {
            // The number of an exited thread was handed out again.
            process.exited_threads.remove(&task.pid);
        }
        process.alive_ns = ns;
        if process.active_in != self.pulse {
            process.active_in = self.pulse;
            self.active.push(id);
        }
        process.last_call_ns = Some(ns);
        if intent == Intent::Demand {
            process.last_demand_ns = Some(ns);
        }
        Some(id)
    }

    fn books(&mut self, id: Identity, ns: u64) -> Option<&mut Books> {
        if self.processes.get(&id)?.books.is_none() {
            self.used_gpu(id);
            self.processes.get_mut(&id)?.books = Some(Box::new(Books::new(ns)));
        }
        self.processes.get_mut(&id)?.books.as_deref_mut()
    }

    fn alloc(&mut self, task: &Task, result: i32, handle: Option<&OpaqueId>, new: &New<'_>) {
        let Some(id) = self.caller(task, new.ns, Intent::Demand) else { return };
        if result != 0 {
            if new.family != Family::Host
                && new.layer == Layer::Driver
                && let Some(failed) = Self::tally(&mut self.failed_allocs, id.tgid)
            {
                *failed = failed.saturating_add(1);
            }
            if result == OUT_OF_MEMORY && new.family != Family::Host {
                if self.refusals.len() == REFUSALS {
                    self.refusals.pop_front();
                }
                self.refusals.push_back(Refused {
                    ns: new.ns,
                    id,
                    comm: task.comm.clone(),
                    device: new.device,
                    size: new.size,
                });
            }
            if let Some(books) = self.books(id, new.ns) {
                books.failed_allocs = books.failed_allocs.saturating_add(1);
            }
            return;
        }
        if handle.is_none_or(OpaqueId::is_null) {
            return;
        }
        let Some(books) = self.books(id, new.ns) else { return };
        let reused = books.reused;
        books.allocated(new);
        if books.reused != reused {
            self.effects.push(Effect::Contradiction(id));
        }
    }

    fn free(&mut self, task: &Task, release: &Release<'_>, handle: Option<&OpaqueId>, result: i32, ns: u64) {
        let Release { api, layer, space, size, device } = *release;
        let Some(id) = self.caller(task, ns, Intent::Release) else { return };
        let Some(handle) = handle.filter(|handle| !handle.is_null()) else { return };
        let Some(books) = self.books(id, ns) else { return };
        if result != 0 {
            // A driver that is shutting down or a bad handle: only a live block makes it a fact.
            if books.holds(space, handle) {
                books.refused(api, result, ns, space, handle);
            }
            return;
        }
        // The runtime's call around the driver's, which has been booked already.
        if books.freed(space, handle, ns) == Freed::Known || layer == Layer::Runtime {
            return;
        }
        if books.import_closed(handle) || books.freed_unlisted(space, device, size, ns) {
            return;
        }
        books.unknown_frees = books.unknown_frees.saturating_add(1);
        self.losses.unknown_frees = self.losses.unknown_frees.saturating_add(1);
        self.effects.push(Effect::Contradiction(id));
    }

    #[expect(clippy::too_many_arguments, reason = "they are the fields of one record")]
    fn free_refused(
        &mut self,
        task: &Task,
        api: &Text,
        handle: Option<&OpaqueId>,
        size: u64,
        device: Option<u32>,
        result: i32,
        ns: u64,
    ) {
        let Some(id) = self.caller(task, ns, Intent::Release) else { return };
        let Some(handle) = handle.filter(|handle| !handle.is_null()) else { return };
        let family = family_of(api);
        let Some(books) = self.books(id, ns) else { return };
        let space = Space::of(family);
        if size > 0 && !books.holds(space, handle) {
            books.allocated(&New {
                ns,
                begin_ns: None,
                tid: task.pid,
                family,
                layer: Layer::Driver,
                handle,
                size,
                device,
                ctx: None,
                stack: None,
                pool: None,
            });
        }
        books.refused(api, result, ns, space, handle);
    }

    pub(super) fn lost(&mut self, ns: u64, count: u64, since_ns: Option<u64>, id: Option<Identity>) {
        self.losses.events = self.losses.events.saturating_add(count);
        self.losses.last_ns = Some(ns);
        let affected: Vec<Identity> = if let Some(id) = id {
            let id = self.ensure(id, Seen::Implied, ns);
            self.books(id, ns);
            vec![id]
        } else {
            let since = since_ns.unwrap_or(ns).saturating_sub(SECOND);
            self.gpu_users()
                .filter(|user| user.books.is_some() && user.last_call_ns.is_some_and(|last| last >= since))
                .map(|user| user.id)
                .collect()
        };
        if affected.is_empty() {
            self.losses.unassigned = self.losses.unassigned.saturating_add(1);
        }
        for id in affected {
            if let Some(books) = self.processes.get_mut(&id).and_then(|process| process.books.as_mut()) {
                books.lost = books.lost.saturating_add(count);
                books.unreliable_since_ns.get_or_insert(since_ns.unwrap_or(ns));
                self.effects.push(Effect::Contradiction(id));
            }
        }
    }

    pub(super) fn resync(&mut self, id: Identity, live: &[LiveEntry], balances: &[DeviceBalance], ns: u64) {
        let id = self.ensure(id, Seen::Implied, ns);
        if self.processes.get(&id).is_some_and(|process| !process.is_alive()) {
            return;
        }
        if let Some(books) = self.books(id, ns) {
            books.resync(live, balances, ns);
            self.effects.push(Effect::Contradiction(id));
        }
    }
}
