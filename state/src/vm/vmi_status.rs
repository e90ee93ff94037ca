//! What is written into the VMI: phase, authority, conditions, guest facts, and the end of its finalizers.

use super::{
    cell::{At, Vm, What},
    command::Command,
    phase::Next,
    plan::{changed, is_same, without},
    verdict::{Evidence, text},
    waits::{Wait, Weight, paused_words},
};
use crate::{
    Timestamp,
    condition::{self, Said},
    domain::{Domain, DomainState, InterfaceFacts, OsInfo},
    node::SILENCE,
    object::Class,
    observe::{Phase, Told, VmiStatus, VmiView, VolumeView, as_object},
};
use api::names;
use litemap::LiteMap;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Conditions of a VMI that this cell writes. All others are kept as they are.
const OWN: [&str; 10] = [
    "Ready",
    "Synchronized",
    "PodScheduled",
    "Paused",
    "AgentConnected",
    "AgentVersionNotSupported",
    "LiveMigratable",
    "StorageLiveMigratable",
    "SoftwareEmulation",
    "EvictionRequested",
];

impl Vm {
    pub(super) fn plan_vmi(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.shared() else { return };
        if vmi.phase == Phase::Unknown {
            return;
        }
        if !self.vmi.is_free(self.now) {
            if let Some(at) = self.vmi.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        if self.vmi.is_doubted() {
            return self.confirm(At::Vmi, out);
        }
        // The pod is being rendered from the VMI at the version that we know.
        if self.flights.values().any(|(_, w)| *w == What::CreatePod) {
            return;
        }
        if self.owner_must_be_confirmed(&vmi) && self.vm.is_free(self.now) {
            self.confirm(At::Vm, out);
        }
        let next = self.next_phase(&vmi);
        let want = self.desired_vmi(&vmi, &next);
        let mut meta = Map::new();
        if want.node_label.as_deref() != vmi.node_label.as_deref() {
            meta.insert("labels".into(), json!({names::LABEL_NODE_NAME: want.node_label}));
        }
        let mut annotations = Map::new();
        if want.boot_id.as_deref() != vmi.boot_id.as_deref() {
            annotations.insert(names::ANN_BOOT_ID.into(), json!(want.boot_id));
        }
        // An instance without a VM keeps the proof itself.
        if next.evidence == Some(Evidence::Fenced)
            && self.own_vmi().is_none()
            && let Some(witness) = self.witness()
        {
            annotations.insert(names::ANN_FENCED.into(), json!(text(&witness)));
        }
        let loose = self.loosened(&vmi);
        if !loose.is_empty() {
            meta.insert("finalizers".into(), json!(without(&vmi.meta.finalizers, &loose)));
        }
        let same = is_same(&vmi.status, &want.status);
        let moved = !meta.is_empty() || !annotations.is_empty();
        if let Some(generation) = self.generation_bump(&vmi) {
            annotations.insert(names::ANN_VM_GENERATION.into(), json!(generation.to_string()));
        }
        annotations.extend(self.following(&vmi));
        if let Some(label) = self.outdated(&vmi) {
            meta.entry("labels").or_insert_with(|| json!({}))[names::LABEL_OUTDATED] = label;
        }
        if !annotations.is_empty() {
            meta.insert("annotations".into(), Value::Object(annotations));
        }
        if meta.is_empty() && same {
            self.lazy.remove(&At::Vmi);
            return;
        }
        let urgent = moved
            || (next.phase != vmi.phase && next.class == Class::Urgent)
            || is_urgent(&vmi.status, &want.status, next.phase);
        let class = if urgent { Class::Urgent } else { Class::Lazy };
        if !self.is_due(At::Vmi, class) {
            return;
        }
        let why = match (loose.is_empty(), next.phase != vmi.phase) {
            (false, _) => "release",
            (true, true) => next.phase.name(),
            (true, false) => "status",
        };
        meta.insert("uid".into(), json!(vmi.meta.uid));
        meta.insert("resourceVersion".into(), json!(vmi.meta.rv.to_string()));
        let mut body = json!({"metadata": meta});
        if !same {
            body["status"] = Value::Object(diff(&vmi.status, &want.status));
        }
        if self.patch(At::Vmi, self.vmi_ref(), false, class, why, body, out).is_some() {
            if next.phase != vmi.phase {
                self.note_phase(&next, out);
            }
            self.note_problems(&vmi, &want.status, out);
        }
    }

    fn note_phase(&mut self, next: &Next, out: &mut Vec<Command>) {
        let about = self.vmi_ref();
        match (next.phase, next.evidence) {
            (Phase::Running, _) => self.note(about, false, "Started", "The virtual machine is running", out),
            (Phase::Succeeded, _) => self.note(about, false, "Stopped", "The virtual machine was shut down", out),
            (Phase::Failed, Some(Evidence::PodRemoved)) => {
                let who = self.declared_by();
                let text = format!("The launcher pod was removed: {who} declared the virtual machine stopped");
                self.note(about, true, "Stopped", &text, out);
            }
            (Phase::Failed, _) => {
                self.note(about, true, "Stopped", &next.failure_words(), out);
            }
            (Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled | Phase::Unknown, _) => {}
        }
    }

    /// Events with the words of conditions that tell of a problem since now.
    fn note_problems(&mut self, vmi: &VmiView, want: &VmiStatus, out: &mut Vec<Command>) {
        for wait in self.vmi_waits(vmi, vmi.phase).iter().filter(|w| w.weight() == Weight::Problem) {
            let (kind, reason) = wait.name();
            let said = |s: &VmiStatus| condition::find(&s.conditions, kind).map(|c| c.message.clone());
            // How it ended is told with its phase.
            if !matches!(wait, Wait::Ended { .. })
                && said(want) == Some(wait.message().into())
                && said(&vmi.status) != said(want)
            {
                self.note(self.vmi_ref(), true, reason, &wait.message(), out);
            }
        }
    }

    /// As it is, and copied as soon as something of it has to change.
    fn desired_vmi<'v>(&mut self, vmi: &'v VmiView, next: &Next) -> Desired<'v> {
        let mut status = Cow::Borrowed(&vmi.status);
        let s = &mut status;
        let mut node_label = vmi.node_label.as_deref().map(Cow::Borrowed);
        let mut boot_id = vmi.boot_id.as_deref().map(Cow::Borrowed);
        let now = self.now;
        if s.phase != next.phase.name() {
            s.to_mut().phase = next.phase.name().into();
        }
        if s.reason != next.reason {
            s.to_mut().reason.clone_from(&next.reason);
        }
        record_phase(s, next.phase, now);
        let pod = self.shared_pod();
        if next.phase == Phase::Scheduled
            && vmi.phase != Phase::Scheduled
            && let Some(p) = &pod
            && let Some(node) = &p.node
        {
            let s = s.to_mut();
            s.node_name = Some(node.0.clone());
            s.active_pods = LiteMap::from_iter([(p.meta.uid.0.clone(), node.0.clone())]);
            node_label = Some(node.0.clone().into());
            s.launcher_container_image_version.clone_from(&p.image);
            if let Some(overhead) = &p.memory_overhead {
                s.memory.insert("memoryOverhead".into(), json!(overhead));
            }
        }
        // Rides along with the two writes that authorise and publish; by the second one the launcher was heard.
        if next.phase != vmi.phase
            && matches!(next.phase, Phase::Scheduled | Phase::Running)
            && let Some(boot) = self.boot_of_launcher()
        {
            boot_id = Some(boot.clone().into());
        }
        if let Phase::Scheduled | Phase::Running = next.phase {
            self.volumes(vmi, next.phase, s);
        }
        if let Some(p) = &pod
            && p.qos_class.is_some()
            && p.qos_class != s.qos_class
        {
            s.to_mut().qos_class.clone_from(&p.qos_class);
        }
        // A domain that is over says nothing new about the guest; addresses of a machine that ended are not shown.
        if next.phase == Phase::Running
            && let Some(d) = self.domain()
        {
            guest_facts(s, d);
        }
        self.conditions(vmi, next, s);
        Desired { status, node_label, boot_id }
    }

    /// Names and claims from the moment in which the machine has its node; what the guest calls them once it runs.
    fn volumes(&self, vmi: &VmiView, phase: Phase, s: &mut Cow<'_, VmiStatus>) {
        let target = |v: &VolumeView| if phase == Phase::Running { v.target.clone() } else { String::new() };
        let is =
            |old: &LiteMap<String, Value>, key: &str, text: &str| old.get(key).and_then(Value::as_str) == Some(text);
        let told = |(v, old): (&VolumeView, &LiteMap<String, Value>)| {
            v.claim.is_none() && is(old, "name", &v.name) && is(old, "target", &target(v))
        };
        if s.volume_status.len() == vmi.volumes.len() && vmi.volumes.iter().zip(&s.volume_status).all(told) {
            return;
        }
        let entry = |v: &VolumeView| {
            // Fields of others stay.
            let old = s.volume_status.iter().find(|old| is(old, "name", &v.name));
            let mut e = old.cloned().unwrap_or_default();
            e.insert("name".into(), json!(v.name));
            e.insert("target".into(), json!(target(v)));
            if let Some(name) = &v.claim
                && let Some(Some(claim)) = self.claims.get(name)
                && let Ok(Value::Object(mut info)) = serde_json::to_value(&claim.info)
            {
                info.insert("claimName".into(), json!(name));
                e.insert("persistentVolumeClaimInfo".into(), Value::Object(info));
            }
            e
        };
        let all: Vec<_> = vmi.volumes.iter().map(entry).collect();
        if all != s.volume_status {
            s.to_mut().volume_status = all;
        }
    }

    fn conditions(&mut self, vmi: &VmiView, next: &Next, s: &mut Cow<'_, VmiStatus>) {
        let now = self.now;
        let mut put = |kind: &str, wish: Keep<'_>| match wish {
            Keep::AsItIs => {}
            Keep::Gone if condition::find(&s.conditions, kind).is_none() => {}
            Keep::Gone => condition::remove(&mut s.to_mut().conditions, kind),
            Keep::This(c) if c.is_in(&s.conditions) => {}
            Keep::This(c) => condition::set(&mut s.to_mut().conditions, c.into(), now),
        };
        let ready = if vmi.phase.is_final() { Keep::AsItIs } else { Keep::This(self.ready(next)) };
        let waits = self.vmi_waits(vmi, next.phase);
        let said = |kind| waits.iter().find_map(|w| w.condition(kind));
        let (sync, mut scheduled) = (said(OWN[1]), said(OWN[2]));
        if let Some(claim) = waits.iter().find(|w| matches!(w, Wait::MissingClaim { .. })) {
            // KubeVirt tells it in both places.
            scheduled = Some(Said::new(OWN[2], false, "Unschedulable", claim.message()));
        }
        let domain = self.domain().filter(|_| next.phase == Phase::Running);
        let silence_ends = self.silence_ends(next.phase);
        put(OWN[0], ready);
        put(OWN[1], sync.map_or(Keep::Gone, Keep::This));
        put(OWN[2], scheduled.map_or(Keep::Gone, Keep::This));
        let text = "the machine is asked to leave its node";
        let evicting = vmi.status.evicting().then(|| Said::new(OWN[9], true, OWN[9], text));
        put(OWN[9], evicting.map_or(Keep::Gone, Keep::This));
        match (&domain, next.phase) {
            (Some(d), _) => {
                let paused = (d.state == DomainState::Paused).then(|| {
                    let by = if d.paused_reason.is_empty() { "PausedByUser" } else { &d.paused_reason };
                    Said::new("Paused", true, by, paused_words(by))
                });
                let known = d.state != DomainState::Deaf;
                put(OWN[3], if known { paused.map_or(Keep::Gone, Keep::This) } else { Keep::AsItIs });
                let agent = d.guest.agent_connected.then(|| Said::new("AgentConnected", true, "", ""));
                put(OWN[4], if known { agent.map_or(Keep::Gone, Keep::This) } else { Keep::AsItIs });
                let lacks = (d.guest.agent_connected && !d.guest.agent_lacks.is_empty()).then(|| {
                    let text = format!("the guest's agent does not have {}", d.guest.agent_lacks.join(", "));
                    Said::new("AgentVersionNotSupported", true, "CommandsMissing", text)
                });
                put(OWN[5], if known { lacks.map_or(Keep::Gone, Keep::This) } else { Keep::AsItIs });
            }
            (None, Phase::Running) => {}
            (
                None,
                Phase::Unset
                | Phase::Pending
                | Phase::Scheduling
                | Phase::Scheduled
                | Phase::Succeeded
                | Phase::Failed
                | Phase::Unknown,
            ) => {
                put(OWN[3], Keep::Gone);
                put(OWN[4], Keep::Gone);
                put(OWN[5], Keep::Gone);
            }
        }
        if next.phase == Phase::Running {
            let text = "this version of virtfold does not migrate running machines";
            for kind in [OWN[6], OWN[7]] {
                put(kind, Keep::This(Said::new(kind, false, "NotMigratable", text)));
            }
            if let Some(d) = domain.filter(|d| !d.accelerator.is_empty()) {
                let text =
                    "the node has no virtualisation that works, so the guest's processors are emulated, which is slow";
                let emulated = (d.accelerator == "tcg").then(|| Said::new(OWN[8], true, "NoAcceleration", text));
                put(OWN[8], emulated.map_or(Keep::Gone, Keep::This));
            }
        }
        if let Some(t) = silence_ends {
            self.want_wake(t);
        }
    }

    /// When silence of the agent that has begun becomes worth telling.
    fn silence_ends(&self, phase: Phase) -> Option<Timestamp> {
        if phase != Phase::Running && phase != Phase::Scheduled {
            return None;
        }
        let since = self.node_fact()?.silent_since?;
        Some(since.after(SILENCE)).filter(|t| *t > self.now)
    }

    fn ready(&self, next: &Next) -> Said<'_> {
        fn not(reason: &'static str, message: impl Into<Cow<'static, str>>) -> Said<'static> {
            Said::new("Ready", false, reason, message)
        }
        match next.phase {
            Phase::Running => {}
            Phase::Failed => return not("GuestNotRunning", next.failure_words()),
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled if self.current_pod().is_none() => {
                return not("PodNotExists", "virt-launcher pod has not yet been scheduled");
            }
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled
                if self.current_pod().is_some_and(|p| p.meta.deleting.is_some() || p.ended()) =>
            {
                return not("PodTerminating", "virt-launcher pod is terminating");
            }
            Phase::Succeeded if !next.message.is_empty() => {
                return not("GuestNotRunning", format!("Guest VM is not reported as running: {}", next.message));
            }
            Phase::Unset
            | Phase::Pending
            | Phase::Scheduling
            | Phase::Scheduled
            | Phase::Succeeded
            | Phase::Unknown => return not("GuestNotRunning", "Guest VM is not reported as running"),
        }
        if let Some((reason, message)) = self.unreachable() {
            return not(reason, message);
        }
        let Some(pod) = self.current_pod() else {
            return not("PodNotExists", "virt-launcher pod has not yet been scheduled");
        };
        if pod.meta.deleting.is_some() || pod.ended() {
            return not("PodTerminating", "virt-launcher pod is terminating");
        }
        match &pod.ready {
            None => not("PodConditionMissing", "virt-launcher pod is missing the Ready condition"),
            Some(c) => {
                Said::new("Ready", c.is_true(), &*c.reason, &*c.message).since(c.last_transition_time.as_deref())
            }
        }
    }
}

