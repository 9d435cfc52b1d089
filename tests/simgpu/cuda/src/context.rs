//! Contexts.

use crate::code::{INVALID_CONTEXT, INVALID_VALUE, Outcome};
use crate::driver::{self, Driver};
use std::cell::RefCell;
use std::time::Duration;

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) ordinal: u32,
    primary: bool,
}

/// The primary context of a device.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// `None` while it is inactive: it was never retained, or destroyed.
    context: Option<u64>,
    retains: u64,
}

thread_local! {
    /// The thread's stack of contexts, the current one last.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The thread's current context.
pub(crate) fn current() -> Option<u64> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// The thread's current context and its device.
pub(crate) fn current_device(driver: &Driver) -> Outcome<(u64, u32)> {
    let context = current().ok_or(INVALID_CONTEXT)?;
    let ordinal = driver.contexts.get(&context).ok_or(INVALID_CONTEXT)?.ordinal;
    Ok((context, ordinal))
}

/// `cuCtxPushCurrent`.
pub(crate) fn push(context: u64) -> Outcome<()> {
    exists(context)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

/// `cuCtxPopCurrent`.
pub(crate) fn pop() -> Outcome<u64> {
    STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)
}

/// `cuCtxSetCurrent`: replaces the top of the stack, or pops it for null.
pub(crate) fn set_current(context: u64) -> Outcome<()> {
    if context != 0 {
        exists(context)?;
    }
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
    Ok(())
}

fn exists(context: u64) -> Outcome<()> {
    driver::with(|driver| driver.contexts.contains_key(&context).then_some(()).ok_or(INVALID_CONTEXT))
}

/// `cuCtxCreate`: the new context is current.
pub(crate) fn create(ordinal: u32) -> Outcome<u64> {
    let context = driver::with(|driver| driver.open_context(ordinal, false))?;
    pause();
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(context)
}

/// `cuCtxDestroy`.
pub(crate) fn destroy(context: u64) -> Outcome<()> {
    driver::with(|driver| {
        let known = driver.contexts.get(&context).ok_or(INVALID_CONTEXT)?;
        if known.primary {
            return Err(INVALID_CONTEXT);
        }
        driver.close_context(context);
        Ok(())
    })?;
    STACK.with_borrow_mut(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    });
    Ok(())
}

/// `cuDevicePrimaryCtxRetain`.
pub(crate) fn retain(ordinal: u32) -> Outcome<u64> {
    let (context, new) = driver::with(|driver| {
        driver.host_index(ordinal)?;
        let (context, new) = match driver.primaries.get(&ordinal).and_then(|primary| primary.context) {
            Some(context) => (context, false),
            None => (driver.open_context(ordinal, true)?, true),
        };
        let primary = driver.primaries.entry(ordinal).or_default();
        primary.context = Some(context);
        primary.retains += 1;
        Ok((context, new))
    })?;
    if new {
        pause();
    }
    Ok(context)
}

/// `cuDevicePrimaryCtxRelease`: the last one destroys the context.
pub(crate) fn release(ordinal: u32) -> Outcome<()> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        let primary = driver.primaries.get_mut(&ordinal).filter(|primary| primary.retains > 0);
        let primary = primary.ok_or(INVALID_CONTEXT)?;
        primary.retains -= 1;
        if primary.retains == 0
            && let Some(context) = primary.context.take()
        {
            driver.close_context(context);
        }
        Ok(())
    })
}

/// `cuDevicePrimaryCtxReset`: destroys the context whatever its references. They stay counted
/// (cuda.h), and the next use makes it anew; here the next retain does.
pub(crate) fn reset(ordinal: u32) -> Outcome<()> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        if let Some(context) = driver.primaries.get_mut(&ordinal).and_then(|primary| primary.context.take()) {
            driver.close_context(context);
        }
        Ok(())
    })
}

/// Whether the primary context of a device is active.
pub(crate) fn is_active(ordinal: u32) -> Outcome<bool> {
    driver::with(|driver| {
        driver.host_index(ordinal)?;
        Ok(driver.primaries.get(&ordinal).is_some_and(|primary| primary.context.is_some()))
    })
}

/// Device of a context, or of the current one for null.
pub(crate) fn device_of(context: u64) -> Outcome<u32> {
    driver::with(|driver| match context {
        0 => current_device(driver).map(|(_, ordinal)| ordinal),
        _ => driver.contexts.get(&context).map(|known| known.ordinal).ok_or(INVALID_VALUE),
    })
}

/// Creating a context takes time.
fn pause() {
    let ms = driver::with(|driver| Ok(driver.client.host().config().context_time_ms)).unwrap_or_default();
    std::thread::sleep(Duration::from_millis(ms));
}

impl Driver {
    fn open_context(&mut self, ordinal: u32, primary: bool) -> Outcome<u64> {
        let index = self.host_index(ordinal)?;
        self.take(ordinal, self.client.host().config().context_overhead)?;
        self.client.context_opened(index);
        let context = self.handle();
        self.contexts.insert(context, Context { ordinal, primary });
        Ok(context)
    }

    /// Frees what a context owns: its device, managed and pinned host memory. Physical handles and
    /// stream-ordered memory are not its (cuda.h, cuCtxDestroy).
    fn close_context(&mut self, context: u64) {
        let Some(known) = self.contexts.remove(&context) else { return };
        self.free_memory_of(context);
        self.give(known.ordinal, self.client.host().config().context_overhead);
        if let Some(index) = self.visible.get(known.ordinal as usize) {
            self.client.context_closed(*index);
        }
        self.retire(context);
    }
}
