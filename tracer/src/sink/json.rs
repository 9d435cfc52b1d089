//! Findings and reports as JSON.

use crate::finding::{Change, Finding, Report};
use serde::Serialize;

/// One line of `--format json` on a live host: a change of a finding.
#[derive(Serialize)]
struct Line<'a> {
    change: &'static str,
    #[serde(flatten)]
    finding: &'a Finding,
}

/// A change as one line of JSON, without the line's end.
pub fn change(change: &Change) -> Result<String, serde_json::Error> {
    let word = match change {
        Change::Opened(_) => "opened",
        Change::Updated(_) => "updated",
        Change::Closed(_) => "closed",
    };
    serde_json::to_string(&Line { change: word, finding: change.finding() })
}

/// The findings document.
pub fn report(report: &Report) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(report)
}
