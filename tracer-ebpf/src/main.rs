//! vramtrace's eBPF programs: two for every traced driver call, three for the life of processes.
//!
//! State lives in maps and is exact whatever happens to the stream of events; the events say when
//! and in which order. Each program is a thin wrapper over a fallible function, and whatever stops
//! one is counted under a name that users see ([`tracer_ebpf::Counter`]).
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(unreachable_pub, missing_docs, reason = "the program macros emit public functions without documentation")]

mod atomic;
mod books;
mod call;
mod maps;
mod output;
mod process;
mod task;
mod verifier;

use aya_ebpf::{
    macros::{raw_tracepoint, tracepoint, uprobe, uretprobe},
    programs::{ProbeContext, RawTracePointContext, RetProbeContext, TracePointContext},
};

/// A traced function was entered. The cookie is its index in the table of symbols.
#[uprobe]
pub fn call_enter(ctx: ProbeContext) -> u32 {
    call::enter(&ctx);
    0
}

/// A traced function returned.
#[uretprobe]
pub fn call_return(ctx: RetProbeContext) -> u32 {
    call::leave(&ctx);
    0
}

/// A process or thread was forked. Needs the offsets of `task_struct`.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub fn fork(ctx: RawTracePointContext) -> i32 {
    process::fork(&ctx);
    0
}

/// The same on a kernel without type information: user space finds out whether it was a thread.
#[tracepoint]
pub fn fork_untyped(ctx: TracePointContext) -> u32 {
    process::fork_untyped(&ctx);
    0
}

/// A process replaced its image.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn exec(ctx: RawTracePointContext) -> i32 {
    process::exec(&ctx);
    0
}

/// A thread is exiting.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn exit(_ctx: RawTracePointContext) -> i32 {
    process::exit();
    0
}

/// The kernel lets only programs that declare a GPL-compatible licence call the helpers that read
/// kernel memory.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 4] = *b"GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
