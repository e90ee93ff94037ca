//! What a Set cell keeps of its set and of instances.

use crate::{
    NodeName, ResourceVersion, Uid, condition,
    condition::Cond,
    hash_hex,
    object::{Kind, ObjectRef, Versioned},
    observe::{Meta, Phase, Project, VmiView},
    selector::{RawSelector, Selector},
};
use api::{ObjectMeta, OwnerReference};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// Longest name of an instance of a set, so that it also fits into a label.
const NAME_MAX: usize = 63;

/// Status of a set, as last written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SetStatus {
    /// Instances that count.
    pub replicas: u32,
    /// Those of them that are ready.
    pub ready_replicas: u32,
    /// The selector as text, for autoscalers.
    pub label_selector: String,
    /// Conditions.
    pub conditions: Vec<Cond>,
}

/// A VirtualMachineInstanceReplicaSet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SetView {
    /// Metadata.
    pub meta: Meta,
    /// How many instances there shall be.
    pub replicas: u32,
    /// Left alone.
    pub paused: bool,
    /// Chooses its instances; empty where `problem` says why.
    pub selector: Selector,
    /// Why nothing can be done for it.
    pub problem: Option<String>,
    /// What the names of its instances begin with.
    pub base: String,
    /// Status as last written; none at first.
    pub status: Option<SetStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawTemplate {
    metadata: RawTemplateMeta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawTemplateMeta {
    name: String,
    generate_name: String,
    labels: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawSpec {
    replicas: Option<i64>,
    paused: bool,
    selector: Option<RawSelector>,
    template: Option<RawTemplate>,
}

/// Typed reader of a VirtualMachineInstanceReplicaSet.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawSet {
    metadata: ObjectMeta,
    spec: RawSpec,
    status: Option<SetStatus>,
}

impl Project for SetView {
    type Raw = RawSet;
    fn metadata(raw: &RawSet) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawSet) -> Self {
        let template = raw.spec.template.unwrap_or_default().metadata;
        let replicas = raw.spec.replicas.unwrap_or(1);
        let (selector, problem) = match usable_selector(raw.spec.selector.as_ref(), &template.labels) {
            Ok(selector) => (selector, None),
            Err(problem) => (Selector::default(), Some(problem)),
        };
        let problem =
            problem.or_else(|| (replicas < 0).then(|| format!("spec.replicas is {replicas}, which is negative")));
        let names = [&template.name, &template.generate_name];
        let base = names.into_iter().find(|n| !n.is_empty()).unwrap_or(&raw.metadata.name).clone();
        Self {
            meta: Meta::of(&raw.metadata),
            replicas: u32::try_from(replicas.max(0)).unwrap_or(u32::MAX),
            paused: raw.spec.paused,
            selector,
            problem,
            base,
            status: raw.status,
        }
    }
}

/// The selector of a set, where it and the template's labels fit each other; else why not.
///
/// A selector that is empty would adopt whatever is there.
pub fn usable_selector(raw: Option<&RawSelector>, labels: &BTreeMap<String, String>) -> Result<Selector, String> {
    let raw = raw.ok_or("there is no selector")?;
    let selector = Selector::parse(raw).map_err(|e| e.to_string())?;
    if selector.is_empty() {
        return Err("the selector is empty: it would choose every instance of the namespace".into());
    }
    if !selector.matches(labels) {
        return Err("selector does not match labels of the template".into());
    }
    Ok(selector)
}

/// Name of the instance in one place of a set: creating it twice is a conflict.
pub fn member_name(base: &str, set: &Uid, place: usize) -> String {
    let hash = hash_hex(&["set-member", set.as_str(), &place.to_string()], 4);
    let mut short: String = base.chars().take(NAME_MAX - 1 - hash.len()).collect();
    while short.ends_with(['-', '.']) {
        short.pop();
    }
    format!("{short}-{hash}")
}

