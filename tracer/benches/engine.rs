//! How fast the engine is, and whether a record costs more for the history before it.
//!
//! A synthetic host day of ten million records: 1,000 processes in turn on 8 devices, sampled every
//! second, with calls at a steady rate in between, and shells that come and go. Records are made
//! ahead in batches, so that only the engine is timed. Prints the speed at each power of ten, the
//! cost of a record then relative to the first, and what a million live allocations take in memory.

use std::time::{Duration, Instant};
use vramtrace::engine::{Engine, EngineConfig};
use vramtrace::record::{Event, Identity, Life, NvmlRow, OpaqueId, Record, Task};

const DAY_NS: u64 = 86_400_000_000_000;
const START_NS: u64 = 1_000_000_000_000;
const DEVICES: u64 = 8;
const PROCESSES: u64 = 1_000;
/// Processes that run at once on each device.
const AT_ONCE: u64 = 5;
/// Records made ahead.
const BATCH: usize = 4_096;
const MIB: u64 = 1 << 20;

fn main() {
    // `cargo test` builds and runs benches with this flag: a short run shows that it works.
    let quick = std::env::args().any(|argument| argument == "--test");
    let marks: &[u64] = if quick { &[20_000] } else { &[100_000, 1_000_000, 10_000_000] };
    println!("{:>10} {:>12} {:>8} {:>10} {:>9}", "records", "records/s", "cost", "resident", "findings");
    host_day(marks);
    if !quick {
        let before = resident();
        let engine = million_live();
        println!(
            "1,000,000 live allocations in 10,000 processes: {} MiB more, {} processes known",
            resident().saturating_sub(before) / MIB,
            engine.ledger().process_count()
        );
    }
}

/// Resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4096
}

/// Runs a day and prints, at each mark, the speed since the mark before and what a record cost then
/// beside the first mark.
fn host_day(marks: &[u64]) {
    let mut engine = Engine::new(EngineConfig::default());
    let mut day = Day::new(10_000_000);
    let mut batch = Vec::with_capacity(BATCH);
    let (mut done, mut first) = (0, None);
    for &mark in marks {
        let mut time = Duration::ZERO;
        let since = done;
        while done < mark {
            batch.clear();
            batch.extend((done..mark.min(done + BATCH as u64)).map(|_| day.next_record()));
            done += batch.len() as u64;
            let start = Instant::now();
            for record in &batch {
                engine.push(record);
            }
            time += start.elapsed();
        }
        let cost = time.as_secs_f64() / (done - since) as f64;
        let first = *first.get_or_insert(cost);
        let (speed, resident) = (1.0 / cost, resident() / MIB);
        let findings = engine.report().findings.len();
        println!("{mark:>10} {speed:>12.0} {:>7.2}x {resident:>6} MiB {findings:>9}", cost / first);
    }
}

/// Makes the records of a day, in order.
struct Day {
    now: u64,
    step: u64,
    made: u64,
    next_sample: u64,
    next_device: u64,
    next_shell: u64,
    shell_lives: Option<Life>,
    workers: Vec<Worker>,
    born: u64,
    life_ns: u64,
    pending: Vec<Event>,
}

struct Worker {
    task: Task,
    device: u32,
    ends_ns: u64,
    /// Live blocks, and how many were made.
    blocks: Vec<(u64, u64)>,
    made: u64,
}

impl Day {
    fn new(records: u64) -> Self {
        let workers = DEVICES * AT_ONCE;
        let mut day = Self {
            now: START_NS,
            step: (DAY_NS / records).max(1),
            made: 0,
            next_sample: START_NS,
            next_device: 0,
            next_shell: START_NS,
            shell_lives: None,
            workers: Vec::new(),
            born: 0,
            life_ns: DAY_NS * workers / PROCESSES,
            pending: vec![Event::TracerStart { probes_ok: true, self_tgid: Some(1), driver: None }],
        };
        for index in 0..workers {
            // The first ones end at different times, so that the later ones come one by one.
            let life = day.life_ns * (index + 1) / workers;
            day.start_worker(index as u32 % DEVICES as u32, life);
        }
        day.pending.reverse();
        day
    }

    fn start_worker(&mut self, device: u32, life_ns: u64) {
        self.born += 1;
        let tgid = 10_000 + self.born as u32;
        let task = Task { pid: tgid, identity: Identity { tgid, start_ns: self.now }, comm: "python3".into() };
        let life = Life {
            task: task.clone(),
            ppid: 900,
            cgroup: "/kubepods.slice/pod-a/cri-b".into(),
            container: None,
            pod: None,
            nspid: None,
        };
        self.pending.push(Event::Fork { life: life.clone(), parent_tgid: 900, parent_start_ns: 1 });
        self.pending.push(Event::Exec { life });
        self.pending.push(Event::CtxCreate {
            task: task.clone(),
            api: "cuDevicePrimaryCtxRetain".into(),
            ctx: Some(OpaqueId::Number(0xc0 + u64::from(device))),
            device: Some(device),
            dur_ns: 200_000_000,
            result: 0,
        });
        self.workers.push(Worker { task, device, ends_ns: self.now + life_ns, blocks: Vec::new(), made: 0 });
    }

