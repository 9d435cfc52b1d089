//! `vramtrace run`: the live host through the engine, until told to stop.

use std::{
    fs,
    future::pending,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use super::{discover_config, monitor_config, runtime, verdict};
use crate::{
    cli::{Format, RunArgs},
    engine::{Engine, EngineConfig},
    finding::{Change, Report},
    gpu::MonitorConfig,
    ledger::Ledger,
    live::{KernelBooks, Live, LiveConfig, Problem},
    probe::KernelConfig,
    record::Record,
    sink,
};

/// How long walks over /proc that are under way may hold up the end.
const ABANDON_WALKS: Duration = Duration::from_millis(100);

pub(super) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let result = runtime.block_on(trace(args));
    runtime.shutdown_timeout(ABANDON_WALKS);
    let report = result?;
    Ok(verdict(&report, args.judging))
}

fn live_config(args: &RunArgs) -> LiveConfig {
    let types = (args.kernel_types != Path::new("none")).then(|| args.kernel_types.clone());
    LiveConfig {
        kernel: KernelConfig {
            calls_ring_bytes: args.calls_ring,
            live_entries: args.live_entries,
            attach_method: args.attach,
            types,
            ..KernelConfig::default()
        },
        discover: discover_config(&args.driver),
        monitor: MonitorConfig { deadline: args.nvml_deadline, ..monitor_config(&args.driver) },
        sample_interval: args.sample_interval,
        device_folder: args.driver.device_folder.clone(),
    }
}

async fn trace(args: &RunArgs) -> anyhow::Result<Report> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let output = Output(args.format);
    let mut live = Live::start(live_config(args));
    let mut engine = Engine::new(EngineConfig::default());
    output.started(&live.libraries())?;

    let deadline = async {
        match args.duration {
            Some(duration) => tokio::time::sleep(duration).await,
            None => pending().await,
        }
    };
    tokio::pin!(deadline);
    loop {
        tokio::select! {
            records = live.next() => {
                output.changes(&take_in(&mut engine, &records))?;
                live.answer(&engine.questions());
            }
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            () = &mut deadline => break,
        }
        for problem in live.take_problems() {
            output.problem(&problem)?;
        }
    }

    if let Some(wait) = live.slow_detach() {
        output.note(&format!("taking {} probes off; this kernel needs about {wait:?} for it", live.probes()))?;
    }
    let (records, books) = live.finish();
    output.changes(&take_in(&mut engine, &records))?;
    output.changes(&engine.finish())?;
    let report = engine.report();
    output.summary(&report, engine.ledger(), books.as_ref())?;
    if let Some(path) = &args.report {
        let document = sink::json::report(&report)? + "\n";
        fs::write(path, document).with_context(|| format!("cannot write the report to {}", path.display()))?;
    }
    Ok(report)
}

fn take_in(engine: &mut Engine, records: &[Record]) -> Vec<Change> {
    records.iter().flat_map(|record| engine.push(record)).collect()
}

/// Where everything is written.
struct Output(Format);

impl Output {
    fn started(&self, libraries: &[String]) -> anyhow::Result<()> {
        write(&match self.0 {
            Format::Text => sink::text::started(libraries),
            Format::Json => sink::json::started(libraries)?,
        })
    }

    fn changes(&self, changes: &[Change]) -> anyhow::Result<()> {
        for change in changes {
            write(&match self.0 {
                Format::Text => sink::text::change(change),
                Format::Json => sink::json::change(change)?,
            })?;
        }
        Ok(())
    }

    fn problem(&self, problem: &Problem) -> anyhow::Result<()> {
        write(&match self.0 {
            Format::Text => sink::text::problem(problem),
            Format::Json => sink::json::problem(problem)?,
        })
    }

    /// Something a person who waits wants to know; programs do not wait.
    fn note(&self, note: &str) -> anyhow::Result<()> {
        if self.0 == Format::Text { write(&format!("{note}\n")) } else { Ok(()) }
    }

    fn summary(&self, report: &Report, ledger: &Ledger, books: Option<&KernelBooks>) -> anyhow::Result<()> {
        write(&match self.0 {
            Format::Text => sink::text::summary(report, ledger, books),
            Format::Json => sink::json::summary(report, books)?,
        })
    }
}

/// At once: a reader of the other end of a pipe sees findings as they come.
fn write(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.context("cannot write to standard output")
}
