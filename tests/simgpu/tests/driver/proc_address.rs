//! `cuGetProcAddress`: which export a public name means.

use crate::rig::{Peer, Rig, config};

const PER_THREAD: u32 = 2;

/// The export whose address the call gives, of those named.
fn means(peer: &mut Peer, name: &str, version: u32, flags: u32, exports: &[&str]) -> String {
    let address = peer.get(&format!("cuGetProcAddress_v2 '{name} $0 {version} {flags} $1"));
    // Exports have the same address by name as by this call, so ask for each by dlsym.
    let same = exports.iter().find(|export| peer.ask(&format!("address {export}")) == address.to_string());
    (*same.unwrap_or(&"none of them")).to_owned()
}

#[test]
fn the_version_chooses_the_form() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    for (name, version, export) in [
        ("cuMemAlloc", 2_000, "cuMemAlloc"),
        ("cuMemAlloc", 3_010, "cuMemAlloc"),
        ("cuMemAlloc", 3_020, "cuMemAlloc_v2"),
        ("cuMemAlloc", 12_040, "cuMemAlloc_v2"),
        ("cuMemAllocManaged", 6_000, "cuMemAllocManaged"),
        ("cuCtxDestroy", 3_020, "cuCtxDestroy"),
        ("cuCtxDestroy", 4_000, "cuCtxDestroy_v2"),
        ("cuCtxCreate", 3_010, "cuCtxCreate"),
        ("cuCtxCreate", 3_020, "cuCtxCreate_v2"),
        ("cuCtxCreate", 11_040, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12_050, "cuCtxCreate_v4"),
        ("cuDevicePrimaryCtxRelease", 10_020, "cuDevicePrimaryCtxRelease"),
        ("cuDevicePrimaryCtxRelease", 11_000, "cuDevicePrimaryCtxRelease_v2"),
        ("cuGetProcAddress", 11_030, "cuGetProcAddress"),
        ("cuGetProcAddress", 12_000, "cuGetProcAddress_v2"),
    ] {
        let forms = [name.to_owned(), format!("{name}_v2"), format!("{name}_v3"), format!("{name}_v4")];
        let forms: Vec<&str> = forms.iter().map(String::as_str).collect();
        assert_eq!(means(&mut peer, name, version, 0, &forms), export, "{name} in {version}");
    }
}

#[test]
fn names_with_a_suffix_are_no_public_names() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    for name in ["cuMemAlloc_v2", "cuCtxCreate_v3", "cuMemAllocAsync_ptsz", "cuNothing", ""] {
        let called = peer.call(&format!("cuGetProcAddress_v2 '{name} $0=7 12040 0 $1"));
        // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        assert_eq!((called.code, called.cells[0], called.cells[1]), (500, 0, 1), "{name}");
        let called = peer.call(&format!("cuGetProcAddress '{name} $0=7 12040 0"));
        assert_eq!((called.code, called.cells[0]), (500, 0), "{name}");
    }
    assert_eq!(peer.code("cuGetProcAddress_v2 0 $0 12040 0 $1"), 1);
    assert_eq!(peer.code("cuGetProcAddress_v2 'cuInit 0 12040 0 $1"), 1);
}

#[test]
fn both_forms_give_the_same_and_the_status_may_be_null() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    let first = peer.get("cuGetProcAddress 'cuMemFree $0 12040 0");
    let called = peer.call("cuGetProcAddress_v2 'cuMemFree $0 12040 0 $1=7");
    assert_eq!((called.code, called.cells[0], called.cells[1]), (0, first, 0));
    assert_eq!(peer.get("cuGetProcAddress_v2 'cuMemFree $0 12040 0 0"), first);
}

#[test]
fn the_flag_for_per_thread_streams() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    let forms = ["cuMemAllocAsync", "cuMemAllocAsync_ptsz"];
    for (flags, export) in [(0, forms[0]), (1, forms[0]), (PER_THREAD, forms[1])] {
        assert_eq!(means(&mut peer, "cuMemAllocAsync", 12_040, flags, &forms), export, "{flags}");
    }
    // Functions without a stream have one form.
    assert_eq!(means(&mut peer, "cuMemAlloc", 12_040, PER_THREAD, &["cuMemAlloc_v2"]), "cuMemAlloc_v2");
}
