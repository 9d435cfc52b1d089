//! Refusals: releases that the driver refused and whose memory is therefore still there.

use super::{process_name, subject};
use crate::engine::{Claim, Moment};
use crate::finding::{Confidence, Severity};
use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::units::{MIB, at, plural, shown, size};

pub(super) fn claims(process: &Process, books: &Books, moment: &Moment<'_>) -> Vec<Claim> {
    let mut claims = Vec::new();
    for refusal in books.refused_frees.iter().filter(|refusal| refusal.count >= 3) {
        let held = if refusal.host { books.host.bytes } else { books.bytes };
        let bytes = refusal.bytes();
        if bytes < 16 * MIB {
            continue;
        }
        let name = process_name(process.id.tgid, &process.comm);
        let kind = if refusal.host { "pinned host memory" } else { "GPU memory" };
        let severe = bytes >= moment.config.held_floor_bytes;
        claims.push(Claim {
            category: super::CATEGORY,
            key: format!("{}-refused-{}-{}", process.id, shown(&refusal.api, 48), refusal.result),
            subject: subject(process, None, refusal.host),
            severity: if severe { Severity::Warning } else { Severity::Info },
            confidence: Confidence::Medium,
            bytes: Some(bytes),
            summary: format!("{name} releases {kind}, the driver refuses with error {}, and {} stay", refusal.result, size(bytes)),
            evidence: vec![
                format!(
                    "{} refused {} time{} with error {}, last {}",
                    shown(&refusal.api, 48),
                    refusal.count,
                    plural(refusal.count),
                    refusal.result,
                    at(refusal.ns)
                ),
                format!(
                    "{} ({bytes} bytes) were to be released; {} ({held} bytes) of {kind} are still allocated",
                    size(bytes),
                    size(held)
                ),
            ],
            advice: "A release that fails must be repeated or moved: error 800 (not permitted) means it was called from a stream callback, where the driver allows no calls.".to_owned(),
        });
    }
    claims
}
