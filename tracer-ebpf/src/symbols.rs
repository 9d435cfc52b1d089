//! THE table of traced driver entry points.
//!
//! One line a symbol says all that the generic programs need: what the call does, to which kind of
//! memory, and where its arguments are. Adding a symbol is one line here. Signatures are those of
//! `cuda.h`; argument positions count from 0 in the order of the C declaration.
//!
//! No two exports of the driver library share an address and none calls another export on the
//! caller's behalf, so probing every version of a function together counts each call once.

use crate::Family;

/// What a call does to the books.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Makes an allocation.
    Alloc,
    /// Gives an allocation back.
    Free,
    /// Creates a context and makes it current on the calling thread.
    CtxCreate,
    /// Destroys a context named by handle.
    CtxDestroy,
    /// Takes a reference on the primary context of a device.
    PrimaryRetain,
    /// Gives such a reference back; the last one destroys the context.
    PrimaryRelease,
    /// Destroys the primary context of a device whatever its references.
    PrimaryReset,
    /// Makes a context current on the calling thread.
    CtxSetCurrent,
    /// As [`Op::CtxSetCurrent`], keeping the previous one on a stack.
    CtxPush,
    /// Takes the current context off the calling thread.
    CtxPop,
    /// Tells the UUID of a device ordinal.
    DeviceUuid,
    /// Starts the driver in this process.
    Init,
}

/// Where the size of an allocation is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The call has none.
    None,
    /// A 64-bit argument.
    Arg(u8),
    /// The low 32 bits of an argument (the ABI of CUDA before 3.2).
    Arg32(u8),
    /// Pitch (64-bit, written by the call through this argument) times height.
    Pitch(u8, u8),
    /// The same with a 32-bit pitch and height.
    Pitch32(u8, u8),
}

/// Where the handle of the object is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    /// The call has none.
    None,
    /// An argument.
    Arg(u8),
    /// The low 32 bits of an argument.
    Arg32(u8),
    /// A 64-bit value the call writes through this argument.
    Out(u8),
    /// A 32-bit value the call writes through this argument.
    Out32(u8),
}

/// Where the device is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// That of the calling thread's current context.
    Current,
    /// An ordinal argument.
    Arg(u8),
    /// `location.id` of the `CUmemAllocationProp` this argument points to (offset 12).
    AllocationProp(u8),
}

/// One entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Exported name.
    pub name: &'static str,
    /// What the call does.
    pub op: Op,
    /// Memory it is about; [`Family::Device`] where the operation is not about memory.
    pub family: Family,
    /// Where its size is.
    pub size: Size,
    /// Where its handle is.
    pub handle: Handle,
    /// Where its device is.
    pub device: Device,
}

/// An entry point as the kernel side needs it: without its name, which would be a pointer in the
/// object's read-only data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// As [`Symbol::op`].
    pub op: Op,
    /// As [`Symbol::family`].
    pub family: Family,
    /// As [`Symbol::size`].
    pub size: Size,
    /// As [`Symbol::handle`].
    pub handle: Handle,
    /// As [`Symbol::device`].
    pub device: Device,
}

/// The table without names, in the same order.
pub const DESCRIPTORS: [Descriptor; TABLE.len()] = {
    let mut descriptors = [Descriptor {
        op: Op::Init,
        family: Family::Device,
        size: Size::None,
        handle: Handle::None,
        device: Device::Current,
    }; TABLE.len()];
    let mut index = 0;
    while index < TABLE.len() {
        let Symbol { op, family, size, handle, device, .. } = TABLE[index];
        descriptors[index] = Descriptor { op, family, size, handle, device };
        index += 1;
    }
    descriptors
};

const fn symbol(name: &'static str, op: Op, family: Family, size: Size, handle: Handle, device: Device) -> Symbol {
    Symbol { name, op, family, size, handle, device }
}

use Device as D;
use Family as F;
use Handle as H;
use Op as O;
use Size as S;

