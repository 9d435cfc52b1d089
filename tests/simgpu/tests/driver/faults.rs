//! Things that go wrong on demand.

use crate::rig::{CONTEXT, Client, DELAY, MIB, Peer, Rig, config, wait_until};
use simgpu::Fault;
use std::time::{Duration, Instant};

fn leave_behind(bytes: u64) -> Fault {
    Fault::LeaveBehind { bytes, comm: None, first: None, row: false }
}

/// A process of that name, which dies holding 4 MiB.
fn dies(rig: &Rig, comm: &str) -> u32 {
    let mut peer = rig.peer();
    peer.ask(&format!("comm {comm}"));
    let mut client = Client::new(peer);
    client.allocate(4 * MIB);
    client.peer.kill();
    client.peer.pid()
}

/// Waits until all but `left` bytes are back, and checks that it stays so.
fn settles_at(observer: &mut Peer, left: u64) {
    wait_until("memory back", || observer.used() == left);
    std::thread::sleep(DELAY + DELAY / 2);
    assert_eq!(observer.used(), left);
}

#[test]
fn left_behind_without_a_row() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    rig.host.fault(leave_behind(3 * MIB)).unwrap();
    dies(&rig, "worker");
    settles_at(&mut observer, 3 * MIB);
    assert_eq!(observer.rows(), []);
    let device = &rig.host.view().devices[0];
    assert_eq!((device.used, device.left_behind), (3 * MIB, 3 * MIB));
    // Never more than it had; and it stays when the fault is cleared.
    rig.host.clear_faults().unwrap();
    rig.host.fault(leave_behind(u64::MAX)).unwrap();
    dies(&rig, "worker");
    settles_at(&mut observer, CONTEXT + 7 * MIB);
    rig.host.clear_faults().unwrap();
    dies(&rig, "worker");
    settles_at(&mut observer, CONTEXT + 7 * MIB);
}

#[test]
fn left_behind_with_a_row() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    rig.host.fault(Fault::LeaveBehind { bytes: 5 * MIB, comm: None, first: None, row: true }).unwrap();
    let pid = dies(&rig, "worker");
    settles_at(&mut observer, 5 * MIB);
    assert_eq!(observer.rows(), [(pid, Some(5 * MIB))]);
    rig.host.clear_faults().unwrap();
    settles_at(&mut observer, 5 * MIB);
    assert_eq!(observer.rows(), [(pid, Some(5 * MIB))]);
}

#[test]
fn a_row_left_behind_stays_without_a_delay_too() {
    let rig = Rig::new(simgpu::Config { release_delay_ms: 0, ..config() });
    let mut observer = rig.peer();
    rig.host.fault(Fault::LeaveBehind { bytes: 5 * MIB, comm: None, first: Some(2), row: true }).unwrap();
    let first = dies(&rig, "worker");
    settles_at(&mut observer, 5 * MIB);
    // Looking at it does not count as another process.
    let second = dies(&rig, "worker");
    settles_at(&mut observer, 10 * MIB);
    rig.host.clear_faults().unwrap();
    settles_at(&mut observer, 10 * MIB);
    let mut rows = [(first, Some(5 * MIB)), (second, Some(5 * MIB))];
    rows.sort_unstable();
    assert_eq!(observer.rows(), rows);
}

#[test]
fn only_the_first_processes() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    rig.host.fault(Fault::LeaveBehind { bytes: 2 * MIB, comm: None, first: Some(2), row: false }).unwrap();
    for left in [2, 4, 4, 4] {
        dies(&rig, "worker");
        settles_at(&mut observer, left * MIB);
    }
}

#[test]
fn only_processes_of_a_name() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let comm = Some("vllm".to_owned());
    rig.host.fault(Fault::LeaveBehind { bytes: 2 * MIB, comm, first: None, row: false }).unwrap();
    for (name, left) in [("worker", 0), ("my-vllm", 0), ("vll", 0), ("vllm", 2), ("vllm-worker", 4)] {
        dies(&rig, name);
        settles_at(&mut observer, left * MIB);
    }
}

