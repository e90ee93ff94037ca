//! JSON decoding that notices what `serde_json::Value` swallows: a field that is there twice.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Decodes JSON; also the paths of fields that occur more than once (the last one counts).
///
/// # Errors
/// What the JSON parser says.
pub fn decode(bytes: &[u8]) -> Result<(Value, Vec<String>), serde_json::Error> {
    let mut duplicates = Vec::new();
    let mut path = String::new();
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Node { path: &mut path, duplicates: &mut duplicates }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok((value, duplicates))
}

struct Node<'a> {
    path: &'a mut String,
    duplicates: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Number::from_f64(v).map_or(Value::Null, Value::Number))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        let length = self.path.len();
        loop {
            use fmt::Write;
            let _ = write!(self.path, "[{}]", out.len());
            let next = seq.next_element_seed(Node { path: self.path, duplicates: self.duplicates })?;
            self.path.truncate(length);
            match next {
                Some(v) => out.push(v),
                None => return Ok(Value::Array(out)),
            }
        }
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        let length = self.path.len();
        while let Some(key) = map.next_key::<String>()? {
            if length > 0 {
                self.path.push('.');
            }
            self.path.push_str(&key);
            if out.contains_key(&key) && self.duplicates.len() < 100 {
                self.duplicates.push(self.path.clone());
            }
            let value = map.next_value_seed(Node { path: self.path, duplicates: self.duplicates })?;
            self.path.truncate(length);
            out.insert(key, value);
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::decode;

    #[test]
    fn duplicate_fields_are_named_and_the_last_counts() {
        let (v, d) = decode(br#"{"a":1,"b":[{"c":1,"c":2}],"a":{"x":null}}"#).unwrap();
        assert_eq!(d, ["b[0].c", "a"]);
        assert_eq!(v["b"][0]["c"], 2);
        assert!(decode(b"{} x").is_err());
    }
}
