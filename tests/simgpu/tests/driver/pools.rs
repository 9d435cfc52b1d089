//! Stream-ordered memory: frees are logical, pages go back later.

use crate::rig::{Client, MIB, Rig, config};

const THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;

fn attribute(client: &mut Client, pool: u64, attribute: u32) -> u64 {
    client.peer.get(&format!("cuMemPoolGetAttribute {pool} {attribute} $0"))
}

fn allocate(client: &mut Client, bytes: u64) -> u64 {
    client.peer.get(&format!("cuMemAllocAsync $0 {bytes} 0"))
}

#[test]
fn a_free_is_logical_until_the_stream_is_synchronised() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let pool = client.peer.get("cuDeviceGetMemPool $0 0");
    let first = allocate(&mut client, MIB);
    assert_eq!(client.billed(), 32 * MIB);
    let second = allocate(&mut client, 32 * MIB);
    assert_eq!(client.billed(), 64 * MIB);
    assert_eq!(attribute(&mut client, pool, USED), 33 * MIB);
    client.peer.get(&format!("cuMemFreeAsync {second} 0"));
    assert_eq!(client.billed(), 64 * MIB);
    assert_eq!(attribute(&mut client, pool, USED), MIB);
    assert_eq!(attribute(&mut client, pool, RESERVED), 64 * MIB);
    // Reused without another byte of the device, and at the same address.
    assert_eq!(allocate(&mut client, 32 * MIB), second);
    assert_eq!(client.billed(), 64 * MIB);
    client.peer.get(&format!("cuMemFreeAsync {second} 0"));
    client.peer.get("cuStreamSynchronize 0");
    assert_eq!(client.billed(), 2 * MIB);
    // The plain free takes stream-ordered memory too.
    client.free(first);
    assert_eq!(client.billed(), 2 * MIB);
    client.peer.get("cuCtxSynchronize");
    assert_eq!(client.billed(), 0);
    assert_eq!(attribute(&mut client, pool, RESERVED), 0);
    assert_eq!(client.peer.code(&format!("cuMemFreeAsync {first} 0")), 1);
}

#[test]
fn the_threshold_stays_and_trimming_does_not_heed_it() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let pool = client.peer.get("cuDeviceGetMemPool $0 0");
    assert_eq!(attribute(&mut client, pool, THRESHOLD), 0);
    let threshold = 48 * MIB;
    assert_eq!(client.peer.code(&format!("cuMemPoolSetAttribute {pool} {THRESHOLD} $0={threshold}")), 0);
    assert_eq!(attribute(&mut client, pool, THRESHOLD), threshold);
    let address = allocate(&mut client, 96 * MIB);
    assert_eq!(client.billed(), 96 * MIB);
    client.peer.get(&format!("cuMemFreeAsync {address} 0"));
    client.peer.get("cuStreamSynchronize 0");
    assert_eq!(client.billed(), 48 * MIB);
    client.peer.get(&format!("cuMemPoolTrimTo {pool} {}", 16 * MIB));
    assert_eq!(client.billed(), 16 * MIB);
    // Never more than it has, never less than is handed out.
    client.peer.get(&format!("cuMemPoolTrimTo {pool} {}", 64 * MIB));
    assert_eq!(client.billed(), 16 * MIB);
    let address = allocate(&mut client, 3 * MIB);
    client.peer.get(&format!("cuMemPoolTrimTo {pool} 0"));
    assert_eq!(client.billed(), 4 * MIB);
    client.peer.get(&format!("cuMemFreeAsync {address} 0"));
    client.peer.get(&format!("cuMemPoolTrimTo {pool} 0"));
    assert_eq!(client.billed(), 0);
}

#[test]
fn a_pool_of_ones_own() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let pool = client.peer.get("cuMemPoolCreate $0 $1");
    assert_ne!(pool, client.peer.get("cuDeviceGetMemPool $0 0"));
    let address = client.peer.get(&format!("cuMemAllocFromPoolAsync $0 512 {pool} 0"));
    assert_eq!(client.billed(), 32 * MIB);
    assert_eq!(client.peer.code(&format!("cuMemPoolDestroy {pool}")), 1);
    client.peer.get(&format!("cuMemFreeAsync {address} 0"));
    client.peer.get(&format!("cuMemPoolDestroy {pool}"));
    assert_eq!(client.billed(), 0);
    assert_eq!(client.peer.code(&format!("cuMemAllocFromPoolAsync $0 512 {pool} 0")), 1);
    // Made current, it is what the plain call allocates from.
    let pool = client.peer.get("cuMemPoolCreate $0 $1");
    client.peer.get(&format!("cuDeviceSetMemPool 0 {pool}"));
    assert_eq!(client.peer.get("cuDeviceGetMemPool $0 0"), pool);
    allocate(&mut client, 1024);
    assert_eq!(attribute(&mut client, pool, USED), 1024);
}
