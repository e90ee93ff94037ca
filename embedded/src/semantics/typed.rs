//! Values seen through their schema, as server-side apply sees them: what is one value and what is made of parts that may
//! have different owners. A list is taken apart only where its schema says by what its items are told (`x-kubernetes-list-type`).

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::fields::{self, Fields};
use super::schema::{Additional, ListType, Node, Schema};

/// Items of a list by what they are told by.
type Elements<'v> = BTreeMap<String, Vec<&'v Value>>;

/// A place in a schema; without a node nothing is known: maps are taken apart, lists are not.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    schema: &'a Schema,
    node: Option<&'a Node>,
    /// A map here is one value.
    whole: bool,
}

/// What differs between two values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// Only in the new one.
    pub added: Fields,
    /// In both, otherwise.
    pub modified: Fields,
    /// Only in the old one.
    pub removed: Fields,
}

impl Difference {
    fn put(&mut self, element: &str, below: Self) {
        self.added.put(element.to_owned(), below.added);
        self.modified.put(element.to_owned(), below.modified);
        self.removed.put(element.to_owned(), below.removed);
    }
}

/// How a value is looked at.
enum Form<'a> {
    One,
    Parts(&'a Map<String, Value>),
    Items(&'a [Value]),
}

impl<'a> Place<'a> {
    /// The root of a schema.
    #[must_use]
    pub fn root(schema: &'a Schema) -> Self {
        Self { schema, node: None, whole: false }.at(&schema.root)
    }

    fn at(self, node: &'a Node) -> Self {
        let resolved = self.schema.resolve(node);
        // Who refers to a type may say that here its parts count.
        let whole = (node.map_atomic || resolved.map_atomic) && !node.map_granular;
        Self { node: Some(resolved), whole, ..self }
    }

    fn unknown(self) -> Self {
        Self { node: None, whole: false, ..self }
    }

    /// The place of a field, and whether the schema names it.
    fn field(self, name: &str) -> (Self, bool) {
        let Some(node) = self.node else { return (self, false) };
        if let Some(known) = node.properties.get(name) {
            return (self.at(known), true);
        }
        match &node.additional {
            Additional::Shaped(shape) => (self.at(shape), false),
            _ => (self.unknown(), false),
        }
    }

    fn item(self) -> Self {
        match self.node.and_then(|n| n.items.as_deref()) {
            Some(node) => self.at(node),
            None => self.unknown(),
        }
    }

    fn form(self, value: &Value) -> Form<'_> {
        match value {
            Value::Object(map) if !self.whole && self.node.is_none_or(|n| !n.int_or_string) => Form::Parts(map),
            Value::Array(list) if self.node.is_some_and(|n| n.list_type != ListType::Atomic) => Form::Items(list),
            _ => Form::One,
        }
    }

    /// By what an item of a list is told.
    fn element(self, item: &Value) -> Result<String, String> {
        let Some(node) = self.node else { return Err("invalid indexing of non-associative list".into()) };
        if node.list_type == ListType::Set {
            return match item {
                Value::Object(_) => Err("associative list without keys has an element that's a map type".into()),
                Value::Array(_) => Err("not supported: associative list with lists as elements".into()),
                Value::Null => Err("associative list without keys has an element that's an explicit null".into()),
                plain => Ok(fields::value(plain)),
            };
        }
        let Value::Object(map) = item else {
            return Err(match item {
                Value::Null => "associative list with keys may not have a null element".into(),
                _ => "associative list with keys may not have non-map elements".into(),
            });
        };
        let shape = self.item().node;
        let pairs: Vec<(&str, &Value)> = node
            .list_keys
            .iter()
            .filter_map(|key| {
                let fallback = || shape.and_then(|n| n.properties.get(key)).and_then(|p| p.default.as_ref());
                map.get(key).or_else(fallback).map(|v| (key.as_str(), v))
            })
            .collect();
        if pairs.is_empty() {
            return Err(format!(
                "associative list with keys has an element that omits all key fields [{}] (and doesn't have default values for any key fields)",
                node.list_keys.iter().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(" ")
            ));
        }
        Ok(fields::keys(&pairs))
    }

    /// Items by element, in order; an element that is there twice has several values. What is no element is left out.
    fn items(self, list: &[Value]) -> (Vec<(String, &Value)>, Elements<'_>) {
        let mut order = Vec::new();
        let mut by = Elements::new();
        for item in list {
            let Ok(element) = self.element(item) else { continue };
            order.push((element.clone(), item));
            by.entry(element).or_default().push(item);
        }
        (order, by)
    }

    /// What is wrong with a value that somebody wants to apply: paths and what is wrong.
    pub fn problems(self, value: &Value, at: &str, out: &mut Vec<String>) {
        match self.form(value) {
            Form::Parts(map) => {
                let open = self.node.is_none_or(|n| n.preserve || !matches!(n.additional, Additional::Unsaid));
                for (key, v) in map {
                    let path = format!("{at}.{key}");
                    let (place, named) = self.field(key);
                    if named || open {
                        place.problems(v, &path, out);
                    } else {
                        out.push(format!("{path}: field not declared in schema"));
                    }
                }
            }
            Form::Items(list) => {
                let mut seen = std::collections::BTreeSet::new();
                for (i, item) in list.iter().enumerate() {
                    match self.element(item) {
                        Err(why) => out.push(format!("{at}: element {i}: {why}")),
                        Ok(element) => {
                            let path = fields::shown(&element);
                            if !seen.insert(element) {
                                out.push(format!("{at}: duplicate entries for key {path}"));
                            }
                            self.item().problems(item, &format!("{at}{path}"), out);
                        }
                    }
                }
            }
            Form::One => {
                if let Some(why) = self.wrong_type(value) {
                    out.push(format!("{at}: {why}"));
                }
            }
        }
    }

    fn wrong_type(self, value: &Value) -> Option<String> {
        use super::schema::Type;
        let node = self.node?;
        let text = |v: &Value| match v {
            Value::String(s) => format!("{s:?}"),
            other => other.to_string(),
        };
        match (node.kind?, value) {
            _ if node.int_or_string => None,
            (_, Value::Null) | (Type::String, Value::String(_)) | (Type::Boolean, Value::Bool(_)) => None,
            (Type::Integer | Type::Number, Value::Number(_)) | (Type::Array, Value::Array(_)) => None,
            (Type::Object, Value::Object(_)) => None,
            (Type::String, v) => Some(format!("expected string, got &value.valueUnstructured{{Value:{}}}", text(v))),
            (Type::Boolean, v) => Some(format!("expected boolean, got {}", text(v))),
            (Type::Integer | Type::Number, v) => {
                let kind = match v {
                    Value::String(_) => "string",
                    Value::Bool(_) => "bool",
                    Value::Array(_) => "[]interface {}",
                    _ => "map[string]interface {}",
                };
                Some(format!("expected numeric (int or float), got {kind}"))
            }
            (Type::Array, v) => Some(format!("expected list, got {}", text(v))),
            (Type::Object, v) => Some(format!("expected map, got {}", text(v))),
        }
    }

    /// All fields of a value.
    #[must_use]
    pub fn fields(self, value: &Value) -> Fields {
        let mut set = Fields::default();
        match self.form(value) {
            Form::One => set.member = true,
            Form::Parts(map) => {
                for (key, v) in map {
                    let (place, named) = self.field(key);
                    let mut below = place.fields(v);
                    let bare = v.is_null() || v.as_object().is_some_and(Map::is_empty);
                    below.member |= bare || !named;
                    set.put(fields::field(key), below);
                }
            }
            Form::Items(list) => {
                for (element, values) in self.items(list).1 {
                    let mut below = match values.as_slice() {
                        [one] => self.item().fields(one),
                        _ => Fields::default(),
                    };
                    below.member = true;
                    set.put(element, below);
                }
            }
        }
        set
    }

    /// What differs between two values of which at least one is there.
    #[must_use]
    pub fn compare(self, old: Option<&Value>, new: Option<&Value>) -> Difference {
        let mut out = Difference::default();
        if old == new {
            return out;
        }
        let whole = |out: &mut Difference| match (old, new) {
            (None, _) => out.added.member = true,
            (_, None) => out.removed.member = true,
            _ => out.modified.member = true,
        };
        let bare = |v: Option<&Value>| match v {
            None | Some(Value::Null) => true,
            Some(Value::Object(m)) => m.is_empty(),
            Some(Value::Array(l)) => l.is_empty(),
            Some(_) => false,
        };
        let (a, b) = (old.filter(|v| !v.is_null()), new.filter(|v| !v.is_null()));
        match (a.map(|v| self.form(v)), b.map(|v| self.form(v))) {
            _ if bare(old) && bare(new) => whole(&mut out),
            (Some(Form::Parts(x)), Some(Form::Parts(y))) => self.compare_parts(x, y, &mut out),
            (Some(Form::Parts(x)), None) => {
                self.compare_parts(x, &Map::new(), &mut out);
                out.removed.member |= new.is_none();
            }
            (None, Some(Form::Parts(y))) => {
                self.compare_parts(&Map::new(), y, &mut out);
                out.added.member |= old.is_none();
            }
            (Some(Form::Items(x)), Some(Form::Items(y))) => self.compare_items(x, y, &mut out),
            (Some(Form::Items(x)), None) => {
                self.compare_items(x, &[], &mut out);
                out.removed.member |= new.is_none();
            }
            (None, Some(Form::Items(y))) => {
                self.compare_items(&[], y, &mut out);
                out.added.member |= old.is_none();
            }
            (a_form, b_form) => {
                whole(&mut out);
                // Of what takes another form nothing stays that was below it.
                if !matches!(a_form, None | Some(Form::One)) {
                    out.removed.below = self.compare(a, None).removed.below;
                }
                if !matches!(b_form, None | Some(Form::One)) {
                    out.added.below = self.compare(None, b).added.below;
                }
            }
        }
        out
    }

    fn compare_parts(self, old: &Map<String, Value>, new: &Map<String, Value>, out: &mut Difference) {
        for (key, v) in old {
            let w = new.get(key);
            if w != Some(v) {
                out.put(&fields::field(key), self.field(key).0.compare(Some(v), w));
            }
        }
        for (key, w) in new.iter().filter(|(key, _)| !old.contains_key(*key)) {
            out.put(&fields::field(key), self.field(key).0.compare(None, Some(w)));
        }
    }

    fn compare_items(self, old: &[Value], new: &[Value], out: &mut Difference) {
        let (before, after) = (self.items(old).1, self.items(new).1);
        let none = Vec::new();
        let all: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for element in all {
            let (x, y) = (before.get(element).unwrap_or(&none), after.get(element).unwrap_or(&none));
            let below = match (x.as_slice(), y.as_slice()) {
                ([] | [_], [] | [_]) => self.item().compare(x.first().copied(), y.first().copied()),
                // Items that are there more than once are one value.
                ([_, _, ..], [_, _, ..]) => {
                    let mut d = Difference::default();
                    d.modified.member = x != y;
                    d
                }
                ([_, _, ..], _) => {
                    let mut d = y.first().map(|v| self.item().compare(None, Some(v))).unwrap_or_default();
                    d.removed.member = true;
                    d
                }
                (_, _) => {
                    let mut d = x.first().map(|v| self.item().compare(Some(v), None)).unwrap_or_default();
                    d.added.member = true;
                    d
                }
            };
            out.put(element, below);
        }
    }

    /// The old value with everything that the new one says.
    #[must_use]
    pub fn merge(self, old: &Value, new: &Value) -> Value {
        match (self.form(old), self.form(new)) {
            (Form::Parts(x), Form::Parts(y)) => {
                let mut out = x.clone();
                for (key, w) in y {
                    let merged = match x.get(key) {
                        Some(v) => self.field(key).0.merge(v, w),
                        None => w.clone(),
                    };
                    out.insert(key.clone(), merged);
                }
                Value::Object(out)
            }
            (Form::Items(x), Form::Items(y)) => self.merge_items(x, y).into(),
            // Nothing is said about the parts.
            (Form::Parts(x), Form::One) if new.is_null() && !x.is_empty() => old.clone(),
            (Form::Items(x), Form::One) if new.is_null() && !x.is_empty() => old.clone(),
            _ => new.clone(),
        }
    }

    /// Items that are in both lists stand in the order of the new one; the others keep their places between them.
    fn merge_items(self, old: &[Value], new: &[Value]) -> Vec<Value> {
        let (left, before) = self.items(old);
        let (right, after) = self.items(new);
        let one = |by: &Elements, e: &str| -> Option<Value> {
            by.get(e).filter(|v| v.len() == 1).and_then(|v| v.first()).map(|v| Value::clone(v))
        };
        let both = |e: &str| match (one(&before, e), one(&after, e)) {
            (Some(v), Some(w)) => self.item().merge(&v, &w),
            (_, Some(w)) => w,
            (Some(v), None) => v,
            (None, None) => Value::Null,
        };
        let mut shared = right.iter().map(|(e, _)| e).filter(|e| before.contains_key(*e));
        let mut next = shared.next();
        let mut merged = std::collections::BTreeSet::new();
        let mut out = Vec::with_capacity(old.len().max(new.len()));
        let (mut l, mut r) = (0, 0);
        while l < left.len() || r < right.len() {
            if let (Some((a, _)), Some((b, _))) = (left.get(l), right.get(r)) {
                if a == b {
                    merged.insert(a.clone());
                    out.push(both(a));
                    l += 1;
                    r += 1;
                    next = shared.next();
                    continue;
                }
                if after.contains_key(a) && next.is_some_and(|n| n != a) {
                    l += 1;
                    continue;
                }
            }
            if let Some((a, item)) = left.get(l) {
                if !after.contains_key(a) {
                    out.push(Value::clone(item));
                    l += 1;
                    continue;
                }
                if merged.contains(a) {
                    l += 1;
                }
            }
            if let Some((b, _)) = right.get(r) {
                merged.insert(b.clone());
                out.push(both(b));
                r += 1;
                if next == Some(b) {
                    next = shared.next();
                }
            }
        }
        out
    }

    /// The value without the fields of a set. What is emptied so becomes null, as with kube-apiserver.
    #[must_use]
    pub fn remove(self, value: &Value, gone: &Fields) -> Value {
        if gone.below.is_empty() {
            return value.clone();
        }
        match self.form(value) {
            Form::Parts(map) => {
                let mut out = Map::new();
                for (key, v) in map {
                    match gone.below.get(&fields::field(key)) {
                        Some(set) if set.member => {}
                        Some(set) => {
                            out.insert(key.clone(), self.field(key).0.remove(v, set));
                        }
                        None => {
                            out.insert(key.clone(), v.clone());
                        }
                    }
                }
                if out.is_empty() { Value::Null } else { Value::Object(out) }
            }
            Form::Items(list) => {
                let mut out = Vec::with_capacity(list.len());
                for item in list {
                    match self.element(item).ok().and_then(|e| gone.below.get(&e)) {
                        Some(set) if set.member => {}
                        Some(set) => out.push(self.item().remove(item, set)),
                        None => out.push(item.clone()),
                    }
                }
                if out.is_empty() { Value::Null } else { Value::Array(out) }
            }
            Form::One => value.clone(),
        }
    }

    /// The set with every field that the schema names and that has something below it.
    #[must_use]
    pub fn with_named(self, set: &Fields) -> Fields {
        let mut out = Fields { member: set.member, below: BTreeMap::new() };
        for (element, below) in &set.below {
            let (place, named) = match element.strip_prefix("f:") {
                Some(name) => self.field(name),
                None => (self.item(), false),
            };
            let mut inner = place.with_named(below);
            inner.member |= named && !below.below.is_empty();
            out.below.insert(element.clone(), inner);
        }
        out
    }
}
