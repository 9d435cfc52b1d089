//! Split devices.

use crate::peer::{Memory, Row};
use crate::rig::{CONTEXT, Client, GIB, MIB, Peer, Rig, config};
use simgpu::Mig;

fn host() -> Rig {
    let mig = vec![Mig { gi: 3, memory: 2 * GIB }, Mig { gi: 5, memory: 4 * GIB }];
    Rig::new(simgpu::Config { devices: 2, mig, ..config() })
}

fn client(rig: &Rig, visible: &str) -> Client {
    let mut command = rig.command(&[]);
    command.env("CUDA_VISIBLE_DEVICES", visible);
    Client::new(Peer::start(command))
}

#[test]
fn the_parent_lists_processes_without_values_and_the_instances_their_own() {
    let rig = host();
    let config = rig.host.config();
    // Of split devices a process sees the first instance, if none is named.
    let mut first = rig.client();
    let mut second = client(&rig, &config.mig_uuid(0, 5));
    let mut other = client(&rig, &config.mig_uuid(1, 3));
    first.allocate(2 * MIB);
    second.allocate(4 * MIB);
    other.allocate(8 * MIB);
    assert_eq!(second.peer.get("cuDeviceGetCount $0"), 1);
    let (one, two, three) = (first.peer.pid(), second.peer.pid(), other.peer.pid());
    let row = |pid, used, gi| Row { pid, used, gi: Some(gi) };
    let figures = first.peer.figures(0);
    let used = 2 * CONTEXT + 6 * MIB;
    assert_eq!(figures.memory, Memory { total: 8 * GIB, reserved: 0, free: 8 * GIB - used, used });
    let mut rows = [row(one, None, 3), row(two, None, 5)];
    rows.sort_by_key(|row| row.pid);
    assert_eq!(figures.rows, rows);

    let [small, large] = figures.instances.try_into().unwrap();
    assert_eq!([&small.uuid, &large.uuid], [&config.mig_uuid(0, 3), &config.mig_uuid(0, 5)]);
    let used = CONTEXT + 2 * MIB;
    assert_eq!(small.memory, Memory { total: 2 * GIB, reserved: 0, free: 2 * GIB - used, used });
    assert_eq!(small.rows, [row(one, Some(used), 3)]);
    let used = CONTEXT + 4 * MIB;
    assert_eq!(large.memory, Memory { total: 4 * GIB, reserved: 0, free: 4 * GIB - used, used });
    assert_eq!(large.rows, [row(two, Some(used), 5)]);

    let figures = first.peer.figures(1);
    assert_eq!(figures.rows, [row(three, None, 3)]);
    let [small, large] = figures.instances.try_into().unwrap();
    assert_eq!(small.rows, [row(three, Some(CONTEXT + 8 * MIB), 3)]);
    assert_eq!((large.memory.used, large.rows), (0, vec![]));
}

#[test]
fn an_instance_is_full_when_its_own_memory_is() {
    let rig = host();
    let mut small = rig.client();
    assert_eq!(small.peer.get("cuDeviceTotalMem_v2 $0 0"), 2 * GIB);
    let info = small.peer.call("cuMemGetInfo_v2 $0 $1");
    assert_eq!((info.cells[0], info.cells[1]), (2 * GIB - CONTEXT, 2 * GIB));
    let mut neighbour = rig.client();
    small.allocate(GIB);
    assert_eq!(neighbour.peer.code(&format!("cuMemAlloc_v2 $0 {GIB}")), 2);
    neighbour.allocate(GIB - 2 * CONTEXT);
    assert_eq!(small.peer.code("cuMemAlloc_v2 $0 512"), 2);
    let figures = small.peer.figures(0);
    assert_eq!(figures.instances[0].memory, Memory { total: 2 * GIB, reserved: 0, free: 0, used: 2 * GIB });
    // The other instance is not touched.
    let mut large = client(&rig, &rig.host.config().mig_uuid(0, 5));
    large.allocate(3 * GIB);
}

#[test]
fn an_instance_that_is_not_there() {
    let rig = host();
    let mut command = rig.command(&[]);
    command.env("CUDA_VISIBLE_DEVICES", "MIG-73696d67-0000-0000-0000-000000000000");
    assert_eq!(Peer::start(command).code("cuInit 0"), 100);
}