enum Keep<'a> {
    AsItIs,
    Gone,
    This(Said<'a>),
}

struct Desired<'v> {
    status: Cow<'v, VmiStatus>,
    node_label: Option<Cow<'v, str>>,
    boot_id: Option<Cow<'v, str>>,
}

/// Appends the phase, and those before it that were too short to be written on their own.
fn record_phase(s: &mut Cow<'_, VmiStatus>, phase: Phase, now: Timestamp) {
    let path: &[Phase] = match phase {
        Phase::Scheduled => &[Phase::Scheduling, Phase::Scheduled],
        Phase::Unset | Phase::Unknown => &[],
        Phase::Pending => &[Phase::Pending],
        Phase::Scheduling => &[Phase::Scheduling],
        Phase::Running => &[Phase::Running],
        Phase::Succeeded => &[Phase::Succeeded],
        Phase::Failed => &[Phase::Failed],
    };
    for p in path {
        if !s.phase_transition_timestamps.iter().any(|t| t.phase == p.name()) {
            s.to_mut()
                .phase_transition_timestamps
                .push(api::PhaseTransition { phase: p.name().into(), phase_transition_timestamp: now.to_string() });
        }
    }
}

fn guest_facts(s: &mut Cow<'_, VmiStatus>, d: &Domain) {
    if d.state == DomainState::Deaf {
        return;
    }
    let (seen, told) = (&d.guest.interfaces, &s.interfaces);
    if seen.len() != told.len() || !seen.iter().zip(told).all(|(i, v)| v.is(&interface(i))) {
        s.to_mut().interfaces = seen.iter().map(|i| Told::new(&interface(i))).collect();
    }
    let os = os(&d.guest.os);
    if os.filled().next().is_some() && !s.guest_os_info.is(&os) {
        s.to_mut().guest_os_info = Told::new(&os);
    }
    let machine = d.guest.machine_type.as_str();
    if !machine.is_empty() && s.machine.get("type").and_then(Value::as_str) != Some(machine) {
        s.to_mut().machine.insert("type".into(), json!(machine));
    }
    let frozen = (d.guest.fs_freeze_status == "frozen").then_some("frozen");
    if s.fs_freeze_status.as_deref() != frozen {
        s.to_mut().fs_freeze_status = frozen.map(str::to_owned);
    }
}

