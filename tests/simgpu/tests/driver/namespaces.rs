//! Numbers of processes as another pid namespace sees them. Needs root.

use crate::rig::{CONTEXT, Client, MIB, Peer, Rig, config, wait_until};

const UNSHARE: [&str; 3] = ["unshare", "-pf", "--mount-proc"];

/// The only child of a process.
fn child_of(pid: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap()
}

fn assert_root() {
    // SAFETY: only reads this process's user.
    assert_eq!(unsafe { libc::geteuid() }, 0, "run this test as root: it makes a pid namespace");
}

#[test]
fn the_outside_sees_its_own_number_and_keeps_it_after_death() {
    assert_root();
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let mut client = Client::new(Peer::start(rig.command(&UNSHARE)));
    client.allocate(2 * MIB);
    let outside = child_of(client.peer.pid());
    let held = CONTEXT + 2 * MIB;
    assert_eq!(observer.rows(), [(outside, Some(held))]);
    // Inside it is the first process.
    assert_eq!(client.peer.rows(), [(1, Some(held))]);
    assert_eq!(observer.rows(), [(outside, Some(held))]);
    // SAFETY: kills the process this test started.
    unsafe { libc::kill(outside.cast_signed(), libc::SIGKILL) };
    wait_until("death", || !std::path::Path::new(&format!("/proc/{outside}")).exists());
    assert_eq!(observer.rows(), [(outside, Some(held))]);
    wait_until("memory back", || observer.used() == 0);
    assert_eq!(observer.rows(), []);
}

#[test]
fn the_inside_sees_the_memory_of_processes_it_cannot_see() {
    assert_root();
    let rig = Rig::new(config());
    let mut client = rig.client();
    client.allocate(2 * MIB);
    let mut inside = Peer::start(rig.command(&UNSHARE));
    assert_eq!(inside.rows(), []);
    assert_eq!(inside.used(), CONTEXT + 2 * MIB);
}

#[test]
fn an_instances_figure_does_not_depend_on_who_asks() {
    assert_root();
    let mig = vec![simgpu::Mig { gi: 3, memory: 2 << 30 }];
    let rig = Rig::new(simgpu::Config { mig, ..config() });
    let mut client = rig.client();
    client.allocate(2 * MIB);
    let mut inside = Peer::start(rig.command(&UNSHARE));
    let figures = inside.figures(0);
    assert_eq!((figures.memory.used, figures.instances[0].memory.used), (CONTEXT + 2 * MIB, CONTEXT + 2 * MIB));
    assert_eq!(figures.instances[0].rows, []);
}
