//! Sizes and durations as people write them: `64MiB`, `4096`, `2s`, `1m30s`, `50ms`.

use std::time::Duration;

/// Reads a size in bytes; binary (`MiB`) and decimal (`MB`) units.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    text.parse::<bytesize::ByteSize>()
        .map(|size| size.as_u64())
        .map_err(|error| format!("{text:?} is not a size ({error}); write for example 64MiB, 4KiB or 4096"))
}

/// Reads a duration; a unit is required.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{text:?} is not a duration ({error}); write for example 2s, 50ms or 1m30s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("4KiB"), Ok(4096));
        assert_eq!(size("64MiB"), Ok(64 << 20));
        assert_eq!(size("80GiB"), Ok(80 << 30));
        assert_eq!(size("1.5GiB"), Ok(3 << 29));
        assert_eq!(size("2MB"), Ok(2_000_000));
        assert!(size("many").unwrap_err().contains("64MiB"));
        assert!(size("-4KiB").is_err());
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("50ms"), Ok(Duration::from_millis(50)));
        assert_eq!(duration("1m30s"), Ok(Duration::from_secs(90)));
        assert!(duration("5").unwrap_err().contains("50ms"));
    }
}
