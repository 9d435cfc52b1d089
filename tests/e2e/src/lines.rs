//! Reading a program's output with patience that ends.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use serde_json::Value;

use crate::PATIENCE;

/// A program's lines, each a JSON object.
pub(crate) struct Lines {
    lines: Receiver<String>,
    seen: Vec<Value>,
}

impl Lines {
    /// Reads in a thread of its own, which ends with the output.
    pub(crate) fn new(output: impl Read + Send + 'static) -> Self {
        let (told, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if told.send(line).is_err() {
                    return;
                }
            }
        });
        Self { lines, seen: Vec::new() }
    }

    /// The next line; `None` at the end of the output.
    pub(crate) fn next(&mut self, awaited: &str) -> Option<Value> {
        let line = match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => panic!("waited in vain for {awaited}; it said {:#?}", self.seen),
        };
        let value: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?} is no JSON: {error}"));
        self.seen.push(value.clone());
        Some(value)
    }

    /// All lines so far.
    pub(crate) fn seen(&self) -> &[Value] {
        &self.seen
    }
}
