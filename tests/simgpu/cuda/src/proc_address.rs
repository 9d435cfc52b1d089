//! `cuGetProcAddress`: the exported address of a function by its public name and a version.

use crate::code::{CuResult, INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::exports::EXPORTS;
use std::ffi::{CStr, c_char, c_int, c_void};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_STREAM: u64 = 2;
/// Since when the later form of a function is what its public name means (from the real library).
const LATER_FORMS: &[(&str, c_int)] = &[("_v4", 12_050), ("_v3", 11_040), ("_v2", 3_020)];
/// Functions whose `_v2` came later than CUDA 3.2.
const LATE_V2: &[(&str, c_int)] = &[
    ("cuGetProcAddress", 12_000),
    ("cuCtxDestroy", 4_000),
    ("cuCtxPushCurrent", 4_000),
    ("cuCtxPopCurrent", 4_000),
    ("cuStreamDestroy", 4_000),
    ("cuEventDestroy", 4_000),
    ("cuDeviceGetUuid", 11_040),
    ("cuDevicePrimaryCtxRelease", 11_000),
    ("cuDevicePrimaryCtxReset", 11_000),
    ("cuDevicePrimaryCtxSetFlags", 11_000),
    ("cuIpcOpenMemHandle", 11_000),
    ("cuCtxGetDevice", 13_000),
];

/// The export that `name` means in `version`.
fn find(name: &str, version: c_int, flags: u64) -> Option<extern "C" fn()> {
    let export = |wanted: &str| EXPORTS.iter().find(|(export, _)| *export == wanted).map(|(_, address)| *address);
    // A name with a suffix is no public name.
    if ["_v2", "_v3", "_v4", "_ptsz", "_ptds"].iter().any(|suffix| name.ends_with(suffix)) {
        return None;
    }
    if flags == PER_THREAD_STREAM
        && let Some(address) = export(&format!("{name}_ptsz"))
    {
        return Some(address);
    }
    let since = |suffix: &str, usual: c_int| match suffix {
        "_v2" => LATE_V2.iter().find(|(late, _)| *late == name).map_or(usual, |(_, since)| *since),
        _ => usual,
    };
    LATER_FORMS
        .iter()
        .filter(|(suffix, usual)| version >= since(suffix, *usual))
        .find_map(|(suffix, _)| export(&format!("{name}{suffix}")))
        .or_else(|| export(name))
}

/// The first form has no place for the reason.
pub(crate) extern "C" fn v1(symbol: *const c_char, out: *mut *const c_void, version: c_int, flags: u64) -> CuResult {
    v2(symbol, out, version, flags, std::ptr::null_mut())
}

/// `status` is 0 when found, 1 when there is no such symbol.
pub(crate) extern "C" fn v2(
    symbol: *const c_char,
    out: *mut *const c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> CuResult {
    if symbol.is_null() || out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the interface requires a terminated string.
    let name = unsafe { CStr::from_ptr(symbol) };
    let found = name.to_str().ok().and_then(|name| find(name, version, flags));
    // SAFETY: the interface requires valid pointers; `status` may be null.
    unsafe {
        out.write(found.map_or(std::ptr::null(), |address| address as *const c_void));
        if !status.is_null() {
            status.write(c_int::from(found.is_none()));
        }
    }
    if found.is_some() { SUCCESS } else { NOT_FOUND }
}
