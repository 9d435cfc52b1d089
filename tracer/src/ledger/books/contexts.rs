//! Contexts: how they come and end, and what the driver frees with them.

use super::{Books, CONTEXTS, Context, Key};
use crate::record::OpaqueId;
use tracer_ebpf::Family;

/// How a context ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ledger) enum ContextEnd {
    Destroy,
    Release,
    Reset,
}

impl Books {
    pub(super) fn context_of(&self, handle: Option<&OpaqueId>, device: Option<u32>) -> u32 {
        if let Some(handle) = handle {
            return self
                .contexts
                .iter()
                .rev()
                .find(|context| context.handle.as_ref() == Some(handle))
                .map_or(0, |context| context.serial);
        }
        let mut on_device = self.contexts.iter().filter(|context| device.is_none() || context.device == device);
        match (on_device.next(), on_device.next()) {
            (Some(only), None) => only.serial,
            _ => 0,
        }
    }

    pub(in crate::ledger) fn context_created(
        &mut self,
        handle: Option<&OpaqueId>,
        device: Option<u32>,
        primary: bool,
        ns: u64,
        dur_ns: u64,
    ) {
        if primary
            && let Some(context) =
                self.contexts.iter_mut().find(|context| context.primary && context.device == device && device.is_some())
        {
            context.refs = context.refs.saturating_add(1);
            return;
        }
        // A context at the address of an older one: the older one's end was lost, and with it that
        // of its memory.
        if let Some(old) = self
            .contexts
            .iter()
            .position(|context| handle.is_some() && context.handle.as_ref() == handle && context.device == device)
        {
            let gone = self.contexts.remove(old);
            self.free_with(&gone, ns, ns);
        }
        if self.contexts.len() >= CONTEXTS {
            return;
        }
        self.serial = self.serial.wrapping_add(1).max(1);
        self.contexts_created = self.contexts_created.saturating_add(1);
        self.context_ns = self.context_ns.saturating_add(dur_ns);
        self.contexts.push(Context {
            handle: handle.cloned(),
            device,
            primary,
            refs: 1,
            ns,
            dur_ns,
            serial: self.serial,
        });
    }

    /// Ends a context (or gives back a reference) and frees what the driver frees with it.
    pub(in crate::ledger) fn context_destroyed(
        &mut self,
        handle: Option<&OpaqueId>,
        device: Option<u32>,
        end: ContextEnd,
        begin_ns: u64,
        ns: u64,
    ) {
        let position = self.contexts.iter().position(|context| {
            context.ns <= begin_ns
                && match end {
                    ContextEnd::Destroy => handle.is_some() && context.handle.as_ref() == handle,
                    ContextEnd::Release | ContextEnd::Reset => {
                        context.primary
                            && (context.device == device || handle.is_some() && context.handle.as_ref() == handle)
                    }
                }
        });
        let Some(position) = position else {
            return;
        };
        if end == ContextEnd::Release
            && let Some(context) = self.contexts.get_mut(position)
            && context.refs > 1
        {
            context.refs -= 1;
            return;
        }
        let gone = self.contexts.remove(position);
        self.free_with(&gone, begin_ns, ns);
    }

    /// Frees what the driver frees with a context: what was made before its end began, but for
    /// physical memory and pools.
    fn free_with(&mut self, gone: &Context, begin_ns: u64, ns: u64) {
        let last_on_device = !self.contexts.iter().any(|context| context.device == gone.device);
        let last = self.contexts.is_empty();
        let doomed: Vec<Key> = self
            .live
            .iter()
            .filter(|(_, allocation)| {
                let in_context = !matches!(allocation.family, Family::Pool | Family::Vmm);
                let ours = match (allocation.owner, allocation.device) {
                    (0, None) => last,
                    (0, device) => last_on_device && device == gone.device,
                    (serial, _) => serial == gone.serial,
                };
                in_context && ours && allocation.ns <= begin_ns
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in doomed {
            self.remove(&key, ns);
        }
    }
}
