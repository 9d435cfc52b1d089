//! Libraries are examined exactly, and no file, however wrong, does harm.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use tracer_ebpf::symbols::TABLE;
use vramtrace::probe::library::{ElfError, Library, LibraryError};
use vramtrace::probe::placement::Placement;

/// Compiles C to a shared library named `name` in `folder`.
fn compile(folder: &Path, name: &str, source: &str) -> PathBuf {
    let (input, output) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&input, source).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-nostdlib", "-Wl,--build-id=0x0123456789abcdef", "-o"])
        .arg(&output)
        .arg(&input)
        .status()
        .unwrap();
    assert!(status.success(), "cc failed on {name}");
    output
}

/// A function that is the driver's stub, byte for byte.
fn stub(name: &str) -> String {
    format!(
        ".globl {name}\n.type {name},@function\n{name}:\n.byte 0x81,0x3d\n.long 0\n.long 0x321cba00\n.byte 0x74,0x06,0xff,0x25\n.long 0\nmov $4,%eax\nret\n"
    )
}

fn driver_source() -> String {
    let stubs: String =
        ["cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemAllocNext_v9"].iter().map(|n| stub(n)).collect();
    let assembly = stubs.replace('\n', "\\n");
    format!("__asm__(\".text\\n{assembly}\");\nint cuMemCreate(void) {{ return 3; }}\n")
}

fn index(name: &str) -> usize {
    TABLE.iter().position(|symbol| symbol.name == name).unwrap()
}

#[test]
fn stubs_are_probed_on_the_branch_and_other_code_at_entry() {
    let folder = tempfile::tempdir().unwrap();
    let path = compile(folder.path(), "libcuda.so.555.58.02", &driver_source());
    let library = Library::open(&path).unwrap();

    let placements: Vec<_> = library.points.iter().map(|p| (TABLE[p.symbol].name, p.placement)).collect();
    assert_eq!(
        placements,
        [
            ("cuInit", Placement::StubBranch),
            ("cuMemAlloc_v2", Placement::StubBranch),
            ("cuMemFree_v2", Placement::StubBranch),
            ("cuMemCreate", Placement::Entry),
        ]
    );
    let bytes = fs::read(&path).unwrap();
    for point in &library.points {
        let at = point.offset as usize;
        if point.placement == Placement::StubBranch {
            assert_eq!(bytes[at - 10..at - 8], [0x81, 0x3d]);
            assert_eq!(bytes[at], 0x74);
        }
    }
    assert_eq!(library.missing.len(), TABLE.len() - 4);
    assert!(!library.missing.contains(&index("cuMemCreate")));
    assert_eq!(library.unknown_allocators, ["cuMemAllocNext_v9"]);
    assert_eq!(library.version.as_deref(), Some("555.58.02"));
    assert_eq!(library.identity.build_id.as_deref(), Some("0123456789abcdef"));
    assert_eq!(library.identity.inode, fs::metadata(&path).unwrap().ino());
    assert_eq!(fs::metadata(library.attach_path()).unwrap().ino(), library.identity.inode);
}

#[test]
fn a_link_tells_the_version_of_its_target() {
    let folder = tempfile::tempdir().unwrap();
    compile(folder.path(), "libcuda.so.535.261.03", &driver_source());
    let link = folder.path().join("libcuda.so.1");
    symlink("libcuda.so.535.261.03", &link).unwrap();
    assert_eq!(Library::open(&link).unwrap().version.as_deref(), Some("535.261.03"));
}

#[test]
fn the_open_file_survives_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = compile(folder.path(), "libcuda.so.1", &driver_source());
    let library = Library::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "another file").unwrap();
    assert_eq!(fs::metadata(library.attach_path()).unwrap().ino(), library.identity.inode);
    assert_ne!(fs::metadata(&path).unwrap().ino(), library.identity.inode);
}

#[test]
fn other_libraries_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = compile(folder.path(), "libcuda.so.1", "int cuInit(unsigned f) { return 0; }");
    let error = Library::open(&path).unwrap_err();
    assert!(matches!(error, LibraryError::NotLibcuda { missing: "cuMemAlloc_v2", .. }), "{error}");
    assert!(error.to_string().contains("is not libcuda: it does not export cuMemAlloc_v2"), "{error}");

    let aliases = format!(
        "{}\n__asm__(\".globl cuMemAlloc\\n.type cuMemAlloc,@function\\n.set cuMemAlloc, cuMemAlloc_v2\\n\");",
        driver_source()
    );
    let error = Library::open(&compile(folder.path(), "libcuda.so.2", &aliases)).unwrap_err();
    assert!(
        matches!(error, LibraryError::SharedAddress { first: "cuMemAlloc", second: "cuMemAlloc_v2", .. }),
        "{error}"
    );
}

