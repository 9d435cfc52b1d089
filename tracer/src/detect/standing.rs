//! What is common to detectors that judge one live process at a time.

use super::Detector;
use crate::engine::{Book, Claim, Moment};
use crate::finding::Category;
use crate::ledger::{Effect, Process};
use crate::record::Identity;
use std::collections::{BTreeMap, BTreeSet};

/// The claims that hold about a process now.
type Judge = fn(&Process, &Moment<'_>, &Book) -> Vec<Claim>;

/// Open findings of one category, by the process they are about.
#[derive(Debug)]
pub(super) struct Standing {
    category: Category,
    open: BTreeMap<Identity, BTreeSet<String>>,
}

impl Standing {
    pub(super) fn new(category: Category) -> Self {
        Self { category, open: BTreeMap::new() }
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
                for key in self.open.remove(id).into_iter().flatten() {
                    book.close(self.category, &key, reason);
                }
            }
        }
    }

    /// Raises what holds about a process and closes what no longer does.
    pub(super) fn hold(&mut self, id: Identity, claims: Vec<Claim>, book: &mut Book, over: &str) {
        if claims.is_empty() && self.open.is_empty() {
            return;
        }
        let before = self.open.remove(&id).unwrap_or_default();
        let mut now = BTreeSet::new();
        for claim in claims {
            now.insert(claim.key.clone());
            book.raise(claim);
        }
        for key in before.difference(&now) {
            book.close(self.category, key, over);
        }
        if !now.is_empty() {
            self.open.insert(id, now);
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
}

impl Detector for EachProcess {
    fn observe(&mut self, moment: &Moment<'_>, book: &mut Book) {
        self.standing.bury(moment, book, "the process ended");
        for process in moment.swept {
            let claims = (self.judge)(process, moment, book);
            self.standing.hold(process.id, claims, book, self.over);
        }
    }
}
