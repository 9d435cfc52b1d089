//! Where growth came from: the call paths whose survivors are part of it.

use crate::ledger::books::Books;
use crate::ledger::classes::{Class, Likeness};
use crate::units::{shown, size};
use std::cmp::Reverse;

/// Call paths that are named.
const NAMED: usize = 4;

/// A line for each call path that holds a tenth or more of what was gained on a device since then,
/// the largest first.
pub(super) fn told(books: &Books, device: Option<u32>, since_ns: u64, gained: u64) -> Vec<String> {
    let paths = books.by_origin.with_survivors(1).into_iter().filter(|(key, _)| !key.host && key.device == device);
    let mut shares: Vec<(u64, String)> = paths
        .filter_map(|(key, class)| {
            let Likeness::Path(stack) = &key.likeness else { return None };
            let bytes = class.live.bytes.saturating_sub(held_at(class, since_ns));
            let told =
                format!("{} of it came from one call path: stack {}", size(bytes), shown(&stack.to_string(), 64));
            (bytes > 0 && bytes >= gained / 10).then_some((bytes, told))
        })
        .collect();
    shares.sort_by_key(|(bytes, _)| Reverse(*bytes));
    shares.truncate(NAMED);
    shares.into_iter().map(|(_, told)| told).collect()
}

fn held_at(class: &Class, ns: u64) -> u64 {
    class.marks.iter().take_while(|mark| mark.ns <= ns).last().map_or(0, |mark| mark.held)
}
