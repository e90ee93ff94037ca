//! Errors as kube-apiserver words and shapes them (`meta/v1 Status`).

use serde_json::{Value, json};

/// One wrong field, as it becomes a cause of a 422.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldError {
    /// The machine-readable reason (`FieldValueInvalid`, ...).
    pub reason: &'static str,
    /// Path of the field (`spec.containers[0].image`).
    pub field: String,
    /// What is wrong, for people.
    pub body: String,
}

fn show(value: &Value) -> String {
    match value {
        Value::String(s) => format!("{s:?}"),
        other => other.to_string(),
    }
}

impl FieldError {
    fn with(reason: &'static str, field: impl Into<String>, head: String, detail: &str) -> Self {
        let body = if detail.is_empty() { head } else { format!("{head}: {detail}") };
        Self { reason, field: field.into(), body }
    }
    /// A field that must be there.
    pub fn required(field: impl Into<String>, detail: &str) -> Self {
        Self::with("FieldValueRequired", field, "Required value".into(), detail)
    }
    /// A value that is not acceptable.
    pub fn invalid(field: impl Into<String>, value: &Value, detail: &str) -> Self {
        Self::with("FieldValueInvalid", field, format!("Invalid value: {}", show(value)), detail)
    }
    /// A value of the wrong type.
    pub fn type_invalid(field: impl Into<String>, value: &Value, detail: &str) -> Self {
        Self::with("FieldValueTypeInvalid", field, format!("Invalid value: {}", show(value)), detail)
    }
    /// A value outside a fixed set.
    pub fn unsupported(field: impl Into<String>, value: &Value, supported: &[String]) -> Self {
        let list: Vec<String> = supported.iter().map(|s| format!("{s:?}")).collect();
        let detail = if list.is_empty() { String::new() } else { format!("supported values: {}", list.join(", ")) };
        Self::with("FieldValueNotSupported", field, format!("Unsupported value: {}", show(value)), &detail)
    }
    /// A field that may not be set or changed.
    pub fn forbidden(field: impl Into<String>, detail: &str) -> Self {
        Self::with("FieldValueForbidden", field, "Forbidden".into(), detail)
    }
    /// A value that occurs twice where it must not.
    pub fn duplicate(field: impl Into<String>, value: &Value) -> Self {
        Self::with("FieldValueDuplicate", field, format!("Duplicate value: {}", show(value)), "")
    }
    /// A text that is too long.
    pub fn too_long(field: impl Into<String>, max: u64) -> Self {
        Self::with("FieldValueTooLong", field, "Too long".into(), &format!("may not be more than {max} bytes"))
    }
    /// A list or map with too many members.
    pub fn too_many(field: impl Into<String>, actual: usize, max: u64) -> Self {
        let detail = format!("must have at most {max} items");
        Self::with("FieldValueTooMany", field, format!("Too many: {actual}"), &detail)
    }
    /// The reference leads nowhere.
    pub fn not_found(field: impl Into<String>, value: &Value) -> Self {
        Self::with("FieldValueNotFound", field, format!("Not found: {}", show(value)), "")
    }
    /// `field: what is wrong`.
    #[must_use]
    pub fn message(&self) -> String {
        if self.field.is_empty() { self.body.clone() } else { format!("{}: {}", self.field, self.body) }
    }
}

/// A refusal (or, for deletions, a success) as it goes over the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, "" for unknown.
    pub reason: String,
    /// The sentence for people.
    pub message: String,
    /// `details`, null when there are none.
    pub details: Value,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} {})", self.message, self.code, self.reason)
    }
}

impl std::error::Error for Status {}

/// `resource.group`, or the resource alone in the core group.
fn qualified(group: &str, what: &str) -> String {
    if group.is_empty() { what.to_owned() } else { format!("{what}.{group}") }
}

