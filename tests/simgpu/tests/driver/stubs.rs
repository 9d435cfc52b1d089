//! The first instructions of every export, which tracers place probes by.

use crate::rig::libraries;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind};

/// The real library's bytes; `None` where they differ from export to export.
const STUB: [Option<u8>; 14] = [
    Some(0x81),
    Some(0x3d),
    None,
    None,
    None,
    None,
    Some(0x00),
    Some(0xba),
    Some(0x1c),
    Some(0x32),
    Some(0x74),
    None,
    Some(0xff),
    Some(0x25),
];

#[test]
fn every_export_is_a_trampoline() {
    let content = std::fs::read(libraries().join("libsimgpu_cuda.so")).unwrap();
    let file = object::File::parse(&*content).unwrap();
    let mut names = Vec::new();
    for symbol in file.dynamic_symbols().filter(object::ObjectSymbol::is_definition) {
        let name = symbol.name().unwrap();
        if !name.starts_with("cu") {
            continue;
        }
        assert_eq!(symbol.kind(), SymbolKind::Text, "{name}");
        let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
        let bytes = section.data_range(symbol.address(), STUB.len() as u64).unwrap().unwrap();
        let same = bytes.iter().zip(STUB).all(|(byte, stub)| stub.is_none_or(|stub| stub == *byte));
        assert!(same, "{name} begins with {bytes:02x?}");
        names.push(name);
    }
    // One for each line of the table in the library's source.
    let source = include_str!("../../cuda/src/exports.rs").split_once("stubs! {").unwrap().1;
    let mut declared: Vec<&str> =
        source.lines().filter_map(|line| line.trim().split_once(" => ")).map(|(name, _)| name).collect();
    names.sort_unstable();
    declared.sort_unstable();
    assert_eq!(names, declared);
}
