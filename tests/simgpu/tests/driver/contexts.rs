//! Contexts: what they own, and when they go.

use crate::rig::{CONTEXT, MIB, Rig, config};

#[test]
fn a_primary_context_lives_until_its_last_release() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    peer.get("cuInit 0");
    let state = |peer: &mut crate::rig::Peer| peer.call("cuDevicePrimaryCtxGetState 0 $1 $0").cells[0];
    assert_eq!((state(&mut peer), peer.used()), (0, 0));
    let context = peer.get("cuDevicePrimaryCtxRetain $0 0");
    assert_eq!(peer.get("cuDevicePrimaryCtxRetain $0 0"), context);
    assert_eq!((state(&mut peer), peer.used()), (1, CONTEXT));
    peer.get("cuDevicePrimaryCtxRelease_v2 0");
    assert_eq!((state(&mut peer), peer.used()), (1, CONTEXT));
    peer.get("cuDevicePrimaryCtxRelease_v2 0");
    assert_eq!((state(&mut peer), peer.used()), (0, 0));
    assert_eq!(peer.code("cuDevicePrimaryCtxRelease_v2 0"), 201);
    assert_eq!(peer.rows(), []);
}

#[test]
fn a_reset_destroys_whatever_the_references() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    peer.get("cuInit 0");
    let context = peer.get("cuDevicePrimaryCtxRetain $0 0");
    peer.get("cuDevicePrimaryCtxRetain $0 0");
    peer.get(&format!("cuCtxSetCurrent {context}"));
    let address = peer.get("cuMemAlloc_v2 $0 4194304");
    assert_eq!(peer.used(), CONTEXT + 4 * MIB);
    peer.get("cuDevicePrimaryCtxReset_v2 0");
    assert_eq!((peer.used(), peer.rows()), (0, vec![]));
    assert_eq!(peer.code(&format!("cuMemFree_v2 {address}")), 1);
    // Nothing to reset is no error.
    peer.get("cuDevicePrimaryCtxReset_v2 0");
    peer.get("cuDevicePrimaryCtxRetain $0 0");
    assert_eq!(peer.used(), CONTEXT);
    // The references of before are still counted.
    peer.get("cuDevicePrimaryCtxRelease_v2 0");
    peer.get("cuDevicePrimaryCtxRelease_v2 0");
    assert_eq!(peer.used(), CONTEXT);
    peer.get("cuDevicePrimaryCtxRelease_v2 0");
    assert_eq!(peer.used(), 0);
    assert_eq!(peer.code("cuDevicePrimaryCtxRelease_v2 0"), 201);
    // Primary contexts are released, not destroyed.
    let context = peer.get("cuDevicePrimaryCtxRetain $0 0");
    assert_eq!(peer.code(&format!("cuCtxDestroy_v2 {context}")), 201);
    assert_eq!(peer.used(), CONTEXT);
}

#[test]
fn destroying_frees_what_the_context_owns_and_nothing_else() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let device = client.allocate(4 * MIB);
    let small = client.allocate(512);
    let managed = client.peer.get("cuMemAllocManaged $0 4194304 1");
    let host = client.peer.get("cuMemAllocHost_v2 $0 4194304");
    let pooled = client.peer.get("cuMemAllocAsync $0 1048576 0");
    let handle = client.peer.get("cuMemCreate $0 6291456 $1 0");
    assert_eq!(client.billed(), (4 + 2 + 32 + 6) * MIB);
    let context = client.context;
    client.peer.get(&format!("cuCtxDestroy_v2 {context}"));
    // The pool's chunk and the physical memory stay, and with them the row.
    let pid = client.peer.pid();
    assert_eq!(client.peer.rows(), [(pid, Some(38 * MIB))]);
    assert_eq!(client.peer.used(), 38 * MIB);
    for gone in [device, small, managed] {
        assert_eq!(client.peer.code(&format!("cuMemFree_v2 {gone}")), 1);
    }
    assert_eq!(client.peer.code(&format!("cuMemFreeHost {host}")), 1);
    assert_eq!(client.peer.code(&format!("cuCtxDestroy_v2 {context}")), 201);
    assert_eq!(client.peer.code("cuMemAlloc_v2 $0 512"), 201);
    // Both are still there to be freed.
    client.peer.get(&format!("cuMemFree_v2 {pooled}"));
    client.peer.get(&format!("cuMemRelease {handle}"));
    client.peer.get("cuCtxSynchronize");
    assert_eq!((client.peer.used(), client.peer.rows()), (0, vec![]));
}

#[test]
fn each_context_costs_and_frees_its_own() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    client.allocate(2 * MIB);
    let second = client.peer.get("cuCtxCreate_v2 $0 0 0");
    let kept = client.allocate(8 * MIB);
    assert_eq!(client.peer.used(), 2 * CONTEXT + 10 * MIB);
    let first = client.context;
    client.peer.get(&format!("cuCtxDestroy_v2 {first}"));
    assert_eq!(client.peer.used(), CONTEXT + 8 * MIB);
    assert_eq!(client.peer.get("cuCtxGetCurrent $0"), second);
    client.free(kept);
    assert_eq!(client.peer.used(), CONTEXT);
}