/// A value of an object in a status; one that is empty is left out.
enum Part<'a> {
    Text(&'a str),
    Texts(&'a [String]),
    Count(u32),
}

impl Part<'_> {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(t) => t.is_empty(),
            Self::Texts(all) => all.is_empty(),
            Self::Count(n) => *n == 0,
        }
    }
}

impl Serialize for Part<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(t) => t.serialize(s),
            Self::Texts(all) => all.serialize(s),
            Self::Count(n) => n.serialize(s),
        }
    }
}

/// An object in a status: its parts, by name.
struct Parts<'a, const N: usize>([(&'static str, Part<'a>); N]);

impl<const N: usize> Parts<'_, N> {
    fn filled(&self) -> impl Iterator<Item = (&'static str, &Part<'_>)> {
        self.0.iter().filter(|(_, p)| !p.is_empty()).map(|(k, p)| (*k, p))
    }
}

impl<const N: usize> Serialize for Parts<'_, N> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.filled())
    }
}

fn os(os: &OsInfo) -> Parts<'_, 8> {
    let OsInfo { name, kernel_release, version, pretty_name, version_id, kernel_version, machine, id } = os;
    Parts([
        ("id", Part::Text(id)),
        ("kernelRelease", Part::Text(kernel_release)),
        ("kernelVersion", Part::Text(kernel_version)),
        ("machine", Part::Text(machine)),
        ("name", Part::Text(name)),
        ("prettyName", Part::Text(pretty_name)),
        ("version", Part::Text(version)),
        ("versionId", Part::Text(version_id)),
    ])
}

