//! Who may still hold a dead process's device files open.

use super::process::{Image, Process};
use super::{Ledger, Teardown};
use crate::record::{Identity, Text};

/// How a holder is known to be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// It was forked after the device was opened and has not executed another image.
    Lineage,
    /// A walk of the open files found device files in it, and it descends from the dead process.
    LineageAndFiles,
    /// Only the open files: it has no GPU use of its own that would explain them.
    Files,
}

/// One process that may hold the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Who.
    pub id: Identity,
    /// Its name.
    pub comm: Text,
    /// When it was forked, and that it has not executed another image since.
    pub forked_ns: Option<u64>,
    /// Device files found open in it.
    pub files: Vec<Text>,
    /// How it is known.
    pub proof: Proof,
}

/// What a search for holders gave.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Who may hold the files.
    pub holders: Vec<Holder>,
    /// Whether the walk found the dead process itself: it has not finished exiting.
    pub itself: bool,
    /// When the open files were walked last after the exit, and whether all could be read.
    pub scan: Option<(u64, bool)>,
}

impl Search {
    /// Whether all open files were read after the exit.
    pub fn is_complete(&self) -> bool {
        matches!(self.scan, Some((_, true)))
    }
}

impl Ledger {
    /// Live processes that may hold the device files of a dead one open.
    pub fn search_holders(&self, teardown: &Teardown) -> Search {
        let scan = self.scan.as_ref().filter(|scan| scan.ns >= teardown.exit_ns);
        let mut search = Search {
            holders: Vec::new(),
            itself: scan.is_some_and(|scan| scan.holders.iter().any(|holder| holder.identity == teardown.id)),
            scan: scan.map(|scan| (scan.ns, scan.complete)),
        };
        let opened_ns = self.process(&teardown.id).and_then(Process::first_gpu_ns).unwrap_or(0);
        let born_ns = teardown.id.start_ns;
        let descendants = self.inheriting_descendants(teardown.id);
        for &(id, forked_ns) in &descendants {
            let Some(process) = self.process(&id) else { continue };
            let found = scan.and_then(|scan| scan.holders.iter().find(|holder| holder.identity == id));
            let inherits = matches!(process.image, Image::Forked { .. }) && forked_ns >= opened_ns;
            let proof = match (found, scan) {
                (Some(_), _) => Proof::LineageAndFiles,
                // A complete walk that does not list it clears it; it may have closed the files.
                (None, Some(scan)) if scan.complete && scan.ns >= process.seen_ns => continue,
                (None, _) if inherits => Proof::Lineage,
                (None, _) => continue,
            };
            search.holders.push(Holder {
                id,
                comm: process.comm.clone(),
                forked_ns: inherits.then_some(forked_ns),
                files: found.map(|holder| holder.files.clone()).unwrap_or_default(),
                proof,
            });
        }
        for holder in scan.into_iter().flat_map(|scan| &scan.holders) {
            let id = holder.identity;
            let process = self.process(&id);
            let known = search.holders.iter().any(|known| known.id == id);
            let alive = process.is_none_or(Process::is_alive);
            let own_use = process.is_some_and(|process| {
                process.books.as_ref().is_some_and(|books| !books.contexts.is_empty() || books.bytes > 0)
                    || !process.rows.is_empty()
            });
            let descends = self.descends(id, teardown.id);
            // Files opened by a process that is older than the dead one cannot be inherited from it.
            let older = id.start_ns < born_ns;
            // Those of its own forebears are not those of a process it does not descend from.
            let of_others = || self.inherited_files(id);
            // The driver's files close at an exec: what another image has open it opened itself, even
            // if none of its calls has arrived yet. A descendant may have been handed the files.
            let reopened = process.is_some_and(|process| matches!(process.image, Image::Executed { .. }));
            if known
                || !alive
                || own_use
                || !descends && (older || reopened || of_others())
                || id == teardown.id
                || self.is_observer(id, &holder.comm)
            {
                continue;
            }
            let proof = if descends { Proof::LineageAndFiles } else { Proof::Files };
            search.holders.push(Holder {
                id,
                comm: holder.comm.clone(),
                forked_ns: None,
                files: holder.files.clone(),
                proof,
            });
        }
        search.holders.sort_by_key(|holder| (holder.proof == Proof::Files, holder.id));
        search
    }

    /// Whether this is a program that opens devices to watch them.
    pub fn is_observer(&self, id: Identity, comm: &str) -> bool {
        self.self_tgid == Some(id.tgid) || self.observers.iter().any(|prefix| comm.starts_with(prefix.as_str()))
    }
}
