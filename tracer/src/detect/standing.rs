//! What is common to detectors that judge one live process at a time.

use super::Detector;
use crate::engine::{Book, Claim, Moment};
use crate::finding::Category;
use crate::ledger::{Effect, Process};
use crate::record::Identity;
use crate::units::SECOND;
use std::collections::BTreeMap;

/// Growth comes in steps, one for each unit of work, and units of some minutes are common. A finding
/// that closes between two of them and opens again says less than one that closes a little late.
const LINGER_NS: u64 = 300 * SECOND;

/// The claims that hold about a process now.
type Judge = fn(&Process, &Moment<'_>, &Book) -> Vec<Claim>;

/// Open findings of one category, by the process they are about.
#[derive(Debug)]
pub(super) struct Standing {
    category: Category,
    /// By key, when the claim last held.
    open: BTreeMap<Identity, BTreeMap<String, u64>>,
    /// A claim that has not held for this long is over.
    linger_ns: u64,
}

impl Standing {
    pub(super) fn new(category: Category) -> Self {
        Self { category, open: BTreeMap::new(), linger_ns: 0 }
    }

    /// Processes with an open finding.
    pub(super) fn about(&self) -> impl Iterator<Item = Identity> {
        self.open.keys().copied()
    }

    /// Closes what is about processes that just died.
    pub(super) fn bury(&mut self, moment: &Moment<'_>, book: &mut Book, reason: &str) {
        if self.open.is_empty() {
            return;
        }
        for effect in moment.ledger.effects() {
            if let Effect::Died(id) = effect {
                for key in self.open.remove(id).into_iter().flat_map(BTreeMap::into_keys) {
                    book.close(self.category, &key, reason);
                }
            }
        }
    }

    /// Raises what holds about a process and closes what no longer does.
    pub(super) fn hold(&mut self, id: Identity, claims: Vec<Claim>, now: u64, book: &mut Book, over: &str) {
        if claims.is_empty() && self.open.is_empty() {
            return;
        }
        let mut held = self.open.remove(&id).unwrap_or_default();
        held.retain(|key, last_ns| {
            let holds = claims.iter().any(|claim| claim.key == *key) || now.saturating_sub(*last_ns) < self.linger_ns;
            if !holds {
                book.close(self.category, key, over);
            }
            holds
        });
        for claim in claims {
            held.insert(claim.key.clone(), now);
            book.raise(claim);
        }
        if !held.is_empty() {
            self.open.insert(id, held);
        }
    }
}

/// A detector that is one function of a live process.
#[derive(Debug)]
pub(super) struct EachProcess {
    judge: Judge,
    over: &'static str,
    standing: Standing,
}

impl EachProcess {
    /// `over` is why a finding closes when its claim no longer holds.
    pub(super) fn boxed(category: Category, judge: Judge, over: &'static str) -> Box<dyn Detector> {
        Box::new(Self { judge, over, standing: Standing::new(category) })
    }

    /// For what grows in steps: a pause between two steps is not its end.
    pub(super) fn lingering(category: Category, judge: Judge, over: &'static str) -> Box<dyn Detector> {
        Box::new(Self { judge, over, standing: Standing { linger_ns: LINGER_NS, ..Standing::new(category) } })
    }
}

impl Detector for EachProcess {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        self.standing.bury(moment, book, "the process ended");
        for process in moment.swept {
            let claims = (self.judge)(process, moment, book);
            self.standing.hold(process.id, claims, moment.now(), book, self.over);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Confidence, Severity, Subject};

    #[test]
    fn a_claim_that_is_withdrawn_within_the_same_nanosecond_is_closed() {
        let id = Identity { tgid: 7, start_ns: 70 };
        let claim = Claim {
            category: Category::IdleHolder,
            key: "one".to_owned(),
            subject: Subject::process(id, &"app".into()),
            severity: Severity::Info,
            confidence: Confidence::High,
            bytes: None,
            summary: String::new(),
            evidence: Vec::new(),
            advice: String::new(),
        };
        let mut book = Book::new(10);
        let mut standing = Standing::new(Category::IdleHolder);
        standing.hold(id, vec![claim], 5, &mut book, "over");
        assert!(book.is_open(Category::IdleHolder, "one"));
        standing.hold(id, Vec::new(), 5, &mut book, "over");
        assert!(!book.is_open(Category::IdleHolder, "one"));
        assert_eq!(standing.about().count(), 0);
    }
}
