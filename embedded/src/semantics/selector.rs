//! Label and field selectors as they come in query strings.

use serde_json::Value;

use super::{Resource, Status};

/// One condition on a label.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Label {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
    Greater(String, i64),
    Less(String, i64),
}

/// Conditions on labels and fields; all must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<Label>,
    /// Field path, value, wanted equal.
    fields: Vec<(String, String, bool)>,
}

impl Selector {
    /// Reads the two query parameters.
    ///
    /// # Errors
    /// 400 as kube-apiserver words it.
    pub fn parse(labels: &str, fields: &str, resource: &Resource) -> Result<Self, Status> {
        let labels = split(labels)
            .into_iter()
            .map(|part| {
                label(part).ok_or_else(|| Status::bad_request(format!("unable to parse requirement: {part:?}")))
            })
            .collect::<Result<_, _>>()?;
        let mut out = Self { labels, fields: Vec::new() };
        for part in fields.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (path, value, equal) = part
                .split_once("!=")
                .map(|(p, v)| (p, v, false))
                .or_else(|| part.split_once("==").map(|(p, v)| (p, v, true)))
                .or_else(|| part.split_once('=').map(|(p, v)| (p, v, true)))
                .ok_or_else(|| {
                    Status::bad_request(format!("invalid field selector: {part:?}; can't understand {part:?}"))
                })?;
            if !resource.selectable(path) {
                return Err(Status::bad_request(format!("field label not supported: {path}")));
            }
            out.fields.push((path.to_owned(), value.to_owned(), equal));
        }
        Ok(out)
    }

    /// A selector of the form that objects carry (`matchLabels`, `matchExpressions`).
    #[must_use]
    pub fn of_object(selector: &Value) -> Self {
        let mut labels = Vec::new();
        if let Some(map) = selector.get("matchLabels").and_then(Value::as_object) {
            for (k, v) in map {
                labels.push(Label::In(k.clone(), vec![v.as_str().unwrap_or_default().to_owned()]));
            }
        }
        for e in super::value::items(selector, "/matchExpressions") {
            let key = super::value::text(e, "/key").to_owned();
            let values = super::value::strings(e, "/values");
            labels.push(match super::value::text(e, "/operator") {
                "In" => Label::In(key, values),
                "NotIn" => Label::NotIn(key, values),
                "Exists" => Label::Exists(key),
                _ => Label::Missing(key),
            });
        }
        Self { labels, fields: Vec::new() }
    }

    /// Whether everything matches.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The name that the selector pins down, if it does.
    #[must_use]
    pub fn single_name(&self) -> Option<&str> {
        self.fields.iter().find(|(p, _, equal)| p == "metadata.name" && *equal).map(|(_, v, _)| v.as_str())
    }

    /// Whether an object matches.
    #[must_use]
    pub fn matches(&self, object: &Value, resource: &Resource) -> bool {
        self.matches_labels(object.pointer("/metadata/labels"))
            && self.fields.iter().all(|(path, value, equal)| (resource.field(object, path) == *value) == *equal)
    }

    /// Whether a map of labels matches.
    #[must_use]
    pub fn matches_labels(&self, labels: Option<&Value>) -> bool {
        let get = |key: &str| labels.and_then(|l| l.get(key)).and_then(Value::as_str);
        let number = |key: &str| get(key).and_then(|v| v.parse::<i64>().ok());
        self.labels.iter().all(|c| match c {
            Label::In(k, vs) => get(k).is_some_and(|v| vs.iter().any(|x| x == v)),
            Label::NotIn(k, vs) => get(k).is_none_or(|v| !vs.iter().any(|x| x == v)),
            Label::Exists(k) => get(k).is_some(),
            Label::Missing(k) => get(k).is_none(),
            Label::Greater(k, n) => number(k).is_some_and(|v| v > *n),
            Label::Less(k, n) => number(k).is_some_and(|v| v < *n),
        })
    }
}

/// Splits at commas outside parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                out.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    out.push(text[start..].trim());
    out.retain(|p| !p.is_empty());
    out
}

fn key(text: &str) -> Option<String> {
    let text = text.trim();
    super::names::check_qualified(text).is_none().then(|| text.to_owned())
}

fn set(text: &str) -> Option<Vec<String>> {
    let inner = text.trim().strip_prefix('(')?.strip_suffix(')')?;
    Some(inner.split(',').map(|v| v.trim().to_owned()).collect())
}

fn label(part: &str) -> Option<Label> {
    if let Some(rest) = part.strip_prefix('!') {
        return key(rest).map(Label::Missing);
    }
    if let Some((k, v)) = part.split_once("!=") {
        return Some(Label::NotIn(key(k)?, vec![v.trim().to_owned()]));
    }
    if let Some((k, v)) = part.split_once("==").or_else(|| part.split_once('=')) {
        let v = v.trim();
        return super::names::check_label_value(v).is_none().then_some(Label::In(key(k)?, vec![v.to_owned()]));
    }
    if let Some((k, v)) = part
        .split_once(" notin ")
        .or_else(|| part.split_once(" notin(").map(|(k, _)| (k, &part[part.find('(').unwrap_or(0)..])))
    {
        return Some(Label::NotIn(key(k)?, set(v)?));
    }
    if let Some((k, v)) = part
        .split_once(" in ")
        .or_else(|| part.split_once(" in(").map(|(k, _)| (k, &part[part.find('(').unwrap_or(0)..])))
    {
        return Some(Label::In(key(k)?, set(v)?));
    }
    if let Some((k, v)) = part.split_once('>') {
        return Some(Label::Greater(key(k)?, v.trim().parse().ok()?));
    }
    if let Some((k, v)) = part.split_once('<') {
        return Some(Label::Less(key(k)?, v.trim().parse().ok()?));
    }
    key(part).map(Label::Exists)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn labels_select() {
        let r = Resource::default();
        let o = json!({"metadata": {"name": "x", "labels": {"a": "1", "b": "two"}}});
        for (text, want) in [
            ("", true),
            ("a=1", true),
            ("a==1,b in (two, three)", true),
            ("b in(two)", true),
            ("a!=1", false),
            ("c!=1", true),
            ("c", false),
            ("!c,a", true),
            ("b notin (two)", false),
            ("a>0", true),
            ("a<1", false),
        ] {
            assert_eq!(Selector::parse(text, "", &r).unwrap().matches(&o, &r), want, "{text}");
        }
        for text in ["=", "a in two", "!", "a=b c"] {
            assert_eq!(Selector::parse(text, "", &r).unwrap_err().code, 400, "{text}");
        }
    }

    #[test]
    fn fields_select_and_unknown_ones_are_refused() {
        let r = Resource::default();
        let o = json!({"metadata": {"name": "x"}});
        assert!(Selector::parse("", "metadata.name=x", &r).unwrap().matches(&o, &r));
        assert!(!Selector::parse("", "metadata.name!=x", &r).unwrap().matches(&o, &r));
        let e = Selector::parse("", "spec.foo=x", &r).unwrap_err();
        assert_eq!(e.message, "field label not supported: spec.foo");
    }
}
