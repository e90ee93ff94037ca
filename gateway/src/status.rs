//! Refusals in the shape of Kubernetes: `meta/v1 Status`.

use serde_json::{Value, json};

/// Why a field is wrong, in the words of Kubernetes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CauseType {
    /// `FieldValueInvalid`
    Invalid,
    /// `FieldValueRequired`
    Required,
    /// `FieldValueNotFound`
    NotFound,
    /// `FieldValueDuplicate`
    Duplicate,
    /// `FieldValueNotSupported`
    NotSupported,
    /// `FieldValueForbidden`
    Forbidden,
}

impl CauseType {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            CauseType::Invalid => "FieldValueInvalid",
            CauseType::Required => "FieldValueRequired",
            CauseType::NotFound => "FieldValueNotFound",
            CauseType::Duplicate => "FieldValueDuplicate",
            CauseType::NotSupported => "FieldValueNotSupported",
            CauseType::Forbidden => "FieldValueForbidden",
        }
    }
}

/// One wrong field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Kind of mistake.
    pub kind: CauseType,
    /// Path of the field, `spec.template.spec...`; empty where no field is to blame.
    pub field: String,
    /// What is wrong, for people.
    pub message: String,
}

/// The most causes that an answer carries.
pub const MAX_CAUSES: usize = 10;

/// A refusal.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message} ({code} {reason})")]
pub struct Status {
    /// HTTP code.
    pub code: u16,
    /// CamelCase reason, empty where there is none.
    pub reason: String,
    /// For people.
    pub message: String,
    /// `details`, null where there are none.
    pub details: Value,
}

impl Status {
    /// A refusal without details.
    pub fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), message: message.into(), details: Value::Null }
    }

    /// 422 for wrong fields: at most [`MAX_CAUSES`] of them are named.
    pub fn invalid(kind: &str, name: &str, causes: &[Cause]) -> Self {
        let shown = &causes[..causes.len().min(MAX_CAUSES)];
        let mut message = shown.iter().map(|c| c.message.as_str()).collect::<Vec<_>>().join(", ");
        if causes.len() > shown.len() {
            message.push_str(", more validation errors");
        }
        let list: Vec<Value> =
            shown.iter().map(|c| json!({"reason": c.kind.word(), "message": c.message, "field": c.field})).collect();
        let mut details = json!({"group": api::names::GROUP, "kind": kind, "causes": list});
        if !name.is_empty() {
            details["name"] = json!(name);
        }
        Self { code: 422, reason: "Invalid".into(), message, details }
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 500.
    pub fn internal(message: impl std::fmt::Display) -> Self {
        Self::new(500, "InternalError", format!("Internal error occurred: {message}"))
    }

    /// 404 for an object of `kubevirt.io`; `what` is `virtualmachine` or `virtualmachineinstance`.
    pub fn not_found(what: &str, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{what}.kubevirt.io {name:?} not found")).about(what, name)
    }

    /// 409: the object is not in the state that the request needs.
    pub fn conflict(what: &str, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {what}.kubevirt.io {name:?}: {why}"))
            .about(what, name)
    }

    /// 403.
    pub fn forbidden(what: &str, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(403, "Forbidden", format!("{what}.kubevirt.io {name:?} is forbidden: {why}")).about(what, name)
    }

    fn about(mut self, what: &str, name: &str) -> Self {
        self.details = json!({"name": name, "group": api::names::GROUP, "kind": what});
        self
    }

    /// The causes in `details`, as (reason, field, message).
    pub fn causes(&self) -> Vec<(String, String, String)> {
        let text = |c: &Value, key: &str| c.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let list = self.details.get("causes").and_then(Value::as_array);
        list.map(|l| l.iter().map(|c| (text(c, "reason"), text(c, "field"), text(c, "message"))).collect())
            .unwrap_or_default()
    }

    /// The object on the wire.
    pub fn to_json(&self) -> Value {
        let mut out = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message, "code": self.code});
        if !self.reason.is_empty() {
            out["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            out["details"] = self.details.clone();
        }
        out
    }
}
