//! The pages about the findings: one for each category, in agreement with the table of reports.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod corpus;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// Each page's text by its category.
fn pages() -> BTreeMap<String, String> {
    let entries = fs::read_dir(docs().join("findings")).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(path).unwrap()))
        .collect()
}

#[test]
fn every_category_has_a_page_and_a_case() {
    let cases = corpus::all();
    let verdicts = cases.iter().flat_map(|case| case.json["expected"]["verdicts"].as_array().unwrap());
    let expected: BTreeSet<String> = verdicts.map(|verdict| verdict["category"].as_str().unwrap().to_owned()).collect();
    let pages = pages();
    assert_eq!(pages.keys().cloned().collect::<BTreeSet<_>>(), expected);
    assert_eq!(pages.len(), 21);
    for (category, text) in pages {
        assert_eq!(text.lines().next(), Some(format!("# {category}").as_str()));
        for part in ["**Claim.**", "**What must be seen", "**What to do.**"] {
            assert!(text.contains(part), "{category} lacks {part}");
        }
    }
}

#[test]
fn pages_and_the_table_of_reports_agree() {
    let table = fs::read_to_string(docs().join("field-reports.md")).unwrap();
    let mut reports: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut known = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| V-")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (id, outcome, how) = (cells[0].trim_start_matches("| "), cells[cells.len() - 2], cells[cells.len() - 1]);
        assert!(known.insert(id.to_owned()), "{id} stands twice");
        assert!(outcome != "out of reach" || how.len() > 10, "{id} lacks a reason");
        for link in outcome.split("](findings/").skip(1) {
            reports.entry(link.split(".md").next().unwrap().to_owned()).or_default().push(id.to_owned());
        }
    }
    assert_eq!(known.len(), 144);
    for (category, text) in pages() {
        let line = text.lines().find_map(|line| line.strip_prefix("Field reports ([all](../field-reports.md)): "));
        let listed: Vec<&str> = line.unwrap().trim_end_matches('.').split(", ").collect();
        assert_eq!(listed, reports.remove(&category).unwrap_or_else(|| vec!["none".to_owned()]), "{category}");
    }
    assert!(reports.is_empty(), "{reports:?} have no page");
}
