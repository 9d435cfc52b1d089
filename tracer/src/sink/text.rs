//! Findings and reports as plain text: the answer first, then what proves it.

use crate::finding::{Change, DataQuality, Finding, Report};
use crate::ledger::Ledger;
use crate::ledger::books::DeviceBooks;
use crate::live::{Calendar, KernelBooks, Problem};
use crate::units::{at, clock, duration, shown, size};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Characters shown of one line of a finding.
const LINE: usize = 400;
/// Evidence lines shown of one finding.
const EVIDENCE: usize = 40;
/// Processes listed in a report's table.
const ROWS: usize = 20;

/// The run began; `None` where no probe can be set.
pub fn started(libraries: Option<&[String]>, calendar: Calendar) -> String {
    let mut out = match libraries {
        None => "No driver call can be traced; what NVML and /proc show is still judged.\n".to_owned(),
        Some([]) => "Tracing processes; there is no driver library to trace yet.\n".to_owned(),
        Some(_) => "Tracing every process that uses\n".to_owned(),
    };
    for library in libraries.unwrap_or_default() {
        let _ = writeln!(out, "  {}", shown(library, LINE));
    }
    let _ = writeln!(out, "Times are seconds since this host started, {}. Ctrl-C ends it.", calendar.boot_time());
    out
}

/// A part of the host cannot be seen.
pub fn problem(problem: &Problem) -> String {
    format!("missing  {}: {}\n", problem.part, shown(&problem.reason, 2 * LINE))
}

/// The end of a live run.
pub fn summary(report: &Report, ledger: &Ledger, kernel: Option<&KernelBooks>) -> String {
    let mut out = "\n".to_owned();
    conclusion(report, &mut out);
    for finding in by_severity(report) {
        let state = match finding.closed_ns {
            Some(_) => closed_line(finding),
            None => format!("open since {}", clock(finding.opened_ns)),
        };
        let _ = writeln!(
            out,
            "{:<8} {}  {}\n         {state}",
            finding.severity.to_string(),
            finding.category,
            shown(&finding.summary, LINE)
        );
    }
    table(ledger, &mut out);
    warnings(report, &mut out);
    if let Some(kernel) = kernel {
        let count = |name| kernel.counters.get(name).copied().unwrap_or_default();
        let _ = writeln!(
            out,
            "\n{} driver calls seen, {} events lost, {} processes called the driver.",
            count("returns"),
            count("calls_lost"),
            kernel.processes.len()
        );
    }
    out
}

/// A change as a block of text.
pub fn change(change: &Change, calendar: Calendar) -> String {
    match change {
        // The first of an incident tells the whole story.
        Change::Opened(finding) if finding.incident != finding.id => format!(
            "{:<8} {}  {}\n         of the same incident\n",
            finding.severity.to_string(),
            finding.category,
            shown(&finding.summary, LINE)
        ),
        Change::Opened(finding) => finding_block(finding, Some(calendar)),
        Change::Updated(finding) => format!("update   {}  {}\n", finding.category, shown(&finding.summary, LINE)),
        Change::Closed(finding) => {
            format!("closed   {}  {} ({})\n", finding.category, closed_line(finding), shown(&finding.id, 128))
        }
    }
}

fn closed_line(finding: &Finding) -> String {
    let lasted = finding.closed_ns.map_or(0, |ns| ns.saturating_sub(finding.opened_ns));
    let reason = finding.close_reason.as_deref().unwrap_or("its condition ended");
    format!("closed after {}: {}", duration(lasted), shown(reason, LINE))
}

fn finding_block(finding: &Finding, calendar: Option<Calendar>) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{:<8} {}  {}\n         confidence {}, raised {}{}",
        finding.severity.to_string(),
        finding.category,
        shown(&finding.summary, LINE),
        finding.confidence,
        at(finding.opened_ns),
        calendar.map_or_else(String::new, |calendar| format!(" ({})", calendar.time(finding.opened_ns)))
    );
    for line in finding.evidence.iter().take(EVIDENCE) {
        let _ = writeln!(out, "           - {}", shown(line, LINE));
    }
    if finding.evidence.len() > EVIDENCE {
        let _ = writeln!(out, "           - and {} more", finding.evidence.len() - EVIDENCE);
    }
    // What is over asks for nothing to be done.
    if finding.closed_ns.is_some() {
        let _ = writeln!(out, "         {}", closed_line(finding));
    } else if !finding.advice.is_empty() {
        let _ = writeln!(out, "         do: {}", shown(&finding.advice, 2 * LINE));
    }
    out
}

