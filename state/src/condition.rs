//! Conditions in a status, foreign ones included.

use crate::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::{borrow::Cow, collections::BTreeMap, fmt, ops::Deref};

/// What the conditions of nearly all machines say, sorted: it is kept once, not with each of them.
const SAID: &[&str] = &[
    "",
    "AgentConnected",
    "Failure",
    "False",
    "Guest VM is not reported as running",
    "GuestNotRunning",
    "LiveMigratable",
    "NoAcceleration",
    "NodeUnreachable",
    "NotMigratable",
    "Paused",
    "PausedByUser",
    "PodNotExists",
    "PodScheduled",
    "Ready",
    "RestartRequired",
    "SoftwareEmulation",
    "StorageLiveMigratable",
    "Synchronized",
    "True",
    "Unknown",
    "VMI does not exist",
    "VMINotExists",
    "the node has no virtualisation that works, so the guest's processors are emulated, which is slow",
    "this version of virtfold does not migrate running machines",
];

/// A word or a sentence of a condition.
#[derive(Clone)]
pub struct Word(Kept);

#[derive(Clone)]
enum Kept {
    Once(&'static str),
    Own(Box<str>),
}

impl Deref for Word {
    type Target = str;
    fn deref(&self) -> &str {
        match &self.0 {
            Kept::Once(text) => text,
            Kept::Own(text) => text,
        }
    }
}

impl Default for Word {
    fn default() -> Self {
        Self(Kept::Once(""))
    }
}

impl<T: AsRef<str> + Into<Box<str>>> From<T> for Word {
    fn from(text: T) -> Self {
        let known = SAID.binary_search(&text.as_ref()).ok().and_then(|at| SAID.get(at));
        Self(known.map_or_else(|| Kept::Own(text.into()), |known| Kept::Once(known)))
    }
}

impl PartialEq for Word {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Kept::Once(a), Kept::Once(b)) => std::ptr::eq(*a, *b),
            (Kept::Once(_), Kept::Own(_)) | (Kept::Own(_), Kept::Once(_)) => false,
            (Kept::Own(a), Kept::Own(b)) => a == b,
        }
    }
}

impl Eq for Word {}

impl PartialEq<str> for Word {
    fn eq(&self, other: &str) -> bool {
        **self == *other
    }
}

impl PartialEq<&str> for Word {
    fn eq(&self, other: &&str) -> bool {
        **self == **other
    }
}

impl PartialEq<Cow<'_, str>> for Word {
    fn eq(&self, other: &Cow<'_, str>) -> bool {
        **self == **other
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl Serialize for Word {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self)
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Text;
        impl serde::de::Visitor<'_> for Text {
            type Value = Word;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }
            fn visit_str<E>(self, text: &str) -> Result<Word, E> {
                Ok(text.into())
            }
        }
        d.deserialize_str(Text)
    }
}

/// A condition. Fields that nobody here knows are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cond {
    /// Type.
    #[serde(rename = "type")]
    pub kind: Word,
    /// `True`, `False` or `Unknown`.
    pub status: Word,
    /// CamelCase reason.
    #[serde(skip_serializing_if = "is_empty")]
    pub reason: Word,
    /// For people.
    #[serde(skip_serializing_if = "is_empty")]
    pub message: Word,
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<String>,
    /// The rest.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

fn is_empty(word: &Word) -> bool {
    word.is_empty()
}

impl Cond {
    /// A condition that begins now, once it is put into a list.
    pub fn new(kind: &str, status: bool, reason: &str, message: impl Into<Word>) -> Self {
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

/// What a condition shall say. Most of the time it does already, so it is made only where it does not.
#[derive(Debug, Clone)]
pub struct Said<'a> {
    kind: &'a str,
    status: bool,
    reason: Cow<'a, str>,
    message: Cow<'a, str>,
    since: Option<&'a str>,
}

impl<'a> Said<'a> {
    /// Since now, unless it says so already.
    pub fn new(kind: &'a str, status: bool, reason: impl Into<Cow<'a, str>>, message: impl Into<Cow<'a, str>>) -> Self {
        Self { kind, status, reason: reason.into(), message: message.into(), since: None }
    }

    /// Since when somebody else has said so.
    #[must_use]
    pub fn since(self, since: Option<&'a str>) -> Self {
        Self { since, ..self }
    }

    /// Whether the list has it.
    pub fn is_in(&self, conds: &[Cond]) -> bool {
        let status = if self.status { "True" } else { "False" };
        find(conds, self.kind)
            .is_some_and(|c| c.status == status && c.reason == self.reason && c.message == self.message)
    }
}

impl From<Said<'_>> for Cond {
    fn from(s: Said<'_>) -> Self {
        Self { last_transition_time: s.since.map(str::to_owned), ..Self::new(s.kind, s.status, &s.reason, s.message) }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{object::Kind, vm::model};

    #[test]
    fn what_the_conditions_of_a_running_machine_say_is_kept_once() {
        assert!(SAID.is_sorted(), "{SAID:?}");
        let mut w = model::World::with(model::vm("Always"));
        w.settle(10_000);
        let launcher = w.get(Kind::Pod).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
        w.say(&launcher, |l| l.guest.agent_connected = true);
        w.settle(10_000);
        for kind in [Kind::VirtualMachine, Kind::VirtualMachineInstance] {
            let conditions: Vec<Cond> =
                serde_json::from_value(w.get(kind).unwrap()["status"]["conditions"].clone()).unwrap();
            assert!(!conditions.is_empty());
            for word in conditions.iter().flat_map(|c| [&c.kind, &c.status, &c.reason, &c.message]) {
                assert!(matches!(word.0, Kept::Once(_)), "not in SAID: {word:?}");
            }
        }
    }

    #[test]
    fn words_are_the_same_by_what_they_say() {
        let (once, own) = (Word::from("Ready"), Word::from("because"));
        assert!(matches!((&once.0, &own.0), (Kept::Once(_), Kept::Own(_))));
        assert!(once == Word::from("Ready".to_owned()) && own == Word::from("because".to_owned()) && once != own);
        let text = serde_json::to_string(&[once, own]).unwrap();
        assert_eq!(text, r#"["Ready","because"]"#);
        assert_eq!(serde_json::from_str::<Vec<Word>>(&text).unwrap(), [Word::from("Ready"), Word::from("because")]);
    }
}