fn interface(i: &InterfaceFacts) -> Parts<'_, 9> {
    Parts([
        ("infoSource", Part::Text(&i.info_source)),
        ("interfaceName", Part::Text(&i.interface_name)),
        ("ipAddress", Part::Text(&i.ip)),
        ("ipAddresses", Part::Texts(&i.ips)),
        ("linkState", Part::Text(&i.link_state)),
        ("mac", Part::Text(&i.mac)),
        ("name", Part::Text(&i.name)),
        ("podInterfaceName", Part::Text(&i.pod_interface_name)),
        ("queueCount", Part::Count(i.queue_count)),
    ])
}

/// The fields of a status that differ, as a merge patch.
fn diff(old: &VmiStatus, new: &VmiStatus) -> Map<String, Value> {
    // All of them, so that none is forgotten.
    let VmiStatus {
        phase,
        reason,
        node_name,
        active_pods,
        conditions,
        interfaces,
        phase_transition_timestamps,
        virtual_machine_revision_name,
        guest_os_info,
        fs_freeze_status,
        launcher_container_image_version,
        qos_class,
        memory,
        machine,
        volume_status,
        // The gateway's.
        evacuation_node_name: _,
    } = new;
    let mut out = Map::new();
    changed(&mut out, "phase", &old.phase, phase);
    changed(&mut out, "reason", &old.reason, reason);
    changed(&mut out, "nodeName", &old.node_name, node_name);
    changed_object(&mut out, "activePods", &old.active_pods, active_pods);
    changed(&mut out, "conditions", &old.conditions, conditions);
    changed(&mut out, "interfaces", &old.interfaces, interfaces);
    changed(&mut out, "phaseTransitionTimestamps", &old.phase_transition_timestamps, phase_transition_timestamps);
    changed(&mut out, "virtualMachineRevisionName", &old.virtual_machine_revision_name, virtual_machine_revision_name);
    changed(&mut out, "guestOSInfo", &old.guest_os_info, guest_os_info);
    changed(&mut out, "fsFreezeStatus", &old.fs_freeze_status, fs_freeze_status);
    let image = &old.launcher_container_image_version;
    changed(&mut out, "launcherContainerImageVersion", image, launcher_container_image_version);
    changed(&mut out, "qosClass", &old.qos_class, qos_class);
    changed_object(&mut out, "memory", &old.memory, memory);
    changed_object(&mut out, "machine", &old.machine, machine);
    changed(&mut out, "volumeStatus", &old.volume_status, volume_status);
    // A map is merged by a merge patch: pods that are no longer active have to be named.
    if let Some(Value::Object(pods)) = out.get_mut("activePods") {
        for gone in old.active_pods.keys().filter(|k| !new.active_pods.contains_key(*k)) {
            pods.insert(gone.clone(), Value::Null);
        }
    }
    if let (Some(Value::Object(os)), Value::Object(before)) = (out.get_mut("guestOSInfo"), old.guest_os_info.value()) {
        for gone in before.keys().filter(|k| !os.contains_key(*k)).cloned().collect::<Vec<_>>() {
            os.insert(gone, Value::Null);
        }
    }
    out
}

