//! `vramtrace run`: the live host through the engine, until told to stop.

use std::{
    future::pending,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    discover_config, monitor_config,
    preflight::{self, NO_TYPES, ReportFile},
    runtime, verdict,
};
use crate::{
    cli::{Format, RunArgs},
    engine::{Engine, EngineConfig},
    finding::{Change, Report},
    gpu::MonitorConfig,
    ledger::Ledger,
    live::{Calendar, KernelBooks, Live, LiveConfig, Problem},
    probe::{KernelConfig, types::KERNEL_TYPES},
    record::Record,
    sink,
};

/// How long walks over /proc that are under way may hold up the end.
const ABANDON_WALKS: Duration = Duration::from_millis(100);

pub(super) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    preflight::check(args)?;
    let file = args.report.as_deref().map(ReportFile::open).transpose()?;
    let runtime = runtime()?;
    let result = runtime.block_on(trace(args, file));
    runtime.shutdown_timeout(ABANDON_WALKS);
    let report = result?;
    Ok(verdict(&report, args.judging))
}

fn live_config(args: &RunArgs) -> LiveConfig {
    let types = match &args.kernel_types {
        None => Some(PathBuf::from(KERNEL_TYPES)),
        Some(path) => (path != Path::new(NO_TYPES)).then(|| path.clone()),
    };
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

async fn trace(args: &RunArgs, file: Option<ReportFile>) -> anyhow::Result<Report> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let output = Output { format: args.format, calendar: Calendar::now() };
    let mut live = Live::start(live_config(args));
    let mut engine = Engine::new(EngineConfig::default());
    output.started(live.libraries().as_deref())?;

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
                if engine.wants_open_files() {
                    live.walk_open_files();
                }
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
    let end = live.finish();
    output.changes(&take_in(&mut engine, &end.records))?;
    for problem in &end.problems {
        output.problem(problem)?;
    }
    output.changes(&engine.finish())?;
    let report = engine.report();
    output.summary(&report, engine.ledger(), end.books.as_ref())?;
    if let Some(file) = file {
        file.write(&(sink::json::report(&report)? + "\n"))?;
    }
    Ok(report)
}

fn take_in(engine: &mut Engine, records: &[Record]) -> Vec<Change> {
    records.iter().flat_map(|record| engine.push(record)).collect()
}

/// Where everything is written.
struct Output {
    format: Format,
    calendar: Calendar,
}

impl Output {
    fn started(&self, libraries: Option<&[String]>) -> anyhow::Result<()> {
        write(&match self.format {
            Format::Text => sink::text::started(libraries, self.calendar),
            Format::Json => sink::json::started(libraries.unwrap_or_default(), self.calendar)?,
        })
    }

    fn changes(&self, changes: &[Change]) -> anyhow::Result<()> {
        for change in changes {
            write(&match self.format {
                Format::Text => sink::text::change(change, self.calendar),
                Format::Json => sink::json::change(change, self.calendar)?,
            })?;
        }
        Ok(())
    }

    fn problem(&self, problem: &Problem) -> anyhow::Result<()> {
        write(&match self.format {
            Format::Text => sink::text::problem(problem),
            Format::Json => sink::json::problem(problem)?,
        })
    }

    /// Something a person who waits wants to know; programs do not wait.
    fn note(&self, note: &str) -> anyhow::Result<()> {
        if self.format == Format::Text { write(&format!("{note}\n")) } else { Ok(()) }
    }

    fn summary(&self, report: &Report, ledger: &Ledger, books: Option<&KernelBooks>) -> anyhow::Result<()> {
        write(&match self.format {
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
