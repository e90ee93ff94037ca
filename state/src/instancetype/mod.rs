//! Instancetypes and preferences: sizes and habits that many machines share.
//!
//! A machine names one of each ([`Matcher`]). What it names is recorded once, in a ControllerRevision of the machine's own, and
//! from then on the record counts: an instancetype that changes later changes no machine. [`apply`] is what an instance is
//! made with, what admission holds a machine against, and what `expand-spec` shows; there is no second one. An instancetype
//! sets, and excludes what the machine sets itself; a preference fills in what is left open. [`rules`] are about the objects
//! themselves and about how they go together.

mod apply;
mod preference;
pub mod rules;

pub use apply::{Conflict, apply};

use crate::object::Pattern;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What an object is to a machine that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// It says how large the machine is.
    Instancetype,
    /// It says what is filled in.
    Preference,
}

impl Role {
    /// Both, in the order in which they are looked at.
    pub const ALL: [Self; 2] = [Self::Instancetype, Self::Preference];

    /// The field of a machine's spec.
    pub fn field(self) -> &'static str {
        match self {
            Self::Instancetype => "instancetype",
            Self::Preference => "preference",
        }
    }

    /// The field of a machine's status.
    pub fn status_field(self) -> &'static str {
        match self {
            Self::Instancetype => "instancetypeRef",
            Self::Preference => "preferenceRef",
        }
    }

    /// Reason of the condition that says that there is none.
    pub fn missing(self) -> &'static str {
        match self {
            Self::Instancetype => "FailedFindInstancetype",
            Self::Preference => "FailedFindPreference",
        }
    }

    /// What a matcher's kind means; the kind of the cluster where it names none.
    pub fn pattern(self, kind: &str) -> Option<Pattern> {
        let word = kind.to_ascii_lowercase();
        match (self, word.strip_suffix('s').unwrap_or(&word)) {
            (Self::Instancetype, "" | "virtualmachineclusterinstancetype") => Some(Pattern::ClusterInstancetype),
            (Self::Instancetype, "virtualmachineinstancetype") => Some(Pattern::Instancetype),
            (Self::Preference, "" | "virtualmachineclusterpreference") => Some(Pattern::ClusterPreference),
            (Self::Preference, "virtualmachinepreference") => Some(Pattern::Preference),
            (Self::Instancetype | Self::Preference, _) => None,
        }
    }

    /// The annotation of an instance that tells the name.
    pub fn annotation(self, pattern: Pattern) -> String {
        let scope = if pattern.namespaced() { "" } else { "cluster-" };
        format!("kubevirt.io/{scope}{}-name", self.field())
    }
}

/// `spec.instancetype` or `spec.preference`, as written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RawMatcher {
    /// Name of the object.
    pub name: Option<String>,
    /// Its kind.
    pub kind: Option<String>,
    /// The record to use, whatever the object is now.
    pub revision_name: Option<String>,
}

/// `status.instancetypeRef` or `status.preferenceRef`: what a machine was found to name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MatcherRef {
    /// Name of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its kind, as the spec has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_revision_ref: Option<RevisionRef>,
}

/// Names a ControllerRevision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RevisionRef {
    /// Its name.
    pub name: String,
}

/// What a machine names, and the record of it where there is one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matcher {
    /// As what.
    pub role: Role,
    /// Name of the object.
    pub name: String,
    /// Its kind, as written.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Name of the ControllerRevision that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl Matcher {
    /// From the spec, and from what the status says of the same name. `None` where the spec names nothing.
    pub fn new(role: Role, spec: Option<&RawMatcher>, status: Option<&MatcherRef>) -> Option<Self> {
        let spec = spec?;
        let given = |o: &Option<String>| o.clone().filter(|s| !s.is_empty());
        let (name, kind) = (given(&spec.name)?, given(&spec.kind).unwrap_or_default());
        let same = status.filter(|s| s.name.as_ref() == Some(&name) && s.kind.as_deref().unwrap_or_default() == kind);
        let recorded = same.and_then(|s| s.controller_revision_ref.as_ref()).map(|r| r.name.clone());
        let revision = given(&spec.revision_name).or(recorded.filter(|r| !r.is_empty()));
        Some(Self { role, name, kind, revision })
    }

    /// What a VirtualMachine, as the API has it, names in this role.
    pub fn of(role: Role, vm: &Value) -> Option<Self> {
        let spec = vm.get("spec").and_then(|s| s.get(role.field())).and_then(|m| RawMatcher::deserialize(m).ok());
        let status = vm.get("status").and_then(|s| s.get(role.status_field()));
        Self::new(role, spec.as_ref(), status.and_then(|r| MatcherRef::deserialize(r).ok()).as_ref())
    }

    /// What kind of object that is; `None` for a word that is none.
    pub fn pattern(&self) -> Option<Pattern> {
        self.role.pattern(&self.kind)
    }

    /// Its entry in the status, with this record.
    pub fn recorded(&self, revision: String) -> MatcherRef {
        MatcherRef {
            name: Some(self.name.clone()),
            kind: Some(self.kind.clone()).filter(|k| !k.is_empty()),
            controller_revision_ref: Some(RevisionRef { name: revision }),
        }
    }
}