/// The same of an object, which is one also where it is empty.
fn changed_object<V>(patch: &mut Map<String, Value>, field: &str, old: &LiteMap<String, V>, new: &LiteMap<String, V>)
where
    V: PartialEq + Serialize,
{
    if old != new
        && let Ok(value) = as_object(new, serde_json::value::Serializer)
    {
        patch.insert(field.into(), value);
    }
}

/// A difference within a phase that somebody waits for.
fn is_urgent(old: &VmiStatus, new: &VmiStatus, phase: Phase) -> bool {
    let ready = |s: &VmiStatus| condition::is_true(&s.conditions, "Ready");
    let paused = |s: &VmiStatus| condition::is_true(&s.conditions, "Paused");
    phase == Phase::Running && (ready(new) != ready(old) || paused(old) != paused(new))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_field_of_a_status_that_changes_is_named_as_the_api_names_it() {
        let text = || Some("x".to_owned());
        let new = VmiStatus {
            phase: "x".into(),
            reason: text(),
            node_name: text(),
            active_pods: LiteMap::from_iter([("p".to_owned(), "n".to_owned())]),
            conditions: vec![crate::condition::Cond::new("x", true, "", "")],
            interfaces: vec![Told::new(&json!({}))],
            phase_transition_timestamps: vec![api::PhaseTransition::default()],
            virtual_machine_revision_name: text(),
            guest_os_info: Told::new(&json!({"id": "x"})),
            fs_freeze_status: text(),
            launcher_container_image_version: text(),
            qos_class: text(),
            memory: LiteMap::from_iter([("x".to_owned(), json!(1))]),
            machine: LiteMap::from_iter([("x".to_owned(), json!(1))]),
            volume_status: vec![LiteMap::new()],
            evacuation_node_name: None,
        };
        let whole = serde_json::to_value(&new).unwrap();
        assert_eq!(Value::Object(diff(&VmiStatus::default(), &new)), whole);
        assert!(diff(&new, &new).is_empty());
        let none = diff(&new, &VmiStatus::default());
        assert_eq!(none.len(), whole.as_object().unwrap().len());
        assert_eq!(none["activePods"], json!({"p": null}));
    }

    #[test]
    fn what_is_told_already_is_recognised() {
        let mut facts = InterfaceFacts {
            name: "default".into(),
            ips: vec!["a".into(), "b".into()],
            queue_count: 1,
            ..Default::default()
        };
        let told = Told::new(&interface(&facts));
        let as_written = json!({"name": "default", "ipAddresses": ["a", "b"], "queueCount": 1});
        assert_eq!(told, serde_json::from_value(as_written).unwrap());
        assert!(told.is(&interface(&facts)));
        facts.ips.pop();
        assert!(!told.is(&interface(&facts)));
        let filled = OsInfo { id: "x".into(), ..OsInfo::default() };
        assert!(!Told::default().is(&os(&filled)));
        assert_eq!(serde_json::to_value(os(&filled)).unwrap(), json!({"id": "x"}));
        let all = serde_json::to_value(&filled).unwrap();
        assert!(os(&filled).0.iter().map(|(k, _)| *k).eq(all.as_object().unwrap().keys()), "in order: {all}");
        assert!(interface(&facts).0.iter().map(|(k, _)| *k).is_sorted());
    }
}
