//! Projections: what the machines keep of an object. They are made at the edge, once; inside nobody sees raw JSON. They are
//! never written back (a write is a patch), so fields that they do not know are not lost.

mod pod;
mod told;
mod vmi;

pub use pod::{ContainerState, PodPhase, PodView, RawPod};
pub use told::Told;

use crate::{
    Millis, ResourceVersion, Timestamp, Uid, VmUid,
    condition::Cond,
    instancetype::{Matcher, MatcherRef, RawMatcher, Role},
    object::{Kind, ObjectRef, Pattern, Versioned},
    template::Template,
};
use api::{ObjectMeta, names};
use litemap::LiteMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use serde_json::Value;
use std::{collections::BTreeMap, sync::Arc};

/// A projection and the raw form that it is read from.
pub trait Project: Sized + Versioned {
    /// Typed reader of the raw object.
    type Raw: DeserializeOwned;
    /// Its metadata.
    fn metadata(raw: &Self::Raw) -> &ObjectMeta;
    /// Keeps what is needed.
    fn project(raw: Self::Raw) -> Self;
}

/// What every projection keeps of the metadata.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: Uid,
    /// resourceVersion.
    pub rv: ResourceVersion,
    /// Since when it is being deleted.
    pub deleting: Option<Timestamp>,
    /// When it was made.
    pub created: Option<Timestamp>,
    /// Finalizers.
    pub finalizers: Vec<String>,
}

impl Meta {
    pub(crate) fn of(m: &ObjectMeta) -> Self {
        let time = |t: &Option<String>| t.as_deref().and_then(Timestamp::parse);
        Self {
            namespace: m.namespace.clone(),
            name: m.name.clone(),
            uid: m.uid.as_str().into(),
            rv: ResourceVersion::parse(&m.resource_version),
            // A timestamp that does not parse still means "deleting".
            deleting: m.deletion_timestamp.as_ref().map(|_| time(&m.deletion_timestamp).unwrap_or_default()),
            created: time(&m.creation_timestamp),
            finalizers: m.finalizers.clone(),
        }
    }

    /// Whether it has this finalizer.
    pub fn has_finalizer(&self, f: &str) -> bool {
        self.finalizers.iter().any(|x| x == f)
    }
}

/// Effective run strategy of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// Always running.
    Always,
    /// Restarted when it failed.
    RerunOnFailure,
    /// As requested.
    Manual,
    /// Never running.
    Halted,
    /// Run once.
    Once,
    /// Target of a migration between clusters; not supported.
    WaitAsReceiver,
    /// `running` and `runStrategy` together, or a word that nobody knows.
    Invalid,
}

impl Strategy {
    /// The strategy that a spec means.
    pub fn of(running: Option<bool>, run_strategy: Option<&str>) -> Self {
        match (running, run_strategy) {
            (Some(true), None) => Self::Always,
            (Some(false) | None, None) => Self::Halted,
            (None, Some("Always")) => Self::Always,
            (None, Some("RerunOnFailure")) => Self::RerunOnFailure,
            (None, Some("Manual")) => Self::Manual,
            (None, Some("Halted")) => Self::Halted,
            (None, Some("Once")) => Self::Once,
            (None, Some("WaitAsReceiver")) => Self::WaitAsReceiver,
            (None | Some(_), Some(_)) => Self::Invalid,
        }
    }

    /// The word in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::RerunOnFailure => "RerunOnFailure",
            Self::Manual => "Manual",
            Self::Halted => "Halted",
            Self::Once => "Once",
            Self::WaitAsReceiver => "WaitAsReceiver",
            Self::Invalid => "Invalid",
        }
    }

    /// Whether failed starts are counted and slowed down.
    pub fn backs_off(self) -> bool {
        match self {
            Self::Always | Self::RerunOnFailure | Self::Once => true,
            Self::Manual | Self::Halted | Self::WaitAsReceiver | Self::Invalid => false,
        }
    }
}

/// One entry of `status.stateChangeRequests`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Request {
    /// `Start` or `Stop`.
    pub action: String,
    /// VMI that a Stop is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Options.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub data: BTreeMap<String, String>,
}

impl Request {
    /// A start with stopped vCPUs.
    pub fn asks_for_paused(&self) -> bool {
        self.data.get("paused").is_some_and(|p| p == "true")
    }
}

