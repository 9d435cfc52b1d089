//! Reads scenario files (`vramtrace-replay/1`).
//!
//! The file is one JSON object; its `events` array holds one record a line. That layout is what
//! lets an error name its line and lets a file of any length be read a line at a time.

use crate::engine::DeviceInfo;
use crate::record::Record;
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The `schema` string of such files.
pub const SCHEMA: &str = "vramtrace-replay/1";
/// Longest line accepted: a record with 100,000 rows is far below it.
const LINE_LIMIT: u64 = 64 << 20;
/// Longest header or trailer accepted.
const HEADER_LIMIT: usize = 64 << 20;

/// What can be wrong with a scenario file.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// It cannot be read at all.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not what it should be.
    #[error("{}:{line}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong and what was expected.
        problem: String,
    },
}

/// The part of a scenario that is not events.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Header {
    /// Must be [`SCHEMA`].
    #[serde(default)]
    pub schema: String,
    /// Name of the scenario.
    #[serde(default)]
    pub id: String,
    /// Devices of the host.
    #[serde(default)]
    pub devices: Vec<DeviceInfo>,
}

/// A scenario file that is being read.
#[derive(Debug)]
pub struct Scenario<R> {
    path: PathBuf,
    lines: R,
    line: u64,
    header: Header,
    done: bool,
    last_ns: u64,
}

impl Scenario<BufReader<File>> {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, ScenarioError> {
        let file = File::open(path).map_err(|source| ScenarioError::Read { path: path.to_owned(), source })?;
        Self::read(path, BufReader::with_capacity(1 << 20, file))
    }
}

impl<R: BufRead> Scenario<R> {
    /// Reads from any source; `path` names it in errors.
    pub fn read(path: &Path, lines: R) -> Result<Self, ScenarioError> {
        let mut scenario =
            Self { path: path.to_owned(), lines, line: 0, header: Header::default(), done: false, last_ns: 0 };
        scenario.read_header()?;
        Ok(scenario)
    }

    /// What stands before the events.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next record, or `None` after the last.
    pub fn next_record(&mut self) -> Result<Option<Record>, ScenarioError> {
        let mut text = String::new();
        while !self.done {
            if !self.next_line(&mut text)? {
                return Err(self.malformed("the file ends inside `events`; its end is missing"));
            }
            let trimmed = text.trim();
            if trimmed.is_empty() {
                continue;
            }
            if trimmed.starts_with(']') {
                self.done = true;
                break;
            }
            let (body, last) = match trimmed.strip_suffix(']') {
                // A record ends in a brace, so a bracket after it ends the array on the same line.
                Some(body) if body.trim_end().ends_with('}') => (body.trim_end(), true),
                _ => (trimmed, false),
            };
            let body = body.strip_suffix(',').unwrap_or(body);
            let record: Record = serde_json::from_str(body).map_err(|error| {
                // The parser's own line is that within this one.
                let told = error.to_string();
                let told = told.split(" at line ").next().unwrap_or_default();
                let hint = if error.is_eof() { "; is the file cut off?" } else { "" };
                self.malformed(&format!(
                    "not a record: {told} at column {}; expected one JSON object a line{hint}",
                    error.column()
                ))
            })?;
            if record.ts_ns < self.last_ns {
                return Err(self.malformed(&format!(
                    "ts_ns {} is earlier than {} of the record before it; records must be in order of delivery",
                    record.ts_ns, self.last_ns
                )));
            }
            self.last_ns = record.ts_ns;
            self.done = last;
            return Ok(Some(record));
        }
        Ok(None)
    }

    fn read_header(&mut self) -> Result<(), ScenarioError> {
        let mut before = String::new();
        let mut text = String::new();
        loop {
            if !self.next_line(&mut text)? {
                let problem = if before.contains("\"vramtrace-findings/") || before.contains("\"vramtrace-run/") {
                    "this is what vramtrace said of an incident, not a recording of one"
                } else {
                    "no line `\"events\": [` found; this is not a scenario file (docs/formats.md), or its records do not stand one a line"
                };
                return Err(self.malformed(problem));
            }
            let trimmed = text.trim();
            if let Some(rest) =
                trimmed.strip_prefix("\"events\"").map(str::trim_start).and_then(|rest| rest.strip_prefix(':'))
            {
                match rest.trim() {
                    "[" => break,
                    "[]" | "[]," => {
                        self.done = true;
                        break;
                    }
                    _ => return Err(self.malformed("`events` must be an array with one record a line")),
                }
            }
            if before.len() + text.len() > HEADER_LIMIT {
                return Err(self.malformed("the header is too long; this is not a scenario file"));
            }
            before.push_str(&text);
        }
        let head = before.trim_end().trim_end_matches(',');
        let whole = format!("{head}\n}}");
        let header: Header = serde_json::from_str(&whole).map_err(|error| ScenarioError::Malformed {
            path: self.path.clone(),
            line: (error.line() as u64).min(self.line),
            problem: format!("the header is not valid: {error}; expected one JSON object as in docs/formats.md"),
        })?;
        if header.schema != SCHEMA {
            return Err(ScenarioError::Malformed {
                path: self.path.clone(),
                line: 1,
                problem: format!("schema is {:?}, expected {SCHEMA:?}", header.schema),
            });
        }
        self.header = header;
        Ok(())
    }

