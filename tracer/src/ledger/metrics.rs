//! Metrics of the services on the host, as scraped: what they say now and how they moved.

use super::Ledger;
use super::process::Process;
use super::series::Series;
use crate::record::{Event, Record, Text};
use serde_json::Value;
use std::collections::BTreeMap;

/// Metrics followed; further ones are not.
const METRICS: usize = 16_384;

/// What a metric was told to be about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// One process.
    Process(u32),
    /// One device.
    Device(u32),
    /// Nothing that is known here.
    Host,
}

/// What a metric means, as far as its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Bytes a framework's objects use (`torch.cuda.memory_allocated` and its like).
    Allocated,
    /// Bytes a framework's allocator holds (`memory_reserved`).
    Reserved,
    /// Whether a model is loaded, or how many.
    Loaded,
    /// Whether a scheduler considers a GPU free.
    Free,
    /// Anything else: that it changes shows work.
    Other,
}

/// One metric.
#[derive(Clone, Debug)]
pub struct Metric {
    /// About what.
    pub scope: Scope,
    /// Its name.
    pub name: Text,
    /// What it means.
    pub meaning: Meaning,
    /// Its value.
    pub value: f64,
    /// When that was told last.
    pub ns: u64,
    /// When it changed last.
    pub changed_ns: u64,
    /// When it fell to zero first.
    pub first_zero_ns: Option<u64>,
    /// How often it rose from zero again after it had fallen to it.
    pub cycles: u32,
    /// Its history.
    pub history: Series<(u64, u64)>,
}

impl Metric {
    /// The value as whole bytes.
    pub fn bytes(&self) -> u64 {
        self.value.max(0.0) as u64
    }

    /// Name and value: `model_loaded 0`.
    pub fn told(&self) -> String {
        format!("{} {}", crate::units::shown(&self.name, 64), self.value)
    }
}

/// Reads a metric's meaning from its name. Names differ by exporter; these words do not.
fn meaning(name: &str) -> Meaning {
    let name = name.to_ascii_lowercase();
    let has = |word: &str| name.contains(word);
    let host = has("host") || has("cpu") || has("pinned");
    if has("loaded") {
        Meaning::Loaded
    } else if has("gpu_free") || has("gpus_free") || has("gpu_available") || has("gpus_available") {
        Meaning::Free
    } else if host || !(has("byte") || has("memory")) {
        Meaning::Other
    } else if has("reserved") || has("cached") {
        Meaning::Reserved
    } else if has("allocated") || has("active_bytes") {
        Meaning::Allocated
    } else {
        Meaning::Other
    }
}

/// All metrics.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    series: BTreeMap<(Scope, Text, Text), Metric>,
}

fn number(labels: &BTreeMap<String, Value>, names: &[&str]) -> Option<u32> {
    let value = names.iter().find_map(|name| labels.get(*name))?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok())?;
    u32::try_from(number).ok()
}

impl Ledger {
    pub(super) fn metric(&mut self, record: &Record) {
        let Event::ServiceMetric { name, value, labels } = &record.event else { return };
        let ns = record.ts_ns;
        let scope = match (number(labels, &["tgid", "pid"]), number(labels, &["device", "gpu"])) {
            (Some(tgid), _) => Scope::Process(tgid),
            (None, Some(device)) => Scope::Device(device),
            (None, None) => Scope::Host,
        };
        // Labels that tell series of one name apart; bounded, since they are somebody's text.
        let told: Vec<String> = labels.iter().take(8).map(|(name, value)| format!("{name}={value}")).collect();
        let mut told = told.join(",");
        told.truncate(told.floor_char_boundary(256));
        let key = (scope, name.clone(), Text::from(told));
        if self.metrics.series.len() >= METRICS && !self.metrics.series.contains_key(&key) {
            self.losses.dropped = self.losses.dropped.saturating_add(1);
            return;
        }
        let fresh = Metric {
            scope,
            name: name.clone(),
            meaning: meaning(name),
            value: *value,
            ns,
            changed_ns: ns,
            first_zero_ns: None,
            cycles: 0,
            history: Series::default(),
        };
        let metric = self.metrics.series.entry(key).or_insert(fresh);
        let changed = metric.value.to_bits() != value.to_bits();
        if changed {
            metric.changed_ns = ns;
            if *value == 0.0 {
                metric.first_zero_ns.get_or_insert(ns);
            } else if metric.value == 0.0 && metric.first_zero_ns.is_some() {
                metric.cycles = metric.cycles.saturating_add(1);
            }
        }
        if metric.meaning != Meaning::Other {
            metric.history.push((ns, value.max(0.0) as u64));
        }
        metric.value = *value;
        metric.ns = ns;
        if changed
            && let Scope::Process(tgid) = scope
            && let Some(id) = self.by_tgid.get(&tgid)
            && let Some(process) = self.processes.get_mut(id)
        {
            process.service_ns = Some(ns);
        }
    }

    /// Metrics that are about a process: those that name it, and those that name no one while it is
    /// the only process that uses a GPU.
    pub fn metrics_of(&self, process: &Process) -> Vec<&Metric> {
        let mine = |scope: Scope| {
            let first = (scope, Text::default(), Text::default());
            // A number that was another process's before says nothing of this one.
            let since = process.id.start_ns;
            self.metrics
                .series
                .range(first..)
                .take_while(move |((of, ..), _)| *of == scope)
                .map(|(_, metric)| metric)
                .filter(move |metric| metric.ns >= since)
        };
        let mut found: Vec<&Metric> = mine(Scope::Process(process.id.tgid)).collect();
        if self.users.len() == 1 {
            found.extend(mine(Scope::Host));
        }
        found
    }

    /// Metrics that are about a device.
    pub fn metrics_of_device(&self, device: u32) -> impl Iterator<Item = &Metric> {
        let first = (Scope::Device(device), Text::default(), Text::default());
        self.metrics
            .series
            .range(first..)
            .take_while(move |((of, ..), _)| *of == Scope::Device(device))
            .map(|(_, metric)| metric)
    }

    /// The metric of a process with a meaning, the one told last.
    pub fn metric_of(&self, process: &Process, meaning: Meaning) -> Option<&Metric> {
        self.metrics_of(process).into_iter().filter(|metric| metric.meaning == meaning).max_by_key(|metric| metric.ns)
    }
}

#[cfg(test)]
mod tests {
    use super::{Meaning, meaning};

    #[test]
    fn names_of_common_exporters_are_understood() {
        for (name, is) in [
            ("framework_allocated_bytes", Meaning::Allocated),
            ("torch_cuda_memory_allocated_bytes", Meaning::Allocated),
            ("torch_cuda_memory_reserved_bytes", Meaning::Reserved),
            ("pytorch_memory_reserved", Meaning::Reserved),
            ("model_loaded", Meaning::Loaded),
            ("scheduler_gpu_free", Meaning::Free),
            ("kv_cache_usage_ratio", Meaning::Other),
            ("host_allocated_bytes", Meaning::Other),
            ("requests_total", Meaning::Other),
        ] {
            assert_eq!(meaning(name), is, "{name}");
        }
    }
}