/// Crash-loop state in a VM's status.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartFailure {
    /// Failures in a row.
    pub consecutive_fail_count: u64,
    /// VMI that counted last.
    #[serde(rename = "lastFailedVMIUID")]
    pub last_failed_vmi_uid: String,
    /// No start before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_timestamp: Option<String>,
}

/// Status of a VM, as last written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VmStatus {
    /// The VMI exists.
    pub created: bool,
    /// The VMI is ready.
    pub ready: bool,
    /// The word that people read.
    pub printable_status: String,
    /// Last observed strategy.
    pub run_strategy: Option<String>,
    /// Conditions.
    pub conditions: Vec<Cond>,
    /// Requests.
    pub state_change_requests: Vec<Request>,
    /// Crash-loop state.
    pub start_failure: Option<StartFailure>,
    /// Generation that the VMI was made from.
    pub observed_generation: Option<i64>,
    /// Generation of the VM.
    pub desired_generation: Option<i64>,
    /// The instancetype that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype_ref: Option<MatcherRef>,
    /// The preference that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference_ref: Option<MatcherRef>,
}

/// What proved that a machine had stopped on a node that cannot be asked: the Node, at a version at which it was not ready
/// and carried the taint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Witness {
    /// UID of the VMI that stopped.
    pub vmi: String,
    /// The node.
    pub node: String,
    /// Version of the Node, by a live read.
    pub resource_version: String,
    /// Key of the taint.
    pub taint: String,
}

/// A VirtualMachine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Metadata.
    pub meta: Meta,
    /// Generation of the spec.
    pub generation: i64,
    /// Effective strategy.
    pub strategy: Strategy,
    /// The spec uses `running`.
    pub uses_running: bool,
    /// Claims that the template needs.
    pub claims: Vec<String>,
    /// Digests of the template.
    pub template: Template,
    /// The instancetype and the preference that it names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matchers: Vec<Matcher>,
    /// Annotations that follow the template ([`names::ANN_FOLLOWING`]).
    #[serde(default, skip_serializing_if = "LiteMap::is_empty")]
    pub following: LiteMap<String, String>,
    /// What its template says of the guest ([`names::ANN_DESCRIBING`]).
    #[serde(default, skip_serializing_if = "LiteMap::is_empty")]
    pub described: LiteMap<String, String>,
    /// The fence that was recorded last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced: Option<Witness>,
    /// Trace of the write that changed the spec.
    pub traceparent: Option<String>,
    /// Who changed the spec last, as admission saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_by: Option<String>,
    /// Status as last written.
    pub status: VmStatus,
}

impl VmView {
    /// UID.
    pub fn vm_uid(&self) -> VmUid {
        VmUid(self.meta.uid.0.clone())
    }
}

/// Typed reader of a VirtualMachine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawVm {
    metadata: ObjectMeta,
    spec: RawVmSpec,
    status: VmStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawVmSpec {
    running: Option<bool>,
    run_strategy: Option<String>,
    template: Value,
    instancetype: Option<RawMatcher>,
    preference: Option<RawMatcher>,
}

impl RawVmSpec {
    /// What it names, given what the status says of that.
    fn matchers(&self, status: Option<&VmStatus>) -> Vec<Matcher> {
        let of = |role, spec: &Option<RawMatcher>, found: Option<&MatcherRef>| Matcher::new(role, spec.as_ref(), found);
        let instancetype = status.and_then(|s| s.instancetype_ref.as_ref());
        let preference = status.and_then(|s| s.preference_ref.as_ref());
        let both = [
            of(Role::Instancetype, &self.instancetype, instancetype),
            of(Role::Preference, &self.preference, preference),
        ];
        both.into_iter().flatten().collect()
    }
}

impl Project for VmView {
    type Raw = RawVm;
    fn metadata(raw: &RawVm) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawVm) -> Self {
        // What does not parse cannot be started either; the API server says so when that is tried.
        let spec = raw.spec.template.get("spec").and_then(|s| api::VmiSpec::deserialize(s).ok());
        let matchers = raw.spec.matchers(Some(&raw.status));
        Self {
            meta: Meta::of(&raw.metadata),
            generation: raw.metadata.generation,
            strategy: Strategy::of(raw.spec.running, raw.spec.run_strategy.as_deref()),
            uses_running: raw.spec.running.is_some(),
            claims: spec.map(|s| claims(&s)).unwrap_or_default(),
            template: Template::of(&raw.spec.template).with(&matchers),
            matchers,
            following: following(|k| {
                Some(raw.spec.template.get("metadata")?.get("annotations")?.get(k)?.as_str()?.to_owned())
            }),
            described: annotations(&names::ANN_DESCRIBING, |k| {
                Some(raw.spec.template.get("metadata")?.get("annotations")?.get(k)?.as_str()?.to_owned())
            }),
            fenced: raw.metadata.annotations.get(names::ANN_FENCED).and_then(|w| serde_json::from_str(w).ok()),
            traceparent: raw.metadata.annotations.get(names::ANN_TRACEPARENT).cloned(),
            changed_by: raw.metadata.annotations.get(names::ANN_CHANGED_BY).cloned(),
            status: raw.status,
        }
    }
}

