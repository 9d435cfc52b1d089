//! Device addresses.

use std::collections::HashMap;

/// Where device addresses start, as on Linux on x86-64.
const FIRST: u64 = 0x7f00_0000_0000;
/// Where they end: they have 57 bits at most.
const END: u64 = 1 << 57;

/// Hands out address ranges. A range given back is handed out again first, and at once, to the next
/// request of its size, as allocators do.
#[derive(Debug)]
pub(crate) struct Addresses {
    next: u64,
    free: HashMap<u64, Vec<u64>>,
}

impl Addresses {
    pub(crate) fn new() -> Self {
        Self { next: FIRST, free: HashMap::new() }
    }

    /// A range of `bytes`, which must be a multiple of its alignment; `None` when there is none left.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        if let Some(address) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Some(address);
        }
        // Ranges of whole pages begin at pages.
        if bytes.is_multiple_of(simgpu::PAGE) {
            self.next = simgpu::pages(self.next);
        }
        let address = self.next;
        self.next = address.checked_add(bytes).filter(|end| *end <= END)?;
        Some(address)
    }

    pub(crate) fn give(&mut self, address: u64, bytes: u64) {
        self.free.entry(bytes).or_default().push(address);
    }
}
