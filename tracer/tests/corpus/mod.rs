//! The scenario files, and how a report is held against what they expect.

#![expect(dead_code, reason = "each test binary uses a part of it")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use vramtrace::engine::{DeviceInfo, Engine, EngineConfig};
use vramtrace::finding::Report;
use vramtrace::record::Record;

/// One scenario file, parsed.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) id: String,
    pub(crate) path: PathBuf,
    pub(crate) json: Value,
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/scenarios")
}

pub(crate) fn all() -> Vec<Case> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            Case { id: json["id"].as_str().unwrap().to_owned(), path, json }
        })
        .collect()
}

pub(crate) fn case(id: &str) -> Case {
    all().into_iter().find(|case| case.id.starts_with(id)).unwrap()
}

/// Replays the events of a (possibly changed) scenario.
pub(crate) fn run(json: &Value) -> Report {
    let devices: Vec<DeviceInfo> = serde_json::from_value(json["devices"].clone()).unwrap();
    let mut engine = Engine::new(EngineConfig { devices, ..EngineConfig::default() });
    for event in json["events"].as_array().unwrap() {
        let record: Record = serde_json::from_value(event.clone()).unwrap();
        engine.push(&record);
    }
    engine.finish();
    engine.report()
}

const LEVELS: [&str; 3] = ["low", "medium", "high"];
const SEVERITIES: [&str; 3] = ["info", "warning", "critical"];

fn rank(levels: &[&str], value: &Value) -> usize {
    levels.iter().position(|level| Some(*level) == value.as_str()).unwrap()
}

fn subject_matches(want: &Value, got: &Value) -> bool {
    want.as_object().unwrap().iter().all(|(key, want)| match (want, &got[key]) {
        (Value::String(want), Value::String(got)) => got.to_lowercase().contains(&want.to_lowercase()),
        (want, got) => want == got,
    })
}

fn fits(want: &Value, found: &Value) -> bool {
    let bytes = found["bytes"].as_u64();
    let opened = found["opened_ns"].as_u64().unwrap();
    let least = want["bytes_min"].as_u64().unwrap_or(0);
    found["category"] == want["category"]
        && subject_matches(&want["subject"], &found["subject"])
        && rank(&SEVERITIES, &found["severity"]) >= rank(&SEVERITIES, &want["severity"])
        && rank(&LEVELS, &found["confidence"]) >= rank(&LEVELS, &want["confidence_at_least"])
        && (least == 0 || bytes.is_some_and(|bytes| bytes >= least))
        && want["bytes_max"].as_u64().is_none_or(|most| most == 0 || bytes.is_none_or(|bytes| bytes <= most))
        && want["not_before_ns"].as_u64().is_none_or(|after| opened >= after)
        && want["by_ns"].as_u64().is_none_or(|by| opened <= by)
}

fn text_of(found: &Value) -> String {
    let lines = found["evidence"].as_array().unwrap().iter().map(|line| line.as_str().unwrap().to_owned());
    let mut parts = vec![found["summary"].as_str().unwrap().to_owned(), found["advice"].as_str().unwrap().to_owned()];
    parts.extend(lines);
    parts.push(found["subject"].to_string());
    parts.join(" ").to_lowercase()
}

fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "_.-/".contains(c))).filter(|word| !word.is_empty()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Amount {
    Bytes(f64),
    Seconds(f64),
}

fn unit(word: &str) -> Option<fn(f64) -> Amount> {
    Some(match word.to_lowercase().as_str() {
        "b" | "bytes" => Amount::Bytes,
        "kib" => |n| Amount::Bytes(n * 1024.0),
        "mib" => |n| Amount::Bytes(n * 1_048_576.0),
        "gib" => |n| Amount::Bytes(n * 1_073_741_824.0),
        "kb" => |n| Amount::Bytes(n * 1e3),
        "mb" => |n| Amount::Bytes(n * 1e6),
        "gb" => |n| Amount::Bytes(n * 1e9),
        "ns" => |n| Amount::Seconds(n * 1e-9),
        "us" => |n| Amount::Seconds(n * 1e-6),
        "ms" => |n| Amount::Seconds(n * 1e-3),
        "s" => Amount::Seconds,
        "min" => |n| Amount::Seconds(n * 60.0),
        "h" => |n| Amount::Seconds(n * 3600.0),
        _ => return None,
    })
}

/// Amounts with their units, and the remaining words.
fn facts<'a>(words: &[&'a str]) -> (Vec<Amount>, Vec<&'a str>) {
    let (mut amounts, mut rest) = (Vec::new(), Vec::new());
    let mut index = 0;
    while let Some(&word) = words.get(index) {
        let number = word.parse::<f64>().ok();
        let of = words.get(index + 1).and_then(|word| unit(word.trim_end_matches(['.', '-', '/'])));
        if let (Some(number), Some(of)) = (number, of) {
            amounts.push(of(number));
            index += 2;
        } else {
            rest.push(word);
            index += 1;
        }
    }
    (amounts, rest)
}

fn near(want: Amount, have: Amount) -> bool {
    match (want, have) {
        (Amount::Bytes(want), Amount::Bytes(have)) | (Amount::Seconds(want), Amount::Seconds(have)) => {
            (want - have).abs() <= 0.03 * want.max(1e-9)
        }
        _ => false,
    }
}

