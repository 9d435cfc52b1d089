//! NVML's process lists, whose rows do not have the size their version promises.
//!
//! Early R535 drivers write 32-byte rows through the `_v3` calls, whose rows have 24 bytes. The
//! buffer is therefore filled with a pattern first, and how far the driver wrote tells the size.

use super::protocol::{INSUFFICIENT_SIZE, UNKNOWN};
use crate::record::{NvmlRow, Text};

/// Rows asked for at first; more are asked for when the driver says so.
const FIRST_ROWS: u32 = 64;
/// Rows beyond which the driver is not believed.
const MAX_ROWS: u32 = 65_536;
/// The largest number a process can have (`PID_MAX_LIMIT`). Bytes of a size look much larger.
const MAX_PID: u32 = 4 << 20;
/// Tries until a growing list fits.
const TRIES: usize = 4;
/// What the buffer holds before the call, 8 times.
const PATTERN: u8 = 0xa5;
/// Largest known row.
const MAX_STRIDE: usize = 32;

/// Row layout of a version of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// `{u32 pid; u64 used}`: 16 bytes.
    First,
    /// `{u32 pid; u64 used; u32 gi; u32 ci}`: 24 bytes, or 32 with a field that was added unannounced.
    WithInstances,
}

impl Layout {
    const fn strides(self) -> &'static [usize] {
        match self {
            Self::First => &[16],
            Self::WithInstances => &[24, MAX_STRIDE],
        }
    }
}

/// A process as one list has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListedProcess {
    pub(super) pid: u32,
    pub(super) used: Option<u64>,
    pub(super) gi: Option<u32>,
}

/// Reads a list. `call` gets the number of rows (in: room, out: rows) and the buffer, which has room
/// for that many rows of the largest known size, and gives NVML's result.
pub(super) fn read(
    layout: Layout,
    mut call: impl FnMut(&mut u32, &mut [u64]) -> u32,
) -> Result<Vec<ListedProcess>, u32> {
    let mut room = FIRST_ROWS;
    for _ in 0..TRIES {
        let words = room as usize * MAX_STRIDE / 8;
        let mut buffer = vec![u64::from_ne_bytes([PATTERN; 8]); words];
        let mut rows = room;
        match call(&mut rows, &mut buffer) {
            0 if rows > room => return Err(UNKNOWN),
            0 => {
                let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
                return parse(layout, rows as usize, &bytes).ok_or(UNKNOWN);
            }
            // Processes may start between two tries.
            INSUFFICIENT_SIZE => room = rows.max(room).saturating_add(FIRST_ROWS).min(MAX_ROWS),
            code => return Err(code),
        }
    }
    Err(INSUFFICIENT_SIZE)
}

/// The rows, with the first size that explains what was written and gives possible process numbers.
fn parse(layout: Layout, rows: usize, bytes: &[u8]) -> Option<Vec<ListedProcess>> {
    if rows == 0 {
        return Some(Vec::new());
    }
    let written = bytes.iter().rposition(|byte| *byte != PATTERN).map_or(0, |last| last + 1);
    let explains = |stride: &&usize| written <= rows * **stride;
    let strides = layout.strides();
    // A driver that clears the whole buffer leaves nothing to measure: then any size may do.
    let by_extent = strides.iter().filter(explains);
    by_extent.chain(strides).find_map(|stride| rows_of(layout, rows, *stride, bytes))
}

fn rows_of(layout: Layout, rows: usize, stride: usize, bytes: &[u8]) -> Option<Vec<ListedProcess>> {
    let u32_at = |row: &[u8], at: usize| Some(u32::from_ne_bytes(row.get(at..at + 4)?.try_into().ok()?));
    bytes
        .chunks_exact(stride)
        .take(rows)
        .map(|row| {
            let pid = u32_at(row, 0).filter(|pid| (1..=MAX_PID).contains(pid))?;
            let used = u64::from_ne_bytes(row.get(8..16)?.try_into().ok()?);
            let gi = match layout {
                Layout::First => None,
                Layout::WithInstances => Some(u32_at(row, 16)?).filter(|gi| *gi != u32::MAX),
            };
            Some(ListedProcess { pid, used: known(used), gi })
        })
        .collect()
}

/// All bits set is NVML's "not available".
pub(super) fn known(value: u64) -> Option<u64> {
    (value != u64::MAX).then_some(value)
}

/// One row a process (and MIG instance). Each list gives the process's whole memory, so a process
/// in several lists has the largest figure, not their sum.
pub(super) fn merge(compute: &[ListedProcess], graphics: &[ListedProcess], mps: &[ListedProcess]) -> Vec<NvmlRow> {
    let mut rows: Vec<NvmlRow> = Vec::with_capacity(compute.len() + graphics.len());
    // MPS first: its clients are in the compute list as well. A compute process that also draws
    // counts as computing.
    for (kind, list) in [("M+C", mps), ("C", compute), ("G", graphics)] {
        for process in list {
            let known = rows.iter_mut().find(|row| row.pid == process.pid && row.gi == process.gi);
            if let Some(row) = known {
                row.used = row.used.max(process.used);
            } else {
                let kind = Text::const_new(kind);
                rows.push(NvmlRow { pid: process.pid, used: process.used, kind, gi: process.gi });
            }
        }
    }
    rows.sort_unstable_by_key(|row| (row.pid, row.gi));
    rows
}

