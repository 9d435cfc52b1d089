//! The findings and their lives: raised, updated, closed.

use crate::finding::{Category, Change, Confidence, Finding, Severity, Subject};
use std::collections::BTreeMap;

/// What a detector holds to be true now.
#[derive(Clone, Debug)]
pub struct Claim {
    /// What.
    pub category: Category,
    /// Distinguishes incidents of a category; ids are made of it.
    pub key: String,
    /// About what.
    pub subject: Subject,
    /// How much it matters.
    pub severity: Severity,
    /// How sure.
    pub confidence: Confidence,
    /// Memory concerned.
    pub bytes: Option<u64>,
    /// One line a person can act on.
    pub summary: String,
    /// Facts.
    pub evidence: Vec<String>,
    /// Steps.
    pub advice: String,
}

/// All findings.
#[derive(Debug)]
pub struct Book {
    now: u64,
    open: BTreeMap<(Category, String), usize>,
    findings: Vec<Finding>,
    occurrences: BTreeMap<(Category, String), u32>,
    told_bytes: BTreeMap<usize, u64>,
    limit: usize,
    first: usize,
    changes: Vec<Change>,
}

impl Book {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            now: 0,
            open: BTreeMap::new(),
            findings: Vec::new(),
            occurrences: BTreeMap::new(),
            told_bytes: BTreeMap::new(),
            limit: limit.max(16),
            first: 0,
            changes: Vec::new(),
        }
    }

    pub(super) fn now(&mut self, ns: u64) {
        self.now = ns;
    }

    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// All findings remembered, in the order in which they were opened.
    pub fn findings(&self) -> Vec<Finding> {
        self.findings.clone()
    }

    /// Whether a finding with this key is open.
    pub fn is_open(&self, category: Category, key: &str) -> bool {
        self.open.contains_key(&(category, key.to_owned()))
    }

    /// Keys of the open findings of a category.
    pub fn open_keys(&self, category: Category) -> Vec<String> {
        let from = self.open.range((category, String::new())..);
        from.take_while(|((of, _), _)| *of == category).map(|((_, key), _)| key.clone()).collect()
    }

    /// Open findings of a category.
    pub fn open_of(&self, category: Category) -> impl Iterator<Item = &Finding> {
        self.open
            .range((category, String::new())..)
            .take_while(move |((of, _), _)| *of == category)
            .filter_map(|(_, &index)| self.findings.get(index.checked_sub(self.first)?))
    }

    /// Whether any finding of a category is open.
    pub fn has_open(&self, category: Category) -> bool {
        self.open_of(category).next().is_some()
    }

    /// Whether a finding of this category was ever raised.
    pub fn ever(&self, category: Category) -> bool {
        self.occurrences.keys().any(|(of, _)| *of == category)
    }

    /// Raises a claim, or brings the open finding with its key up to date.
    pub fn raise(&mut self, claim: Claim) {
        let key = (claim.category, claim.key.clone());
        if let Some(&index) = self.open.get(&key) {
            self.update(index, claim);
            return;
        }
        self.make_room();
        let occurrence = self.occurrences.entry(key.clone()).or_insert(0);
        *occurrence += 1;
        let id = match *occurrence {
            1 => format!("{}-{}", claim.category, claim.key),
            again => format!("{}-{}-{again}", claim.category, claim.key),
        };
        let finding = Finding {
            id,
            category: claim.category,
            severity: claim.severity,
            confidence: claim.confidence,
            subject: claim.subject,
            bytes: claim.bytes,
            opened_ns: self.now,
            closed_ns: None,
            close_reason: None,
            summary: claim.summary,
            evidence: claim.evidence,
            advice: claim.advice,
        };
        let index = self.first + self.findings.len();
        self.told_bytes.insert(index, finding.bytes.unwrap_or(0));
        self.changes.push(Change::Opened(finding.clone()));
        self.findings.push(finding);
        self.open.insert(key, index);
    }

    fn update(&mut self, index: usize, claim: Claim) {
        let Some(finding) = index.checked_sub(self.first).and_then(|at| self.findings.get_mut(at)) else { return };
        let told = self.told_bytes.get(&index).copied().unwrap_or(0);
        let bytes = claim.bytes.unwrap_or(0);
        let notable = claim.severity != finding.severity
            || claim.confidence != finding.confidence
            || bytes.abs_diff(told) > told / 4;
        // The process a finding was opened about stays its subject.
        let subject = finding.subject.clone();
        finding.subject = Subject {
            tgid: subject.tgid.or(claim.subject.tgid),
            start_ns: subject.start_ns.or(claim.subject.start_ns),
            ..claim.subject
        };
        finding.severity = claim.severity;
        finding.confidence = claim.confidence;
        finding.bytes = claim.bytes;
        finding.summary = claim.summary;
        finding.evidence = claim.evidence;
        finding.advice = claim.advice;
        if notable {
            self.told_bytes.insert(index, bytes);
            self.changes.push(Change::Updated(finding.clone()));
        }
    }

    /// Closes the open finding with this key, if there is one.
    pub fn close(&mut self, category: Category, key: &str, reason: &str) {
        if !self.has_open(category) {
            return;
        }
        let Some(index) = self.open.remove(&(category, key.to_owned())) else { return };
        self.told_bytes.remove(&index);
        let Some(finding) = index.checked_sub(self.first).and_then(|at| self.findings.get_mut(at)) else { return };
        finding.closed_ns = Some(self.now);
        finding.close_reason = Some(reason.to_owned());
        self.changes.push(Change::Closed(finding.clone()));
    }

    /// Forgets the oldest findings, closed or not, when there are too many.
    fn make_room(&mut self) {
        if self.findings.len() < self.limit {
            return;
        }
        let gone = self.limit / 2;
        self.findings.drain(..gone);
        self.first += gone;
        let first = self.first;
        self.open.retain(|_, index| *index >= first);
        self.told_bytes.retain(|index, _| *index >= first);
        if self.occurrences.len() > 4 * self.limit {
            let open = &self.open;
            self.occurrences.retain(|key, _| open.contains_key(key));
        }
    }
}