    fn next_line(&mut self, text: &mut String) -> Result<bool, ScenarioError> {
        text.clear();
        self.line += 1;
        let read = self.lines.by_ref().take(LINE_LIMIT).read_line(text).map_err(|source| match source.kind() {
            std::io::ErrorKind::InvalidData => {
                self.malformed("the line is not UTF-8 text; a scenario file is JSON in UTF-8 (docs/formats.md)")
            }
            _ => ScenarioError::Read { path: self.path.clone(), source },
        })?;
        // Some editors begin a file with a mark.
        if self.line == 1 && text.starts_with('\u{feff}') {
            text.remove(0);
        }
        if read as u64 == LINE_LIMIT {
            return Err(self.malformed("the line is longer than 64 MiB"));
        }
        Ok(read > 0)
    }

    fn malformed(&self, problem: &str) -> ScenarioError {
        ScenarioError::Malformed { path: self.path.clone(), line: self.line, problem: problem.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::{Scenario, ScenarioError};
    use std::path::Path;

    const HEAD: &str = "{\n \"schema\": \"vramtrace-replay/1\",\n \"id\": \"x\",\n \"devices\": [],\n \"events\": [\n";

    fn read(text: &str) -> Result<usize, ScenarioError> {
        let mut scenario = Scenario::read(Path::new("x.json"), text.as_bytes())?;
        let mut count = 0;
        while scenario.next_record()?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    fn error(text: &str) -> String {
        read(text).expect_err("it must be refused").to_string()
    }

    #[test]
    fn a_mark_at_the_start_is_no_part_of_the_file() {
        assert_eq!(read(&format!("\u{feff}{HEAD} ]\n}}\n")).unwrap(), 0);
    }

    #[test]
    fn records_are_read_a_line_each() {
        let body = "  {\"ts_ns\": 1, \"kind\": \"tick\"},\n\n  {\"ts_ns\": 1, \"kind\": \"new_thing\", \"x\": [1]}\n ],\n \"expected\": {}\n}\n";
        assert_eq!(read(&format!("{HEAD}{body}")).unwrap(), 2);
        assert_eq!(read(&format!("{HEAD} {{\"ts_ns\": 1, \"kind\": \"tick\"}} ]\n}}")).unwrap(), 1);
        assert_eq!(read(&HEAD.replace("[\n", "[]\n")).unwrap(), 0);
    }

    #[test]
    fn errors_name_file_and_line() {
        let broken = error(&format!("{HEAD}  {{\"ts_ns\": 1, \"kind\": \"tick\"}},\n  {{\"ts_ns\": 1, \"kind\": \n"));
        assert!(broken.starts_with("x.json:7: not a record: "), "{broken}");
        let lacking = error(&format!("{HEAD}  {{\"ts_ns\": 1, \"kind\": \"alloc\"}}\n ]\n}}"));
        assert!(lacking.starts_with("x.json:6: not a record: missing field"), "{lacking}");
        let cut = error(&format!("{HEAD}  {{\"ts_ns\": 1, \"kind\": \"ti"));
        assert!(cut.starts_with("x.json:6: not a record: EOF") && cut.ends_with("is the file cut off?"), "{cut}");
        let backwards = error(&format!(
            "{HEAD}  {{\"ts_ns\": 9, \"kind\": \"tick\"}},\n  {{\"ts_ns\": 8, \"kind\": \"tick\"}}\n ]\n}}"
        ));
        assert!(backwards.starts_with("x.json:7: ts_ns 8 is earlier than 9"), "{backwards}");
        let cut = error(&format!("{HEAD}  {{\"ts_ns\": 9, \"kind\": \"tick\"}},\n"));
        assert_eq!(cut, "x.json:7: the file ends inside `events`; its end is missing");
        assert!(error("").contains("this is not a scenario file"));
        assert!(error("{\n \"schema\": \"vramtrace-findings/1\"\n}\n").ends_with("not a recording of one"));
        assert!(error("\u{7f}ELF").contains("this is not a scenario file"));
        let schema = error(&HEAD.replace("replay/1", "replay/9"));
        assert_eq!(schema, "x.json:1: schema is \"vramtrace-replay/9\", expected \"vramtrace-replay/1\"");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Scenario::open(Path::new("no/such/file.json")).expect_err("it does not exist").to_string();
        assert!(error.starts_with("cannot read no/such/file.json: "), "{error}");
    }
}
