//! `CUresult` values (cuda.h).

/// A `CUresult`.
pub(crate) type CuResult = i32;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const INVALID_VALUE: CuResult = 1;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const NOT_INITIALIZED: CuResult = 3;
pub(crate) const NO_DEVICE: CuResult = 100;
pub(crate) const INVALID_DEVICE: CuResult = 101;
pub(crate) const INVALID_CONTEXT: CuResult = 201;
pub(crate) const DEVICE_UNAVAILABLE: CuResult = 46;
pub(crate) const NOT_FOUND: CuResult = 500;
pub(crate) const NOT_SUPPORTED: CuResult = 801;

/// The outcome of a call inside the model.
pub(crate) type Outcome<T> = Result<T, CuResult>;

/// Name and description of the errors the model gives.
pub(crate) const NAMES: &[(CuResult, &std::ffi::CStr, &std::ffi::CStr)] = &[
    (SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (DEVICE_UNAVAILABLE, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
];
