//! Label selectors as objects carry them (`matchLabels`, `matchExpressions`).

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

/// Longest name of a label, and longest value.
const LABEL_MAX: usize = 63;
/// Longest prefix of a label's key.
const PREFIX_MAX: usize = 253;

/// A selector as it stands in a spec.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RawSelector {
    match_labels: BTreeMap<String, String>,
    match_expressions: Vec<RawExpression>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct RawExpression {
    key: String,
    operator: String,
    values: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Operator {
    Equals,
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

/// A selector that makes sense; all its requirements must hold. None at all match everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Selector {
    /// Key, operator, sorted values.
    requirements: Vec<(String, Operator, Vec<String>)>,
}

/// Why a selector makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// A key that no label can have.
    #[error("{0:?} is not a valid label key")]
    Key(String),
    /// A value that no label can have.
    #[error("{1:?} is not a valid value of label {0}")]
    Value(String, String),
    /// An operator that does not exist.
    #[error("{1:?} is not an operator (label {0}): use In, NotIn, Exists or DoesNotExist")]
    Operator(String, String),
    /// Values where there must be none, or none where there must be some.
    #[error("operator {1} of label {0} takes {2}")]
    Values(String, String, &'static str),
}

impl Selector {
    /// Reads a selector.
    pub fn parse(raw: &RawSelector) -> Result<Self, SelectorError> {
        let mut requirements = vec![];
        for (key, value) in &raw.match_labels {
            requirements.push((key.clone(), Operator::Equals, vec![value.clone()]));
        }
        for e in &raw.match_expressions {
            let operator = match e.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => return Err(SelectorError::Operator(e.key.clone(), other.into())),
            };
            let wants_values = matches!(operator, Operator::In | Operator::NotIn);
            if wants_values == e.values.is_empty() {
                let rule = if wants_values { "at least one value" } else { "no values" };
                return Err(SelectorError::Values(e.key.clone(), e.operator.clone(), rule));
            }
            let mut values = e.values.clone();
            values.sort();
            values.dedup();
            requirements.push((e.key.clone(), operator, values));
        }
        for (key, _, values) in &requirements {
            if !is_key(key) {
                return Err(SelectorError::Key(key.clone()));
            }
            if let Some(v) = values.iter().find(|v| !is_value(v)) {
                return Err(SelectorError::Value(key.clone(), v.clone()));
            }
        }
        requirements.sort();
        Ok(Self { requirements })
    }

    /// It has no requirement, so it matches everything.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether labels match.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|(key, operator, values)| {
            let value = labels.get(key);
            match operator {
                Operator::Equals | Operator::In => value.is_some_and(|v| values.contains(v)),
                Operator::NotIn => value.is_none_or(|v| !values.contains(v)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// The form of query strings and of `status.labelSelector`.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, operator, values)) in self.requirements.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let values = values.join(",");
            match operator {
                Operator::Equals => write!(f, "{comma}{key}={values}")?,
                Operator::In => write!(f, "{comma}{key} in ({values})")?,
                Operator::NotIn => write!(f, "{comma}{key} notin ({values})")?,
                Operator::Exists => write!(f, "{comma}{key}")?,
                Operator::DoesNotExist => write!(f, "{comma}!{key}")?,
            }
        }
        Ok(())
    }
}

/// Whether a label can have this key: a name, with a DNS domain and a slash before it or without.
pub fn is_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(p, n)| (Some(p), n));
    let part = |p: &str| {
        !p.is_empty() && p.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') && ends(p)
    };
    !name.is_empty()
        && is_value(name)
        && prefix.is_none_or(|p| !p.is_empty() && p.len() <= PREFIX_MAX && p.split('.').all(part))
}

/// Whether a label can have this value.
pub fn is_value(value: &str) -> bool {
    value.len() <= LABEL_MAX
        && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && (value.is_empty() || ends(value))
}

fn ends(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn parse(raw: Value) -> Result<Selector, SelectorError> {
        Selector::parse(&serde_json::from_value(raw).unwrap())
    }

    #[test]
    fn selectors_match_and_print_as_clients_expect() {
        let e =
            |key: &str, operator: &str, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        let all = json!({"matchLabels": {"b": "2", "a": "1"}, "matchExpressions": [
            e("c", "In", &["y", "x", "x"]), e("d", "NotIn", &["z"]), e("e", "Exists", &[]), e("f", "DoesNotExist", &[])]});
        let s = parse(all).unwrap();
        assert_eq!(s.to_string(), "a=1,b=2,c in (x,y),d notin (z),e,!f");
        let labels = |text: &str| -> BTreeMap<String, String> {
            text.split(',').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
        };
        for (text, matches) in [
            ("a=1,b=2,c=x,e=", true),
            ("a=1,b=2,c=y,d=q,e=1,g=7", true),
            ("a=1,b=3,c=x,e=", false),
            ("a=1,b=2,c=w,e=", false),
            ("a=1,b=2,c=x,d=z,e=", false),
            ("a=1,b=2,c=x", false),
            ("a=1,b=2,c=x,e=,f=", false),
        ] {
            assert_eq!(s.matches(&labels(text)), matches, "{text}");
        }
        assert!(parse(json!({})).unwrap().is_empty());
        assert!(parse(json!({})).unwrap().matches(&labels("")));
    }

    #[test]
    fn selectors_that_make_no_sense_say_why() {
        let e = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (raw, text) in [
            (e("a", "in", &["x"]), "\"in\" is not an operator (label a): use In, NotIn, Exists or DoesNotExist"),
            (e("a", "In", &[]), "operator In of label a takes at least one value"),
            (e("a", "Exists", &["x"]), "operator Exists of label a takes no values"),
            (e("-a", "Exists", &[]), "\"-a\" is not a valid label key"),
            (e("A.b/a", "Exists", &[]), "\"A.b/a\" is not a valid label key"),
            (json!({"matchLabels": {"a": "x y"}}), "\"x y\" is not a valid value of label a"),
        ] {
            assert_eq!(parse(raw).unwrap_err().to_string(), text);
        }
        assert!(parse(json!({"matchLabels": {"kubevirt.io/vmReplicaSet": "a"}})).is_ok());
    }
}
