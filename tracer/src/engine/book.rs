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
    open: BTreeMap<(Category, String), u64>,
    /// By serial number, which is the order in which they were opened.
    findings: BTreeMap<u64, Entry>,
    occurrences: BTreeMap<(Category, String), u32>,
    incidents: BTreeMap<(Category, String), Incident>,
    limit: usize,
    serial: u64,
    changes: Vec<Change>,
}

#[derive(Debug)]
struct Entry {
    finding: Finding,
    /// Bytes when it was last told.
    told_bytes: u64,
    cause: String,
}

/// A cause with open findings.
#[derive(Debug)]
struct Incident {
    id: String,
    open: usize,
}

impl Book {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            now: 0,
            open: BTreeMap::new(),
            findings: BTreeMap::new(),
            occurrences: BTreeMap::new(),
            incidents: BTreeMap::new(),
            limit: limit.max(16),
            serial: 0,
            changes: Vec::new(),
        }
    }

    pub(crate) fn now(&mut self, ns: u64) {
        self.now = ns;
    }

    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// All findings remembered, in the order in which they were opened.
    pub fn findings(&self) -> Vec<Finding> {
        self.findings.values().map(|entry| entry.finding.clone()).collect()
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
            .filter_map(|(_, serial)| self.findings.get(serial).map(|entry| &entry.finding))
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
        if let Some(&serial) = self.open.get(&key) {
            self.update(serial, claim);
            return;
        }
        self.make_room();
        let occurrence = self.occurrences.entry(key.clone()).or_insert(0);
        *occurrence += 1;
        let id = match *occurrence {
            1 => format!("{}-{}", claim.category, claim.key),
            again => format!("{}-{}-{again}", claim.category, claim.key),
        };
        let cause = claim.subject.cause(claim.category);
        let incident = self.incidents.entry((claim.category, cause.clone()));
        let incident = incident.or_insert_with(|| Incident { id: id.clone(), open: 0 });
        incident.open += 1;
        let finding = Finding {
            id,
            incident: incident.id.clone(),
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
        self.changes.push(Change::Opened(finding.clone()));
        let told_bytes = finding.bytes.unwrap_or(0);
        self.findings.insert(self.serial, Entry { finding, told_bytes, cause });
        self.open.insert(key, self.serial);
        self.serial += 1;
    }

    fn update(&mut self, serial: u64, claim: Claim) {
        let Some(Entry { finding, told_bytes, .. }) = self.findings.get_mut(&serial) else { return };
        let bytes = claim.bytes.unwrap_or(0);
        let notable = claim.severity != finding.severity
            || claim.confidence != finding.confidence
            || bytes.abs_diff(*told_bytes) > *told_bytes / 4;
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
            *told_bytes = bytes;
            self.changes.push(Change::Updated(finding.clone()));
        }
    }

    /// Closes the open finding with this key, if there is one.
    pub fn close(&mut self, category: Category, key: &str, reason: &str) {
        // Most categories have none, and a key costs an allocation.
        if self.has_open(category)
            && let Some(serial) = self.open.remove(&(category, key.to_owned()))
        {
            self.end(serial, reason);
        }
    }

    fn end(&mut self, serial: u64, reason: &str) {
        let Some(Entry { finding, cause, .. }) = self.findings.get_mut(&serial) else { return };
        finding.closed_ns = Some(self.now);
        finding.close_reason = Some(reason.to_owned());
        self.changes.push(Change::Closed(finding.clone()));
        let key = (finding.category, cause.clone());
        if let Some(incident) = self.incidents.get_mut(&key) {
            incident.open -= 1;
            if incident.open == 0 {
                self.incidents.remove(&key);
            }
        }
    }

    /// Forgets closed findings, the oldest first, when there are too many; only if that is not
    /// enough open ones, and says so.
    fn make_room(&mut self) {
        if self.findings.len() < self.limit {
            return;
        }
        let half = self.limit / 2;
        let is_closed = |entry: &Entry| entry.finding.closed_ns.is_some();
        let closed = self.findings.iter().filter(|(_, entry)| is_closed(entry)).map(|(&serial, _)| serial);
        let mut gone: Vec<u64> = closed.take(half).collect();
        if gone.is_empty() {
            gone = self.findings.keys().copied().take(half).collect();
            for &serial in &gone {
                self.end(serial, "too many findings are open: this one is no longer followed");
            }
            self.open.retain(|_, serial| gone.binary_search(serial).is_err());
        }
        for serial in gone {
            self.findings.remove(&serial);
        }
        if self.occurrences.len() > 4 * self.limit {
            let open = &self.open;
            self.occurrences.retain(|key, _| open.contains_key(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Book, Claim};
    use crate::finding::{Category, Change, Confidence, Severity, Subject};

    fn orphan(tgid: u32, owner: u32) -> Claim {
        Claim {
            category: Category::OrphanProcess,
            key: tgid.to_string(),
            subject: Subject { tgid: Some(tgid), lineage_root_tgid: Some(owner), ..Subject::default() },
            severity: Severity::Warning,
            confidence: Confidence::High,
            bytes: None,
            summary: String::new(),
            evidence: Vec::new(),
            advice: String::new(),
        }
    }

    #[test]
    fn findings_of_one_cause_are_one_incident_while_any_is_open() {
        let mut book = Book::new(100);
        for (tgid, owner) in [(11, 1), (12, 1), (21, 2)] {
            book.raise(orphan(tgid, owner));
        }
        let incidents = |book: &Book| book.findings().into_iter().map(|finding| finding.incident).collect::<Vec<_>>();
        assert_eq!(incidents(&book), ["orphan_process-11", "orphan_process-11", "orphan_process-21"]);
        for key in ["11", "12"] {
            book.close(Category::OrphanProcess, key, "it ended");
        }
        book.raise(orphan(13, 1));
        assert_eq!(incidents(&book)[3], "orphan_process-13", "the number of the owner was used again");
    }

    #[test]
    fn closed_findings_make_room_and_open_ones_are_told_when_they_must() {
        let mut book = Book::new(16);
        for tgid in 0..16 {
            book.raise(orphan(tgid, tgid));
        }
        book.close(Category::OrphanProcess, "3", "it ended");
        book.take_changes();
        book.raise(orphan(16, 16));
        assert_eq!(book.findings().len(), 16);
        assert_eq!(book.take_changes().len(), 1, "the closed one was forgotten in silence");
        book.raise(orphan(17, 17));
        let closed = |change: &Change| matches!(change, Change::Closed(finding) if finding.close_reason.as_deref() == Some("too many findings are open: this one is no longer followed"));
        assert_eq!(book.take_changes().iter().filter(|change| closed(change)).count(), 8);
        assert_eq!(book.open_keys(Category::OrphanProcess).len(), 9);
    }
}