/// Phase of a VMI.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Nobody has looked at it yet.
    #[default]
    Unset,
    /// Waits for its pod.
    Pending,
    /// The pod exists.
    Scheduling,
    /// The node agent may start the domain.
    Scheduled,
    /// The domain runs.
    Running,
    /// Ended well.
    Succeeded,
    /// Ended badly.
    Failed,
    /// A word that this version does not know; left alone.
    Unknown,
}

impl Phase {
    /// Reads the word.
    pub fn parse(word: &str) -> Self {
        match word {
            "" => Self::Unset,
            "Pending" => Self::Pending,
            "Scheduling" => Self::Scheduling,
            "Scheduled" => Self::Scheduled,
            "Running" => Self::Running,
            "Succeeded" => Self::Succeeded,
            "Failed" => Self::Failed,
            _ => Self::Unknown,
        }
    }

    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unset => "",
            Self::Pending => "Pending",
            Self::Scheduling => "Scheduling",
            Self::Scheduled => "Scheduled",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// Succeeded or Failed.
    pub fn is_final(self) -> bool {
        match self {
            Self::Succeeded | Self::Failed => true,
            Self::Unset | Self::Pending | Self::Scheduling | Self::Scheduled | Self::Running | Self::Unknown => false,
        }
    }
}

/// Status of a VMI, as last written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VmiStatus {
    /// Phase, as written.
    pub phase: String,
    /// Reason of a failure.
    pub reason: Option<String>,
    /// Node.
    pub node_name: Option<String>,
    /// Pods that may run a domain, and where.
    #[serde(serialize_with = "as_object")]
    pub active_pods: LiteMap<String, String>,
    /// Conditions.
    pub conditions: Vec<Cond>,
    /// Interfaces, as written.
    pub interfaces: Vec<Told>,
    /// When each phase began.
    pub phase_transition_timestamps: Vec<api::PhaseTransition>,
    /// ControllerRevision.
    pub virtual_machine_revision_name: Option<String>,
    /// Guest OS, as written.
    #[serde(rename = "guestOSInfo")]
    pub guest_os_info: Told,
    /// Frozen or empty.
    pub fs_freeze_status: Option<String>,
    /// Image of the launcher.
    pub launcher_container_image_version: Option<String>,
    /// QoS class of the pod.
    pub qos_class: Option<String>,
    /// Guest memory by admission, and what the launcher needs beside it.
    #[serde(serialize_with = "as_object")]
    pub memory: LiteMap<String, Value>,
    /// Machine type that the hypervisor chose.
    #[serde(serialize_with = "as_object")]
    pub machine: LiteMap<String, Value>,
    /// Volumes, as written.
    pub volume_status: Vec<LiteMap<String, Value>>,
    /// The node that it is asked to leave; the gateway's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evacuation_node_name: Option<String>,
}

impl VmiStatus {
    /// Somebody has asked for its eviction.
    pub fn evicting(&self) -> bool {
        self.evacuation_node_name.as_ref().is_some_and(|n| !n.is_empty())
    }
}

/// A volume of a VMI, as far as its status tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeView {
    /// Name.
    pub name: String,
    /// Name of its disk in the guest; empty where it has none.
    pub target: String,
    /// The claim behind it.
    pub claim: Option<String>,
}

