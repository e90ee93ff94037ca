//! Sets of fields of an object, as `metadata.managedFields` writes them (`FieldsV1`).
//!
//! A set is a tree of path elements. An element is kept in its written form: `f:name` is a field, `k:{"name":"x"}` an item of
//! a list by its keys, `v:"x"` an item of a list by its value, `i:0` one by its place.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Levels that a written set may have.
const DEPTH_MAX: usize = 128;

/// A set of fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    /// The place itself is in the set.
    pub member: bool,
    /// What is in the set below it, by path element. Nothing in here is empty.
    pub below: BTreeMap<String, Fields>,
}

impl Fields {
    /// The place alone.
    #[must_use]
    pub fn leaf() -> Self {
        Self { member: true, ..Self::default() }
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }

    /// Puts a set under a path element.
    pub fn put(&mut self, element: String, set: Self) {
        if !set.is_empty() {
            self.below.insert(element, set);
        }
    }

    /// Adds all of another set.
    pub fn add(&mut self, other: &Self) {
        self.member |= other.member;
        for (element, set) in &other.below {
            match self.below.get_mut(element) {
                Some(mine) => mine.add(set),
                None => {
                    self.below.insert(element.clone(), set.clone());
                }
            }
        }
    }

    /// Both sets together.
    #[must_use]
    pub fn union(mut self, other: &Self) -> Self {
        self.add(other);
        self
    }

    /// Takes out what is in another set.
    pub fn subtract(&mut self, other: &Self) {
        self.member &= !other.member;
        for (element, set) in &other.below {
            if let Some(mine) = self.below.get_mut(element) {
                mine.subtract(set);
                if mine.is_empty() {
                    self.below.remove(element);
                }
            }
        }
    }

    /// The set without what is in another.
    #[must_use]
    pub fn without(mut self, other: &Self) -> Self {
        self.subtract(other);
        self
    }

    /// What is in both.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let mut out = Self { member: self.member && other.member, ..Self::default() };
        for (element, set) in &self.below {
            if let Some(theirs) = other.below.get(element) {
                out.put(element.clone(), set.common(theirs));
            }
        }
        out
    }

    /// Takes out a place with all that is below it.
    pub fn cut(&mut self, path: &[&str]) {
        let Some((first, rest)) = path.split_first() else { return };
        if rest.is_empty() {
            self.below.remove(*first);
        } else if let Some(set) = self.below.get_mut(*first) {
            set.cut(rest);
            if set.is_empty() {
                self.below.remove(*first);
            }
        }
    }

    /// All places of the set, as people read them, those of a level before what is below them.
    #[must_use]
    pub fn paths(&self) -> Vec<String> {
        let mut out = Vec::new();
        self.walk("", &mut out);
        out
    }

    fn walk(&self, at: &str, out: &mut Vec<String>) {
        for (element, _) in self.below.iter().filter(|(_, set)| set.member) {
            out.push(format!("{at}{}", shown(element)));
        }
        for (element, set) in &self.below {
            set.walk(&format!("{at}{}", shown(element)), out);
        }
    }

    /// The written form.
    #[must_use]
    pub fn encode(&self) -> Value {
        let mut map = Map::new();
        for (element, set) in &self.below {
            let mut inner = set.encode();
            if set.member
                && !set.below.is_empty()
                && let Value::Object(inner) = &mut inner
            {
                inner.insert(".".into(), Value::Object(Map::new()));
            }
            map.insert(element.clone(), inner);
        }
        Value::Object(map)
    }

    /// Reads the written form; none when it is no set.
    #[must_use]
    pub fn decode(value: &Value) -> Option<Self> {
        Self::read(value, 0)
    }

    fn read(value: &Value, depth: usize) -> Option<Self> {
        let map = value.as_object()?;
        if depth > DEPTH_MAX {
            return None;
        }
        let mut set = Self::default();
        for (key, inner) in map {
            if key == "." {
                set.member = true;
                continue;
            }
            let element = canonical(key)?;
            let mut below = Self::read(inner, depth + 1)?;
            below.member |= below.below.is_empty();
            set.below.insert(element, below);
        }
        Some(set)
    }
}

