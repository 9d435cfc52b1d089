//! Memory that one process exports and others open.

use crate::rig::{CONTEXT, Client, MIB, Peer, Rig, config, wait_until};

const BLOCK: u64 = 64 * MIB;

/// The words of a block's handle.
fn export(client: &mut Client, address: u64) -> String {
    let called = client.peer.call(&format!("cuIpcGetMemHandle $0 {address}"));
    assert_eq!(called.code, 0);
    called.cells.map(|cell| cell.to_string()).join(" ")
}

fn try_open(client: &mut Client, handle: &str) -> (i32, u64) {
    let answer = client.peer.ask(&format!("ipc-open {handle}"));
    let (code, address) = answer.split_once(' ').unwrap();
    (code.parse().unwrap(), address.parse().unwrap())
}

fn open(client: &mut Client, handle: &str) -> u64 {
    let (code, address) = try_open(client, handle);
    assert_eq!(code, 0);
    address
}

fn close(client: &mut Client, address: u64) {
    client.peer.get(&format!("cuIpcCloseMemHandle {address}"));
}

fn rows(observer: &mut Peer, rows: &[(&Client, u64)]) {
    let mut expected: Vec<_> = rows.iter().map(|(client, bytes)| (client.peer.pid(), Some(CONTEXT + bytes))).collect();
    expected.sort_unstable();
    assert_eq!(observer.rows(), expected);
}

#[test]
fn shared_memory_is_used_once_and_billed_to_all_who_hold_it() {
    let rig = Rig::new(config());
    let (mut observer, mut owner, mut importer) = (rig.peer(), rig.client(), rig.client());
    let block = owner.allocate(BLOCK);
    let handle = export(&mut owner, block);
    assert_eq!(export(&mut owner, block), handle);
    let address = open(&mut importer, &handle);
    assert_eq!(observer.used(), 2 * CONTEXT + BLOCK);
    rows(&mut observer, &[(&owner, BLOCK), (&importer, BLOCK)]);
    // Counted: the same address, closed as often as it was opened, and never freed.
    assert_eq!(open(&mut importer, &handle), address);
    assert_eq!(importer.peer.code(&format!("cuMemFree_v2 {address}")), 1);
    close(&mut importer, address);
    rows(&mut observer, &[(&owner, BLOCK), (&importer, BLOCK)]);
    close(&mut importer, address);
    rows(&mut observer, &[(&owner, BLOCK), (&importer, 0)]);
    assert_eq!(importer.peer.code(&format!("cuIpcCloseMemHandle {address}")), 1);
    owner.free(block);
    assert_eq!(observer.used(), 2 * CONTEXT);
    // It is gone, and another block does not answer to its handle.
    let other = owner.allocate(BLOCK);
    export(&mut owner, other);
    assert_eq!(try_open(&mut importer, &handle).0, 1);
}

#[test]
fn a_freed_block_stays_until_its_last_importer_closes_it() {
    let rig = Rig::new(config());
    let (mut observer, mut owner) = (rig.peer(), rig.client());
    let (mut first, mut second) = (rig.client(), rig.client());
    let block = owner.allocate(BLOCK);
    let handle = export(&mut owner, block);
    let (one, two) = (open(&mut first, &handle), open(&mut second, &handle));
    owner.free(block);
    assert_eq!(observer.used(), 3 * CONTEXT + BLOCK);
    rows(&mut observer, &[(&owner, 0), (&first, BLOCK), (&second, BLOCK)]);
    // Nobody can open it any more.
    assert_eq!(try_open(&mut owner, &handle).0, 1);
    close(&mut first, one);
    assert_eq!(observer.used(), 3 * CONTEXT + BLOCK);
    close(&mut second, two);
    assert_eq!(observer.used(), 3 * CONTEXT);
    rows(&mut observer, &[(&owner, 0), (&first, 0), (&second, 0)]);
}

#[test]
fn a_dead_owners_block_stays_until_its_importer_is_dead_too() {
    let rig = Rig::new(config());
    let (mut observer, mut owner, mut importer) = (rig.peer(), rig.client(), rig.client());
    let block = owner.allocate(BLOCK);
    owner.allocate(8 * MIB);
    let handle = export(&mut owner, block);
    open(&mut importer, &handle);
    owner.peer.kill();
    wait_until("the rest", || observer.used() == CONTEXT + BLOCK);
    rows(&mut observer, &[(&importer, BLOCK)]);
    importer.peer.kill();
    wait_until("the block", || observer.used() == 0);
    assert_eq!(observer.rows(), []);
}

#[test]
fn a_context_takes_its_imports_along() {
    let rig = Rig::new(simgpu::Config { bill_imports: false, ..config() });
    let (mut observer, mut owner, mut importer) = (rig.peer(), rig.client(), rig.client());
    let block = owner.allocate(BLOCK);
    let handle = export(&mut owner, block);
    open(&mut importer, &handle);
    rows(&mut observer, &[(&owner, BLOCK), (&importer, 0)]);
    owner.free(block);
    assert_eq!(observer.used(), 2 * CONTEXT + BLOCK);
    // Now it is on nobody's bill.
    rows(&mut observer, &[(&owner, 0), (&importer, 0)]);
    let context = importer.context;
    importer.peer.get(&format!("cuCtxDestroy_v2 {context}"));
    assert_eq!(observer.used(), CONTEXT);
}

#[test]
fn what_cannot_be_shared() {
    let rig = Rig::new(simgpu::Config { devices: 2, ..config() });
    let (mut owner, mut importer) = (rig.client(), rig.client());
    let block = owner.allocate(BLOCK);
    let small = owner.allocate(512);
    let managed = owner.peer.get("cuMemAllocManaged $0 4194304 1");
    let pooled = owner.peer.get("cuMemAllocAsync $0 4194304 0");
    assert_eq!(owner.peer.code(&format!("cuIpcGetMemHandle $0 {small}")), 801);
    for address in [managed, pooled, 0, 4096] {
        assert_eq!(owner.peer.code(&format!("cuIpcGetMemHandle $0 {address}")), 1);
    }
    let handle = export(&mut owner, block);
    // Not in the owner itself, not on another device, not from a made-up handle.
    assert_eq!(try_open(&mut owner, &handle).0, 1);
    importer.peer.get("cuCtxCreate_v2 $0 0 1");
    assert_eq!(try_open(&mut importer, &handle).0, 1);
    for handle in ["0 0 0 0", "1 4000000000 1 2", "1 99999999999 1 2", "1 0 77 2"] {
        assert_eq!(try_open(&mut importer, handle).0, 1, "{handle}");
    }
}