#[cfg(test)]
mod tests {
    use super::{INSUFFICIENT_SIZE, Layout, ListedProcess, UNKNOWN, merge, read};

    /// Bytes of rows as a driver with this stride writes them.
    fn driver(stride: usize, rows: &[(u32, u64, u32)]) -> Vec<u8> {
        rows.iter()
            .flat_map(|(pid, used, gi)| {
                let mut row = vec![0; stride];
                row[0..4].copy_from_slice(&pid.to_ne_bytes());
                row[8..16].copy_from_slice(&used.to_ne_bytes());
                if stride > 16 {
                    row[16..20].copy_from_slice(&gi.to_ne_bytes());
                    row[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
                }
                row
            })
            .collect()
    }

    fn answer(bytes: &[u8], rows: usize) -> impl FnMut(&mut u32, &mut [u64]) -> u32 {
        move |count, buffer| {
            *count = rows as u32;
            for (word, chunk) in buffer.iter_mut().zip(bytes.chunks(8)) {
                *word = u64::from_ne_bytes(chunk.try_into().unwrap());
            }
            0
        }
    }

    const ROWS: [(u32, u64, u32); 3] = [(4711, 6 << 30, u32::MAX), (4712, u64::MAX, 3), (1, 0, 0)];

    fn expected(with_instances: bool) -> Vec<ListedProcess> {
        let gi = |gi| if with_instances { gi } else { None };
        vec![
            ListedProcess { pid: 4711, used: Some(6 << 30), gi: None },
            ListedProcess { pid: 4712, used: None, gi: gi(Some(3)) },
            ListedProcess { pid: 1, used: Some(0), gi: gi(Some(0)) },
        ]
    }

    #[test]
    fn every_row_size_drivers_were_seen_to_write() {
        for (layout, stride) in [(Layout::First, 16), (Layout::WithInstances, 24), (Layout::WithInstances, 32)] {
            for rows in 1..=3 {
                let bytes = driver(stride, &ROWS[..rows]);
                let got = read(layout, answer(&bytes, rows)).unwrap();
                assert_eq!(got, expected(layout == Layout::WithInstances)[..rows], "{stride} bytes, {rows} rows");
            }
        }
        assert_eq!(read(Layout::WithInstances, answer(&[], 0)), Ok(vec![]));
    }

    #[test]
    fn sizes_are_never_taken_for_processes() {
        // 40-byte rows: at 24 and at 32, a size or zero would be a process number.
        let bytes = driver(40, &ROWS);
        assert_eq!(read(Layout::WithInstances, answer(&bytes, 3)), Err(UNKNOWN));
        let bytes = driver(24, &[(6 << 28, 1, 0)]);
        assert_eq!(read(Layout::WithInstances, answer(&bytes, 1)), Err(UNKNOWN));
    }

    #[test]
    fn a_cleared_buffer_is_read_by_what_is_possible() {
        let mut bytes = driver(24, &ROWS);
        bytes.resize(64 * 32, 0);
        assert_eq!(read(Layout::WithInstances, answer(&bytes, 3)).unwrap(), expected(true));
    }

    #[test]
    fn a_growing_list_is_asked_for_again() {
        let rows: Vec<_> = (1..=200).map(|pid| (pid, u64::from(pid), u32::MAX)).collect();
        let bytes = driver(24, &rows);
        let mut calls = 0;
        let got = read(Layout::WithInstances, |count, buffer| {
            calls += 1;
            if *count < 200 {
                *count = 200;
                return INSUFFICIENT_SIZE;
            }
            answer(&bytes, 200)(count, buffer)
        });
        assert_eq!((got.unwrap().len(), calls), (200, 2));
        assert_eq!(
            read(Layout::First, |count, _| {
                *count += 1;
                INSUFFICIENT_SIZE
            }),
            Err(INSUFFICIENT_SIZE)
        );
    }

    #[test]
    fn errors_and_lies_are_told() {
        assert_eq!(read(Layout::First, |_, _| 15), Err(15));
        assert_eq!(
            read(Layout::First, |count, _| {
                *count += 1;
                0
            }),
            Err(UNKNOWN),
            "more rows than room"
        );
    }

    #[test]
    fn a_process_in_several_lists_is_one_row() {
        let p = |pid, used, gi| ListedProcess { pid, used, gi };
        let rows = merge(
            &[p(1, Some(10), None), p(2, None, None), p(3, Some(5), Some(1)), p(3, Some(6), Some(2))],
            &[p(1, Some(10), None), p(4, Some(7), None)],
            &[p(2, Some(20), None)],
        );
        let rows: Vec<_> = rows.iter().map(|r| (r.pid, r.used, r.kind.as_str(), r.gi)).collect();
        assert_eq!(
            rows,
            [
                (1, Some(10), "C", None),
                (2, Some(20), "M+C", None),
                (3, Some(5), "C", Some(1)),
                (3, Some(6), "C", Some(2)),
                (4, Some(7), "G", None),
            ]
        );
    }
}
