//! Before the driver is initialised, and without a host.

use crate::rig::{Peer, Rig, config, peer_command};

#[test]
fn without_a_host_there_is_no_device() {
    let rig = Rig::new(config());
    let mut peer = Peer::start(peer_command(&[], &rig.host.lib_dir()));
    assert_eq!(peer.code("cuInit 0"), 100);
    // It failed, so nothing is initialised.
    assert_eq!(peer.code("cuDeviceGetCount $0"), 3);
}

#[test]
fn nothing_works_before_initialisation() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    for call in [
        "cuDeviceGetCount $0",
        "cuDeviceGet $0 0",
        "cuDeviceGetUuid $0 0",
        "cuDeviceTotalMem_v2 $0 0",
        "cuCtxCreate_v2 $0 0 0",
        "cuCtxGetCurrent $0",
        "cuDevicePrimaryCtxRetain $0 0",
        "cuMemAlloc_v2 $0 512",
        "cuMemAllocManaged $0 512 1",
        "cuMemHostAlloc $0 512 0",
        "cuMemAllocAsync $0 512 0",
        "cuMemCreate $0 2097152 $1 0",
        "cuMemAddressReserve $0 2097152 0 0 0",
        "cuMemFree_v2 4096",
        "cuMemGetInfo_v2 $0 $1",
    ] {
        assert_eq!(peer.code(call), 3, "{call}");
    }
    // The version needs no initialisation.
    assert_eq!(peer.get("cuDriverGetVersion $0"), 12_040);
    assert_eq!(peer.sample()[0].as_ref().unwrap().rows, []);
}

#[test]
fn initialising_again_is_harmless_and_costs_nothing() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    assert_eq!([peer.code("cuInit 0"), peer.code("cuInit 0")], [0, 0]);
    assert_eq!(peer.get("cuDeviceGetCount $0"), 1);
    assert_eq!(peer.used(), 0);
    // A process without a context on a device is none of its compute processes.
    assert_eq!(peer.rows(), []);
    assert_eq!(rig.host.view().clients.len(), 1);
}

#[test]
fn a_device_that_is_not_there() {
    let rig = Rig::new(config());
    let mut peer = rig.peer();
    peer.get("cuInit 0");
    for call in
        ["cuDeviceGet $0 1", "cuCtxCreate_v2 $0 0 1", "cuDevicePrimaryCtxRetain $0 1", "cuDeviceGetMemPool $0 7"]
    {
        assert_eq!(peer.code(call), 101, "{call}");
    }
    assert_eq!(peer.code("cuMemAlloc_v2 $0 512"), 201);
    assert_eq!(peer.used(), 0);
}
