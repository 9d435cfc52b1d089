//! How processes go, and when their memory comes back.

use crate::rig::{CONTEXT, DELAY, Forked, MIB, Rig, config, wait_until};
use std::time::{Duration, Instant};

#[test]
fn the_memory_of_a_killed_process_comes_back_in_one_step() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let mut client = rig.client();
    for bytes in [512, 6 * MIB, 32 * MIB] {
        client.allocate(bytes);
    }
    client.peer.get("cuMemAllocAsync $0 512 0");
    let held = CONTEXT + (2 + 6 + 32 + 32) * MIB;
    let pid = client.peer.pid();
    assert_eq!(observer.rows(), [(pid, Some(held))]);
    client.peer.kill();
    let killed = Instant::now();
    let mut seen = vec![];
    wait_until("memory back", || {
        let figures = observer.figures(0);
        let rows: Vec<_> = figures.rows.iter().map(|row| (row.pid, row.used)).collect();
        // Memory is read before the list: the row never goes before the memory.
        if figures.memory.used == 0 {
            assert_eq!(rows, []);
        } else if killed.elapsed() < DELAY {
            assert_eq!(rows, [(pid, Some(held))]);
        }
        seen.push(figures.memory.used);
        figures.memory.used == 0
    });
    let took = killed.elapsed();
    seen.dedup();
    assert_eq!(seen, [held, 0]);
    assert!(took >= DELAY && took < DELAY + Duration::from_secs(5), "{took:?}");
}

#[test]
fn pinned_memory_takes_longer() {
    let rig = Rig::new(simgpu::Config { release_delay_ms: 0, release_per_pinned_gib_ms: 300, ..config() });
    let mut observer = rig.peer();
    let mut client = rig.client();
    client.peer.get(&format!("cuMemHostAlloc $0 {} 0", 2_u64 << 30));
    client.peer.kill();
    let killed = Instant::now();
    wait_until("memory back", || observer.used() == 0);
    assert!(killed.elapsed() >= Duration::from_millis(600), "{:?}", killed.elapsed());
}

#[test]
fn a_process_that_exits_leaves_like_one_that_is_killed() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let mut client = rig.client();
    client.allocate(4 * MIB);
    // Its input ends, and it returns from its main function.
    client.peer.exit();
    assert_eq!(observer.used(), CONTEXT + 4 * MIB);
    wait_until("memory back", || observer.used() == 0);
    assert_eq!(observer.rows(), []);
}

#[test]
fn a_forked_child_keeps_the_dead_parents_memory_and_row() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let mut client = rig.client();
    client.allocate(4 * MIB);
    let child = Forked(client.peer.ask("fork").parse().unwrap());
    let pid = client.peer.pid();
    client.peer.kill();
    let killed = Instant::now();
    let row = [(pid, Some(CONTEXT + 4 * MIB))];
    while killed.elapsed() < 3 * DELAY {
        assert_eq!(observer.rows(), row);
        std::thread::sleep(Duration::from_millis(20));
    }
    // It ends at once if the driver let it do anything.
    assert!(child.is_running());
    assert!(!rig.host.view().clients[0].gone);
    drop(child);
    wait_until("memory back", || observer.used() == 0);
    assert_eq!(observer.rows(), []);
}

#[test]
fn a_child_that_executes_another_program_does_not() {
    let rig = Rig::new(config());
    let mut observer = rig.peer();
    let mut client = rig.client();
    client.allocate(4 * MIB);
    let child = Forked(client.peer.ask("fork-exec").parse().unwrap());
    let program = format!("/proc/{}/comm", child.0);
    wait_until("exec", || std::fs::read_to_string(&program).unwrap() == "sleep\n");
    client.peer.kill();
    wait_until("memory back", || observer.used() == 0);
    assert_eq!(observer.rows(), []);
    assert!(child.is_running());
}

#[test]
fn memory_that_came_back_can_be_had_without_anybody_looking() {
    let rig = Rig::new(simgpu::Config { memory: 2 * CONTEXT, release_delay_ms: 0, ..config() });
    let mut second = rig.client();
    let mut first = rig.client();
    assert_eq!(second.peer.code("cuMemAlloc_v2 $0 512"), 2);
    first.peer.kill();
    wait_until("memory", || second.peer.code("cuMemAlloc_v2 $0 512") == 0);
}