/// The `spec` of an instancetype or preference in what records it.
pub fn spec_of_record(role: Role, revision: &Value) -> Option<&Value> {
    let data = revision.get("data")?;
    let pattern = data.get("kind").and_then(Value::as_str).and_then(|k| role.pattern(k))?;
    (pattern.role() == role).then(|| data.get("spec"))?
}

/// The value at a dotted path, or null.
fn get<'v>(value: &'v Value, path: &str) -> &'v Value {
    path.split('.').fold(value, |v, key| v.get(key).unwrap_or(&Value::Null))
}

/// The place at a dotted path; objects on the way are made where there is nothing.
fn at<'v>(value: &'v mut Value, path: &str) -> &'v mut Value {
    path.split('.').fold(value, |v, key| {
        if !v.is_object() {
            *v = json!({});
        }
        &mut v[key]
    })
}

/// Missing, null or "".
fn is_open(value: &Value) -> bool {
    value.is_null() || value == ""
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// The objects of a list, to be changed.
fn list<'v>(value: &'v mut Value, path: &str) -> impl Iterator<Item = &'v mut Value> {
    let found = path.split('.').try_fold(value, |v, key| v.get_mut(key));
    found.and_then(Value::as_array_mut).map(|l| l.iter_mut()).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matchers() {
        let vm = |matcher: Value, status: Value| {
            Matcher::of(
                Role::Instancetype,
                &json!({"spec": {"instancetype": matcher}, "status": {"instancetypeRef": status}}),
            )
        };
        let seen = json!({"name": "a", "controllerRevisionRef": {"name": "r"}});
        let revision = |m: Option<Matcher>| m.and_then(|m| m.revision);
        assert_eq!(vm(Value::Null, seen.clone()), None);
        assert_eq!(vm(json!({"inferFromVolume": "v"}), seen.clone()), None);
        assert_eq!(revision(vm(json!({"name": "a"}), Value::Null)), None);
        assert_eq!(revision(vm(json!({"name": "a"}), seen.clone())), Some("r".into()));
        assert_eq!(revision(vm(json!({"name": "a", "revisionName": "s"}), seen.clone())), Some("s".into()));
        assert_eq!(revision(vm(json!({"name": "b"}), seen.clone())), None, "another name");
        let own = json!({"name": "a", "kind": "VirtualMachineInstancetype"});
        assert_eq!(revision(vm(own.clone(), seen)), None, "another kind");
        for (kind, pattern) in [
            ("", Some(Pattern::ClusterInstancetype)),
            ("VirtualMachineClusterInstancetype", Some(Pattern::ClusterInstancetype)),
            ("virtualmachineinstancetypes", Some(Pattern::Instancetype)),
            ("VirtualMachinePreference", None),
        ] {
            assert_eq!(Role::Instancetype.pattern(kind), pattern, "{kind}");
        }
        assert_eq!(Role::Preference.annotation(Pattern::ClusterPreference), "kubevirt.io/cluster-preference-name");
        assert_eq!(Role::Instancetype.annotation(Pattern::Instancetype), "kubevirt.io/instancetype-name");
    }

    #[test]
    fn a_record_is_read_in_its_role_alone() {
        let record = json!({"data": {"kind": "VirtualMachineClusterInstancetype", "spec": {"cpu": {"guest": 1}}}});
        assert!(spec_of_record(Role::Instancetype, &record).is_some());
        assert_eq!(spec_of_record(Role::Preference, &record), None);
        assert_eq!(spec_of_record(Role::Instancetype, &json!({"data": {"spec": {}}})), None, "a machine's");
    }
}
