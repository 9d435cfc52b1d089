//! Names of things: processes and the driver's handles.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A process. Its number alone is reused; with its start time it is unique.
///
/// `start_ns` counts in whole clock ticks (10 ms) in live records, because that is all
/// `/proc/PID/stat` tells and both sources must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Process (thread group) id.
    pub tgid: u32,
    /// Start of its main thread on the boot clock, in nanoseconds.
    #[serde(default)]
    pub start_ns: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.tgid, self.start_ns)
    }
}

/// A handle, address or id whose meaning only its source knows.
///
/// Numbers, which is what live sources have, are kept as numbers; any other text is kept as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpaqueId {
    /// Printed as `0x` and lower-case hexadecimal.
    Number(u64),
    /// Anything that does not read back as such a number unchanged.
    Text(Box<str>),
}

impl OpaqueId {
    /// Whether this is the null handle, which frees nothing and names nothing.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Number(0))
    }
}

impl From<&str> for OpaqueId {
    fn from(text: &str) -> Self {
        let canonical = |number: &u64| text.len() <= 18 && format!("{number:#x}") == text;
        text.strip_prefix("0x")
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .filter(canonical)
            .map_or_else(|| Self::Text(text.into()), Self::Number)
    }
}

impl From<u64> for OpaqueId {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl fmt::Display for OpaqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number:#x}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Serialize for OpaqueId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OpaqueId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = OpaqueId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an opaque id (text or a number)")
            }
            fn visit_str<E>(self, text: &str) -> Result<OpaqueId, E> {
                Ok(text.into())
            }
            fn visit_u64<E>(self, number: u64) -> Result<OpaqueId, E> {
                Ok(number.into())
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::OpaqueId;

    #[test]
    fn text_survives_unless_it_is_a_plain_number() {
        assert_eq!(OpaqueId::from("0x7f00"), OpaqueId::Number(0x7f00));
        for text in ["0xB03", "0x007", "0xp0", "ipc-1", "", "0x"] {
            assert_eq!(OpaqueId::from(text), OpaqueId::Text(text.into()));
            assert_eq!(OpaqueId::from(text).to_string(), text);
        }
    }
}
