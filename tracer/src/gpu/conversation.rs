//! The monitor's side of the conversation with its helper process.

use super::error::MonitorError;
use super::helper;
use super::monitor::MonitorConfig;
use super::protocol::{Reply, Request};
use crate::record::Text;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;

/// Longest reply that is read: 65,536 rows of some 60 bytes on each of a device's instances.
const MAX_REPLY: u64 = 64 << 20;
/// A running helper and the pipes to it.
#[derive(Debug)]
pub(super) struct Helper {
    pub(super) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// What was read of the next reply.
    partial: Vec<u8>,
    pub(super) started: Instant,
    pub(super) phase: Phase,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// NVML is being opened.
    Opening,
    /// It waits for a request.
    Ready,
    /// A request is being answered. If its asker went away, the rest of the answer is still to come.
    Answering,
}

impl Helper {
    pub(super) fn start(config: &MonitorConfig) -> Result<Self, MonitorError> {
        let failed = |message: String| MonitorError::Start { program: config.program.clone(), message };
        let mut command = Command::new(&config.program);
        command.arg(helper::SUBCOMMAND);
        for library in &config.libraries {
            command.arg(helper::LIBRARY_OPTION).arg(library);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A Ctrl-C at the terminal is for the agent, which ends its helper in good order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or_else(|| failed("it has no pipes".to_owned()))?;
        let output = BufReader::new(output);
        Ok(Self { child, input, output, partial: Vec::new(), started: Instant::now(), phase: Phase::Opening })
    }

    pub(super) async fn hello(&mut self) -> Result<(Text, Option<Text>), MonitorError> {
        match self.reply().await? {
            Reply::Hello { library, driver } => {
                self.phase = Phase::Ready;
                Ok((library, driver))
            }
            Reply::Failed { failure } => Err(failure.into()),
            Reply::Device(_) | Reply::Done => Err(out_of_turn()),
        }
    }

    pub(super) async fn ask(&mut self, request: &Request) -> Result<(), MonitorError> {
        let failed = |message: String| MonitorError::Helper { message };
        let mut line = serde_json::to_vec(request).map_err(|error| failed(error.to_string()))?;
        line.push(b'\n');
        self.phase = Phase::Answering;
        self.input.write_all(&line).await.map_err(|error| failed(format!("it takes no requests ({error})")))
    }

    /// The next reply. What was read of it survives when the future is dropped.
    pub(super) async fn reply(&mut self) -> Result<Reply, MonitorError> {
        let failed = |message: String| MonitorError::Helper { message };
        let room = MAX_REPLY.saturating_sub(self.partial.len() as u64);
        let read = (&mut self.output).take(room).read_until(b'\n', &mut self.partial).await;
        read.map_err(|error| failed(format!("reading its answer failed ({error})")))?;
        if self.partial.last() != Some(&b'\n') {
            return Err(failed("it ended in the middle of a call".to_owned()));
        }
        let line = std::mem::take(&mut self.partial);
        serde_json::from_slice(&line).map_err(|error| failed(format!("its answer has an unknown form ({error})")))
    }
}

pub(super) fn out_of_turn() -> MonitorError {
    MonitorError::Helper { message: "it answered out of turn".to_owned() }
}
