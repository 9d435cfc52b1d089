//! The exported functions: C signatures on the outside, the model behind.

use crate::code::{self, CuResult, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Outcome, SUCCESS};
use crate::stub::stubs;
use crate::{context, device, driver, memory, pool, proc_address, sharing, vmm};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type Handle = u64;
type Size = usize;

/// The result code of an outcome without a value.
fn done(outcome: Outcome<()>) -> CuResult {
    outcome.err().unwrap_or(SUCCESS)
}

/// Runs `call` and writes its value through `out`, which must not be null.
fn put<T>(out: *mut T, call: impl FnOnce() -> Outcome<T>) -> CuResult {
    if out.is_null() {
        return INVALID_VALUE;
    }
    match call() {
        Ok(value) => {
            // SAFETY: the interface requires a valid pointer to such a value.
            unsafe { out.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

fn ordinal(device: c_int) -> Outcome<u32> {
    u32::try_from(device).map_err(|_| INVALID_DEVICE)
}

fn succeed() -> Outcome<()> {
    driver::with(|_| Ok(()))
}

extern "C" fn init(_flags: c_uint) -> CuResult {
    done(driver::init())
}

extern "C" fn driver_version(out: *mut c_int) -> CuResult {
    let directory = std::env::var_os(simgpu::DIRECTORY);
    let host = directory.and_then(|directory| simgpu::Host::open(directory.as_ref()).ok());
    put(out, || Ok(host.map_or(12_040, |host| host.config().cuda)))
}

extern "C" fn error_name(error: CuResult, out: *mut *const c_char) -> CuResult {
    put(out, || named(error).map(|(name, _)| name.as_ptr()))
}

extern "C" fn error_string(error: CuResult, out: *mut *const c_char) -> CuResult {
    put(out, || named(error).map(|(_, text)| text.as_ptr()))
}

fn named(error: CuResult) -> Outcome<(&'static CStr, &'static CStr)> {
    code::NAMES.iter().find(|(code, ..)| *code == error).map(|(_, name, text)| (*name, *text)).ok_or(INVALID_VALUE)
}

// Devices

extern "C" fn device_count(out: *mut c_int) -> CuResult {
    put(out, || driver::with(|driver| Ok(driver.visible.len() as c_int)))
}

extern "C" fn device_get(out: *mut c_int, number: c_int) -> CuResult {
    put(out, || {
        let device = ordinal(number)?;
        driver::with(|driver| driver.visible.get(device as usize).map(|_| number).ok_or(INVALID_DEVICE))
    })
}

/// Host index of a device this process sees.
fn index(device: c_int) -> Outcome<u32> {
    let ordinal = ordinal(device)?;
    driver::with(|driver| driver.visible.get(ordinal as usize).copied().ok_or(INVALID_DEVICE))
}

extern "C" fn device_name(out: *mut c_char, length: c_int, device: c_int) -> CuResult {
    let name = index(device).and_then(|_| driver::with(|driver| Ok(driver.client.host().config().name.clone())));
    text(out, length, name)
}

extern "C" fn device_pci(out: *mut c_char, length: c_int, device: c_int) -> CuResult {
    let address = index(device).and_then(|index| driver::with(|driver| Ok(driver.client.host().config().pci(index))));
    text(out, length, address)
}

/// Writes a string and its terminator, cut to `length` bytes.
fn text(out: *mut c_char, length: c_int, text: Outcome<String>) -> CuResult {
    let (Ok(length), false) = (usize::try_from(length), out.is_null()) else { return INVALID_VALUE };
    match text {
        Ok(text) if length > 0 => {
            let length = text.len().min(length - 1);
            // SAFETY: the interface requires room for `length` bytes.
            unsafe {
                out.copy_from_nonoverlapping(text.as_ptr().cast(), length);
                out.add(length).write(0);
            }
            SUCCESS
        }
        Ok(_) => INVALID_VALUE,
        Err(code) => code,
    }
}

extern "C" fn device_uuid(out: *mut [u8; 16], device: c_int) -> CuResult {
    put(out, || {
        let index = index(device)?;
        driver::with(|driver| Ok(driver.client.host().config().uuid_bytes(index)))
    })
}

extern "C" fn device_memory(out: *mut Size, device: c_int) -> CuResult {
    put(out, || {
        index(device)?;
        driver::with(|driver| Ok(driver.total() as Size))
    })
}

extern "C" fn device_attribute(out: *mut c_int, attribute: c_int, device: c_int) -> CuResult {
    put(out, || index(device).map(|_| device::attribute(attribute)))
}

extern "C" fn compute_capability(major: *mut c_int, minor: *mut c_int, device: c_int) -> CuResult {
    match put(major, || index(device).map(|_| 9)) {
        SUCCESS => put(minor, || Ok(0)),
        code => code,
    }
}

// Contexts

extern "C" fn ctx_create(out: *mut Handle, _flags: c_uint, device: c_int) -> CuResult {
    put(out, || context::create(ordinal(device)?))
}

extern "C" fn ctx_create_v3(out: *mut Handle, _: *const c_void, _: c_int, flags: c_uint, device: c_int) -> CuResult {
    ctx_create(out, flags, device)
}

extern "C" fn ctx_create_v4(out: *mut Handle, _: *const c_void, flags: c_uint, device: c_int) -> CuResult {
    ctx_create(out, flags, device)
}

extern "C" fn ctx_destroy(context: Handle) -> CuResult {
    done(context::destroy(context))
}

extern "C" fn primary_retain(out: *mut Handle, device: c_int) -> CuResult {
    put(out, || context::retain(ordinal(device)?))
}

extern "C" fn primary_release(device: c_int) -> CuResult {
    done(ordinal(device).and_then(context::release))
}

extern "C" fn primary_reset(device: c_int) -> CuResult {
    done(ordinal(device).and_then(context::reset))
}

extern "C" fn primary_state(device: c_int, flags: *mut c_uint, active: *mut c_int) -> CuResult {
    match put(active, || context::is_active(ordinal(device)?).map(c_int::from)) {
        SUCCESS => put(flags, || Ok(0)),
        code => code,
    }
}

extern "C" fn primary_flags(device: c_int, _flags: c_uint) -> CuResult {
    done(index(device).map(drop))
}

extern "C" fn ctx_set_current(context: Handle) -> CuResult {
    done(context::set_current(context))
}

extern "C" fn ctx_push(context: Handle) -> CuResult {
    done(context::push(context))
}

extern "C" fn ctx_pop(out: *mut Handle) -> CuResult {
    let popped = succeed().and_then(|()| context::pop());
    if out.is_null() { done(popped.map(drop)) } else { put(out, || popped) }
}

extern "C" fn ctx_current(out: *mut Handle) -> CuResult {
    put(out, || succeed().map(|()| context::current().unwrap_or(0)))
}

extern "C" fn ctx_device(out: *mut c_int) -> CuResult {
    put(out, || context::device_of(0).map(|ordinal| ordinal as c_int))
}

extern "C" fn ctx_device_v2(out: *mut c_int, context: Handle) -> CuResult {
    put(out, || context::device_of(context).map(|ordinal| ordinal as c_int))
}

extern "C" fn ctx_api_version(_context: Handle, out: *mut c_uint) -> CuResult {
    put(out, || succeed().map(|()| 3020))
}

extern "C" fn ctx_flags(out: *mut c_uint) -> CuResult {
    put(out, || context::device_of(0).map(|_| 0))
}

extern "C" fn ctx_get_limit(out: *mut Size, _limit: c_int) -> CuResult {
    put(out, || context::device_of(0).map(|_| 1024))
}

extern "C" fn ctx_set_limit(_limit: c_int, _value: Size) -> CuResult {
    done(context::device_of(0).map(drop))
}

// Memory

extern "C" fn mem_alloc(out: *mut u64, bytes: Size) -> CuResult {
    put(out, || memory::allocate(bytes as u64))
}

/// Device addresses do not fit the 32 bits of this version: like the real one with a large address
/// space, it has none to give.
extern "C" fn mem_alloc_v1(_out: *mut u32, _bytes: c_uint) -> CuResult {
    done(succeed().and(Err(code::OUT_OF_MEMORY)))
}

extern "C" fn mem_alloc_pitch(
    out: *mut u64,
    pitch: *mut Size,
    width: Size,
    height: Size,
    _element: c_uint,
) -> CuResult {
    let row = width.checked_next_multiple_of(512);
    let bytes = || row.and_then(|row| row.checked_mul(height)).ok_or(code::OUT_OF_MEMORY);
    match put(out, || memory::allocate(bytes()? as u64)) {
        SUCCESS => put(pitch, || Ok(row.unwrap_or_default())),
        code => code,
    }
}

extern "C" fn mem_alloc_pitch_v1(out: *mut u32, _: *mut c_uint, _: c_uint, _: c_uint, _: c_uint) -> CuResult {
    mem_alloc_v1(out, 0)
}

extern "C" fn mem_free(address: u64) -> CuResult {
    done(memory::free(address))
}

extern "C" fn mem_free_v1(address: u32) -> CuResult {
    done(memory::free(u64::from(address)))
}

extern "C" fn mem_alloc_managed(out: *mut u64, bytes: Size, _flags: c_uint) -> CuResult {
    put(out, || memory::allocate_managed(bytes as u64))
}

extern "C" fn mem_info(free: *mut Size, total: *mut Size) -> CuResult {
    let info = memory::info();
    match put(free, || info.map(|(free, _)| free as Size)) {
        SUCCESS => put(total, || info.map(|(_, total)| total as Size)),
        code => code,
    }
}

extern "C" fn mem_host_alloc(out: *mut u64, bytes: Size, _flags: c_uint) -> CuResult {
    put(out, || memory::allocate_host(bytes as u64))
}

extern "C" fn mem_alloc_host(out: *mut u64, bytes: Size) -> CuResult {
    put(out, || memory::allocate_host(bytes as u64))
}

extern "C" fn mem_alloc_host_v1(out: *mut u64, bytes: c_uint) -> CuResult {
    put(out, || memory::allocate_host(u64::from(bytes)))
}

extern "C" fn mem_free_host(address: u64) -> CuResult {
    done(memory::free_host(address))
}

extern "C" fn mem_host_device_pointer(out: *mut u64, address: u64, _flags: c_uint) -> CuResult {
    put(out, || succeed().map(|()| address))
}

/// Copies and fills have no effect.
extern "C" fn mem_op() -> CuResult {
    done(context::device_of(0).map(drop))
}

// Stream-ordered memory

extern "C" fn mem_alloc_async(out: *mut u64, bytes: Size, _stream: Handle) -> CuResult {
    put(out, || pool::allocate(bytes as u64, None))
}

extern "C" fn mem_alloc_from_pool(out: *mut u64, bytes: Size, pool: Handle, _stream: Handle) -> CuResult {
    put(out, || pool::allocate(bytes as u64, Some(pool)))
}

extern "C" fn mem_free_async(address: u64, _stream: Handle) -> CuResult {
    done(pool::free(address))
}

extern "C" fn pool_get(out: *mut Handle, device: c_int) -> CuResult {
    put(out, || pool::current(ordinal(device)?))
}

extern "C" fn pool_set(device: c_int, pool: Handle) -> CuResult {
    done(ordinal(device).and_then(|ordinal| pool::set_current(ordinal, pool)))
}

/// `CUmemPoolProps`: the device is at offset 12 (cuda.h: allocType, handleTypes, location {type, id}).
extern "C" fn pool_create(out: *mut Handle, properties: *const [i32; 22]) -> CuResult {
    if properties.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the interface requires a valid pointer to 88 bytes.
    let device = unsafe { (*properties)[3] };
    put(out, || pool::create(ordinal(device)?))
}

extern "C" fn pool_destroy(pool: Handle) -> CuResult {
    done(pool::destroy(pool))
}

extern "C" fn pool_trim(pool: Handle, keep: Size) -> CuResult {
    done(pool::trim(pool, keep as u64))
}

extern "C" fn pool_set_attribute(pool: Handle, attribute: c_int, value: *const u64) -> CuResult {
    if value.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the interface requires a valid pointer: to 64 bits for the threshold, to 32 for others.
    let value = if attribute == 4 { unsafe { value.read() } } else { 0 };
    done(pool::set_attribute(pool, attribute, value))
}

extern "C" fn pool_attribute(pool: Handle, attribute: c_int, out: *mut u64) -> CuResult {
    put(out, || pool::attribute(pool, attribute))
}

// Virtual memory management

/// `CUmemAllocationProp`: the device is at offset 12.
extern "C" fn mem_create(out: *mut Handle, bytes: Size, properties: *const [i32; 8], _flags: u64) -> CuResult {
    if properties.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the interface requires a valid pointer to 32 bytes.
    let device = unsafe { (*properties)[3] };
    put(out, || vmm::create(ordinal(device)?, bytes as u64))
}

extern "C" fn mem_release(handle: Handle) -> CuResult {
    done(vmm::release(handle))
}

extern "C" fn mem_retain(out: *mut Handle, address: u64) -> CuResult {
    put(out, || vmm::retain(address))
}

extern "C" fn mem_reserve(out: *mut u64, bytes: Size, _alignment: Size, _address: u64, _flags: u64) -> CuResult {
    put(out, || vmm::reserve(bytes as u64))
}

extern "C" fn mem_unreserve(address: u64, bytes: Size) -> CuResult {
    done(vmm::unreserve(address, bytes as u64))
}

extern "C" fn mem_map(address: u64, bytes: Size, _offset: Size, handle: Handle, _flags: u64) -> CuResult {
    done(vmm::map(address, bytes as u64, handle))
}

extern "C" fn mem_unmap(address: u64, bytes: Size) -> CuResult {
    done(vmm::unmap(address, bytes as u64))
}

extern "C" fn mem_set_access(_address: u64, _bytes: Size, _descriptors: *const c_void, _count: Size) -> CuResult {
    done(succeed())
}

extern "C" fn mem_granularity(out: *mut Size, _properties: *const c_void, _option: c_int) -> CuResult {
    put(out, || succeed().map(|()| simgpu::PAGE as Size))
}

// Memory of other processes

/// `CUipcMemHandle`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u64; 8]);

extern "C" fn ipc_get(out: *mut IpcHandle, address: u64) -> CuResult {
    put(out, || sharing::export(address).map(|words| IpcHandle([words[0], words[1], words[2], words[3], 0, 0, 0, 0])))
}

extern "C" fn ipc_open(out: *mut u64, handle: IpcHandle, _flags: c_uint) -> CuResult {
    let [first, second, third, fourth, ..] = handle.0;
    put(out, || sharing::open([first, second, third, fourth]))
}

extern "C" fn ipc_close(address: u64) -> CuResult {
    done(sharing::close(address))
}

// Streams, events, modules: they exist and do nothing but release pools when waited for

extern "C" fn object_create(out: *mut Handle) -> CuResult {
    put(out, || driver::with(|driver| Ok(driver.handle())))
}

extern "C" fn object_destroy(handle: Handle) -> CuResult {
    done(driver::with(|driver| {
        driver.retire(handle);
        Ok(())
    }))
}

extern "C" fn synchronize() -> CuResult {
    done(pool::synchronized())
}

extern "C" fn query() -> CuResult {
    done(succeed())
}

extern "C" fn event_elapsed(out: *mut f32, _start: Handle, _end: Handle) -> CuResult {
    put(out, || succeed().map(|()| 0.0))
}

extern "C" fn function_get(out: *mut Handle, _module: Handle, _name: *const c_char) -> CuResult {
    object_create(out)
}

extern "C" fn launch() -> CuResult {
    done(context::device_of(0).map(drop))
}

extern "C" fn loading_mode(out: *mut c_int) -> CuResult {
    // CU_MODULE_LAZY_LOADING
    put(out, || Ok(2))
}

extern "C" fn pointer_attribute(_out: *mut c_void, _attribute: c_int, _address: u64) -> CuResult {
    done(succeed().and(Err(NOT_SUPPORTED)))
}

extern "C" fn export_table(_out: *mut *const c_void, _uuid: *const c_void) -> CuResult {
    INVALID_VALUE
}

stubs! {
    cuInit => init;
    cuDriverGetVersion => driver_version;
    cuGetErrorName => error_name;
    cuGetErrorString => error_string;
    cuGetProcAddress => proc_address::v1;
    cuGetProcAddress_v2 => proc_address::v2;
    cuGetExportTable => export_table;
    cuModuleGetLoadingMode => loading_mode;

    cuDeviceGetCount => device_count;
    cuDeviceGet => device_get;
    cuDeviceGetName => device_name;
    cuDeviceGetPCIBusId => device_pci;
    cuDeviceGetUuid => device_uuid;
    cuDeviceGetUuid_v2 => device_uuid;
    cuDeviceTotalMem_v2 => device_memory;
    cuDeviceGetAttribute => device_attribute;
    cuDeviceComputeCapability => compute_capability;

    cuCtxCreate => ctx_create;
    cuCtxCreate_v2 => ctx_create;
    cuCtxCreate_v3 => ctx_create_v3;
    cuCtxCreate_v4 => ctx_create_v4;
    cuCtxDestroy => ctx_destroy;
    cuCtxDestroy_v2 => ctx_destroy;
    cuDevicePrimaryCtxRetain => primary_retain;
    cuDevicePrimaryCtxRelease => primary_release;
    cuDevicePrimaryCtxRelease_v2 => primary_release;
    cuDevicePrimaryCtxReset => primary_reset;
    cuDevicePrimaryCtxReset_v2 => primary_reset;
    cuDevicePrimaryCtxGetState => primary_state;
    cuDevicePrimaryCtxSetFlags => primary_flags;
    cuDevicePrimaryCtxSetFlags_v2 => primary_flags;
    cuCtxSetCurrent => ctx_set_current;
    cuCtxPushCurrent => ctx_push;
    cuCtxPushCurrent_v2 => ctx_push;
    cuCtxPopCurrent => ctx_pop;
    cuCtxPopCurrent_v2 => ctx_pop;
    cuCtxGetCurrent => ctx_current;
    cuCtxGetDevice => ctx_device;
    cuCtxGetDevice_v2 => ctx_device_v2;
    cuCtxGetApiVersion => ctx_api_version;
    cuCtxGetFlags => ctx_flags;
    cuCtxGetLimit => ctx_get_limit;
    cuCtxSetLimit => ctx_set_limit;
    cuCtxSynchronize => synchronize;

    cuMemAlloc => mem_alloc_v1;
    cuMemAlloc_v2 => mem_alloc;
    cuMemAllocPitch => mem_alloc_pitch_v1;
    cuMemAllocPitch_v2 => mem_alloc_pitch;
    cuMemAllocManaged => mem_alloc_managed;
    cuMemFree => mem_free_v1;
    cuMemFree_v2 => mem_free;
    cuMemGetInfo_v2 => mem_info;
    cuMemHostAlloc => mem_host_alloc;
    cuMemAllocHost => mem_alloc_host_v1;
    cuMemAllocHost_v2 => mem_alloc_host;
    cuMemFreeHost => mem_free_host;
    cuMemHostGetDevicePointer_v2 => mem_host_device_pointer;
    cuMemcpyHtoD_v2 => mem_op;
    cuMemcpyDtoH_v2 => mem_op;
    cuMemcpyDtoD_v2 => mem_op;
    cuMemcpyHtoDAsync_v2 => mem_op;
    cuMemcpyDtoHAsync_v2 => mem_op;
    cuMemcpyDtoDAsync_v2 => mem_op;
    cuMemsetD8_v2 => mem_op;
    cuMemsetD8Async => mem_op;
    cuMemsetD32_v2 => mem_op;

    cuMemAllocAsync => mem_alloc_async;
    cuMemAllocAsync_ptsz => mem_alloc_async;
    cuMemAllocFromPoolAsync => mem_alloc_from_pool;
    cuMemAllocFromPoolAsync_ptsz => mem_alloc_from_pool;
    cuMemFreeAsync => mem_free_async;
    cuMemFreeAsync_ptsz => mem_free_async;
    cuDeviceGetMemPool => pool_get;
    cuDeviceGetDefaultMemPool => pool_get;
    cuDeviceSetMemPool => pool_set;
    cuMemPoolCreate => pool_create;
    cuMemPoolDestroy => pool_destroy;
    cuMemPoolTrimTo => pool_trim;
    cuMemPoolSetAttribute => pool_set_attribute;
    cuMemPoolGetAttribute => pool_attribute;

    cuMemCreate => mem_create;
    cuMemRelease => mem_release;
    cuMemRetainAllocationHandle => mem_retain;
    cuMemAddressReserve => mem_reserve;
    cuMemAddressFree => mem_unreserve;
    cuMemMap => mem_map;
    cuMemUnmap => mem_unmap;
    cuMemSetAccess => mem_set_access;
    cuMemGetAllocationGranularity => mem_granularity;

    cuIpcGetMemHandle => ipc_get;
    cuIpcOpenMemHandle => ipc_open;
    cuIpcOpenMemHandle_v2 => ipc_open;
    cuIpcCloseMemHandle => ipc_close;

    cuStreamCreate => object_create;
    cuStreamCreateWithPriority => object_create;
    cuStreamDestroy_v2 => object_destroy;
    cuStreamSynchronize => synchronize;
    cuStreamSynchronize_ptsz => synchronize;
    cuStreamQuery => query;
    cuStreamWaitEvent => query;
    cuEventCreate => object_create;
    cuEventDestroy_v2 => object_destroy;
    cuEventRecord => query;
    cuEventSynchronize => synchronize;
    cuEventQuery => query;
    cuEventElapsedTime => event_elapsed;
    cuModuleLoadData => object_create;
    cuModuleLoadDataEx => object_create;
    cuModuleUnload => object_destroy;
    cuModuleGetFunction => function_get;
    cuLaunchKernel => launch;
    cuPointerGetAttribute => pointer_attribute;
}