/// The volumes of a spec by name. Disks are called as the guest will most likely call them: by bus, in their order.
fn volumes(spec: &api::VmiSpec) -> Vec<VolumeView> {
    let mut targets: BTreeMap<&str, String> = BTreeMap::new();
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    for d in &spec.domain.devices.disks {
        let bus = [&d.disk, &d.cdrom, &d.lun].into_iter().flatten().find_map(|t| t.bus.as_deref()).unwrap_or("sata");
        let prefix = if bus == "virtio" { "vd" } else { "sd" };
        let n = taken.entry(prefix).or_default();
        targets.insert(&d.name, format!("{prefix}{}", letters(*n)));
        *n += 1;
    }
    let mut all: Vec<VolumeView> = spec
        .volumes
        .iter()
        .map(|v| VolumeView {
            name: v.name.clone(),
            target: targets.get(v.name.as_str()).cloned().unwrap_or_default(),
            claim: claim(v),
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// a, b, ..., z, aa, ab, ...
fn letters(n: usize) -> String {
    let last = char::from(b'a' + u8::try_from(n % 26).unwrap_or(0));
    if n < 26 { last.into() } else { format!("{}{last}", letters(n / 26 - 1)) }
}

/// A VirtualMachineInstance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmiView {
    /// Metadata.
    pub meta: Meta,
    /// VM that controls it.
    pub owner: Option<VmUid>,
    /// Something else controls it.
    pub foreign: bool,
    /// All owners: who takes one on or off must write the others back.
    pub owners: Vec<api::OwnerReference>,
    /// Labels, by which sets find it.
    #[serde(serialize_with = "as_object")]
    pub labels: LiteMap<String, String>,
    /// Generation of the VM that it was made from.
    pub vm_generation: Option<i64>,
    /// Trace.
    pub traceparent: Option<String>,
    /// When the start that made it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Timestamp>,
    /// Trace context of the set that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// Who created it, as admission saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// Label that agents select by.
    pub node_label: Option<String>,
    /// From power button to kill.
    pub grace: Millis,
    /// It wants to be migrated when its node is drained.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
    /// The guest can hear the power button: with a grace period, it is promised a shutdown in order.
    pub acpi: bool,
    /// Claims that it needs.
    pub claims: Vec<String>,
    /// Volumes, by name.
    pub volumes: Vec<VolumeView>,
    /// Annotations that follow the template ([`names::ANN_FOLLOWING`]).
    #[serde(default, skip_serializing_if = "LiteMap::is_empty")]
    pub following: LiteMap<String, String>,
    /// What is said of the guest ([`names::ANN_DESCRIBING`]).
    #[serde(default, skip_serializing_if = "LiteMap::is_empty")]
    pub described: LiteMap<String, String>,
    /// Boot of the node in which the domain was authorised.
    pub boot_id: Option<String>,
    /// Phase.
    pub phase: Phase,
    /// Status as last written.
    pub status: VmiStatus,
}

/// Typed reader of a VirtualMachineInstance.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawVmi {
    metadata: ObjectMeta,
    spec: api::VmiSpec,
    status: VmiStatus,
}

impl Project for VmiView {
    type Raw = RawVmi;
    fn metadata(raw: &RawVmi) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawVmi) -> Self {
        let controller = raw.metadata.owner_references.iter().find(|o| o.controller);
        let owner = controller.filter(|o| o.kind == Kind::VirtualMachine.name());
        Self {
            meta: Meta::of(&raw.metadata),
            owner: owner.map(|o| VmUid(o.uid.clone())),
            foreign: controller.is_some() && owner.is_none(),
            owners: raw.metadata.owner_references.clone(),
            labels: raw.metadata.labels.clone().into_iter().collect(),
            vm_generation: raw.metadata.annotations.get(names::ANN_VM_GENERATION).and_then(|g| g.parse().ok()),
            traceparent: raw.metadata.annotations.get(names::ANN_TRACEPARENT).cloned(),
            began: raw.metadata.annotations.get(names::ANN_BEGAN).and_then(|t| t.parse().ok()).map(Timestamp),
            made_by: raw.metadata.annotations.get(names::ANN_MADE_BY).cloned(),
            created_by: raw.metadata.annotations.get(names::ANN_CHANGED_BY).cloned(),
            node_label: raw.metadata.labels.get(names::LABEL_NODE_NAME).cloned(),
            grace: Millis::secs(u64::try_from(raw.spec.grace_seconds()).unwrap_or(0)),
            moves: raw.spec.eviction_strategy.as_deref() == Some("LiveMigrate"),
            acpi: raw.spec.domain.features.pointer("/acpi/enabled").and_then(Value::as_bool).unwrap_or(true),
            claims: claims(&raw.spec),
            volumes: volumes(&raw.spec),
            following: following(|k| raw.metadata.annotations.get(k).cloned()),
            described: annotations(&names::ANN_DESCRIBING, |k| raw.metadata.annotations.get(k).cloned()),
            boot_id: raw.metadata.annotations.get(names::ANN_BOOT_ID).cloned(),
            phase: Phase::parse(&raw.status.phase),
            status: raw.status,
        }
    }
}

