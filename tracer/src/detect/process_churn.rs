//! Short-lived workers pay for a context again and again.
//!
//! Each process that touches a GPU builds a context: 0.1 to several seconds and 100 to 600 MiB.
//! A pool that replaces its workers after each task pays that for each task. Nothing leaks, so
//! only the cost shows; and where the driver leaves a little behind at each exit, only a pool that
//! churns makes it visible.
//!
//! Evidence needed: several children of one parent that created a context and died young, and a
//! large share of their lives spent on that. The residue is a robust slope (median of pairwise
//! slopes) of what the device uses beyond its listed processes, against the number of exits.
//! Refuted by: workers that live long, contexts that cost little beside the work.
//!
//! Thresholds: 6 workers that lived at most a minute, 30% of their lives and 2 s in total spent on
//! contexts; ended after two minutes without a new one (or three usual gaps).

use super::{Detector, process_name};
use crate::engine::{Book, Claim, Moment};
use crate::finding::{Category, Confidence, Severity, Subject};
use crate::ledger::{Effect, Process};
use crate::record::{Event, Identity, Text};
use crate::robust::trend;
use crate::units::{MIB, SECOND, clock, duration, plural, size};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const CATEGORY: Category = Category::ProcessChurn;
/// Workers whose lives are kept for the medians.
const RECENT: usize = 256;
/// Pools followed at once.
const POOLS: usize = 4096;
/// Points of the residue's slope.
const POINTS: usize = 64;
/// Less than this in total is not worth a finding.
const COST_NS: u64 = 2 * SECOND;
/// A residue below this for each exit is noise.
const RESIDUE: f64 = MIB as f64;

/// Pools of workers by parent.
#[derive(Debug, Default)]
pub(super) struct ProcessChurn {
    pools: BTreeMap<Identity, Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    comm: Text,
    workers: u64,
    failed: u64,
    first_ns: u64,
    last_ns: u64,
    life_ns: u64,
    context_ns: u64,
    contexts: u64,
    alive: BTreeSet<Identity>,
    most_alive: usize,
    recent: VecDeque<(u64, u64)>,
    devices: BTreeMap<u32, Vec<(u64, u64)>>,
    peak: u64,
}

impl Detector for ProcessChurn {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        let ledger = moment.ledger;
        for effect in ledger.effects() {
            match *effect {
                Effect::Context(id) => {
                    let Some(process) = ledger.process(&id) else { continue };
                    let parent = parent_of(process);
                    if self.pools.len() >= POOLS && !self.pools.contains_key(&parent) {
                        continue;
                    }
                    let pool = self.pools.entry(parent).or_default();
                    if let Some(parent) = ledger.process(&parent) {
                        pool.comm.clone_from(&parent.comm);
                    }
                    if pool.alive.len() < RECENT {
                        pool.alive.insert(id);
                    }
                    pool.most_alive = pool.most_alive.max(pool.alive.len());
                }
                Effect::Died(id) => {
                    let Some(process) = ledger.process(&id) else { continue };
                    let parent = parent_of(process);
                    if let Some(pool) = self.pools.get_mut(&parent)
                        && pool.alive.remove(&id)
                    {
                        pool.ended(process, moment);
                        if let Some(claim) = pool.claim(parent, moment) {
                            book.raise(claim);
                        }
                    }
                }
                _ => {}
            }
        }
        if let Event::NvmlSample { device, gi: None, .. } = moment.event
            && let Some(last) = ledger.devices.get(&(*device, None)).and_then(|series| series.last)
            && let Some(unattributed) = last.unattributed()
        {
            for pool in self.pools.values_mut() {
                if let Some(points) = pool.devices.get_mut(device)
                    && points.last().is_none_or(|&(workers, _)| workers < pool.workers)
                {
                    if points.len() == POINTS {
                        let mut keep = false;
                        points.retain(|_| {
                            keep = !keep;
                            keep
                        });
                    }
                    points.push((pool.workers, unattributed));
                }
            }
        }
        if moment.pulse {
            let now = moment.now();
            self.pools.retain(|parent, pool| {
                let quiet = now.saturating_sub(pool.last_ns) > pool.quiet_ns(moment.config.churn_quiet_ns);
                if quiet && pool.workers > 0 {
                    book.close(CATEGORY, &parent.to_string(), "no new worker for a while");
                    pool.forget_history();
                }
                !(quiet && pool.alive.is_empty())
            });
        }
    }
}

/// The parent as recorded, or its number where nothing more is known.
fn parent_of(process: &Process) -> Identity {
    process.parent.unwrap_or(Identity { tgid: process.ppid, start_ns: 0 })
}

fn life_of(process: &Process) -> Option<u64> {
    let born = process.forked_ns.unwrap_or(process.id.start_ns);
    process.death.map(|death| death.ns.saturating_sub(born))
}

