//! Numbers and untrusted text as people read them.

use std::fmt::Write;

/// One kibibyte, mebibyte, gibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;
/// One second in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;
/// One millisecond in nanoseconds.
pub const MILLISECOND: u64 = 1_000_000;

/// A size in binary units with three significant digits or more: `12.41 GiB`.
pub fn size(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        GIB.. => format!("{:.2} GiB", value / GIB as f64),
        MIB.. => format!("{:.1} MiB", value / MIB as f64),
        KIB.. => format!("{:.1} KiB", value / KIB as f64),
        _ => format!("{bytes} bytes"),
    }
}

/// A length of time: `250 ms`, `1.60 s`, `24 min`.
pub fn duration(ns: u64) -> String {
    let seconds = ns as f64 / SECOND as f64;
    match ns {
        0..MILLISECOND => format!("{:.0} us", ns as f64 / 1e3),
        MILLISECOND..SECOND => format!("{:.0} ms", ns as f64 / 1e6),
        _ if seconds < 100.0 => format!("{seconds:.2} s"),
        _ if seconds < 7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A moment on the boot clock: `1000020.000 s`.
pub fn clock(ns: u64) -> String {
    format!("{}.{:03} s", ns / SECOND, ns % SECOND / MILLISECOND)
}

/// The same with its preposition: `at 1000020.000 s`.
pub fn at(ns: u64) -> String {
    format!("at {}", clock(ns))
}

/// Untrusted text (names, paths, control groups) made safe to show: control characters and
/// characters that reorder text are escaped, and it is cut at `limit` characters.
pub fn shown(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for (index, c) in text.chars().enumerate() {
        if index == limit {
            out.push('…');
            break;
        }
        if c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
        {
            // Writing to a String cannot fail.
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// A plural `s` where the count asks for one.
pub const fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::{GIB, MIB, SECOND, at, duration, shown, size};

    #[test]
    fn sizes_are_binary() {
        assert_eq!(size(0), "0 bytes");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(8_519_680), "8.1 MiB");
        assert_eq!(size(12 * GIB + 512 * MIB), "12.50 GiB");
    }

    #[test]
    fn times_keep_their_scale() {
        assert_eq!(duration(250_000_000), "250 ms");
        assert_eq!(duration(1_600_000_000), "1.60 s");
        assert_eq!(duration(600 * SECOND), "10.0 min");
        assert_eq!(at(1_000_020 * SECOND + 5_000_000), "at 1000020.005 s");
    }

    #[test]
    fn hostile_names_cannot_move_the_cursor_or_flood_a_line() {
        assert_eq!(shown("a\x1b[2Jb\n", 64), "a\\u{1b}[2Jb\\u{a}");
        assert_eq!(shown("abc\u{202e}d", 64), "abc\\u{202e}d");
        assert_eq!(shown("abcdef", 3), "abc…");
    }
}
