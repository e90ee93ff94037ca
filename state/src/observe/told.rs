//! Parts of a status that are written and compared whole.

use serde::{Deserialize, Deserializer, Serialize, Serializer, ser::Error};
use serde_json::{Value, value::RawValue};
use std::{fmt, io};

/// A value of JSON, kept as its text: as a tree of small maps it takes many times as much. `Null` is the default.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Told(Box<str>);

impl Told {
    /// The value that this serialises to. Maps have to give their keys in order.
    pub fn new(value: &impl Serialize) -> Self {
        // What is told is data that always serialises.
        serde_json::to_string(value).map_or_else(|_| Self::default(), Self::of)
    }

    fn of(text: String) -> Self {
        if text == "null" { Self::default() } else { Self(text.into()) }
    }

    fn text(&self) -> &str {
        if self.0.is_empty() { "null" } else { &self.0 }
    }

    /// The value itself.
    pub fn value(&self) -> Value {
        serde_json::from_str(self.text()).unwrap_or_default()
    }

    /// Whether [`Told::new`] of this would be the same.
    pub fn is(&self, value: &impl Serialize) -> bool {
        let mut rest = Rest(self.text().as_bytes());
        serde_json::to_writer(&mut rest, value).is_ok() && rest.0.is_empty()
    }
}

/// What is left of a text that is being compared with what is written.
struct Rest<'a>(&'a [u8]);

impl io::Write for Rest<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.strip_prefix(bytes).ok_or(io::ErrorKind::InvalidData)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl Serialize for Told {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        serde_json::from_str::<&RawValue>(self.text()).map_err(S::Error::custom)?.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Told {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Ok(Self::new(&Value::deserialize(d)?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_comes_back_as_it_was() {
        for value in [json!(null), json!({}), json!({"b": [1, {"z": "\u{1F600}\n\"", "a": null}], "a": ""}), json!("x")]
        {
            let told: Told = serde_json::from_value(value.clone()).unwrap();
            assert_eq!(told.value(), value);
            assert_eq!(serde_json::to_value(&told).unwrap(), value);
            assert_eq!(serde_json::to_string(&told).unwrap(), value.to_string());
            assert!(told.is(&value) && told == Told::new(&value));
            for other in [json!(null), json!({"b": 1}), json!({"b": [1], "a": "", "c": 1}), json!("xy")] {
                assert_eq!(told.is(&other), other == value, "{told:?} {other}");
            }
        }
        assert_eq!(Told::default().value(), Value::Null);
    }
}
