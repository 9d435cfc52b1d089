//! The driver functions a workload calls, one line each: the exported symbol, the name and version an application asks
//! `cuGetProcAddress` for to get that symbol, and the arguments.

use std::ffi::{c_int, c_uint};

use super::{CallError, Driver, abi};

/// Which flavour of a function `cuGetProcAddress` is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamFlavour {
    /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
    Legacy = 1,
    /// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`: gives the `_ptsz` symbol.
    PerThread = 2,
}

macro_rules! entry_points {
    ($($variant:ident $method:ident $symbol:literal = $base:literal $version:literal $flavour:ident
        ($($argument:ident: $type:ty),*);)*) => {
        /// A function of the driver API.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum EntryPoint { $($variant),* }

        impl EntryPoint {
            /// Every function, in the order of their discriminants.
            pub(crate) const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The exported symbol.
            pub(crate) fn symbol(self) -> &'static str {
                match self { $(Self::$variant => $symbol),* }
            }

            /// What `cuGetProcAddress` is asked for: base name, CUDA version, stream flavour.
            pub(crate) fn request(self) -> (&'static str, c_int, StreamFlavour) {
                match self { $(Self::$variant => ($base, $version, StreamFlavour::$flavour)),* }
            }
        }

        impl Driver {
            $(pub(crate) fn $method(&self, $($argument: $type),*) -> Result<(), CallError> {
                let address = self.address(EntryPoint::$variant)?;
                // SAFETY: the address is the driver's function of this name, whose C signature is the one written here
                // (a Rust reference and a C pointer have the same representation).
                let function = unsafe {
                    std::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> c_int>(address)
                };
                // SAFETY: references are valid for the call; the driver checks handles and addresses itself and
                // answers with an error code, which is what some workloads ask for.
                self.record(EntryPoint::$variant, unsafe { function($($argument),*) })
            })*
        }
    };
}

entry_points! {
    Init init "cuInit" = "cuInit" 2000 Legacy (flags: c_uint);
    DeviceGet device_get "cuDeviceGet" = "cuDeviceGet" 2000 Legacy (device: &mut c_int, ordinal: c_int);
    DeviceGetUuid device_get_uuid "cuDeviceGetUuid_v2" = "cuDeviceGetUuid" 11040 Legacy
        (uuid: &mut [u8; 16], device: c_int);
    PrimaryCtxRetain primary_ctx_retain "cuDevicePrimaryCtxRetain" = "cuDevicePrimaryCtxRetain" 7000 Legacy
        (context: &mut usize, device: c_int);
    PrimaryCtxRelease primary_ctx_release "cuDevicePrimaryCtxRelease_v2" = "cuDevicePrimaryCtxRelease" 11000 Legacy
        (device: c_int);
    CtxCreate ctx_create "cuCtxCreate_v2" = "cuCtxCreate" 3020 Legacy
        (context: &mut usize, flags: c_uint, device: c_int);
    CtxDestroy ctx_destroy "cuCtxDestroy_v2" = "cuCtxDestroy" 4000 Legacy (context: usize);
    CtxSetCurrent ctx_set_current "cuCtxSetCurrent" = "cuCtxSetCurrent" 4000 Legacy (context: usize);
    CtxPushCurrent ctx_push_current "cuCtxPushCurrent_v2" = "cuCtxPushCurrent" 4000 Legacy (context: usize);
    CtxPopCurrent ctx_pop_current "cuCtxPopCurrent_v2" = "cuCtxPopCurrent" 4000 Legacy (context: &mut usize);
    StreamSynchronize stream_synchronize "cuStreamSynchronize" = "cuStreamSynchronize" 2000 Legacy (stream: usize);
    MemAlloc mem_alloc "cuMemAlloc_v2" = "cuMemAlloc" 3020 Legacy (pointer: &mut u64, bytes: usize);
    MemAllocPitch mem_alloc_pitch "cuMemAllocPitch_v2" = "cuMemAllocPitch" 3020 Legacy
        (pointer: &mut u64, pitch: &mut usize, width_bytes: usize, height: usize, element_bytes: c_uint);
    MemAllocManaged mem_alloc_managed "cuMemAllocManaged" = "cuMemAllocManaged" 6000 Legacy
        (pointer: &mut u64, bytes: usize, flags: c_uint);
    MemFree mem_free "cuMemFree_v2" = "cuMemFree" 3020 Legacy (pointer: u64);
    MemAllocAsync mem_alloc_async "cuMemAllocAsync" = "cuMemAllocAsync" 11020 Legacy
        (pointer: &mut u64, bytes: usize, stream: usize);
    MemFreeAsync mem_free_async "cuMemFreeAsync" = "cuMemFreeAsync" 11020 Legacy (pointer: u64, stream: usize);
    MemAllocAsyncPtsz mem_alloc_async_ptsz "cuMemAllocAsync_ptsz" = "cuMemAllocAsync" 11020 PerThread
        (pointer: &mut u64, bytes: usize, stream: usize);
    MemFreeAsyncPtsz mem_free_async_ptsz "cuMemFreeAsync_ptsz" = "cuMemFreeAsync" 11020 PerThread
        (pointer: u64, stream: usize);
    MemHostAlloc mem_host_alloc "cuMemHostAlloc" = "cuMemHostAlloc" 2020 Legacy
        (pointer: &mut usize, bytes: usize, flags: c_uint);
    MemAllocHost mem_alloc_host "cuMemAllocHost_v2" = "cuMemAllocHost" 3020 Legacy
        (pointer: &mut usize, bytes: usize);
    MemFreeHost mem_free_host "cuMemFreeHost" = "cuMemFreeHost" 2000 Legacy (pointer: usize);
    MemCreate mem_create "cuMemCreate" = "cuMemCreate" 10020 Legacy
        (handle: &mut u64, bytes: usize, properties: &abi::AllocationProperties, flags: u64);
    MemRelease mem_release "cuMemRelease" = "cuMemRelease" 10020 Legacy (handle: u64);
    MemAddressReserve mem_address_reserve "cuMemAddressReserve" = "cuMemAddressReserve" 10020 Legacy
        (pointer: &mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    MemAddressFree mem_address_free "cuMemAddressFree" = "cuMemAddressFree" 10020 Legacy
        (pointer: u64, bytes: usize);
    MemMap mem_map "cuMemMap" = "cuMemMap" 10020 Legacy
        (pointer: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    MemUnmap mem_unmap "cuMemUnmap" = "cuMemUnmap" 10020 Legacy (pointer: u64, bytes: usize);
}