/// Every traced entry point. The index of a symbol is its id in events and attach cookies.
#[rustfmt::skip]
pub const TABLE: &[Symbol] = &[
    symbol("cuInit",                          O::Init,           F::Device,  S::None,          H::None,     D::Current),

    symbol("cuCtxCreate",                     O::CtxCreate,      F::Device,  S::None,          H::Out(0),   D::Arg(2)),
    symbol("cuCtxCreate_v2",                  O::CtxCreate,      F::Device,  S::None,          H::Out(0),   D::Arg(2)),
    symbol("cuCtxCreate_v3",                  O::CtxCreate,      F::Device,  S::None,          H::Out(0),   D::Arg(4)),
    symbol("cuCtxCreate_v4",                  O::CtxCreate,      F::Device,  S::None,          H::Out(0),   D::Arg(3)),
    symbol("cuCtxDestroy",                    O::CtxDestroy,     F::Device,  S::None,          H::Arg(0),   D::Current),
    symbol("cuCtxDestroy_v2",                 O::CtxDestroy,     F::Device,  S::None,          H::Arg(0),   D::Current),
    symbol("cuDevicePrimaryCtxRetain",        O::PrimaryRetain,  F::Device,  S::None,          H::Out(0),   D::Arg(1)),
    symbol("cuDevicePrimaryCtxRelease",       O::PrimaryRelease, F::Device,  S::None,          H::None,     D::Arg(0)),
    symbol("cuDevicePrimaryCtxRelease_v2",    O::PrimaryRelease, F::Device,  S::None,          H::None,     D::Arg(0)),
    symbol("cuDevicePrimaryCtxReset",         O::PrimaryReset,   F::Device,  S::None,          H::None,     D::Arg(0)),
    symbol("cuDevicePrimaryCtxReset_v2",      O::PrimaryReset,   F::Device,  S::None,          H::None,     D::Arg(0)),
    symbol("cuCtxSetCurrent",                 O::CtxSetCurrent,  F::Device,  S::None,          H::Arg(0),   D::Current),
    symbol("cuCtxPushCurrent",                O::CtxPush,        F::Device,  S::None,          H::Arg(0),   D::Current),
    symbol("cuCtxPushCurrent_v2",             O::CtxPush,        F::Device,  S::None,          H::Arg(0),   D::Current),
    symbol("cuCtxPopCurrent",                 O::CtxPop,         F::Device,  S::None,          H::None,     D::Current),
    symbol("cuCtxPopCurrent_v2",              O::CtxPop,         F::Device,  S::None,          H::None,     D::Current),

    symbol("cuMemAlloc",                      O::Alloc,          F::Device,  S::Arg32(1),      H::Out32(0), D::Current),
    symbol("cuMemAlloc_v2",                   O::Alloc,          F::Device,  S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemAllocPitch",                 O::Alloc,          F::Device,  S::Pitch32(1, 3), H::Out32(0), D::Current),
    symbol("cuMemAllocPitch_v2",              O::Alloc,          F::Device,  S::Pitch(1, 3),   H::Out(0),   D::Current),
    symbol("cuMemAllocManaged",               O::Alloc,          F::Managed, S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemFree",                       O::Free,           F::Device,  S::None,          H::Arg32(0), D::Current),
    symbol("cuMemFree_v2",                    O::Free,           F::Device,  S::None,          H::Arg(0),   D::Current),

    symbol("cuMemAllocAsync",                 O::Alloc,          F::Pool,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemAllocAsync_ptsz",            O::Alloc,          F::Pool,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemAllocFromPoolAsync",         O::Alloc,          F::Pool,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemAllocFromPoolAsync_ptsz",    O::Alloc,          F::Pool,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemFreeAsync",                  O::Free,           F::Pool,    S::None,          H::Arg(0),   D::Current),
    symbol("cuMemFreeAsync_ptsz",             O::Free,           F::Pool,    S::None,          H::Arg(0),   D::Current),

    symbol("cuMemHostAlloc",                  O::Alloc,          F::Host,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemAllocHost",                  O::Alloc,          F::Host,    S::Arg32(1),      H::Out(0),   D::Current),
    symbol("cuMemAllocHost_v2",               O::Alloc,          F::Host,    S::Arg(1),        H::Out(0),   D::Current),
    symbol("cuMemFreeHost",                   O::Free,           F::Host,    S::None,          H::Arg(0),   D::Current),

    symbol("cuMemCreate",                     O::Alloc,          F::Vmm,     S::Arg(1),        H::Out(0),   D::AllocationProp(2)),
    symbol("cuMemRelease",                    O::Free,           F::Vmm,     S::None,          H::Arg(0),   D::Current),

    symbol("cuDeviceGetUuid",                 O::DeviceUuid,     F::Device,  S::None,          H::Out(0),   D::Arg(1)),
    symbol("cuDeviceGetUuid_v2",              O::DeviceUuid,     F::Device,  S::None,          H::Out(0),   D::Arg(1)),
];

/// The number space of a handle: all device pointers share one (`cuMemFree` accepts pointers of
/// every device allocator), host pointers and VMM handles have their own.
#[must_use]
pub const fn handle_space(family: Family) -> u32 {
    match family {
        Family::Device | Family::Managed | Family::Pool => Family::Device as u32,
        Family::Vmm => Family::Vmm as u32,
        Family::Host => Family::Host as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::TABLE;

    #[test]
    fn every_symbol_is_listed_once() {
        for (index, symbol) in TABLE.iter().enumerate() {
            assert!(
                TABLE[index + 1..].iter().all(|other| other.name != symbol.name),
                "{} is listed twice",
                symbol.name
            );
        }
    }
}
