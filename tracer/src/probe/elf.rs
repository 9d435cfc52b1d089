//! Reads what placing probes needs out of an ELF file nobody vouches for.
//!
//! The file may come from any container, so each part is read into memory only after its size was
//! checked against a limit, and nothing is mapped (a mapped file that shrinks kills the reader).

use object::LittleEndian as Le;
use object::elf;
use object::pod::{from_bytes, slice_from_bytes};
use object::read::elf::NoteIterator;
use std::fs::File;
use std::os::unix::fs::FileExt;

type Header = elf::FileHeader64<Le>;
type Segment = elf::ProgramHeader64<Le>;
type Section = elf::SectionHeader64<Le>;
type Symbol = elf::Sym64<Le>;

/// Program headers; real driver libraries have about 10.
const MAX_SEGMENTS: u16 = 128;
/// Section headers; real driver libraries have about 30.
const MAX_SECTIONS: u16 = 1024;
/// Bytes of `.dynsym`; the largest known driver library has 20 KB.
const MAX_SYMBOL_BYTES: u64 = 4 << 20;
/// Bytes of `.dynstr`.
const MAX_STRING_BYTES: u64 = 4 << 20;
/// Bytes of one note segment.
const MAX_NOTE_BYTES: u64 = 64 << 10;
/// Bytes of a build id; the linkers write 8 to 32.
const MAX_BUILD_ID: usize = 64;
/// Longest exported name that is looked at.
const MAX_NAME: usize = 256;

/// Why an ELF file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// Reading failed.
    #[error("reading {part} failed: {source}")]
    Read {
        /// Part of the file.
        part: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file ends before something its headers point to.
    #[error("the file ends inside its {part}")]
    Truncated {
        /// Part of the file.
        part: &'static str,
    },
    /// The file does not begin as ELF files do.
    #[error("it is not an ELF file")]
    NotElf,
    /// ELF, but for another kind of machine or not a shared library.
    #[error("it is ELF {found}, this host needs a 64-bit little-endian {} shared library", std::env::consts::ARCH)]
    WrongKind {
        /// What the file says it is.
        found: String,
    },
    /// A count or size is beyond anything a driver library has.
    #[error("its {part} claims {size}, more than the {limit} that are accepted")]
    TooLarge {
        /// Part of the file.
        part: &'static str,
        /// What the file says.
        size: u64,
        /// What is accepted.
        limit: u64,
    },
    /// There is no dynamic symbol table.
    #[error("it exports nothing (no dynamic symbol table)")]
    NoDynamicSymbols,
    /// The headers contradict themselves.
    #[error("its {part} is malformed")]
    Malformed {
        /// Part of the file.
        part: &'static str,
    },
}

/// An exported function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Export {
    pub(super) name: String,
    pub(super) address: u64,
}

/// Part of the file that is mapped executable.
struct Code {
    address: u64,
    offset: u64,
    size: u64,
}

/// What was read.
pub(super) struct Elf {
    pub(super) exports: Vec<Export>,
    pub(super) build_id: Option<Vec<u8>>,
    code: Vec<Code>,
}

impl Elf {
    pub(super) fn read(file: &File) -> Result<Self, ElfError> {
        let header = read(file, "ELF header", 0, size_of::<Header>() as u64)?;
        let header: &Header = view(&header, "ELF header")?;
        check_kind(header)?;

        let segments = read_table(
            file,
            "program header table",
            header.e_phoff.get(Le),
            header.e_phnum.get(Le),
            MAX_SEGMENTS,
            (header.e_phentsize.get(Le), size_of::<Segment>()),
        )?;
        let segments: &[Segment] = views(&segments, "program header table")?;
        let sections = read_table(
            file,
            "section header table",
            header.e_shoff.get(Le),
            header.e_shnum.get(Le),
            MAX_SECTIONS,
            (header.e_shentsize.get(Le), size_of::<Section>()),
        )?;
        let sections: &[Section] = views(&sections, "section header table")?;

        Ok(Self {
            exports: read_exports(file, sections)?,
            build_id: read_build_id(file, segments)?,
            code: segments
                .iter()
                .filter(|s| s.p_type.get(Le) == elf::PT_LOAD && s.p_flags.get(Le).contains(elf::PF_X))
                .map(|s| Code { address: s.p_vaddr.get(Le), offset: s.p_offset.get(Le), size: s.p_filesz.get(Le) })
                .collect(),
        })
    }

    /// The file offset of `address`, and how many bytes of code the file has from there, if the
    /// loader maps it executable from the file.
    pub(super) fn code_offset(&self, address: u64) -> Option<(u64, u64)> {
        self.code.iter().find_map(|code| {
            let within = address.checked_sub(code.address).filter(|within| *within < code.size)?;
            Some((code.offset.checked_add(within)?, code.size - within))
        })
    }
}

