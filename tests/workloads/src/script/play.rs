//! Plays the steps of a script.

use std::{
    collections::BTreeMap,
    os::unix::process::CommandExt,
    process::{Child, ExitCode},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result, anyhow};

use super::parse::Step;
use crate::{
    driver::CallError,
    memory::Allocation,
    process::{self, Forked},
    report::Event,
    run::{Gpu, Run},
};

/// What happens after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    End(u8),
}

/// What the threads of a script share.
#[derive(Default)]
struct Shared {
    contexts: BTreeMap<i32, Gpu>,
    allocations: BTreeMap<String, Vec<Allocation>>,
    children: Vec<Child>,
    forked: Vec<i32>,
}

/// One thread of a script.
struct Player<'a> {
    run: &'a Run,
    shared: &'a Mutex<Shared>,
    /// Ordinals of the contexts that are current here, the last on top.
    current: Vec<i32>,
}

/// Plays a whole script; what it holds at the end is kept for `--free-at-end`.
pub(super) fn play(run: &Run, steps: &[Step]) -> Result<ExitCode> {
    let shared = Mutex::default();
    let played = Player { run, shared: &shared, current: Vec::new() }.steps(steps);
    let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    run.keep(shared.allocations.into_values().flatten());
    Ok(match played? {
        Flow::Next => ExitCode::SUCCESS,
        Flow::End(code) => ExitCode::from(code),
    })
}

impl Player<'_> {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn steps(&mut self, steps: &[Step]) -> Result<Flow> {
        for step in steps {
            let flow = self.step(step)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
            if self.run.stopped() {
                return Ok(Flow::End(0));
            }
        }
        Ok(Flow::Next)
    }

    fn step(&mut self, step: &Step) -> Result<Flow> {
        let run = self.run;
        match step {
            Step::Init => run.init()?,
            Step::Context { ordinal, ownership } => {
                let gpu = run.enter(*ordinal, ownership.unwrap_or_else(|| run.options.ownership()))?;
                self.shared().contexts.insert(*ordinal, gpu);
                self.current.pop();
                self.current.push(*ordinal);
            }
            Step::Push { ordinal } => {
                let gpu = self.context(*ordinal)?;
                run.driver()?.ctx_push_current(gpu.context)?;
                self.current.push(*ordinal);
            }
            Step::Pop => {
                run.driver()?.ctx_pop_current(&mut 0)?;
                self.current.pop();
            }
            Step::Release { ordinal } => {
                let gpu = self.context(*ordinal)?;
                run.leave(gpu)?;
                self.shared().contexts.remove(ordinal);
            }
            Step::Allocate { family, name, bytes, count, every } => {
                let device = self.current.last().copied().unwrap_or(run.options.device);
                for done in 0..*count {
                    if done > 0 {
                        run.sleep(*every);
                    }
                    let allocation = run.allocate(device, *family, *bytes)?;
                    self.shared().allocations.entry(name.clone()).or_default().push(allocation);
                }
            }
            Step::Free { name } => {
                let allocations = self.shared().allocations.remove(name);
                let allocations = allocations.with_context(|| format!("free {name}: nothing has that name"))?;
                allocations.iter().try_for_each(|allocation| run.free(allocation))?;
            }
            Step::FreeAll => {
                let allocations = std::mem::take(&mut self.shared().allocations);
                allocations.values().flatten().try_for_each(|allocation| run.free(allocation))?;
            }
            Step::Synchronize => run.driver()?.stream_synchronize(0)?,
            Step::Try(inner) => return self.attempt(inner),
            Step::Sleep(duration) => drop(run.sleep(*duration)),
            Step::Hold => drop(run.sleep_for(None)),
            Step::Ready => run.ready(),
            Step::Print => {
                run.report_calls();
                run.report_live();
            }
            Step::Say(text) => run.report.emit(Event::Message { text }),
            Step::Name(name) => {
                process::set_name(name)?;
                run.report.rename(name);
            }
            Step::Repeat(count, steps) => {
                for _ in 0..*count {
                    let flow = self.steps(steps)?;
                    if flow != Flow::Next {
                        return Ok(flow);
                    }
                }
            }
            Step::Threads(count, steps) => return self.threads(*count, steps),
            Step::Fork { name, steps } => return self.fork(name.as_deref().unwrap_or("forked"), steps),
            Step::Spawn { name, text } => {
                let name = name.as_deref().unwrap_or("spawned");
                let mut command = process::command(&run.options, name)?;
                let child = process::spawn(run, command.args(["script", "--text", text]), name)?;
                self.shared().children.push(child);
            }
            Step::Exec { name, text } => {
                let mut command = process::command(&run.options, name.as_deref().unwrap_or("script"))?;
                run.report_calls();
                run.report_live();
                run.report.emit(Event::End { reason: "exec" });
                return Err(command.args(["script", "--text", text]).exec()).context("exec of this program");
            }
            Step::Wait => self.wait()?,
            Step::KillSelf => run.kill_self()?,
            Step::Exit(code) => return Ok(Flow::End(*code)),
        }
        Ok(Flow::Next)
    }

    fn context(&self, ordinal: i32) -> Result<Gpu> {
        self.shared()
            .contexts
            .get(&ordinal)
            .copied()
            .with_context(|| format!("no context on device {ordinal}; use ctx"))
    }

    /// Plays a step that the driver may refuse.
    fn attempt(&mut self, step: &Step) -> Result<Flow> {
        match self.step(step) {
            Ok(flow) => Ok(flow),
            Err(error) => match error.downcast_ref::<CallError>() {
                Some(CallError::Refused { symbol, code }) => {
                    self.run.report.emit(Event::Outcome { case: symbol, code: *code });
                    Ok(Flow::Next)
                }
                _ => Err(error),
            },
        }
    }

    /// Plays the steps in threads that begin with the context that is current here.
    fn threads(&mut self, count: u32, steps: &[Step]) -> Result<Flow> {
        let gpu = self.current.last().map(|ordinal| self.context(*ordinal)).transpose()?;
        let thread = || {
            if let Some(gpu) = gpu {
                self.run.driver()?.ctx_set_current(gpu.context)?;
            }
            let current = gpu.iter().map(|gpu| gpu.ordinal).collect();
            Player { run: self.run, shared: self.shared, current }.steps(steps)
        };
        let flows = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..count).map(|_| scope.spawn(thread)).collect();
            let joined = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
            joined.collect::<Result<Vec<_>>>()
        })?;
        Ok(flows.into_iter().find(|flow| *flow != Flow::Next).unwrap_or(Flow::Next))
    }

    fn fork(&mut self, name: &str, steps: &[Step]) -> Result<Flow> {
        match process::fork(self.run, name)? {
            Forked::Parent(child) => {
                self.shared().forked.push(child);
                Ok(Flow::Next)
            }
            Forked::Child => {
                let mut shared = self.shared();
                shared.children.clear();
                shared.forked.clear();
                // The memory is the parent's; the child neither frees nor reports it.
                shared.allocations.clear();
                drop(shared);
                Ok(match self.steps(steps)? {
                    Flow::Next => Flow::End(0),
                    end @ Flow::End(_) => end,
                })
            }
        }
    }

    fn wait(&mut self) -> Result<()> {
        let (children, forked) = {
            let mut shared = self.shared();
            (std::mem::take(&mut shared.children), std::mem::take(&mut shared.forked))
        };
        children.into_iter().try_for_each(|child| process::wait(self.run, child))?;
        forked.into_iter().try_for_each(|child| process::wait_forked(self.run, child))
    }
}
