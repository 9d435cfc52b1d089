//! Any bytes as a container's libcuda: examined or refused, never a panic.

#![no_main]
#![expect(clippy::expect_used, reason = "a panic is what the fuzzer looks for")]

use libfuzzer_sys::fuzz_target;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use vramtrace::probe::library::Library;

fuzz_target!(|bytes: &[u8]| {
    let memory = rustix::fs::memfd_create("fuzzed", rustix::fs::MemfdFlags::CLOEXEC).expect("a file in memory");
    let mut file = File::from(memory);
    file.write_all(bytes).expect("memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if let Err(error) = Library::open(&path) {
        let _ = error.to_string();
    }
});
