//! What the name of an entry point says.

use super::Layer;
use tracer_ebpf::Family;

/// What kind of memory an entry point makes, from the table of traced symbols where it is listed
/// and from the naming rules of the driver and runtime otherwise.
pub(in crate::ledger) fn family_of(api: &str) -> Family {
    // By far the most frequent ones.
    if api == "cuMemAlloc_v2" || api == "cuMemFree_v2" {
        return Family::Device;
    }
    if api.contains("Managed") {
        Family::Managed
    } else if api.contains("Async") {
        Family::Pool
    } else if api.starts_with("cuMemCreate")
        || api.starts_with("cuMemRelease")
        || api.starts_with("cuMemRetainAllocationHandle")
        || api.starts_with("cuMemImport")
    {
        Family::Vmm
    } else if api.contains("Host") {
        Family::Host
    } else {
        Family::Device
    }
}

/// The layer a call was seen in.
pub(in crate::ledger) fn layer_of(lib: &str, api: &str) -> Layer {
    if lib.starts_with("libcudart") || api.starts_with("cuda") { Layer::Runtime } else { Layer::Driver }
}

#[cfg(test)]
mod tests {
    use super::family_of;
    use tracer_ebpf::symbols::{Op, TABLE};

    #[test]
    fn families_agree_with_the_table_of_symbols() {
        for symbol in TABLE.iter().filter(|symbol| symbol.op == Op::Alloc) {
            assert_eq!(family_of(symbol.name), symbol.family, "{}", symbol.name);
        }
    }
}