/// As an object, also where it is empty: a `LiteMap` itself would then be a list, and what is in a status goes into patches.
pub(crate) fn as_object<S: Serializer>(
    map: &LiteMap<String, impl Serialize>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(map.iter())
}

/// Those annotations of an object that follow the template.
pub(crate) fn following(get: impl Fn(&str) -> Option<String>) -> LiteMap<String, String> {
    annotations(&names::ANN_FOLLOWING, get)
}

fn annotations(keys: &[&str], get: impl Fn(&str) -> Option<String>) -> LiteMap<String, String> {
    keys.iter().filter_map(|k| Some(((*k).to_owned(), get(k)?))).collect()
}

fn claims(spec: &api::VmiSpec) -> Vec<String> {
    spec.volumes.iter().filter_map(claim).collect()
}

fn claim(v: &api::Volume) -> Option<String> {
    match (&v.persistent_volume_claim, &v.data_volume) {
        (Some(c), _) => Some(c.claim_name.clone()),
        (None, Some(d)) => Some(d.name.clone()),
        (None, None) => None,
    }
}

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimView {
    /// Metadata.
    pub meta: Meta,
    /// It has its volume.
    pub bound: bool,
    /// What a VMI's status tells of it.
    pub info: ClaimInfo,
}

/// What a VMI's status tells of a claim.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimInfo {
    /// Access modes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub access_modes: Vec<String>,
    /// `Filesystem` or `Block`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_mode: Option<String>,
    /// What there is.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, Value>,
    /// What was asked for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawClaimStatus {
    phase: String,
    capacity: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawClaimSpec {
    access_modes: Vec<String>,
    volume_mode: Option<String>,
    resources: api::Resources,
}

/// Typed reader of a PersistentVolumeClaim.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawClaim {
    metadata: ObjectMeta,
    spec: RawClaimSpec,
    status: RawClaimStatus,
}

impl Project for ClaimView {
    type Raw = RawClaim;
    fn metadata(raw: &RawClaim) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawClaim) -> Self {
        let info = ClaimInfo {
            access_modes: raw.spec.access_modes,
            volume_mode: raw.spec.volume_mode,
            capacity: raw.status.capacity,
            requests: raw.spec.resources.requests,
        };
        Self { meta: Meta::of(&raw.metadata), bound: raw.status.phase == "Bound", info }
    }
}

/// A Node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    /// Metadata.
    pub meta: Meta,
    /// Condition Ready: `Some(true)`, `Some(false)` (also Unknown), or missing.
    pub ready: Option<bool>,
    /// Has the out-of-service taint.
    pub out_of_service: bool,
    /// Label `kubevirt.io/schedulable`.
    pub schedulable: Option<bool>,
    /// Where its agent listens.
    pub agent_address: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawNodeSpec {
    taints: Vec<RawTaint>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawTaint {
    key: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawNodeStatus {
    conditions: Vec<Cond>,
}

/// Typed reader of a Node.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawNode {
    metadata: ObjectMeta,
    spec: RawNodeSpec,
    status: RawNodeStatus,
}

impl Project for NodeView {
    type Raw = RawNode;
    fn metadata(raw: &RawNode) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawNode) -> Self {
        Self {
            meta: Meta::of(&raw.metadata),
            ready: crate::condition::find(&raw.status.conditions, "Ready").map(Cond::is_true),
            out_of_service: raw.spec.taints.iter().any(|t| t.key == names::TAINT_OUT_OF_SERVICE),
            schedulable: raw.metadata.labels.get(names::LABEL_SCHEDULABLE).map(|v| v == "true"),
            agent_address: raw.metadata.annotations.get(names::ANN_AGENT_ADDRESS).filter(|a| !a.is_empty()).cloned(),
        }
    }
}

/// A ControllerRevision that records the spec from which a VMI was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RevisionView {
    /// Metadata.
    pub meta: Meta,
    /// Digests of the recorded template.
    pub template: Template,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawRevisionData {
    spec: RawVmSpec,
}

/// Typed reader of a ControllerRevision.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawRevision {
    metadata: ObjectMeta,
    data: RawRevisionData,
}

impl Project for RevisionView {
    type Raw = RawRevision;
    fn metadata(raw: &RawRevision) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawRevision) -> Self {
        let matchers = raw.data.spec.matchers(None);
        Self { meta: Meta::of(&raw.metadata), template: Template::of(&raw.data.spec.template).with(&matchers) }
    }
}

