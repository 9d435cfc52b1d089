//! Kernel events as records.

use tracer_ebpf::{
    COMM_LEN, CallEvent, EventKind, Family, NO_CONTEXT, NO_DEVICE, ProcessEvent,
    symbols::{Op, Symbol, TABLE},
};

use crate::record::{Event, Identity, Life, OpaqueId, Task, Text};

/// `lib` of records made from probes on the driver library.
pub(super) const DRIVER_LIBRARY: &str = "libcuda";

/// `/proc/PID/stat` counts process starts in these (`USER_HZ` is 100 on every Linux that runs CUDA).
pub(super) const CLOCK_TICK_NS: u64 = 10_000_000;

/// The identity of a process as /proc tells it too: its start in whole clock ticks.
pub(super) fn identity(tgid: u32, start_ns: u64) -> Identity {
    Identity { tgid, start_ns: start_ns - start_ns % CLOCK_TICK_NS }
}

/// The entry point an event is about; `None` for an index outside the table.
pub(super) fn symbol(event: &CallEvent) -> Option<&'static Symbol> {
    TABLE.get(event.symbol as usize)
}

/// A task name as records hold it.
pub(super) fn comm(raw: &[u8; COMM_LEN]) -> Text {
    let name = raw.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).as_ref().into()
}

/// A driver call as a record. `identity` is the caller's process and `device` the NVML index of the
/// device the call is about, if known. Calls that say nothing the engine needs give `None`.
pub(super) fn call(event: &CallEvent, identity: Identity, device: Option<u32>) -> Option<Event> {
    let symbol = symbol(event)?;
    let task = Task { pid: event.tid, identity, comm: comm(&event.comm) };
    let api = Text::from(symbol.name);
    let handle = (event.handle != 0).then(|| OpaqueId::from(event.handle));
    let ctx = (event.context != NO_CONTEXT).then(|| OpaqueId::from(event.context));
    let dur_ns = event.ts_ns.saturating_sub(event.begin_ns);
    let (size, result) = (event.size, event.result);
    let refused = EventKind::from_raw(event.kind) == Some(EventKind::CallRefused);
    Some(match symbol.op {
        Op::Alloc if symbol.family == Family::Host => {
            Event::HostAlloc { task, api, handle, size, result, ctx, stack_id: None }
        }
        Op::Alloc => Event::Alloc {
            task,
            lib: DRIVER_LIBRARY.into(),
            api,
            handle,
            size,
            device,
            result,
            ctx,
            stack_id: None,
            pool: None,
            stream: None,
            begin_ns: None,
        },
        Op::Free if refused => Event::FreeRefused { task, api, handle, size, device, result },
        Op::Free if symbol.family == Family::Host => Event::HostFree { task, api, handle, size, result },
        Op::Free => Event::Free {
            task,
            lib: DRIVER_LIBRARY.into(),
            api,
            handle,
            size,
            device,
            result,
            stream: None,
            begin_ns: None,
        },
        Op::CtxCreate | Op::PrimaryRetain => Event::CtxCreate { task, api, ctx, device, dur_ns, result },
        Op::CtxDestroy | Op::PrimaryRelease | Op::PrimaryReset => {
            Event::CtxDestroy { task, api, ctx, device, dur_ns, begin_ns: Some(event.begin_ns), result }
        }
        Op::CtxSetCurrent | Op::CtxPush | Op::CtxPop | Op::DeviceUuid | Op::Init => return None,
    })
}

/// The ordinal a call gives, if any.
pub(super) fn ordinal(event: &CallEvent) -> Option<u32> {
    if event.device == NO_DEVICE { None } else { u32::try_from(event.device).ok() }
}

/// The sixteen bytes of a UUID told by `cuDeviceGetUuid`.
pub(super) fn uuid(event: &CallEvent) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&event.handle.to_le_bytes());
    uuid[8..].copy_from_slice(&event.size.to_le_bytes());
    uuid
}

/// Something in the life of a process as a record. What only /proc knows (control group, container)
/// is left empty: it is told when the process turns out to matter.
pub(super) fn life(event: &ProcessEvent, identity: Identity, parent: Option<Identity>) -> Option<Event> {
    let task = Task { pid: event.tid, identity, comm: comm(&event.comm) };
    let ppid = event.parent_tgid;
    let life = |task| Life { task, ppid, cgroup: Text::default(), container: None, pod: None, nspid: None };
    // Wait status (wait(2)): the low seven bits are the signal, the next byte the exit code.
    let (signal, code) = ((event.exit_code & 0x7f).cast_signed(), Some((event.exit_code >> 8 & 0xff).cast_signed()));
    Some(match EventKind::from_raw(event.kind)? {
        EventKind::Fork => {
            let parent = parent.unwrap_or(Identity { tgid: ppid, start_ns: 0 });
            Event::Fork { life: life(task), parent_tgid: parent.tgid, parent_start_ns: parent.start_ns }
        }
        EventKind::Exec => Event::Exec { life: life(task) },
        EventKind::Exit => Event::Exit { task, ppid, code, signal, group_dead: true },
        EventKind::ThreadExit => Event::Exit { task, ppid, code, signal, group_dead: false },
        EventKind::Call | EventKind::CallRefused => return None,
    })
}