    fn next_record(&mut self) -> Record {
        self.made += 1;
        self.now += self.step;
        let event = self.next_event();
        Record { ts_ns: self.now, occurred_ns: None, event }
    }

    fn next_event(&mut self) -> Event {
        if let Some(event) = self.pending.pop() {
            return event;
        }
        if self.now >= self.next_sample {
            let device = self.next_device;
            self.next_device = (device + 1) % DEVICES;
            if self.next_device == 0 {
                self.next_sample = self.now + 1_000_000_000;
            }
            return self.sample(device as u32);
        }
        if let Some(life) = self.shell_lives.take() {
            return Event::Exit { task: life.task, ppid: 1, code: Some(0), signal: 0, group_dead: true };
        }
        if self.now >= self.next_shell {
            self.next_shell = self.now + 500_000_000;
            return self.shell();
        }
        let index = (self.made * 7919 % self.workers.len() as u64) as usize;
        if self.now >= self.workers[index].ends_ns {
            let gone = self.workers.swap_remove(index);
            self.start_worker(gone.device, self.life_ns);
            self.pending.reverse();
            self.pending.insert(0, Event::Reap { task: gone.task.clone() });
            return Event::Exit { task: gone.task, ppid: 900, code: Some(0), signal: 0, group_dead: true };
        }
        self.workers[index].call(self.made)
    }

    fn shell(&mut self) -> Event {
        let tgid = 1_000_000 + (self.made % 2_000_000) as u32;
        let task = Task { pid: tgid, identity: Identity { tgid, start_ns: self.now }, comm: "sh".into() };
        let life = Life {
            task,
            ppid: 900,
            cgroup: "/system.slice/cron.service".into(),
            container: None,
            pod: None,
            nspid: None,
        };
        self.shell_lives = Some(life.clone());
        Event::Fork { life, parent_tgid: 900, parent_start_ns: 1 }
    }

    fn sample(&self, device: u32) -> Event {
        let row = |worker: &Worker| NvmlRow {
            pid: worker.task.pid,
            used: Some(400 * MIB + worker.blocks.iter().map(|(_, size)| size).sum::<u64>()),
            kind: "C".into(),
            gi: None,
        };
        let procs: Vec<NvmlRow> = self.workers.iter().filter(|worker| worker.device == device).map(row).collect();
        Event::NvmlSample {
            device,
            gi: None,
            status: "ok".into(),
            used: Some(procs.iter().filter_map(|row| row.used).sum()),
            total: Some(80 << 30),
            reserved: None,
            procs,
            gpu_util: Some(50),
            dur_ns: 3_000_000,
        }
    }
}

impl Worker {
    /// A model of 64 blocks that stay, and one block that comes and goes.
    fn call(&mut self, turn: u64) -> Event {
        if self.blocks.len() > 64 {
            let (handle, _) = self.blocks.swap_remove(self.blocks.len() - 1);
            return free(&self.task, self.device, handle);
        }
        self.made += 1;
        let (handle, size) = (0x7f00_0000_0000 + self.made * 2 * MIB, (turn % 37 + 1) * MIB);
        self.blocks.push((handle, size));
        alloc(&self.task, self.device, handle, size)
    }
}

fn alloc(task: &Task, device: u32, handle: u64, size: u64) -> Event {
    Event::Alloc {
        task: task.clone(),
        lib: "libcuda".into(),
        api: "cuMemAlloc_v2".into(),
        handle: Some(OpaqueId::Number(handle)),
        size,
        device: Some(device),
        result: 0,
        ctx: Some(OpaqueId::Number(0xc0 + u64::from(device))),
        stack_id: None,
        pool: None,
        stream: None,
        begin_ns: None,
    }
}

fn free(task: &Task, device: u32, handle: u64) -> Event {
    Event::Free {
        task: task.clone(),
        lib: "libcuda".into(),
        api: "cuMemFree_v2".into(),
        handle: Some(OpaqueId::Number(handle)),
        size: 0,
        device: Some(device),
        result: 0,
        stream: None,
        begin_ns: None,
    }
}

/// An engine that has seen a million allocations and no release.
fn million_live() -> Engine {
    let mut engine = Engine::new(EngineConfig::default());
    for index in 0..1_000_000_u64 {
        let tgid = 1_000 + (index % 10_000) as u32;
        let identity = Identity { tgid, start_ns: u64::from(tgid) };
        let task = Task { pid: tgid, identity, comm: "python3".into() };
        let event = alloc(&task, 0, 0x7f00_0000_0000 + index * 4096, (index % 37 + 1) << 12);
        engine.push(&Record { ts_ns: START_NS + index * 1000, occurred_ns: None, event });
    }
    engine
}