#[test]
fn a_sticky_context_keeps_everything() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    // Another fault before it must not use itself up on a process that does not go.
    rig.host.fault(Fault::LeaveBehind { bytes: 2 * MIB, comm: None, first: Some(1), row: false }).unwrap();
    rig.host.fault(Fault::StickyContext { comm: "stuck".to_owned() }).unwrap();
    let stuck = dies(&rig, "stuck-worker");
    settles_at(&mut observer, CONTEXT + 4 * MIB);
    assert_eq!(observer.rows(), [(stuck, Some(CONTEXT + 4 * MIB))]);
    dies(&rig, "worker");
    settles_at(&mut observer, CONTEXT + 6 * MIB);
    assert_eq!(observer.rows(), [(stuck, Some(CONTEXT + 4 * MIB))]);
    rig.host.clear_faults().unwrap();
    settles_at(&mut observer, 2 * MIB);
    assert_eq!(observer.rows(), []);
}

#[test]
fn a_hang_lasts_as_long_as_it_says() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    client.peer.sample();
    rig.host.fault(Fault::Hang { ms: 400 }).unwrap();
    // The driver does not hang, and calls that concern no device do not either.
    let start = Instant::now();
    client.allocate(2 * MIB);
    assert!(start.elapsed() < Duration::from_millis(400));
    assert_eq!(client.billed(), 2 * MIB);
    assert!(start.elapsed() >= Duration::from_millis(400));
    rig.host.clear_faults().unwrap();
    let start = Instant::now();
    client.peer.sample();
    assert!(start.elapsed() < Duration::from_millis(400));
}

#[test]
fn an_error_code() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    for (code, error) in [(999, "Unknown"), (15, "GpuLost"), (4, "NoPermission")] {
        rig.host.clear_faults().unwrap();
        rig.host.fault(Fault::Error { code }).unwrap();
        assert_eq!(client.peer.sample(), [Err(error.to_owned())]);
        // Only NVML fails.
        let address = client.allocate(2 * MIB);
        client.free(address);
    }
    rig.host.clear_faults().unwrap();
    assert_eq!(client.billed(), 0);
}

#[test]
fn no_values() {
    let rig = Rig::new(config());
    let mut client = rig.client();
    rig.host.fault(Fault::NoValues).unwrap();
    let pid = client.peer.pid();
    assert_eq!(client.peer.rows(), [(pid, None)]);
    // The device's own figure is there.
    assert_eq!(client.peer.used(), CONTEXT);
    rig.host.clear_faults().unwrap();
    assert_eq!(client.peer.rows(), [(pid, Some(CONTEXT))]);
}

#[test]
fn a_lost_device_takes_only_itself() {
    let rig = Rig::new(simgpu::Config { devices: 2, ..config() });
    let mut client = rig.client();
    rig.host.fault(Fault::DeviceLost { device: 0 }).unwrap();
    let sample = client.peer.sample();
    assert_eq!(sample[0], Err("GpuLost".to_owned()));
    assert_eq!(sample[1].as_ref().unwrap().memory.used, 0);
    for call in
        ["cuMemAlloc_v2 $0 512", "cuCtxCreate_v2 $0 0 0", "cuMemGetInfo_v2 $0 $1", "cuDevicePrimaryCtxRetain $0 0"]
    {
        assert_eq!(client.peer.code(call), 46, "{call}");
    }
    client.peer.get("cuCtxCreate_v2 $0 0 1");
    client.allocate(2 * MIB);
    assert_eq!(client.peer.figures(1).memory.used, CONTEXT + 2 * MIB);
}

#[test]
fn rows_of_the_wrong_size() {
    let rig = Rig::new(config());
    let (mut first, mut second) = (rig.client(), rig.client());
    first.allocate(2 * MIB);
    second.allocate(4 * MIB);
    let (one, two) = (first.peer.pid(), second.peer.pid());
    let right = format!("{one} {} {two} {}", CONTEXT + 2 * MIB, CONTEXT + 4 * MIB);
    let list = |peer: &mut Peer, version: &str, stride: u32| peer.ask(&format!("rows {version} {stride}"));
    for (version, stride) in [("_v3", 24), ("_v2", 24), ("", 16)] {
        assert_eq!(list(&mut first.peer, version, stride), right, "{version}");
    }
    rig.host.fault(Fault::WrongStride).unwrap();
    for (version, stride) in [("_v3", 32), ("_v2", 24), ("", 16)] {
        assert_eq!(list(&mut first.peer, version, stride), right, "{version}");
    }
    // Read at the usual distance, the second row is what lies between: no process, no bytes known.
    let garbage = list(&mut first.peer, "_v3", 24);
    assert!(garbage.starts_with(&format!("{one} {} 0 ", CONTEXT + 2 * MIB)), "{garbage}");
}
