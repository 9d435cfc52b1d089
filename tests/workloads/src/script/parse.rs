//! From the text of a script to its steps.

use std::{str::FromStr, time::Duration};

use clap::ValueEnum;

use crate::{memory::Family, quantity, run::Ownership};

/// One step of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Init,
    Context {
        ordinal: i32,
        ownership: Option<Ownership>,
    },
    Push {
        ordinal: i32,
    },
    Pop,
    Release {
        ordinal: i32,
    },
    Allocate {
        family: Family,
        name: String,
        bytes: u64,
        count: u32,
        every: Duration,
    },
    Free {
        name: String,
    },
    FreeAll,
    Synchronize,
    Try(Box<Step>),
    Sleep(Duration),
    Hold,
    Ready,
    Print,
    Say(String),
    Name(String),
    Repeat(u32, Vec<Step>),
    Threads(u32, Vec<Step>),
    Fork {
        name: Option<String>,
        steps: Vec<Step>,
    },
    /// The text of the block goes to the new process, which parses it again.
    Spawn {
        name: Option<String>,
        text: String,
    },
    Exec {
        name: Option<String>,
        text: String,
    },
    Wait,
    KillSelf,
    Exit(u8),
}

/// Why a script is not one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the script: {problem}")]
pub(crate) struct ParseError {
    line: usize,
    problem: String,
}

/// Reads a whole script.
pub(crate) fn parse(text: &str) -> Result<Vec<Step>, ParseError> {
    let lines: Vec<_> = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).collect();
    let mut parser = Parser { lines, next: 0 };
    let steps = parser.block()?;
    if parser.next < parser.lines.len() {
        return Err(error(parser.next, "} closes no block".to_owned()));
    }
    Ok(steps)
}

fn error(index: usize, problem: String) -> ParseError {
    ParseError { line: index + 1, problem }
}

struct Parser<'a> {
    lines: Vec<&'a str>,
    next: usize,
}

impl Parser<'_> {
    /// Steps up to the closing brace, which is left, or the end.
    fn block(&mut self) -> Result<Vec<Step>, ParseError> {
        let mut steps = Vec::new();
        while let Some(&line) = self.lines.get(self.next) {
            if line == "}" {
                break;
            }
            let index = self.next;
            self.next += 1;
            if let Some(head) = line.strip_suffix('{') {
                let steps_inside = self.block()?;
                if self.next == self.lines.len() {
                    return Err(error(index, "the block that begins here is not closed by }".to_owned()));
                }
                let text = self.lines[index + 1..self.next].join("\n");
                self.next += 1;
                steps.push(block_step(head, steps_inside, text).map_err(|problem| error(index, problem))?);
            } else if !line.is_empty() {
                steps.push(simple_step(line).map_err(|problem| error(index, problem))?);
            }
        }
        Ok(steps)
    }
}

fn block_step(head: &str, steps: Vec<Step>, text: String) -> Result<Step, String> {
    let words: Vec<_> = head.split_whitespace().collect();
    match words[..] {
        ["repeat", count] => Ok(Step::Repeat(number(count)?, steps)),
        // A fork in a process with threads leaves locks that nobody can release.
        ["threads", _] if contains_fork(&steps) => Err("fork is not possible inside threads".to_owned()),
        ["threads", count] => Ok(Step::Threads(number(count)?, steps)),
        ["fork"] => Ok(Step::Fork { name: None, steps }),
        ["fork", name] => Ok(Step::Fork { name: Some(name.to_owned()), steps }),
        ["spawn"] => Ok(Step::Spawn { name: None, text }),
        ["spawn", name] => Ok(Step::Spawn { name: Some(name.to_owned()), text }),
        ["exec"] => Ok(Step::Exec { name: None, text }),
        ["exec", name] => Ok(Step::Exec { name: Some(name.to_owned()), text }),
        _ => Err(format!("{head:?} opens no block; see workload script --help")),
    }
}

fn contains_fork(steps: &[Step]) -> bool {
    steps.iter().any(|step| match step {
        Step::Fork { .. } => true,
        Step::Repeat(_, inner) | Step::Threads(_, inner) => contains_fork(inner),
        _ => false,
    })
}

fn simple_step(line: &str) -> Result<Step, String> {
    if let Some(rest) = line.strip_prefix("try ") {
        return Ok(Step::Try(Box::new(simple_step(rest.trim())?)));
    }
    if let Some(text) = line.strip_prefix("say ") {
        return Ok(Step::Say(text.trim().to_owned()));
    }
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        ["init"] => Ok(Step::Init),
        ["ctx", ordinal] => Ok(Step::Context { ordinal: number(ordinal)?, ownership: None }),
        ["ctx", ordinal, "primary"] => {
            Ok(Step::Context { ordinal: number(ordinal)?, ownership: Some(Ownership::Primary) })
        }
        ["ctx", ordinal, "own"] => Ok(Step::Context { ordinal: number(ordinal)?, ownership: Some(Ownership::Own) }),
        ["push", ordinal] => Ok(Step::Push { ordinal: number(ordinal)? }),
        ["pop"] => Ok(Step::Pop),
        ["release", ordinal] => Ok(Step::Release { ordinal: number(ordinal)? }),
        ["free", name] => Ok(Step::Free { name: name.to_owned() }),
        ["free-all"] => Ok(Step::FreeAll),
        ["sync"] => Ok(Step::Synchronize),
        ["sleep", duration] => Ok(Step::Sleep(quantity::duration(duration)?)),
        ["hold"] => Ok(Step::Hold),
        ["ready"] => Ok(Step::Ready),
        ["print"] => Ok(Step::Print),
        ["name", name] => Ok(Step::Name(name.to_owned())),
        ["wait"] => Ok(Step::Wait),
        ["kill-self"] => Ok(Step::KillSelf),
        ["exit", code] => Ok(Step::Exit(number(code)?)),
        [family, name, size, ref rest @ ..] => allocation(family, name, size, rest),
        _ => Err(format!("{line:?} is not a step; see workload script --help")),
    }
}

fn allocation(family: &str, name: &str, size: &str, rest: &[&str]) -> Result<Step, String> {
    let family = match family {
        "alloc" => Family::Device,
        other => Family::from_str(other, false)
            .map_err(|_| format!("{other:?} is neither a step nor a family; see workload script --help"))?,
    };
    let (count, rest) = match rest {
        [first, tail @ ..] if first.starts_with('x') => (number(&first[1..])?, tail),
        _ => (1, rest),
    };
    let every = match rest {
        [] => Duration::ZERO,
        ["every", interval] => quantity::duration(interval)?,
        _ => return Err(format!("{rest:?} after an allocation; write NAME SIZE [xN] [every DUR]")),
    };
    Ok(Step::Allocate { family, name: name.to_owned(), bytes: quantity::size(size)?, count, every })
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("{word:?} is not a number that fits here"))
}
