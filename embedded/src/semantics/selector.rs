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
        let labels = Parser { rest: labels }.all().map_err(Status::bad_request)?;
        let mut out = Self { labels, fields: Vec::new() };
        for part in fields.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (path, value, equal) = part
                .split_once("!=")
                .map(|(p, v)| (p, v, false))
                .or_else(|| part.split_once("==").map(|(p, v)| (p, v, true)))
                .or_else(|| part.split_once('=').map(|(p, v)| (p, v, true)))
                .ok_or_else(|| {
                    Status::bad_request(format!("invalid selector: '{fields}'; can't understand '{part}'"))
                })?;
            if !resource.selectable(path) {
                // Kinds that have fields of their own say it in other words.
                let plain = !resource.custom && resource.behaviour.selectable().is_empty();
                return Err(Status::bad_request(if plain {
                    let only = "only \"metadata.name\", \"metadata.namespace\"";
                    format!("{path:?} is not a known field selector: {only}")
                } else {
                    format!("field label not supported: {path}")
                }));
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

/// Reads conditions on labels from a text, with kube-apiserver's words for what is none.
struct Parser<'a> {
    rest: &'a str,
}

/// Words and signs, "" at the end.
const SIGNS: [&str; 9] = ["==", "!=", "=", "!", ">", "<", ",", "(", ")"];

impl<'a> Parser<'a> {
    fn look(&self) -> (&'a str, &'a str) {
        let text = self.rest.trim_start();
        let length = SIGNS.iter().find(|s| text.starts_with(**s)).map_or_else(
            || text.find(|c: char| c.is_whitespace() || "=!<>,()".contains(c)).unwrap_or(text.len()),
            |s| s.len(),
        );
        text.split_at(length)
    }

    fn take(&mut self) -> &'a str {
        let (token, rest) = self.look();
        self.rest = rest;
        token
    }

    fn word(&mut self) -> Result<&'a str, String> {
        let token = self.take();
        if is_word(token) { Ok(token) } else { Err(format!("found '{token}', expected: identifier")) }
    }

    fn all(mut self) -> Result<Vec<Label>, String> {
        let mut out = Vec::new();
        loop {
            match self.look().0 {
                "" => return Ok(out),
                token if is_word(token) || token == "!" => {
                    out.push(self.one().map_err(|why| format!("unable to parse requirement: {why}"))?);
                }
                other => return Err(format!("found '{other}', expected: !, identifier, or 'end of string'")),
            }
            match self.take() {
                "" => return Ok(out),
                "," => {
                    let next = self.look().0;
                    if !is_word(next) && next != "!" {
                        return Err(format!("found '{next}', expected: identifier after ','"));
                    }
                }
                other => return Err(format!("found '{other}', expected: ',' or 'end of string'")),
            }
        }
    }

    fn one(&mut self) -> Result<Label, String> {
        let missing = self.look().0 == "!";
        if missing {
            self.take();
        }
        let key = self.word()?;
        if let Some(why) = super::names::check_qualified(key) {
            return Err(format!("key: Invalid value: {key:?}: {why}"));
        }
        let key = key.to_owned();
        if missing {
            return Ok(Label::Missing(key));
        }
        if matches!(self.look().0, "" | ",") {
            return Ok(Label::Exists(key));
        }
        match self.take() {
            "=" | "==" => Ok(Label::In(key.clone(), vec![self.value(&key)?])),
            "!=" => Ok(Label::NotIn(key.clone(), vec![self.value(&key)?])),
            "in" => Ok(Label::In(key.clone(), self.values(&key)?)),
            "notin" => Ok(Label::NotIn(key.clone(), self.values(&key)?)),
            sign @ (">" | "<") => {
                let value = self.value(&key)?;
                let number = value.parse().map_err(|_| {
                    format!("values[0][{key}]: Invalid value: {value:?}: for 'Gt', 'Lt' operators, the value must be an integer")
                })?;
                Ok(if sign == ">" { Label::Greater(key, number) } else { Label::Less(key, number) })
            }
            other => Err(format!("found '{other}', expected: in, notin, =, ==, !=, gt, lt")),
        }
    }

    fn checked(key: &str, value: &str) -> Result<String, String> {
        match super::names::check_label_value(value) {
            None => Ok(value.to_owned()),
            Some(why) => Err(format!("values[0][{key}]: Invalid value: {value:?}: {why}")),
        }
    }

    fn value(&mut self, key: &str) -> Result<String, String> {
        if matches!(self.look().0, "" | ",") {
            return Ok(String::new());
        }
        let word = self.word()?;
        Self::checked(key, word)
    }

    fn values(&mut self, key: &str) -> Result<Vec<String>, String> {
        let open = self.take();
        if open != "(" {
            return Err(format!("found '{open}' expected: '('"));
        }
        let mut out = Vec::new();
        loop {
            match self.look().0 {
                word if is_word(word) => {
                    self.take();
                    out.push(Self::checked(key, word)?);
                }
                // Nothing between two commas is the empty value.
                "," | ")" => out.push(String::new()),
                other => return Err(format!("found '{other}', expected: ',', ')' or identifier")),
            }
            match self.take() {
                "," => {}
                ")" => return Ok(out),
                other => return Err(format!("found '{other}', expected: ',', or ')'")),
            }
        }
    }
}

fn is_word(token: &str) -> bool {
    !token.is_empty() && !SIGNS.contains(&token)
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
        assert!(e.message.starts_with("\"spec.foo\" is not a known field selector"), "{e}");
    }
}
