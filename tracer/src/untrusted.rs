//! Text that other programs wrote: process names, paths, the contents of files.

use crate::record::Text;

/// Longest text kept from one source, in bytes of its printable form.
pub const TEXT_LIMIT: usize = 4096;

/// What may be shown of `bytes`: at most `limit` bytes, control characters (which could rewrite a
/// terminal or forge a log line) and invalid UTF-8 in escaped form.
pub fn printable(bytes: &[u8], limit: usize) -> Text {
    // Bytes past the limit cannot show, and a hostile text may be very long.
    let mut end = bytes.len().min(limit);
    while end > 0 && end < bytes.len() && bytes[end] & 0xc0 == 0x80 {
        end -= 1;
    }
    let mut shown = String::with_capacity(end);
    let mut push = |piece: &str| {
        let fits = shown.len() + piece.len() <= limit;
        if fits {
            shown.push_str(piece);
        }
        fits
    };
    'text: for chunk in bytes[..end].utf8_chunks() {
        for character in chunk.valid().chars() {
            let fits = if is_harmless(character) {
                push(character.encode_utf8(&mut [0; 4]))
            } else {
                push(&character.escape_unicode().to_string())
            };
            if !fits {
                break 'text;
            }
        }
        for byte in chunk.invalid() {
            if !push(&format!("\\x{byte:02x}")) {
                break 'text;
            }
        }
    }
    Text::from(shown)
}

/// Control characters and those that reorder or hide their neighbours are not.
fn is_harmless(character: char) -> bool {
    !character.is_control()
        && !matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_and_broken_utf8_are_escaped_and_length_is_bounded() {
        assert_eq!(printable(b"python3", 16), "python3");
        assert_eq!(printable("Größe".as_bytes(), 16), "Größe");
        assert_eq!(printable(b"a\x1b[2Jb\n", 64), "a\\u{1b}[2Jb\\u{a}");
        assert_eq!(printable(b"\xff\xfe", 64), "\\xff\\xfe");
        assert_eq!(printable("a\u{202e}b".as_bytes(), 64), "a\\u{202e}b");
        assert_eq!(printable(&[b'x'; 100], 10), "xxxxxxxxxx");
        assert_eq!(printable(b"ab\n", 4), "ab", "no half escape");
        assert_eq!(printable("ééé".as_bytes(), 3), "é");
    }
}
