//! The process on the other side: it loads the libraries of a host and does what it reads.

use libloading::Library;
use nvml_wrapper::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::io::Write as _;
use std::path::PathBuf;

/// Folder of the libraries to load; what tells this process what it is.
pub(crate) const LIBRARIES: &str = "SIMGPU_TEST_LIBRARIES";
/// What answers begin with: the test harness writes to the same stream.
pub(crate) const ANSWER: &str = "@answer ";
/// Words a call can write to.
pub(crate) const CELLS: usize = 8;

/// Memory of a device or an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// A compute process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) pid: u32,
    /// `None` where NVML says "not available".
    pub(crate) used: Option<u64>,
    pub(crate) gi: Option<u32>,
}

/// A device or an instance, as NVML tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) uuid: String,
    pub(crate) memory: Memory,
    pub(crate) rows: Vec<Row>,
    pub(crate) instances: Vec<Figures>,
}

/// Each device's figures, or the error.
pub(crate) type Sample = Vec<Result<Figures, String>>;

#[test]
#[ignore = "the process that the other tests start"]
fn process() {
    let Some(libraries) = std::env::var_os(LIBRARIES).map(PathBuf::from) else { return };
    let cuda = libraries.join("libcuda.so.1");
    // SAFETY: the library's constructors do nothing.
    let cuda = unsafe { Library::new(&cuda) }.unwrap();
    let nvml_library = libraries.join("libnvidia-ml.so.1");
    let mut nvml = None;
    say("ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["call", name, arguments @ ..] => say(&call(&cuda, name, arguments)),
            ["ipc-open", words @ ..] => say(&ipc_open(&cuda, words)),
            ["nvml"] => {
                let open = || Nvml::builder().lib_path(nvml_library.as_os_str()).init().unwrap();
                say(&serde_json::to_string(&sample(nvml.get_or_insert_with(open))).unwrap());
            }
            ["rows", version, stride] => {
                // SAFETY: as above.
                let library = unsafe { Library::new(&nvml_library) }.unwrap();
                say(&raw_rows(&library, version, stride.parse().unwrap()));
            }
            ["storm", threads, pairs, context] => {
                let numbers = [threads, pairs, context].map(|word| word.parse().unwrap());
                say(&storm(&cuda, numbers).to_string());
            }
            ["address", name] => {
                // SAFETY: the address is not called.
                let address = unsafe { cuda.get::<*const ()>(name.as_bytes()) };
                say(&address.map_or(0, |address| *address as usize).to_string());
            }
            ["comm", name] => {
                std::fs::write("/proc/self/comm", name).unwrap();
                say("done");
            }
            ["fork"] => say(&fork(|| cuda_after_fork(&cuda))),
            ["fork-exec"] => say(&fork(|| {
                let sleep = [c"/bin/sleep".as_ptr(), c"30".as_ptr(), std::ptr::null()];
                // SAFETY: the arguments are terminated strings in a terminated array.
                unsafe { libc::execv(sleep[0], sleep.as_ptr()) };
            })),
            other => panic!("no such command: {other:?}"),
        }
    }
}

fn say(answer: &str) {
    println!("\n{ANSWER}{answer}");
    std::io::stdout().flush().unwrap();
}

/// Calls a function of up to six arguments, all of which the System V calling convention passes in
/// registers: numbers, `$n` for the address of a cell, `$n=value` to fill it in first, `'text`.
/// Answers with the result and the cells.
fn call(library: &Library, name: &str, arguments: &[&str]) -> String {
    let mut cells = [0_u64; CELLS];
    let mut texts = Vec::new();
    let mut registers = [0_u64; 6];
    let base = cells.as_mut_ptr();
    for (register, word) in registers.iter_mut().zip(arguments) {
        *register = if let Some(cell) = word.strip_prefix('$') {
            let (cell, value) = cell.split_once('=').unwrap_or((cell, "0"));
            let cell: usize = cell.parse().unwrap();
            assert!(cell < CELLS);
            // SAFETY: the cell is within the array.
            unsafe {
                base.add(cell).write(value.parse().unwrap());
                base.add(cell) as u64
            }
        } else if let Some(text) = word.strip_prefix('\'') {
            texts.push(CString::new(text).unwrap());
            texts.last().unwrap().as_ptr() as u64
        } else {
            word.parse().unwrap()
        };
    }
    // SAFETY: the tests pass what the function of this name takes; further registers are ignored.
    let result = unsafe {
        let function =
            library.get::<unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32>(name.as_bytes()).unwrap();
        function(registers[0], registers[1], registers[2], registers[3], registers[4], registers[5])
    };
    let cells = std::hint::black_box(cells).map(|cell| cell.to_string()).join(" ");
    format!("{result} {cells}")
}