/// A whole report.
pub fn report(report: &Report) -> String {
    let mut out = String::new();
    conclusion(report, &mut out);
    for finding in by_severity(report) {
        out.push('\n');
        out.push_str(&finding_block(finding, None));
    }
    holders(report, &mut out);
    warnings(report, &mut out);
    out
}

fn warnings(report: &Report, out: &mut String) {
    for warning in &report.warnings {
        let _ = writeln!(out, "note: {}", shown(warning, LINE));
    }
}

/// One line for each live process and device: what its calls hold, and what NVML bills for it.
fn table(ledger: &Ledger, out: &mut String) {
    let mut rows: Vec<(u64, String)> = Vec::new();
    for process in ledger.gpu_users().filter(|process| process.is_alive()) {
        let books = process.books.as_ref();
        let called = books.into_iter().flat_map(|books| books.devices.keys().copied());
        let billed = process.rows.keys().map(|(device, _)| Some(*device));
        let devices: BTreeSet<Option<u32>> = called.chain(billed).collect();
        for device in devices {
            let held = books.and_then(|books| books.devices.get(&device)).map_or(0, DeviceBooks::bytes);
            let billed: u64 =
                process.rows.iter().filter(|((row, _), _)| Some(*row) == device).map(|(_, row)| row.used).sum();
            let device = device.map_or_else(|| "?".to_owned(), |device| device.to_string());
            let line = format!(
                "  {:>10} {:<16} {device:>3} {:>12} {:>12}",
                process.id.tgid,
                shown(&process.comm, 16),
                size(held),
                size(billed)
            );
            rows.push((held.max(billed), line));
        }
    }
    if rows.is_empty() {
        return;
    }
    rows.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    let _ = writeln!(
        out,
        "\nLive processes that use a GPU:\n  {:>10} {:<16} {:>3} {:>12} {:>12}",
        "pid", "name", "GPU", "by calls", "billed"
    );
    for (_, line) in rows.iter().take(ROWS) {
        let _ = writeln!(out, "{line}");
    }
    if rows.len() > ROWS {
        let _ = writeln!(out, "  and {} more", rows.len() - ROWS);
    }
}

/// How many findings, and how much of the truth could be seen.
fn conclusion(report: &Report, out: &mut String) {
    let open = report.findings.iter().filter(|finding| finding.closed_ns.is_none()).count();
    let _ = match (report.findings.len(), open) {
        (0, _) if report.data_quality == DataQuality::Full => writeln!(out, "Nothing to report."),
        (0, _) => writeln!(out, "Nothing to report as far as could be seen; that was not everything:"),
        (all, open) => writeln!(out, "{all} finding{}, {open} still open.", if all == 1 { "" } else { "s" }),
    };
    let _ = writeln!(out, "Data quality: {}.", report.data_quality);
    for reason in &report.data_quality_reasons {
        let _ = writeln!(out, "  - {}", shown(reason, LINE));
    }
}

fn by_severity(report: &Report) -> Vec<&Finding> {
    let mut findings: Vec<&Finding> = report.findings.iter().collect();
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.opened_ns));
    findings
}

fn holders(report: &Report, out: &mut String) {
    let end = &report.end_state;
    let mut rows: Vec<(u64, u32)> = end.outstanding_bytes_by_tgid.iter().map(|(&tgid, &bytes)| (bytes, tgid)).collect();
    rows.sort_unstable_by(|a, b| b.cmp(a));
    if rows.is_empty() {
        return;
    }
    let _ =
        writeln!(out, "\nStill allocated by live processes:\n  {:>10} {:>12} {:>12}", "pid", "GPU memory", "at most");
    for &(bytes, tgid) in rows.iter().take(ROWS) {
        let peak = end.peak_bytes_by_tgid.get(&tgid).copied().unwrap_or(bytes);
        let _ = writeln!(out, "  {tgid:>10} {:>12} {:>12}", size(bytes), size(peak));
    }
    if rows.len() > ROWS {
        let _ = writeln!(out, "  and {} more", rows.len() - ROWS);
    }
}
