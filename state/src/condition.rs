//! Conditions in a status, foreign ones included.

use crate::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// A condition. Fields that nobody here knows are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cond {
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// CamelCase reason.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// For people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<String>,
    /// The rest.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl Cond {
    /// A condition that begins now, once it is put into a list.
    pub fn new(kind: &str, status: bool, reason: &str, message: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            status: if status { "True" } else { "False" }.into(),
            reason: reason.into(),
            message: message.into(),
            ..Self::default()
        }
    }

    /// Whether it says `True`.
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }

    /// Same status, reason and message.
    pub fn says_the_same(&self, other: &Self) -> bool {
        (&self.status, &self.reason, &self.message) == (&other.status, &other.reason, &other.message)
    }
}

/// Finds a condition.
pub fn find<'a>(conds: &'a [Cond], kind: &str) -> Option<&'a Cond> {
    conds.iter().find(|c| c.kind == kind)
}

/// Whether a condition is there and `True`.
pub fn is_true(conds: &[Cond], kind: &str) -> bool {
    find(conds, kind).is_some_and(Cond::is_true)
}

/// Puts a condition in place of the one of its type; one that says the same stays as it is.
pub fn set(conds: &mut Vec<Cond>, mut new: Cond, now: Timestamp) {
    match conds.iter_mut().find(|c| c.kind == new.kind) {
        Some(old) if old.says_the_same(&new) => {}
        Some(old) => {
            if old.status == new.status && old.last_transition_time.is_some() {
                new.last_transition_time.clone_from(&old.last_transition_time);
            }
            new.last_transition_time.get_or_insert_with(|| now.to_string());
            new.extra = std::mem::take(&mut old.extra);
            *old = new;
        }
        None => {
            new.last_transition_time.get_or_insert_with(|| now.to_string());
            conds.push(new);
        }
    }
}

/// Takes a condition out.
pub fn remove(conds: &mut Vec<Cond>, kind: &str) {
    conds.retain(|c| c.kind != kind);
}
