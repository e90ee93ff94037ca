//! The grammars of names, labels and annotations, with kube-apiserver's words when they are broken.

use serde_json::{Map, Value};

use super::FieldError;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const QUALIFIED: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

/// How the names of a kind are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NameRule {
    /// A DNS subdomain, as most kinds.
    #[default]
    Subdomain,
    /// A DNS label (namespaces).
    Label,
    /// Anything that can be one segment of a path (RBAC).
    PathSegment,
}

fn lower(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

/// Whether this is an RFC 1123 label.
#[must_use]
pub fn is_label(s: &str) -> bool {
    let b = s.as_bytes();
    b.len() <= 63
        && b.first().copied().is_some_and(lower)
        && b.last().copied().is_some_and(lower)
        && b.iter().all(|c| lower(*c) || *c == b'-')
}

/// Whether this is an RFC 1123 subdomain.
#[must_use]
pub fn is_subdomain(s: &str) -> bool {
    s.len() <= 253
        && s.split('.').all(|part| {
            let b = part.as_bytes();
            b.first().copied().is_some_and(lower)
                && b.last().copied().is_some_and(lower)
                && b.iter().all(|c| lower(*c) || *c == b'-')
        })
}

fn is_loose(s: &str) -> bool {
    let b = s.as_bytes();
    b.first().is_some_and(u8::is_ascii_alphanumeric)
        && b.last().is_some_and(u8::is_ascii_alphanumeric)
        && b.iter().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.'))
}

/// What is wrong with a name, if anything.
#[must_use]
pub fn check_name(rule: NameRule, name: &str) -> Option<String> {
    match rule {
        NameRule::Subdomain if name.len() > 253 => Some("must be no more than 253 bytes".into()),
        NameRule::Subdomain => (!is_subdomain(name)).then(|| SUBDOMAIN.into()),
        NameRule::Label if name.contains('.') => Some("must not contain dots".into()),
        NameRule::Label if name.len() > 63 => Some("must be no more than 63 bytes".into()),
        NameRule::Label => (!is_label(name)).then(|| LABEL.into()),
        NameRule::PathSegment if matches!(name, "." | "..") => Some(format!("may not be '{name}'")),
        NameRule::PathSegment => {
            ['/', '%'].iter().find(|c| name.contains(**c)).map(|c| format!("may not contain '{c}'"))
        }
    }
}

/// What is wrong with a qualified name (label key, finalizer), if anything.
#[must_use]
pub fn check_qualified(key: &str) -> Option<String> {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(p, n)| (Some(p), n));
    if let Some(prefix) = prefix {
        if prefix.is_empty() {
            return Some("prefix part must be non-empty".into());
        }
        if !is_subdomain(prefix) {
            return Some(format!("prefix part {SUBDOMAIN}"));
        }
    }
    if name.is_empty() {
        return Some("name part must be non-empty".into());
    }
    if name.len() > 63 {
        return Some("name part must be no more than 63 bytes".into());
    }
    (!is_loose(name)).then(|| QUALIFIED.into())
}

/// What is wrong with a label's value, if anything.
#[must_use]
pub fn check_label_value(value: &str) -> Option<String> {
    if value.len() > 63 {
        return Some("must be no more than 63 bytes".into());
    }
    (!value.is_empty() && !is_loose(value)).then(|| LABEL_VALUE.into())
}

/// Checks a map of labels.
pub fn check_labels(labels: &Map<String, Value>, field: &str, errors: &mut Vec<FieldError>) {
    for (key, value) in labels {
        if let Some(why) = check_qualified(key) {
            errors.push(FieldError::invalid(field, &key.as_str().into(), &why));
        }
        if let Some(why) = value.as_str().and_then(check_label_value) {
            errors.push(FieldError::invalid(field, value, &why));
        }
    }
}

/// The most that all annotations together may weigh.
const ANNOTATIONS_BYTES_MAX: usize = 256 << 10;

/// Checks a map of annotations.
pub fn check_annotations(annotations: &Map<String, Value>, field: &str, errors: &mut Vec<FieldError>) {
    let mut total = 0;
    for (key, value) in annotations {
        if let Some(why) = check_qualified(&key.to_lowercase()) {
            errors.push(FieldError::invalid(field, &key.as_str().into(), &why));
        }
        total += key.len() + value.as_str().map_or(0, str::len);
    }
    if total > ANNOTATIONS_BYTES_MAX {
        errors.push(FieldError::too_long(field, ANNOTATIONS_BYTES_MAX as u64));
    }
}
