//! From records to findings. Pure: no clock, no I/O, no thread; time is the records'.
//!
//! Live and replay run the same code, so they cannot differ, and the same records give the same
//! bytes of output.

mod book;
mod config;
mod quality;

pub use book::{Book, Claim};
pub use config::{DeviceInfo, EngineConfig};

use crate::detect::{self, Detector};
use crate::finding::{Change, Report, SCHEMA};
use crate::ledger::{Ledger, Process};
use crate::record::{Event, Record};
use crate::units::SECOND;
use std::collections::BTreeMap;

/// Detectors look at the whole at most this often; what a record itself brings about they see at once.
const PULSE_NS: u64 = SECOND;
/// Conditions that take minutes to form are looked at this often, and for a device's processes when
/// its first sample after that comes.
const SWEEP_NS: u64 = 5 * SECOND;

/// What a detector sees.
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    /// The record that was just taken in.
    pub event: &'a Event,
    /// The state after it.
    pub ledger: &'a Ledger,
    /// The thresholds.
    pub config: &'a EngineConfig,
    /// Whether it is time to look at what is pending.
    pub pulse: bool,
    /// Which live processes it is time to look at.
    pub sweep: Sweep,
    /// Those processes.
    pub swept: &'a [&'a Process],
}

/// Which live GPU users are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// None.
    None,
    /// Those that a device lists: it was just sampled.
    Device(u32),
    /// All.
    All,
}

impl Moment<'_> {
    /// The time of the record.
    pub fn now(&self) -> u64 {
        self.ledger.now
    }
}

/// Turns records into findings.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    ledger: Ledger,
    detectors: Vec<Box<dyn Detector>>,
    book: Book,
    next_pulse_ns: u64,
    next_sweep_ns: u64,
    next_device_sweep_ns: BTreeMap<u32, u64>,
    records: u64,
    unknown_kinds: u64,
    out_of_order: u64,
}

impl Engine {
    /// An engine that knows nothing yet.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            ledger: Ledger::new(&config),
            detectors: detect::all(),
            book: Book::new(config.remembered_findings),
            next_pulse_ns: 0,
            next_sweep_ns: 0,
            next_device_sweep_ns: BTreeMap::new(),
            records: 0,
            unknown_kinds: 0,
            out_of_order: 0,
            config,
        }
    }

    /// The facts.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Takes a record in and says which findings changed, in order.
    pub fn push(&mut self, record: &Record) -> Vec<Change> {
        self.records += 1;
        if record.ts_ns < self.ledger.now {
            self.out_of_order += 1;
        }
        if record.event == Event::Unknown {
            self.unknown_kinds += 1;
        }
        self.ledger.apply(record);
        let pulse = self.ledger.now >= self.next_pulse_ns || is_state(&record.event);
        if pulse || !self.ledger.effects().is_empty() {
            let sweep = if pulse { self.sweep(&record.event) } else { Sweep::None };
            self.look(&record.event, pulse, sweep);
        }
        self.book.take_changes()
    }

    /// Says what is still pending at the end of the records.
    pub fn finish(&mut self) -> Vec<Change> {
        // No tick: that the records end does not mean that time passed in silence.
        self.look(&Event::Unknown, true, Sweep::All);
        self.book.take_changes()
    }

    /// Whom a record gives cause to look at.
    fn sweep(&mut self, event: &Event) -> Sweep {
        let now = self.ledger.now;
        let due = now.saturating_add(SWEEP_NS);
        let sampled = if let Event::NvmlSample { device, .. } = event { Some(*device) } else { None };
        if now >= self.next_sweep_ns || sampled.is_none() && is_state(event) {
            self.next_sweep_ns = due;
            if let Some(device) = sampled {
                self.next_device_sweep_ns.insert(device, due);
            }
            return Sweep::All;
        }
        let Some(device) = sampled else { return Sweep::None };
        let next = self.next_device_sweep_ns.entry(device).or_insert(0);
        if now < *next {
            return Sweep::None;
        }
        *next = due;
        Sweep::Device(device)
    }

    fn look(&mut self, event: &Event, pulse: bool, sweep: Sweep) {
        let swept: Vec<&Process> = match sweep {
            Sweep::None => Vec::new(),
            Sweep::All => self.ledger.gpu_users().collect(),
            Sweep::Device(device) => {
                let listed = |user: &&Process| user.rows.keys().any(|&(on, _)| on == device);
                self.ledger.gpu_users().filter(listed).collect()
            }
        };
        let moment = Moment { event, ledger: &self.ledger, config: &self.config, pulse, sweep, swept: &swept };
        self.book.now(self.ledger.now);
        for detector in &mut self.detectors {
            detector.observe(&moment, &mut self.book);
        }
        if pulse {
            self.next_pulse_ns = self.ledger.now.saturating_add(PULSE_NS);
            self.ledger.pulse_done();
        }
        if sweep == Sweep::All {
            self.ledger.forget_the_old();
        }
    }

    /// The findings and facts so far.
    pub fn report(&self) -> Report {
        let (data_quality, data_quality_reasons) =
            quality::judge(&self.ledger, &self.book, self.config.context_ceiling_bytes);
        let mut warnings = Vec::new();
        if self.unknown_kinds > 0 {
            warnings.push(format!("{} records of an unknown kind were ignored", self.unknown_kinds));
        }
        if self.out_of_order > 0 {
            warnings.push(format!("{} records were older than the one before them", self.out_of_order));
        }
        if self.ledger.losses.dropped > 0 {
            warnings.push(format!("{} facts were dropped because a limit was reached", self.ledger.losses.dropped));
        }
        Report {
            schema: SCHEMA,
            data_quality,
            data_quality_reasons,
            findings: self.book.findings(),
            end_state: self.ledger.end_state(),
            warnings,
        }
    }

    /// Whether a walk of the open files ([`Event::FdScan`]) would help to judge what is pending.
    pub fn wants_open_files(&self) -> bool {
        let ledger = &self.ledger;
        let mut pending = ledger.teardowns.values().filter(|teardown| teardown.returned_ns.is_none());
        pending.any(|teardown| {
            let due = teardown.exit_ns.saturating_add(self.config.exit_grace_ns);
            let walked = ledger.scan.as_ref().is_some_and(|scan| scan.ns >= due);
            ledger.now >= due && !walked && teardown.billed_ns.is_some_and(|ns| ns >= due)
        })
    }

    /// Records taken in so far.
    pub fn records(&self) -> u64 {
        self.records
    }
}

/// Records that are rare and change what may be concluded are looked at as they come.
fn is_state(event: &Event) -> bool {
    matches!(
        event,
        Event::NvmlSample { .. }
            | Event::FdScan { .. }
            | Event::ContainerEvent { .. }
            | Event::PodEvent { .. }
            | Event::JobEvent { .. }
            | Event::LibraryMap { .. }
            | Event::ProbeStatus { .. }
            | Event::TracerStart { .. }
            | Event::AdminEvent { .. }
            | Event::Checkpoint { .. }
            | Event::Kmsg { .. }
    )
}
