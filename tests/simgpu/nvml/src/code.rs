//! `nvmlReturn_t` values (nvml.h).

/// An `nvmlReturn_t`.
pub(crate) type Return = u32;

pub(crate) const SUCCESS: Return = 0;
pub(crate) const UNINITIALIZED: Return = 1;
pub(crate) const INVALID_ARGUMENT: Return = 2;
pub(crate) const NOT_SUPPORTED: Return = 3;
pub(crate) const NOT_FOUND: Return = 6;
pub(crate) const INSUFFICIENT_SIZE: Return = 7;
pub(crate) const DRIVER_NOT_LOADED: Return = 9;
pub(crate) const GPU_IS_LOST: Return = 15;
pub(crate) const ARGUMENT_VERSION_MISMATCH: Return = 25;
/// `NVML_VALUE_NOT_AVAILABLE`, as 64 bits.
pub(crate) const NOT_AVAILABLE: u64 = u64::MAX;

/// The outcome of a call.
pub(crate) type Outcome<T> = Result<T, Return>;

/// Descriptions, as `nvmlErrorString` gives them.
pub(crate) fn describe(code: Return) -> &'static std::ffi::CStr {
    match code {
        SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        GPU_IS_LOST => c"GPU is lost",
        ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
}