#[test]
fn what_is_no_file_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("libcuda.so.1");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Opening a pipe for reading would wait for a writer for ever.
    assert!(matches!(Library::open(&pipe), Err(LibraryError::NotAFile { found: "named pipe", .. })));
    assert!(matches!(Library::open(folder.path()), Err(LibraryError::NotAFile { found: "directory", .. })));
    assert!(matches!(Library::open(Path::new("/dev/zero")), Err(LibraryError::NotAFile { .. })));
    assert!(matches!(Library::open(&folder.path().join("absent")), Err(LibraryError::Open { .. })));
}

/// Writes `bytes` as a library and tells what is wrong with it.
fn elf_error(folder: &Path, bytes: &[u8]) -> ElfError {
    let path = folder.join("libcuda.so.9");
    fs::write(&path, bytes).unwrap();
    match Library::open(&path) {
        Err(LibraryError::Elf { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn headers_are_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let good = fs::read(compile(folder.path(), "libcuda.so.1", &driver_source())).unwrap();
    let with = |offset: usize, patch: &[u8]| {
        let mut bytes = good.clone();
        bytes[offset..offset + patch.len()].copy_from_slice(patch);
        elf_error(folder.path(), &bytes)
    };
    assert!(matches!(elf_error(folder.path(), b""), ElfError::Truncated { part: "ELF header" }));
    assert!(matches!(elf_error(folder.path(), &[b'#'; 100]), ElfError::NotElf));
    assert!(matches!(with(4, &[1]), ElfError::WrongKind { .. }), "32 bit");
    assert!(matches!(with(5, &[2]), ElfError::WrongKind { .. }), "big endian");
    let foreign = with(18, &40u16.to_le_bytes());
    assert_eq!(
        foreign.to_string(),
        format!(
            "it is ELF of type 3 for machine 40, this host needs a 64-bit little-endian {} shared library",
            std::env::consts::ARCH
        )
    );
    assert!(matches!(with(16, &2u16.to_le_bytes()), ElfError::WrongKind { .. }), "an executable");
    // e_shnum, e_phnum, e_shentsize, e_shoff.
    assert!(matches!(with(60, &[0xff, 0xff]), ElfError::TooLarge { size: 65535, limit: 1024, .. }));
    assert!(matches!(with(56, &[0xff, 0xff]), ElfError::TooLarge { size: 65535, limit: 128, .. }));
    assert!(matches!(with(58, &[0x20, 0]), ElfError::Malformed { part: "section header table" }));
    assert!(matches!(with(40, &[0xff; 8]), ElfError::Truncated { part: "section header table" }));
    assert!(matches!(with(60, &[0, 0]), ElfError::NoDynamicSymbols));

    let sections = u64::from_le_bytes(good[40..48].try_into().unwrap()) as usize;
    let count = usize::from(u16::from_le_bytes(good[60..62].try_into().unwrap()));
    let dynsym = (0..count)
        .map(|i| sections + i * 64)
        .find(|at| u32::from_le_bytes(good[at + 4..at + 8].try_into().unwrap()) == 11)
        .unwrap();
    assert!(matches!(with(dynsym + 32, &[0xff; 8]), ElfError::TooLarge { part: "dynamic symbol table", .. }));
    assert!(matches!(with(dynsym + 32, &(4u64 << 20).to_le_bytes()), ElfError::Truncated { .. }));
    assert!(matches!(with(dynsym + 40, &[0xff; 4]), ElfError::Malformed { .. }), "names elsewhere");
}

#[test]
fn no_truncation_or_flipped_byte_makes_it_panic() {
    let folder = tempfile::tempdir().unwrap();
    let good = fs::read(compile(folder.path(), "libcuda.so.1", &driver_source())).unwrap();
    let path = folder.path().join("libcuda.so.9");
    for length in (0..good.len()).step_by(41) {
        fs::write(&path, &good[..length]).unwrap();
        assert!(Library::open(&path).is_err(), "{length} bytes");
    }
    fs::write(&path, &good).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let sections = u64::from_le_bytes(good[40..48].try_into().unwrap()) as usize;
    for position in (0..2048.min(good.len())).chain(sections..good.len()) {
        file.write_all_at(&[good[position] ^ 0xff], position as u64).unwrap();
        // Any answer will do, as long as there is one.
        drop(Library::open(&path));
        file.write_all_at(&good[position..=position], position as u64).unwrap();
    }
    assert!(Library::open(&path).is_ok());
}

#[test]
fn a_symbol_outside_the_code_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = format!(
        "{}\nint table[4] = {{1}};\n__asm__(\".globl cuMemFree\\n.type cuMemFree,@function\\n.set cuMemFree, table\\n\");",
        driver_source()
    );
    let error = Library::open(&compile(folder.path(), "libcuda.so.1", &source)).unwrap_err();
    assert!(matches!(error, LibraryError::OutsideCode { symbol: "cuMemFree", .. }), "{error}");
}
