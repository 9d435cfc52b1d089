//! What two detectors share about memory of the dead: what still holds it, and since when nothing does.

use crate::engine::Moment;
use crate::ledger::{Search, Teardown};
use crate::record::Identity;
use std::collections::BTreeMap;

/// Names one teardown.
pub(super) type Key = (Identity, u32, Option<u32>);

/// Memory of a dead process and what may still hold it.
pub(super) struct Pending<'a> {
    pub(super) teardown: &'a Teardown,
    pub(super) search: Search,
    pub(super) importers: Vec<(Identity, u64)>,
    /// Since when nothing is known to hold it: its exit, or the end of the last holder.
    pub(super) since_ns: u64,
}

impl Pending<'_> {
    /// Whether something is known to hold it.
    pub(super) fn is_held(&self) -> bool {
        !self.search.holders.is_empty() || !self.importers.is_empty()
    }
}

/// Follows since when nothing holds the memory of the dead.
#[derive(Debug, Default)]
pub(super) struct Releases {
    held_until: BTreeMap<Key, u64>,
}

impl Releases {
    pub(super) fn look<'a>(&mut self, moment: &Moment<'a>) -> Vec<Pending<'a>> {
        let ledger = moment.ledger;
        self.held_until.retain(|key, _| ledger.teardowns.contains_key(key));
        let mut pending = Vec::new();
        for (key, teardown) in &ledger.teardowns {
            if teardown.returned_ns.is_some() {
                let since_ns = self.held_until.get(key).copied().unwrap_or(teardown.exit_ns);
                pending.push(Pending { teardown, search: Search::default(), importers: Vec::new(), since_ns });
                continue;
            }
            let search = ledger.search_holders(teardown);
            let importers = ledger.importers_of(key.0);
            if !search.holders.is_empty() || !importers.is_empty() {
                self.held_until.insert(*key, ledger.now);
            }
            let since_ns = self.held_until.get(key).copied().unwrap_or(teardown.exit_ns);
            pending.push(Pending { teardown, search, importers, since_ns });
        }
        pending
    }
}

/// The key of a finding about a teardown.
pub(super) fn finding_key(key: &Key) -> String {
    let (id, device, gi) = key;
    gi.map_or_else(|| format!("{id}-gpu{device}"), |gi| format!("{id}-gpu{device}-gi{gi}"))
}