fn check_kind(header: &Header) -> Result<(), ElfError> {
    let ident = &header.e_ident;
    if ident.magic != elf::ELFMAG {
        return Err(ElfError::NotElf);
    }
    let machine = header.e_machine.get(Le);
    let expected = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    let wide = ident.class == elf::ELFCLASS64;
    let little = ident.data == elf::ELFDATA2LSB;
    let shared = header.e_type.get(Le) == elf::ET_DYN;
    if wide && little && shared && machine == expected {
        return Ok(());
    }
    let found = if wide && little {
        format!("of type {} for machine {}", header.e_type.get(Le).0, machine.0)
    } else {
        format!("of class {} and byte order {}", ident.class.0, ident.data.0)
    };
    Err(ElfError::WrongKind { found })
}

fn read_exports(file: &File, sections: &[Section]) -> Result<Vec<Export>, ElfError> {
    let table = sections.iter().find(|s| s.sh_type.get(Le) == elf::SHT_DYNSYM).ok_or(ElfError::NoDynamicSymbols)?;
    let strings = sections
        .get(table.sh_link.get(Le) as usize)
        .filter(|s| s.sh_type.get(Le) == elf::SHT_STRTAB)
        .ok_or(ElfError::Malformed { part: "link from symbols to names" })?;
    let symbols = read_section(file, "dynamic symbol table", table, MAX_SYMBOL_BYTES)?;
    let strings = read_section(file, "dynamic string table", strings, MAX_STRING_BYTES)?;
    let symbols: &[Symbol] = views(&symbols, "dynamic symbol table")?;

    Ok(symbols
        .iter()
        .filter(|s| s.st_info.st_type() == elf::STT_FUNC && s.st_shndx.get(Le) != elf::SHN_UNDEF)
        .filter_map(|s| {
            let name = strings.get(s.st_name.get(Le) as usize..)?;
            let name = &name[..memchr::memchr(0, &name[..name.len().min(MAX_NAME)])?];
            Some(Export { name: std::str::from_utf8(name).ok()?.to_owned(), address: s.st_value.get(Le) })
        })
        .collect())
}

fn read_build_id(file: &File, segments: &[Segment]) -> Result<Option<Vec<u8>>, ElfError> {
    for segment in segments.iter().filter(|s| s.p_type.get(Le) == elf::PT_NOTE) {
        let size = limited("note segment", segment.p_filesz.get(Le), MAX_NOTE_BYTES)?;
        let notes = read(file, "note segment", segment.p_offset.get(Le), size)?;
        let malformed = |_| ElfError::Malformed { part: "note segment" };
        let notes = NoteIterator::<Header>::new(Le, segment.p_align.get(Le), &notes).map_err(malformed)?;
        for note in notes {
            let note = note.map_err(malformed)?;
            let is_id = note.name() == elf::ELF_NOTE_GNU && note.n_type(Le) == elf::NT_GNU_BUILD_ID;
            if is_id && (1..=MAX_BUILD_ID).contains(&note.desc().len()) {
                return Ok(Some(note.desc().to_vec()));
            }
        }
    }
    Ok(None)
}

fn read_section(file: &File, part: &'static str, section: &Section, limit: u64) -> Result<Vec<u8>, ElfError> {
    let size = limited(part, section.sh_size.get(Le), limit)?;
    read(file, part, section.sh_offset.get(Le), size)
}

fn read_table(
    file: &File,
    part: &'static str,
    offset: u64,
    count: u16,
    limit: u16,
    (entry_size, expected_size): (u16, usize),
) -> Result<Vec<u8>, ElfError> {
    let count = limited(part, count.into(), limit.into())?;
    if count > 0 && usize::from(entry_size) != expected_size {
        return Err(ElfError::Malformed { part });
    }
    read(file, part, offset, count * expected_size as u64)
}

fn limited(part: &'static str, size: u64, limit: u64) -> Result<u64, ElfError> {
    if size > limit { Err(ElfError::TooLarge { part, size, limit }) } else { Ok(size) }
}

/// Reads `size` bytes at `offset`; callers have checked `size`.
fn read(file: &File, part: &'static str, offset: u64, size: u64) -> Result<Vec<u8>, ElfError> {
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, offset).map_err(|source| match source.kind() {
        // An offset past what the system can express is past the end as well.
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::InvalidInput => ElfError::Truncated { part },
        _ => ElfError::Read { part, source },
    })?;
    Ok(bytes)
}

fn view<'a, T: object::Pod>(bytes: &'a [u8], part: &'static str) -> Result<&'a T, ElfError> {
    from_bytes(bytes).map(|(value, _)| value).map_err(|()| ElfError::Malformed { part })
}

fn views<'a, T: object::Pod>(bytes: &'a [u8], part: &'static str) -> Result<&'a [T], ElfError> {
    slice_from_bytes(bytes, bytes.len() / size_of::<T>())
        .map(|(values, _)| values)
        .map_err(|()| ElfError::Malformed { part })
}