fn contains_word(text: &str, word: &str) -> bool {
    let word = word.to_lowercase();
    text.match_indices(&word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        let wordy = |c: char| c.is_alphanumeric() || c == '_';
        before.is_none_or(|c| !wordy(c) && c != '.') && after.is_none_or(|c| !wordy(c))
    })
}

/// Whether a finding states the checkable facts of a phrase: amounts, ids, names of entry points.
fn states(text: &str, phrase: &str) -> bool {
    let mut kept = Vec::new();
    let mut bound = false;
    for part in phrase.split_whitespace() {
        if part.starts_with(['<', '>']) {
            bound = part.trim_matches(['<', '>', '=']).is_empty();
        } else if !part.starts_with("t=") {
            if !bound {
                kept.push(part);
            }
            bound = false;
        }
    }
    let phrase = kept.join(" ");
    let (amounts, rest) = facts(&words(&phrase));
    let (mut have, plain) = facts(&words(text));
    have.extend(plain.iter().filter(|word| word.len() >= 5).filter_map(|word| word.parse().ok()).map(Amount::Bytes));
    let tokens = rest
        .into_iter()
        .filter(|word| word.contains(|c: char| c.is_ascii_digit() || c == '_' || c == '/') || word.starts_with("cu"));
    amounts.iter().all(|&want| have.iter().any(|&have| near(want, have)))
        && tokens.into_iter().all(|token| contains_word(text, token))
}

fn without_zeros(value: &Value) -> Value {
    match value {
        Value::Object(map) => map
            .iter()
            .filter(|(_, value)| {
                !matches!(value, Value::Null)
                    && value.as_u64() != Some(0)
                    && value.as_object().is_none_or(|map| !map.is_empty())
            })
            .map(|(key, value)| (key.clone(), without_zeros(value)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        other => other.clone(),
    }
}

/// What a report gets wrong, by aspect.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) raised: Vec<String>,
    pub(crate) quiet: Vec<String>,
    pub(crate) evidence: Vec<String>,
    pub(crate) end_state: Vec<String>,
    pub(crate) quality: Vec<String>,
}

impl Faults {
    pub(crate) fn any(&self) -> bool {
        [&self.raised, &self.quiet, &self.evidence, &self.end_state, &self.quality]
            .iter()
            .any(|faults| !faults.is_empty())
    }
}

/// Holds a report against what a scenario expects.
pub(crate) fn score(case: &Value, report: &Report) -> Faults {
    let doc = serde_json::to_value(report).unwrap();
    let found = doc["findings"].as_array().unwrap();
    let expected = &case["expected"];
    let mut faults = Faults::default();
    let mut claimed = vec![false; found.len()];
    for want in expected["verdicts"].as_array().unwrap() {
        for (index, finding) in found.iter().enumerate() {
            claimed[index] |=
                finding["category"] == want["category"] && subject_matches(&want["subject"], &finding["subject"]);
        }
        if want["required"] != true {
            continue;
        }
        let hits: Vec<&Value> = found.iter().filter(|finding| fits(want, finding)).collect();
        if hits.is_empty() {
            faults.raised.push(format!("missing {} {}", want["category"], want["subject"]));
        }
        for phrase in want["evidence_must_mention"].as_array().unwrap() {
            let phrase = phrase.as_str().unwrap();
            if !hits.is_empty() && !hits.iter().any(|finding| states(&text_of(finding), phrase)) {
                faults.evidence.push(format!("{} does not state {phrase:?}", want["category"]));
            }
        }
    }
    for forbidden in expected["forbidden"].as_array().unwrap() {
        let mut subject = forbidden["subject"].clone();
        let limits = subject.as_object_mut().map(|subject| (subject.remove("after_ns"), subject.remove("before_ns")));
        let (after, before) = limits.unwrap_or_default();
        for finding in found {
            let opened = finding["opened_ns"].as_u64().unwrap();
            let in_time = after.as_ref().and_then(Value::as_u64).is_none_or(|after| opened > after)
                && before.as_ref().and_then(Value::as_u64).is_none_or(|before| opened < before);
            if in_time && finding["category"] == forbidden["category"] && subject_matches(&subject, &finding["subject"])
            {
                faults.quiet.push(format!(
                    "forbidden {} {}: {}",
                    forbidden["category"], finding["subject"], forbidden["reason"]
                ));
            }
        }
    }
    for (finding, claimed) in found.iter().zip(claimed) {
        if !claimed && finding["severity"] != "info" {
            faults
                .quiet
                .push(format!("unexpected {} {}: {}", finding["category"], finding["subject"], finding["summary"]));
        }
    }
    for (key, want) in expected["end_state"].as_object().unwrap() {
        let got = &doc["end_state"][key];
        let (want, have) = (without_zeros(want), without_zeros(got));
        let empty = |value: &Value| value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty);
        if want != have && !(empty(&want) && empty(&have)) {
            faults.end_state.push(format!("{key}: want {want}, got {have}"));
        }
    }
    if doc["data_quality"] != expected["data_quality"] {
        faults.quality.push(format!(
            "want {}, got {} ({})",
            expected["data_quality"], doc["data_quality"], doc["data_quality_reasons"]
        ));
    }
    faults
}
