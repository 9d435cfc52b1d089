//! Findings and reports as JSON. On a live host each document is one line.

use crate::finding::{Change, Finding, Report};
use crate::live::{Calendar, KernelBooks, Problem};
use serde::Serialize;

/// Schema of the lines of a live run.
pub const RUN_SCHEMA: &str = "vramtrace-run/1";

/// One line of a live run.
#[derive(Serialize)]
struct Line<'a> {
    schema: &'static str,
    #[serde(flatten)]
    event: RunEvent<'a>,
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum RunEvent<'a> {
    Started {
        libraries: &'a [String],
        boot_time: String,
    },
    Problem {
        part: &'static str,
        reason: &'a str,
    },
    Finding {
        change: &'static str,
        opened_time: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        closed_time: Option<String>,
        finding: &'a Finding,
    },
    Summary {
        report: &'a Report,
        kernel: Option<&'a KernelBooks>,
    },
}

fn line(event: RunEvent<'_>) -> Result<String, serde_json::Error> {
    let mut line = serde_json::to_string(&Line { schema: RUN_SCHEMA, event })?;
    line.push('\n');
    Ok(line)
}

/// Tracing began; the libraries that carry probes, and what the boot clock counts from.
pub fn started(libraries: &[String], calendar: Calendar) -> Result<String, serde_json::Error> {
    line(RunEvent::Started { libraries, boot_time: calendar.boot_time() })
}

/// A part of the host cannot be seen.
pub fn problem(problem: &Problem) -> Result<String, serde_json::Error> {
    line(RunEvent::Problem { part: problem.part, reason: &problem.reason })
}

/// A finding opened, changed or closed.
pub fn change(change: &Change, calendar: Calendar) -> Result<String, serde_json::Error> {
    let word = match change {
        Change::Opened(_) => "opened",
        Change::Updated(_) => "updated",
        Change::Closed(_) => "closed",
    };
    let finding = change.finding();
    line(RunEvent::Finding {
        change: word,
        opened_time: calendar.time(finding.opened_ns),
        closed_time: finding.closed_ns.map(|ns| calendar.time(ns)),
        finding,
    })
}

/// The end of a live run: the findings document, and what the kernel side counted.
pub fn summary(report: &Report, kernel: Option<&KernelBooks>) -> Result<String, serde_json::Error> {
    line(RunEvent::Summary { report, kernel })
}

/// The findings document.
pub fn report(report: &Report) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(report)
}
