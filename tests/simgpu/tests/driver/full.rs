//! A full device.

use crate::rig::{CONTEXT, GIB, MIB, Rig, config};

/// Exactly a context and 10 pages.
fn small() -> simgpu::Config {
    simgpu::Config { memory: CONTEXT + 20 * MIB, ..config() }
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let rig = Rig::new(small());
    let mut client = rig.client();
    client.allocate(18 * MIB);
    for call in [
        format!("cuMemAlloc_v2 $0 {}", 2 * MIB + 1),
        format!("cuMemAlloc_v2 $0 {GIB}"),
        format!("cuMemAlloc_v2 $0 {}", u64::MAX),
        "cuMemAllocAsync $0 512 0".to_owned(),
        "cuMemCreate $0 4194304 $1 0".to_owned(),
        "cuCtxCreate_v2 $0 0 0".to_owned(),
        "cuDevicePrimaryCtxRetain $0 0".to_owned(),
    ] {
        let called = client.peer.call(&call);
        assert_eq!((called.code, called.cells[0]), (2, 0), "{call}");
        assert_eq!(client.billed(), 18 * MIB, "{call}");
    }
    assert_eq!(client.peer.call("cuDevicePrimaryCtxGetState 0 $1 $0").cells[0], 0);
    // To the last byte.
    client.allocate(1);
    assert_eq!(client.peer.figures(0).memory.free, 0);
    client.allocate(MIB);
    client.allocate(MIB - 512);
    assert_eq!(client.peer.code("cuMemAlloc_v2 $0 1"), 2);
    assert_eq!(client.billed(), 20 * MIB);
}

#[test]
fn absurd_sizes_are_refused() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let pages = u64::MAX - (u64::MAX % (2 * MIB));
    for call in [
        format!("cuMemAllocManaged $0 {} 1", u64::MAX),
        format!("cuMemAllocAsync $0 {} 0", u64::MAX),
        format!("cuMemAllocAsync $0 {} 0", u64::MAX - 1024),
        format!("cuMemAllocPitch_v2 $0 $1 {} 2 4", u64::MAX),
        format!("cuMemAllocPitch_v2 $0 $1 {} {} 4", 1_u64 << 40, 1_u64 << 40),
        format!("cuMemAddressReserve $0 {pages} 0 0 0"),
        format!("cuMemCreate $0 {pages} $1 0"),
        format!("cuMemHostAlloc $0 {} 0", u64::MAX),
    ] {
        let called = client.peer.call(&call);
        assert_eq!((called.code, called.cells[0]), (2, 0), "{call}");
    }
    let end = u64::MAX;
    assert_eq!(client.peer.code(&format!("cuMemUnmap 4096 {end}")), 1);
    assert_eq!(client.peer.code(&format!("cuMemAddressFree 4096 {end}")), 1);
    assert_eq!(client.billed(), 0);
    // And the driver still works.
    client.allocate(2 * MIB);
    assert_eq!(client.billed(), 2 * MIB);
}

#[test]
fn two_processes_share_the_device() {
    let rig = Rig::new(simgpu::Config { memory: 2 * CONTEXT + 20 * MIB, ..config() });
    let (mut first, mut second) = (rig.client(), rig.client());
    first.allocate(12 * MIB);
    let address = second.allocate(8 * MIB);
    assert_eq!(second.peer.code("cuMemAlloc_v2 $0 512"), 2);
    assert_eq!(first.peer.code("cuMemAlloc_v2 $0 2097152"), 2);
    let mut rows = [(first.peer.pid(), Some(CONTEXT + 12 * MIB)), (second.peer.pid(), Some(CONTEXT + 8 * MIB))];
    rows.sort_unstable();
    assert_eq!(first.peer.rows(), rows);
    let memory = first.peer.figures(0).memory;
    assert_eq!((memory.used, memory.free), (2 * CONTEXT + 20 * MIB, 0));
    second.free(address);
    first.allocate(8 * MIB);
    assert_eq!(second.peer.code("cuMemAlloc_v2 $0 512"), 2);
}
