//! C structures of the driver API that a workload fills in (`cuda.h`, unchanged since CUDA 10.2 for these fields).

use std::ffi::{c_int, c_uchar, c_ushort, c_void};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_TYPE_DEVICE: c_int = 1;
/// `CU_MEM_ATTACH_GLOBAL`, the flag of `cuMemAllocManaged`.
pub(crate) const MEM_ATTACH_GLOBAL: u32 = 1;

/// `CUmemAllocationProp`: what `cuMemCreate` is asked for.
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    requested_handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    win32_handle_metadata: *mut c_void,
    compression_type: c_uchar,
    gpu_direct_rdma_capable: c_uchar,
    usage: c_ushort,
    reserved: [c_uchar; 4],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32);

impl AllocationProperties {
    /// Physical memory of `device`, not exportable.
    pub(crate) fn on_device(device: c_int) -> Self {
        Self {
            kind: ALLOCATION_TYPE_PINNED,
            requested_handle_types: 0,
            location_type: LOCATION_TYPE_DEVICE,
            location_id: device,
            win32_handle_metadata: std::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}
