//! Virtual memory management.

use crate::rig::{MIB, Rig, config};

#[test]
fn physical_memory_lives_until_no_handle_and_no_mapping_is_left() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let handle = client.peer.get("cuMemCreate $0 4194304 $1 0");
    assert_eq!(client.billed(), 4 * MIB);
    let address = client.peer.get("cuMemAddressReserve $0 8388608 0 0 0");
    assert_eq!(client.billed(), 4 * MIB);
    for offset in [0, 4 * MIB] {
        client.peer.get(&format!("cuMemMap {} 4194304 0 {handle} 0", address + offset));
    }
    let again = client.peer.get(&format!("cuMemRetainAllocationHandle $0 {address}"));
    assert_eq!((again, client.billed()), (handle, 4 * MIB));
    // Two handles and two mappings, gone one by one.
    client.peer.get(&format!("cuMemRelease {handle}"));
    client.peer.get(&format!("cuMemUnmap {address} 4194304"));
    client.peer.get(&format!("cuMemRelease {handle}"));
    assert_eq!(client.billed(), 4 * MIB);
    assert_eq!(client.peer.code(&format!("cuMemRelease {handle}")), 1);
    assert_eq!(client.peer.code(&format!("cuMemAddressFree {address} 8388608")), 1);
    client.peer.get(&format!("cuMemUnmap {} 4194304", address + 4 * MIB));
    assert_eq!(client.billed(), 0);
    client.peer.get(&format!("cuMemAddressFree {address} 8388608"));
}

#[test]
fn an_unmapped_handle_goes_with_its_release() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let handle = client.peer.get("cuMemCreate $0 2097152 $1 0");
    let address = client.peer.get("cuMemAddressReserve $0 2097152 0 0 0");
    client.peer.get(&format!("cuMemMap {address} 2097152 0 {handle} 0"));
    client.peer.get(&format!("cuMemUnmap {address} 2097152"));
    assert_eq!(client.billed(), 2 * MIB);
    client.peer.get(&format!("cuMemRelease {handle}"));
    assert_eq!(client.billed(), 0);
}

#[test]
fn what_is_refused() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    let handle = client.peer.get("cuMemCreate $0 4194304 $1 0");
    let address = client.peer.get("cuMemAddressReserve $0 4194304 0 0 0");
    client.peer.get(&format!("cuMemMap {address} 4194304 0 {handle} 0"));
    for call in [
        "cuMemCreate $0 0 $1 0".to_owned(),
        "cuMemCreate $0 2097153 $1 0".to_owned(),
        "cuMemCreate $0 2097152 0 0".to_owned(),
        format!("cuMemMap {address} 4194304 0 {handle} 0"),
        // Half of a mapping cannot be unmapped.
        format!("cuMemUnmap {address} 2097152"),
        format!("cuMemUnmap {} 2097152", address + 64 * MIB),
        // Mapped memory is not freed like allocated memory.
        format!("cuMemFree_v2 {address}"),
    ] {
        assert_eq!(client.peer.code(&call), 1, "{call}");
    }
    assert_eq!(client.billed(), 4 * MIB);
}