/// An instancetype or a preference, as far as it has to be told from others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PatternView {
    /// Metadata.
    pub meta: Meta,
    /// Which kind.
    pub pattern: Pattern,
    /// Generation of its spec.
    pub generation: i64,
}

/// Typed reader of an instancetype or a preference.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawPattern {
    metadata: ObjectMeta,
}

impl PatternView {
    fn of(pattern: Pattern, raw: RawPattern) -> Self {
        Self { meta: Meta::of(&raw.metadata), pattern, generation: raw.metadata.generation }
    }
}

macro_rules! versioned {
    ($($t:ty),*) => { $(
        impl Versioned for $t {
            fn uid(&self) -> &Uid { &self.meta.uid }
            fn rv(&self) -> ResourceVersion { self.meta.rv }
        }
    )* };
}
versioned!(VmView, VmiView, PodView, ClaimView, NodeView, RevisionView, PatternView);

/// Any projection that a Vm cell is told of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Object {
    /// The VM.
    Vm(Arc<VmView>),
    /// The VMI.
    Vmi(Arc<VmiView>),
    /// A launcher pod.
    Pod(Arc<PodView>),
    /// A claim.
    Claim(Arc<ClaimView>),
    /// A ControllerRevision.
    Revision(Arc<RevisionView>),
    /// An instancetype or a preference.
    Pattern(Arc<PatternView>),
}

impl Object {
    /// What it is.
    pub fn reference(&self) -> ObjectRef {
        let of = |kind, m: &Meta| ObjectRef {
            kind,
            namespace: m.namespace.clone(),
            name: m.name.clone(),
            uid: m.uid.clone(),
        };
        match self {
            Self::Vm(o) => of(Kind::VirtualMachine, &o.meta),
            Self::Vmi(o) => of(Kind::VirtualMachineInstance, &o.meta),
            Self::Pod(o) => of(Kind::Pod, &o.meta),
            Self::Claim(o) => of(Kind::PersistentVolumeClaim, &o.meta),
            Self::Revision(o) => of(Kind::ControllerRevision, &o.meta),
            Self::Pattern(o) => of(Kind::Pattern(o.pattern), &o.meta),
        }
    }

    /// A VM or VMI that is being deleted and that nothing holds any more: the server has removed it.
    pub fn is_over(&self) -> bool {
        let over = |m: &Meta| m.deleting.is_some() && m.finalizers.is_empty();
        match self {
            Self::Vm(o) => over(&o.meta),
            Self::Vmi(o) => over(&o.meta),
            // Pods have a grace period; the others are not written.
            Self::Pod(_) | Self::Claim(_) | Self::Revision(_) | Self::Pattern(_) => false,
        }
    }

    /// Its resourceVersion.
    pub fn rv(&self) -> ResourceVersion {
        match self {
            Self::Vm(o) => o.meta.rv,
            Self::Vmi(o) => o.meta.rv,
            Self::Pod(o) => o.meta.rv,
            Self::Claim(o) => o.meta.rv,
            Self::Revision(o) => o.meta.rv,
            Self::Pattern(o) => o.meta.rv,
        }
    }
}

/// Reads the projection of an object that a server sent, by kind. `None` where it does not parse, or the machines keep
/// nothing of that kind.
pub fn object<'de>(kind: Kind, raw: impl Deserializer<'de>) -> Option<Object> {
    fn read<'de, P: Project>(raw: impl Deserializer<'de>) -> Option<P> {
        P::Raw::deserialize(raw).ok().map(P::project)
    }
    match kind {
        Kind::VirtualMachine => read(raw).map(|o| Object::Vm(Arc::new(o))),
        Kind::VirtualMachineInstance => read(raw).map(|o| Object::Vmi(Arc::new(o))),
        Kind::Pod => read(raw).map(|o| Object::Pod(Arc::new(o))),
        Kind::PersistentVolumeClaim => read(raw).map(|o| Object::Claim(Arc::new(o))),
        Kind::ControllerRevision => read(raw).map(|o| Object::Revision(Arc::new(o))),
        Kind::Pattern(p) => RawPattern::deserialize(raw).ok().map(|o| Object::Pattern(Arc::new(PatternView::of(p, o)))),
        Kind::VirtualMachineInstanceReplicaSet | Kind::Node => None,
    }
}