/// Opens another process's memory: the handle travels by value, on the stack. Answers with the
/// result and the address.
fn ipc_open(library: &Library, words: &[&str]) -> String {
    #[repr(C)]
    struct Handle([u64; CELLS]);
    let mut handle = Handle([0; CELLS]);
    for (into, word) in handle.0.iter_mut().zip(words) {
        *into = word.parse().unwrap();
    }
    let mut address = 0;
    // SAFETY: this is the function's type.
    let code = unsafe {
        let open = library.get::<unsafe extern "C" fn(*mut u64, Handle, u32) -> i32>(b"cuIpcOpenMemHandle_v2").unwrap();
        open(&raw mut address, handle, 1)
    };
    format!("{code} {address}")
}

/// Pairs of allocations and frees in several threads at once; answers with how many calls failed.
fn storm(library: &Library, [threads, pairs, context]: [u64; 3]) -> u64 {
    // SAFETY: these are the functions' types.
    let (current, allocate, free) = unsafe {
        (
            *library.get::<extern "C" fn(u64) -> i32>(b"cuCtxSetCurrent").unwrap(),
            *library.get::<extern "C" fn(*mut u64, u64) -> i32>(b"cuMemAlloc_v2").unwrap(),
            *library.get::<extern "C" fn(u64) -> i32>(b"cuMemFree_v2").unwrap(),
        )
    };
    let work = |thread: u64| {
        let mut failed = u64::from(current(context) != 0);
        for pair in 0..pairs {
            let mut address = 0;
            // Small ones, which share pages, and large ones.
            let bytes = [512, 100_000, (1 << 20) + 1, 5 << 20][((thread + pair) % 4) as usize];
            failed += u64::from(allocate(&raw mut address, bytes) != 0);
            failed += u64::from(free(address) != 0);
        }
        failed
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

/// Forks; the child runs `then` and waits to be killed. Answers with its number.
fn fork(then: impl FnOnce()) -> String {
    // SAFETY: the child calls what is allowed after a fork, and never returns.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child, should the test not come to it.
        unsafe { libc::alarm(60) };
        then();
        loop {
            // SAFETY: waits.
            unsafe { libc::pause() };
        }
    }
    child.to_string()
}

/// A forked child must not use the driver it inherited: if it can, it ends at once.
fn cuda_after_fork(library: &Library) {
    // SAFETY: these are the functions' types; the driver's lock was free, since this thread forked.
    let refused = unsafe {
        let mut address = 0;
        let init = *library.get::<extern "C" fn(u32) -> i32>(b"cuInit").unwrap();
        let allocate = *library.get::<extern "C" fn(*mut u64, u64) -> i32>(b"cuMemAlloc_v2").unwrap();
        init(0) == 3 && allocate(&raw mut address, 1) == 3
    };
    if !refused {
        // SAFETY: ends the child.
        unsafe { libc::_exit(1) };
    }
}

fn sample(nvml: &Nvml) -> Sample {
    let device = |index| {
        let device = nvml.device_by_index(index)?;
        let mut figures = figures(&device)?;
        for instance in 0..device.mig_device_count()? {
            figures.instances.push(self::figures(&device.mig_device_by_index(instance)?)?);
        }
        Ok(figures)
    };
    let devices = nvml.device_count().unwrap();
    (0..devices).map(|index| device(index).map_err(|error: NvmlError| format!("{error:?}"))).collect()
}

fn figures(device: &Device<'_>) -> Result<Figures, NvmlError> {
    let memory = device.memory_info()?;
    let row = |row: nvml_wrapper::struct_wrappers::device::ProcessInfo| Row {
        pid: row.pid,
        used: match row.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        gi: row.gpu_instance_id,
    };
    let mut rows: Vec<Row> = device.running_compute_processes()?.into_iter().map(row).collect();
    rows.sort_by_key(|row| row.pid);
    Ok(Figures {
        uuid: device.uuid()?,
        memory: Memory { total: memory.total, reserved: memory.reserved, free: memory.free, used: memory.used },
        rows,
        instances: Vec::new(),
    })
}

/// The process list of device 0 as the library writes it: pid and bytes at each `stride`.
fn raw_rows(library: &Library, version: &str, stride: usize) -> String {
    let mut buffer = [0_u8; 1024];
    let mut count = 16_u32;
    let mut device = 0_usize;
    // SAFETY: these are the functions' types, and the buffer has room for 16 rows of 64 bytes.
    let results = unsafe {
        let init = library.get::<extern "C" fn() -> u32>(b"nvmlInit_v2").unwrap();
        let handle = library.get::<extern "C" fn(u32, *mut usize) -> u32>(b"nvmlDeviceGetHandleByIndex_v2").unwrap();
        let name = format!("nvmlDeviceGetComputeRunningProcesses{version}");
        let list = library.get::<extern "C" fn(usize, *mut u32, *mut u8) -> u32>(name.as_bytes()).unwrap();
        [init(), handle(0, &raw mut device), list(device, &raw mut count, buffer.as_mut_ptr())]
    };
    assert_eq!(results, [0; 3]);
    let word = |at: usize| u64::from_ne_bytes(buffer[at..at + 8].try_into().unwrap());
    let row = |row: usize| format!("{} {}", word(row * stride) as u32, word(row * stride + 8));
    (0..count as usize).map(row).collect::<Vec<_>>().join(" ")
}
