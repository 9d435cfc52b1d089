//! Where in a driver function the probe goes.
//!
//! The driver's exports are stubs: `cmpl $0x321cba00, disp(%rip)`; `je`; `jmp *slot(%rip)`. The
//! kernel emulates the `je`, but single-steps the `cmpl`, which costs 3 times as much on bare metal
//! and 20 to 30 times in virtual machines. Neither instruction touches an argument register or the
//! stack, so a call looks the same at both. A probe must never sit where the bytes were not
//! recognised: the kernel checks only that some instruction decodes there.

use serde::Serialize;

/// Bytes that must be readable at a function's start to recognise the stub.
pub const STUB_LEN: usize = 14;
/// Distance from the function's start to the stub's `je`.
pub const BRANCH_OFFSET: u64 = 10;

/// Where a probe sits in its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the `je` of the driver's stub.
    StubBranch,
    /// On the first instruction, whatever it is.
    Entry,
}

impl Placement {
    /// The placement for a function that starts with `code`.
    pub fn of(code: &[u8]) -> Self {
        // `81 3d disp32 imm32`; `74 rel8`; `ff 25`. The displacement and the branch distance vary.
        match code {
            [0x81, 0x3d, _, _, _, _, 0x00, 0xba, 0x1c, 0x32, 0x74, _, 0xff, 0x25, ..] => Self::StubBranch,
            _ => Self::Entry,
        }
    }

    /// Distance from the function's start to the probe.
    pub const fn offset(self) -> u64 {
        match self {
            Self::StubBranch => BRANCH_OFFSET,
            Self::Entry => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Placement;

    const STUB: [u8; 16] =
        [0x81, 0x3d, 0x12, 0x34, 0x56, 0x78, 0x00, 0xba, 0x1c, 0x32, 0x74, 0x0c, 0xff, 0x25, 0x01, 0x02];

    #[test]
    fn the_stub_is_probed_on_its_branch() {
        assert_eq!(Placement::of(&STUB), Placement::StubBranch);
        assert_eq!(Placement::StubBranch.offset(), 10);
    }

    #[test]
    fn every_fixed_byte_of_the_stub_counts() {
        for position in [0, 1, 6, 7, 8, 9, 10, 12, 13] {
            let mut changed = STUB;
            changed[position] ^= 0x40;
            assert_eq!(Placement::of(&changed), Placement::Entry, "byte {position}");
        }
    }

    #[test]
    fn other_prologues_and_short_reads_are_probed_at_entry() {
        let prologues: [&[u8]; 6] = [
            &[0x55, 0x48, 0x89, 0xe5],
            &[0xf3, 0x0f, 0x1e, 0xfa],
            &[0xc3],
            &[],
            &STUB[..13],
            &[0xb8, 0x21, 3, 0, 0, 0xc3],
        ];
        for code in prologues {
            assert_eq!(Placement::of(code), Placement::Entry, "{code:x?}");
            assert_eq!(Placement::of(code).offset(), 0);
        }
    }
}
