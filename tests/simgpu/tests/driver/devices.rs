//! Which devices a process sees, and in what order.

use crate::rig::{CONTEXT, MIB, Peer, Rig, config};

fn host() -> Rig {
    Rig::new(simgpu::Config { devices: 3, ..config() })
}

/// A process with `CUDA_VISIBLE_DEVICES` set, initialised or not.
fn start(rig: &Rig, visible: &str) -> (Peer, i32) {
    let mut command = rig.command(&[]);
    command.env("CUDA_VISIBLE_DEVICES", visible);
    let mut peer = Peer::start(command);
    let code = peer.code("cuInit 0");
    (peer, code)
}

/// Host indices of the devices a process sees, by the last word of their UUIDs.
fn seen(rig: &Rig, visible: &str) -> Vec<u64> {
    let (mut peer, code) = start(rig, visible);
    assert_eq!(code, 0, "{visible}");
    let count = peer.get("cuDeviceGetCount $0");
    let uuid = |ordinal: u64| peer.call(&format!("cuDeviceGetUuid_v2 $0 {ordinal}")).cells[1].swap_bytes();
    (0..count).map(uuid).map(|uuid| (uuid & 0xffff_ffff) - 1).collect()
}

#[test]
fn by_index() {
    let rig = host();
    assert_eq!(seen(&rig, "0,1,2"), [0, 1, 2]);
    assert_eq!(seen(&rig, "1"), [1]);
    assert_eq!(seen(&rig, "2,0"), [2, 0]);
    assert_eq!(seen(&rig, " 2 , 1 "), [2, 1]);
    // Up to the first that does not exist.
    assert_eq!(seen(&rig, "1,7,2"), [1]);
    assert_eq!(seen(&rig, "0,-1,2"), [0]);
    let mut peer = rig.peer();
    peer.get("cuInit 0");
    assert_eq!(peer.get("cuDeviceGetCount $0"), 3);
}

#[test]
fn by_uuid() {
    let rig = host();
    let uuid = |index| format!("GPU-{}", rig.host.config().uuid(index));
    assert_eq!(seen(&rig, &uuid(1)), [1]);
    assert_eq!(seen(&rig, &format!("{},{}", uuid(2), uuid(0))), [2, 0]);
    assert_eq!(seen(&rig, &format!("{},1", uuid(2))), [2, 1]);
    let mut peer = rig.peer();
    let listed: Vec<String> = peer.sample().into_iter().map(|figures| figures.unwrap().uuid).collect();
    assert_eq!(listed, [uuid(0), uuid(1), uuid(2)]);
}

#[test]
fn none_is_no_device() {
    let rig = host();
    for visible in ["", "-1", "3", "GPU-", "GPU-00000000", "NoDevFiles"] {
        assert_eq!(start(&rig, visible).1, 100, "{visible:?}");
    }
}

#[test]
fn memory_is_billed_to_the_device_behind_the_ordinal() {
    let rig = host();
    let (mut peer, _) = start(&rig, "2,0");
    let pid = peer.pid();
    peer.get("cuCtxCreate_v2 $0 0 0");
    peer.get("cuMemAlloc_v2 $0 4194304");
    peer.get("cuCtxCreate_v2 $0 0 1");
    let figures: Vec<_> = peer.sample().into_iter().map(Result::unwrap).collect();
    let used: Vec<u64> = figures.iter().map(|figures| figures.memory.used).collect();
    assert_eq!(used, [CONTEXT, 0, CONTEXT + 4 * MIB]);
    let rows: Vec<Vec<_>> =
        figures.iter().map(|figures| figures.rows.iter().map(|row| (row.pid, row.used)).collect()).collect();
    assert_eq!(rows, [vec![(pid, Some(CONTEXT))], vec![], vec![(pid, Some(CONTEXT + 4 * MIB))]]);
    assert_eq!(peer.code("cuCtxCreate_v2 $0 0 2"), 101);
}
