//! Process lists, in the layouts of their three versions.

use crate::code::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_AVAILABLE, Outcome, Return, SUCCESS};
use crate::session::{Device, Raw, with_device};
use simgpu::{Fault, Host};
use std::ffi::c_void;

/// GPU or compute instance of a process on a device that is not split.
const NO_INSTANCE: u32 = u32::MAX;
/// Bytes of a row: version 1 has pid and memory, later ones the instances as well, and early R535
/// drivers wrote 32 bytes under the name of the third version.
const ROW_V1: usize = 16;
const ROW: usize = 24;
const ROW_R535: usize = 32;

/// Which list.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    /// Compute processes: every client is one.
    Compute,
    /// Graphics and MPS processes: there are none.
    Empty,
}

struct Row {
    pid: u32,
    used: u64,
    gi: u32,
}

/// Rows of a device: clients with a context on it or memory of it. The handle of a split device
/// lists the processes of all instances without their memory.
fn rows(host: &Host, device: Device) -> Vec<Row> {
    let faults = host.faults();
    let no_values = faults.iter().any(|fault| matches!(fault, Fault::NoValues));
    let split = !host.config().mig.is_empty();
    let (index, gi) = match device {
        Device::Whole(index) => (index, None),
        Device::Instance(index, instance) => (index, host.config().mig.get(instance as usize).map(|mig| mig.gi)),
    };
    let clients = host.view().clients.into_iter().filter(|client| gi.is_none_or(|gi| client.gi == gi));
    clients
        .filter_map(|client| {
            let (_, bytes) = *client.billed.iter().find(|(device, _)| *device == index)?;
            let hidden = no_values || (split && gi.is_none());
            let used = if hidden { NOT_AVAILABLE } else { bytes };
            Some(Row { pid: client.pid, used, gi: if client.gi == 0 { NO_INSTANCE } else { client.gi } })
        })
        .collect()
}

/// Fills `out` with as many rows as there are; `count` is the room and then the number of rows.
pub(crate) fn list(handle: Raw, list: List, version: u32, count: *mut u32, out: *mut c_void) -> Return {
    let listed: Outcome<(Vec<Row>, usize)> = with_device(handle, |host, device| {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let rows = if list == List::Compute { rows(host, device) } else { Vec::new() };
        let wrong = version == 3 && host.faults().contains(&Fault::WrongStride);
        Ok((
            rows,
            if version == 1 {
                ROW_V1
            } else if wrong {
                ROW_R535
            } else {
                ROW
            },
        ))
    });
    let (rows, stride) = match listed {
        Ok(listed) => listed,
        Err(code) => return code,
    };
    // SAFETY: the interface requires a valid counter, and as many rows behind `out` as it says.
    unsafe {
        let room = count.read() as usize;
        count.write(rows.len() as u32);
        if rows.len() > room || (out.is_null() && !rows.is_empty()) {
            return INSUFFICIENT_SIZE;
        }
        for (index, row) in rows.iter().enumerate() {
            let at = out.byte_add(index * stride);
            at.cast::<u32>().write_unaligned(row.pid);
            at.byte_add(8).cast::<u64>().write_unaligned(row.used);
            if stride >= ROW {
                at.byte_add(16).cast::<u32>().write_unaligned(row.gi);
                at.byte_add(20).cast::<u32>().write_unaligned(if row.gi == NO_INSTANCE { NO_INSTANCE } else { 0 });
            }
            if stride == ROW_R535 {
                // usedGpuCcProtectedMemory
                at.byte_add(24).cast::<u64>().write_unaligned(0);
            }
        }
    }
    SUCCESS
}