/// An instance, as far as sets care.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Metadata.
    pub meta: Meta,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Owners.
    pub owners: Vec<OwnerReference>,
    /// Phase.
    pub phase: Phase,
    /// It has been Running.
    pub ran: bool,
    /// Condition Ready is True.
    pub ready: bool,
    /// Its launcher pod was deleted, so it is about to end.
    pub doomed: bool,
    /// Where it is.
    pub node: Option<NodeName>,
}

impl Member {
    /// UID of the owner that controls it.
    pub fn controller(&self) -> Option<&str> {
        self.owners.iter().find(|o| o.controller).map(|o| o.uid.as_str())
    }

    /// The same but for the version.
    pub fn says_the_same(&self, other: &Self) -> bool {
        let at = |m: &Self| Self { meta: Meta { rv: ResourceVersion(0), ..m.meta.clone() }, ..m.clone() };
        at(self) == at(other)
    }
}

impl From<&VmiView> for Member {
    fn from(v: &VmiView) -> Self {
        let ready = condition::find(&v.status.conditions, "Ready");
        Self {
            meta: v.meta.clone(),
            labels: v.labels.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
            owners: v.owners.clone(),
            phase: v.phase,
            ran: v.was(Phase::Running),
            ready: ready.is_some_and(Cond::is_true),
            doomed: ready.is_some_and(|c| c.status == "False" && c.reason == "PodTerminating"),
            node: v.status.node_name.clone().filter(|n| !n.is_empty()).map(NodeName),
        }
    }
}

impl Versioned for SetView {
    fn uid(&self) -> &Uid {
        &self.meta.uid
    }
    fn rv(&self) -> ResourceVersion {
        self.meta.rv
    }
}

impl Versioned for Member {
    fn uid(&self) -> &Uid {
        &self.meta.uid
    }
    fn rv(&self) -> ResourceVersion {
        self.meta.rv
    }
}

/// What a Set cell sees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Sight {
    /// The set.
    Set(Box<SetView>),
    /// An instance.
    Member(Box<Member>),
    /// All instances that the set's selector chooses, read live.
    All {
        /// They.
        members: Vec<Member>,
        /// The version of the list.
        rv: ResourceVersion,
    },
    /// The watch said that this UID was deleted.
    Gone(ObjectRef),
    /// A new list does not have it. Lists may be stale, so this is a reason to ask, not evidence.
    Vanished(ObjectRef),
}

impl Sight {
    /// Reads an object that a server sent. `None` where it does not parse or is nothing that a set looks at.
    pub fn read<'de>(kind: Kind, raw: impl Deserializer<'de>) -> Option<Self> {
        match kind {
            Kind::VirtualMachineInstanceReplicaSet => {
                RawSet::deserialize(raw).ok().map(|r| Self::Set(Box::new(SetView::project(r))))
            }
            Kind::VirtualMachineInstance => {
                let raw = <VmiView as Project>::Raw::deserialize(raw).ok()?;
                Some(Self::Member(Box::new(Member::from(&VmiView::project(raw)))))
            }
            Kind::VirtualMachine
            | Kind::Pod
            | Kind::ControllerRevision
            | Kind::PersistentVolumeClaim
            | Kind::Node
            | Kind::Pattern(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_members_are_frozen_and_fit() {
        let uid = Uid::from("0d2ba0a1-6f3a-4d6c-8f63-0b8fd0b4f001");
        assert_eq!(member_name("web", &uid, 0), "web-82fabb50");
        assert_ne!(member_name("web", &uid, 0), member_name("web", &uid, 1));
        assert_ne!(member_name("web", &uid, 0), member_name("web", &"other".into(), 0));
        let long = member_name(&"a".repeat(80), &uid, 3);
        assert_eq!(long.len(), 63);
        assert!(member_name("web-", &uid, 0).starts_with("web-") && !member_name("web-", &uid, 0).contains("--"));
    }
}