fn details(group: &str, kind: &str, name: &str) -> Value {
    let mut d = json!({});
    for (key, value) in [("name", name), ("group", group), ("kind", kind)] {
        if !value.is_empty() {
            d[key] = value.into();
        }
    }
    d
}

impl Status {
    /// A refusal without details.
    pub fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), message: message.into(), details: Value::Null }
    }
    /// 400: what was sent cannot be understood.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }
    /// 401.
    #[must_use]
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }
    /// 403 about one object.
    #[must_use]
    pub fn forbidden(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let what = qualified(group, resource);
        let message = if name.is_empty() {
            format!("{what} is forbidden: {why}")
        } else {
            format!("{what} {name:?} is forbidden: {why}")
        };
        Self { details: details(group, resource, name), ..Self::new(403, "Forbidden", message) }
    }
    /// 404 about one object.
    #[must_use]
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} {name:?} not found", qualified(group, resource));
        Self { details: details(group, resource, name), ..Self::new(404, "NotFound", message) }
    }
    /// 404 about a path.
    #[must_use]
    pub fn no_such_path() -> Self {
        Self { details: json!({}), ..Self::new(404, "NotFound", "the server could not find the requested resource") }
    }
    /// 405.
    #[must_use]
    pub fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self { details: json!({}), ..Self::new(405, "MethodNotAllowed", message) }
    }
    /// 406.
    pub fn not_acceptable(message: impl Into<String>) -> Self {
        Self::new(406, "NotAcceptable", message)
    }
    /// 409: there is one already.
    #[must_use]
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", qualified(group, resource));
        Self { details: details(group, resource, name), ..Self::new(409, "AlreadyExists", message) }
    }
    /// 409: somebody else was faster, or a precondition does not hold.
    #[must_use]
    pub fn conflict(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", qualified(group, resource));
        Self { details: details(group, resource, name), ..Self::new(409, "Conflict", message) }
    }
    /// 409 of an update whose resourceVersion is not the newest.
    #[must_use]
    pub fn modified(group: &str, resource: &str, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(group, resource, name, why)
    }
    /// 410: the history is gone.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }
    /// 415.
    pub fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::new(415, "UnsupportedMediaType", message)
    }
    /// 422 with its causes.
    #[must_use]
    pub fn invalid(group: &str, kind: &str, name: &str, errors: &[FieldError]) -> Self {
        let mut texts: Vec<String> = Vec::new();
        for text in errors.iter().map(FieldError::message) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        let all = match texts.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let mut d = details(group, kind, name);
        d["causes"] = errors
            .iter()
            .map(|e| json!({"reason": e.reason, "message": e.body, "field": e.field}))
            .collect::<Vec<_>>()
            .into();
        let message = format!("{} {name:?} is invalid: {all}", qualified(group, kind));
        Self { details: d, ..Self::new(422, "Invalid", message) }
    }
    /// 429 with a hint when to come again.
    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self {
            details: json!({"retryAfterSeconds": retry_after_seconds}),
            ..Self::new(429, "TooManyRequests", message)
        }
    }
    /// 500.
    pub fn internal(what: impl std::fmt::Display) -> Self {
        let message = format!("Internal error occurred: {what}");
        Self { details: json!({"causes": [{"message": what.to_string()}]}), ..Self::new(500, "InternalError", message) }
    }
    /// 503.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(503, "ServiceUnavailable", message)
    }
    /// 504: whether it happened is not known.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(504, "Timeout", message)
    }
    /// Whether this is a 409 of concurrency.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code == 409 && self.reason == "Conflict"
    }
    /// The wire form.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let mut v = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": if self.code < 400 { "Success" } else { "Failure" },
        });
        if !self.message.is_empty() {
            v["message"] = self.message.clone().into();
        }
        if !self.reason.is_empty() {
            v["reason"] = self.reason.clone().into();
        }
        if !self.details.is_null() {
            v["details"] = self.details.clone();
        }
        v["code"] = self.code.into();
        v
    }
}
