//! What NVML bills for device, managed and host memory.

use crate::peer::Memory;
use crate::rig::{CONTEXT, GIB, KIB, MIB, Rig, config};

#[test]
fn a_context_costs_its_overhead() {
    let rig = Rig::new(simgpu::Config { reserved: 512 * MIB, ..config() });
    let mut client = rig.client();
    let figures = client.peer.figures(0);
    let free = 8 * GIB - 512 * MIB - CONTEXT;
    assert_eq!(figures.memory, Memory { total: 8 * GIB, reserved: 512 * MIB, free, used: CONTEXT });
    assert_eq!(client.billed(), 0);
    let info = client.peer.call("cuMemGetInfo_v2 $0 $1");
    assert_eq!((info.code, info.cells[0], info.cells[1]), (0, free, 8 * GIB));
}

#[test]
fn large_allocations_take_whole_pages_of_2_mib() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    for (bytes, billed) in
        [(MIB + 1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB), (5 * MIB, 6 * MIB), (GIB, GIB)]
    {
        let address = client.allocate(bytes);
        assert_eq!(address % (2 * MIB), 0, "{bytes}");
        assert_eq!(client.billed(), billed, "{bytes}");
        client.free(address);
        assert_eq!(client.billed(), 0, "{bytes}");
    }
}

#[test]
fn small_allocations_share_pages() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let first = client.allocate(1);
    assert_eq!(client.billed(), 2 * MIB);
    // A byte takes 512: one page holds 2 of 1 MiB less 512 and 2 of 512.
    let second = client.allocate(MIB - 512);
    let third = client.allocate(MIB - 512);
    let fourth = client.allocate(512);
    assert_eq!(client.billed(), 2 * MIB);
    let fifth = client.allocate(512);
    assert_eq!(client.billed(), 4 * MIB);
    for (address, billed) in [(first, 2), (second, 2), (third, 2), (fourth, 2), (fifth, 0)] {
        client.free(address);
        assert_eq!(client.billed(), billed * MIB);
    }
    // The largest that shares, next to one that does not.
    let (shared, whole) = (client.allocate(MIB), client.allocate(MIB + 1));
    let shared_too = client.allocate(MIB);
    assert_eq!(client.billed(), 4 * MIB);
    for address in [shared, whole, shared_too] {
        client.free(address);
    }
    assert_eq!(client.billed(), 0);
}

#[test]
fn pitched_rows_are_multiples_of_512_bytes() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let called = client.peer.call("cuMemAllocPitch_v2 $0 $1 1000 4096 4");
    assert_eq!((called.code, called.cells[1]), (0, 1024));
    assert_eq!(client.billed(), 4 * MIB);
    client.free(called.cells[0]);
    assert_eq!(client.billed(), 0);
}

#[test]
fn managed_and_host_memory_is_not_billed() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let managed = client.peer.get(&format!("cuMemAllocManaged $0 {GIB} 1"));
    let host = client.peer.get(&format!("cuMemHostAlloc $0 {} 0", 64 * KIB));
    assert_eq!(client.billed(), 0);
    client.free(managed);
    client.peer.get(&format!("cuMemFreeHost {host}"));
    assert_eq!(client.peer.code(&format!("cuMemFreeHost {host}")), 1);
    assert_eq!(client.peer.code("cuMemFreeHost 0"), 0);
}

#[test]
fn freeing_nothing_and_freeing_twice() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let address = client.allocate(4 * MIB);
    client.free(0);
    assert_eq!(client.billed(), 4 * MIB);
    client.free(address);
    assert_eq!(client.peer.code(&format!("cuMemFree_v2 {address}")), 1);
    assert_eq!(client.peer.code(&format!("cuMemFree_v2 {}", address + 512)), 1);
    assert_eq!(client.peer.code("cuMemAlloc_v2 $0 0"), 1);
    assert_eq!(client.peer.code("cuMemAlloc_v2 0 512"), 1);
    assert_eq!(client.billed(), 0);
}

#[test]
fn addresses_are_reused_last_in_first_out() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    for bytes in [512, 4 * MIB] {
        let addresses = [(); 3].map(|()| client.allocate(bytes));
        for address in addresses {
            client.free(address);
        }
        let again = [(); 3].map(|()| client.allocate(bytes));
        let [first, second, third] = addresses;
        assert_eq!(again, [third, second, first]);
    }
    // Another size gets other addresses.
    let known = client.allocate(6 * MIB);
    client.free(known);
    assert_ne!(client.allocate(8 * MIB), known);
    assert_eq!(client.allocate(6 * MIB), known);
}
