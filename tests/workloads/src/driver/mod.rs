//! The CUDA driver as an application sees it: `libcuda.so.1` opened by its soname, functions found by name or through
//! `cuGetProcAddress_v2`, and a count of every call by its outcome.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

pub(crate) mod abi;
mod entry;

pub(crate) use entry::EntryPoint;

/// The name applications open; the loader finds the file (`LD_LIBRARY_PATH` included).
const SONAME: &str = "libcuda.so.1";

/// How an application finds the driver's functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// `dlsym` of the exported name.
    Symbol,
    /// `cuGetProcAddress_v2` with base name and version, as cudart and cuda-bindings do.
    ProcAddress,
}

/// Why a driver call did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The driver answered with an error code.
    #[error("{symbol} returned CUresult {code}")]
    Refused {
        /// The exported symbol.
        symbol: &'static str,
        /// The `CUresult`.
        code: c_int,
    },
    /// The library has no such function.
    #[error("{SONAME} does not give {symbol} ({reason}); use a driver or simulated driver that has it")]
    Missing {
        /// The exported symbol.
        symbol: &'static str,
        /// What the loader or `cuGetProcAddress_v2` said.
        reason: String,
    },
}

/// Calls of one function by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Outcomes {
    /// Calls that returned 0.
    pub(crate) ok: u64,
    /// Calls that returned anything else.
    pub(crate) failed: u64,
}

#[derive(Default)]
struct Slot {
    address: OnceLock<usize>,
    ok: AtomicU64,
    failed: AtomicU64,
}

/// An open driver library.
pub(crate) struct Driver {
    library: Library,
    lookup: Lookup,
    slots: Vec<Slot>,
}

impl Driver {
    /// Opens the library. Functions are looked up at their first use.
    pub(crate) fn open(lookup: Lookup) -> Result<Self, libloading::Error> {
        // SAFETY: loading runs the library's initialisers; that is what an application accepts when it uses CUDA.
        let library = unsafe { Library::open(Some(SONAME), RTLD_NOW | RTLD_GLOBAL) }?;
        Ok(Self { library, lookup, slots: EntryPoint::ALL.iter().map(|_| Slot::default()).collect() })
    }

    /// Functions that were called, with their counts.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&'static str, Outcomes)> {
        EntryPoint::ALL.iter().zip(&self.slots).filter_map(|(entry, slot)| {
            let outcomes =
                Outcomes { ok: slot.ok.load(Ordering::Relaxed), failed: slot.failed.load(Ordering::Relaxed) };
            (outcomes != Outcomes::default()).then_some((entry.symbol(), outcomes))
        })
    }

    /// Sets every count to zero: after a fork the child has made no call yet.
    pub(crate) fn forget_outcomes(&self) {
        for slot in &self.slots {
            slot.ok.store(0, Ordering::Relaxed);
            slot.failed.store(0, Ordering::Relaxed);
        }
    }

    fn address(&self, entry: EntryPoint) -> Result<*const (), CallError> {
        let cached = &self.slots[entry as usize].address;
        if let Some(&address) = cached.get() {
            return Ok(address as *const ());
        }
        let found = match self.lookup {
            Lookup::Symbol => self.exported(entry.symbol()),
            Lookup::ProcAddress => self.proc_address(entry),
        };
        let address = found.map_err(|reason| CallError::Missing { symbol: entry.symbol(), reason })?;
        Ok(*cached.get_or_init(|| address as usize) as *const ())
    }

    fn exported(&self, name: &str) -> Result<*const (), String> {
        // SAFETY: the address is only turned into a function of the right type by the caller, who knows the name.
        let symbol = unsafe { self.library.get::<*const ()>(name.as_bytes()) };
        symbol.map(|symbol| symbol.into_raw().cast_const().cast()).map_err(|error| error.to_string())
    }

    fn proc_address(&self, entry: EntryPoint) -> Result<*const (), String> {
        type GetProcAddress = unsafe extern "C" fn(
            symbol: *const c_char,
            function: *mut *mut c_void,
            cuda_version: c_int,
            flags: u64,
            status: *mut c_int,
        ) -> c_int;
        let address = self.exported("cuGetProcAddress_v2")?;
        // SAFETY: this is the signature of cuGetProcAddress_v2 in cuda.h.
        let get_proc_address = unsafe { std::mem::transmute::<*const (), GetProcAddress>(address) };
        let (base, version, flavour) = entry.request();
        let name = CString::new(base).map_err(|error| error.to_string())?;
        let (mut function, mut status) = (std::ptr::null_mut(), 0);
        // SAFETY: all pointers are valid for the call.
        let code =
            unsafe { get_proc_address(name.as_ptr(), &raw mut function, version, flavour as u64, &raw mut status) };
        if code != 0 || function.is_null() {
            return Err(format!(
                "cuGetProcAddress_v2({base:?}, {version}, flags {}) returned {code}, status {status}",
                flavour as u64
            ));
        }
        Ok(function.cast_const().cast())
    }

    fn record(&self, entry: EntryPoint, code: c_int) -> Result<(), CallError> {
        let slot = &self.slots[entry as usize];
        if code == 0 {
            slot.ok.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        slot.failed.fetch_add(1, Ordering::Relaxed);
        Err(CallError::Refused { symbol: entry.symbol(), code })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_in_the_order_of_the_discriminants() {
        assert!(EntryPoint::ALL.iter().enumerate().all(|(index, entry)| *entry as usize == index));
    }

    #[test]
    fn no_symbol_is_listed_twice_and_each_extends_its_base_name() {
        let mut symbols: Vec<_> = EntryPoint::ALL.iter().map(|entry| entry.symbol()).collect();
        symbols.sort_unstable();
        assert!(symbols.windows(2).all(|pair| pair[0] != pair[1]));
        for entry in EntryPoint::ALL {
            let (base, _, flavour) = entry.request();
            assert!(entry.symbol().starts_with(base), "{entry:?}");
            assert_eq!(entry.symbol().ends_with("_ptsz"), flavour == entry::StreamFlavour::PerThread, "{entry:?}");
        }
    }
}