impl Pool {
    fn ended(&mut self, process: &Process, moment: &Moment<'_>) {
        let (Some(life), Some(books)) = (life_of(process), process.books.as_ref()) else { return };
        if life > moment.config.churn_life_ns || books.contexts_created == 0 {
            return;
        }
        let now = moment.now();
        if self.workers == 0 {
            self.first_ns = now.saturating_sub(life);
        }
        self.last_ns = now;
        self.workers += 1;
        self.life_ns = self.life_ns.saturating_add(life);
        self.context_ns = self.context_ns.saturating_add(books.context_ns.min(life));
        self.contexts = self.contexts.saturating_add(books.contexts_created);
        self.peak = self.peak.max(books.peak);
        if process.death.is_some_and(|death| !death.was_clean()) {
            self.failed += 1;
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((life, books.context_ns.min(life)));
        for device in moment.ledger.devices_of(process) {
            self.devices.entry(device).or_default();
        }
    }

    fn quiet_ns(&self, least: u64) -> u64 {
        let usual = self.last_ns.saturating_sub(self.first_ns) / self.workers.max(1);
        least.max(usual.saturating_mul(3))
    }

    fn forget_history(&mut self) {
        let alive = std::mem::take(&mut self.alive);
        let comm = std::mem::take(&mut self.comm);
        *self = Self { most_alive: alive.len(), alive, comm, ..Self::default() };
    }

    fn claim(&self, parent: Identity, moment: &Moment<'_>) -> Option<Claim> {
        let config = moment.config;
        let share = self.context_ns as f64 / self.life_ns.max(1) as f64;
        if self.workers < config.churn_workers as u64 || share < config.churn_share || self.context_ns < COST_NS {
            return None;
        }
        let workers = self.workers;
        let span = self.last_ns.saturating_sub(self.first_ns);
        let name = process_name(parent.tgid, &self.comm);
        let mut evidence = vec![
            format!(
                "{workers} workers of parent {name} were born and died from {} to {} ({})",
                clock(self.first_ns),
                clock(self.last_ns),
                duration(span)
            ),
            format!(
                "context creation {} (median of each worker), {} in total for {} contexts, {:.0}% of the workers' lives",
                duration(median(self.recent.iter().map(|&(_, context)| context))),
                duration(self.context_ns),
                self.contexts,
                share * 100.0
            ),
            format!("median life of a worker {}", duration(median(self.recent.iter().map(|&(life, _)| life)))),
            format!(
                "at most {} worker{} had a context at once; each held up to {}",
                self.most_alive,
                plural(self.most_alive as u64),
                size(self.peak)
            ),
        ];
        if self.failed > 0 {
            evidence.push(format!("{} of them ended with an error or by a signal", self.failed));
        }
        let mut severity = Severity::Warning;
        for (device, points) in &self.devices {
            let Some(trend) = trend(points) else { continue };
            let gained = trend.slope * workers as f64;
            // Driver evidence only where the whole confidence interval is a rise.
            if trend.rises() && trend.slope >= RESIDUE && gained >= config.held_floor_bytes as f64 {
                severity = Severity::Critical;
                evidence.push(format!(
                    "GPU {device} keeps {} more after each exit (95% between {} and {}; {} in all, {} points): the driver does not give everything back",
                    size(trend.slope as u64),
                    size(trend.low.max(0.0) as u64),
                    size(trend.high.max(0.0) as u64),
                    size(gained as u64),
                    points.len()
                ));
            } else {
                evidence.push(format!(
                    "what GPU {device} uses beyond its processes did not rise with the exits ({} points)",
                    points.len()
                ));
            }
        }
        Some(Claim {
            category: CATEGORY,
            key: parent.to_string(),
            subject: Subject {
                parent_tgid: Some(parent.tgid),
                start_ns: (parent.start_ns != 0).then_some(parent.start_ns),
                comm: Some(self.comm.clone()),
                device: self.devices.keys().next().copied(),
                ..Subject::default()
            },
            severity,
            confidence: if workers >= 2 * config.churn_workers as u64 || share >= 0.5 {
                Confidence::High
            } else {
                Confidence::Medium
            },
            bytes: None,
            summary: format!(
                "{name} has replaced {workers} GPU worker{} in {}; {:.0}% of their lives went into creating contexts",
                plural(workers),
                duration(span),
                share * 100.0
            ),
            evidence,
            advice: format!(
                "Keep the workers of pid {} alive, or move their GPU work into one long-lived process; recycle on a memory threshold instead of after each task (gunicorn max_requests, Celery max_tasks_per_child, multiprocessing maxtasksperchild). Persistence mode shortens the first start on an idle node.",
                parent.tgid
            ),
        })
    }
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([5, 1, 9].into_iter()), 5);
    }
}
