//! A cursor over JSON that remembers what was looked at, so that what nobody looked at can be refused by its path
//! instead of being dropped in silence.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

/// A field of the VMI that cannot be served, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct SpecError {
    /// `spec.domain...`.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Paths that were looked at; a path that ends in `/` covers all below it.
#[derive(Default)]
pub(crate) struct Seen(RefCell<BTreeSet<String>>);

#[derive(Clone)]
pub(crate) struct Cursor<'a> {
    value: Option<&'a Value>,
    path: String,
    seen: &'a Seen,
}

impl<'a> Cursor<'a> {
    pub fn root(value: &'a Value, path: &str, seen: &'a Seen) -> Self {
        Self { value: Some(value), path: path.into(), seen }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn error(&self, problem: impl Into<String>) -> SpecError {
        SpecError { path: self.path.clone(), problem: problem.into() }
    }

    pub fn exists(&self) -> bool {
        self.value.is_some_and(|v| !v.is_null())
    }

    pub fn get(&self, key: &str) -> Cursor<'a> {
        let path = format!("{}.{key}", self.path);
        self.seen.0.borrow_mut().insert(path.clone());
        Cursor { value: self.value.and_then(|v| v.get(key)).filter(|v| !v.is_null()), path, seen: self.seen }
    }

    /// The field and all below it is somebody else's trade.
    pub fn skip(&self, keys: &[&str]) {
        for key in keys {
            self.seen.0.borrow_mut().insert(format!("{}.{key}/", self.path));
        }
    }

    pub fn items(&self) -> Result<Vec<Cursor<'a>>, SpecError> {
        match self.value {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => Ok(list
                .iter()
                .enumerate()
                .map(|(i, v)| Cursor { value: Some(v), path: format!("{}[{i}]", self.path), seen: self.seen })
                .collect()),
            Some(_) => Err(self.error("is not a list")),
        }
    }

    pub fn text(&self) -> Result<Option<&'a str>, SpecError> {
        match self.value {
            None => Ok(None),
            Some(Value::String(s)) if s.is_empty() => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.error("is not a string")),
        }
    }

    pub fn flag(&self) -> Result<Option<bool>, SpecError> {
        match self.value {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(self.error("is not a boolean")),
        }
    }

    pub fn int(&self) -> Result<Option<i64>, SpecError> {
        match self.value {
            None => Ok(None),
            Some(v) => v.as_i64().map(Some).ok_or_else(|| self.error("is not an integer")),
        }
    }

    pub fn number(&self) -> Result<Option<u32>, SpecError> {
        match self.int()? {
            None => Ok(None),
            Some(n) => u32::try_from(n).map(Some).map_err(|_| self.error(format!("is out of range: {n}"))),
        }
    }

    /// A resource quantity in thousandths, rounded up.
    pub fn milli(&self) -> Result<Option<u128>, SpecError> {
        let text = match self.value {
            None => return Ok(None),
            Some(Value::String(s)) => s.clone(),
            Some(Value::Number(n)) => n.to_string(),
            Some(_) => return Err(self.error("is not a quantity")),
        };
        milli(&text).map(Some).ok_or_else(|| self.error(format!("is not a quantity: {text:?}")))
    }

    /// A resource quantity in whole units, rounded up.
    pub fn quantity(&self) -> Result<Option<u64>, SpecError> {
        match self.milli()? {
            None => Ok(None),
            Some(m) => u64::try_from(m.div_ceil(1000)).map(Some).map_err(|_| self.error("is too large")),
        }
    }

    /// The first field below this one that asks for something and that nobody looked at.
    pub fn unread(&self) -> Option<String> {
        let seen = self.seen.0.borrow();
        self.value.and_then(|v| unread(v, &self.path, &seen))
    }
}

fn unread(value: &Value, path: &str, seen: &BTreeSet<String>) -> Option<String> {
    match value {
        Value::Object(map) => map.iter().find_map(|(key, v)| {
            let below = format!("{path}.{key}");
            if seen.contains(&format!("{below}/")) || asks_nothing(v) {
                None
            } else if seen.contains(&below) {
                unread(v, &below, seen)
            } else {
                Some(below)
            }
        }),
        Value::Array(list) => list.iter().enumerate().find_map(|(i, v)| unread(v, &format!("{path}[{i}]"), seen)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(_) | Value::Bool(true) | Value::Number(_) => false,
    }
}

/// A Kubernetes quantity in thousandths, rounded up; `None` where it is none, negative or absurd.
pub(crate) fn milli(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || whole.len() > 20 || fraction.len() > 12 || fraction.contains('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let (multiplier, divisor): (u128, u128) = match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let size = 10u128.checked_pow(power.unsigned_abs()).filter(|_| power.abs() <= 18)?;
            if power < 0 { (1, size) } else { (size, 1) }
        }
    };
    let divisor = divisor.checked_mul(10u128.pow(u32::try_from(fraction.len()).ok()?))?;
    Some(digits.checked_mul(multiplier)?.checked_mul(1000)?.div_ceil(divisor))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities() {
        for (text, expected) in [
            ("1", 1000),
            ("128Mi", 134_217_728_000),
            ("1.5Gi", 1_610_612_736_000),
            ("500m", 500),
            ("0.1", 100),
            ("1e3", 1_000_000),
            ("2E", 2_000_000_000_000_000_000_000),
            ("1n", 1),
            ("+3k", 3_000_000),
        ] {
            assert_eq!(milli(text), Some(expected), "{text}");
        }
        for bad in ["", "x", "-1", "1.2.3", "1Xi", "1e99", "9999999999999999999999", ".", "1 Gi", "1é"] {
            assert_eq!(milli(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_nobody_looked_at_is_named() {
        let value =
            json!({"a": {"b": 1, "c": [{"d": "x", "e": true}]}, "off": false, "none": null, "theirs": {"z": 1}});
        let seen = Seen::default();
        let root = Cursor::root(&value, "spec", &seen);
        root.skip(&["theirs"]);
        assert_eq!(root.unread().unwrap(), "spec.a");
        let a = root.get("a");
        assert_eq!(a.get("b").int().unwrap(), Some(1));
        assert_eq!(root.unread().unwrap(), "spec.a.c");
        let c = a.get("c").items().unwrap();
        assert_eq!(c[0].get("d").text().unwrap(), Some("x"));
        assert_eq!(root.unread().unwrap(), "spec.a.c[0].e");
        c[0].get("e").flag().unwrap();
        assert_eq!(root.unread(), None);
        assert_eq!(root.get("a").text().unwrap_err().to_string(), "spec.a: is not a string");
    }
}