/// The element of a field.
#[must_use]
pub fn field(name: &str) -> String {
    format!("f:{name}")
}

/// The element of a list item that is told by its keys.
#[must_use]
pub fn keys(pairs: &[(&str, &Value)]) -> String {
    let mut pairs: Vec<_> = pairs.to_vec();
    pairs.sort_by_key(|(name, _)| *name);
    let written: Vec<String> = pairs.iter().map(|(name, value)| format!("{}:{value}", Value::from(*name))).collect();
    format!("k:{{{}}}", written.join(","))
}

/// The element of a list item that is told by its value.
#[must_use]
pub fn value(value: &Value) -> String {
    format!("v:{value}")
}

/// An element as this server writes it, so that equal ones are equal texts.
fn canonical(element: &str) -> Option<String> {
    let (kind, rest) = element.split_once(':')?;
    match kind {
        "f" => Some(element.to_owned()),
        "i" => rest.parse::<u32>().ok().map(|n| format!("i:{n}")),
        "v" => serde_json::from_str::<Value>(rest).ok().map(|v| value(&v)),
        "k" => {
            let map: Map<String, Value> = serde_json::from_str(rest).ok()?;
            Some(keys(&map.iter().map(|(k, v)| (k.as_str(), v)).collect::<Vec<_>>()))
        }
        _ => None,
    }
}

/// An element as people read it.
#[must_use]
pub fn shown(element: &str) -> String {
    let (kind, rest) = element.split_once(':').unwrap_or(("", element));
    match kind {
        "f" => format!(".{rest}"),
        "v" => format!("[={rest}]"),
        "i" => format!("[{rest}]"),
        _ => {
            let map: Map<String, Value> = serde_json::from_str(rest).unwrap_or_default();
            let pairs: Vec<String> = map.iter().map(|(k, v)| format!("{k}={v}")).collect();
            format!("[{}]", pairs.join(","))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn set(v: Value) -> Fields {
        Fields::decode(&v).unwrap()
    }

    #[test]
    fn a_set_is_read_and_written_and_its_places_are_named() {
        let written = json!({"f:metadata": {"f:labels": {".": {}, "f:a.b/c": {}}},
            "f:spec": {"f:list": {"k:{\"name\":\"x\",\"port\":1}": {".": {}, "f:y": {}}, "v:\"z\"": {}}}});
        let s = set(written.clone());
        assert_eq!(s.encode(), written);
        // Keys in another order are the same keys.
        let other = set(json!({"k:{\"port\": 1, \"name\": \"x\"}": {}}));
        assert_eq!(other.below.keys().next().unwrap(), "k:{\"name\":\"x\",\"port\":1}");
        assert_eq!(
            s.paths(),
            [
                ".metadata.labels",
                ".metadata.labels.a.b/c",
                ".spec.list[name=\"x\",port=1]",
                ".spec.list[=\"z\"]",
                ".spec.list[name=\"x\",port=1].y"
            ]
        );
        for wrong in [json!([]), json!({"x": {}}), json!({"f:a": 1}), json!({"k:x": {}})] {
            assert!(Fields::decode(&wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn sets_are_added_subtracted_and_intersected() {
        let a = set(json!({"f:x": {".": {}, "f:y": {}}, "f:z": {}}));
        let b = set(json!({"f:x": {"f:y": {}, "f:w": {}}}));
        assert_eq!(a.clone().union(&b).encode(), json!({"f:x": {".": {}, "f:y": {}, "f:w": {}}, "f:z": {}}));
        assert_eq!(a.clone().without(&b).encode(), json!({"f:x": {}, "f:z": {}}));
        assert_eq!(a.common(&b).encode(), json!({"f:x": {"f:y": {}}}));
        let mut c = a.clone();
        c.cut(&["f:x", "f:y"]);
        assert_eq!(c.encode(), json!({"f:x": {}, "f:z": {}}));
        assert!(a.clone().without(&a).is_empty());
    }
}
