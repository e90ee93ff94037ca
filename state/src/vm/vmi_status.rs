//! What is written into the VMI: phase, authority, conditions, guest facts, and the end of its finalizers.

use super::{
    cell::{At, Vm, What},
    command::Command,
    phase::Next,
    plan::without,
    verdict::{Evidence, text},
    waits::{Wait, Weight, paused_words},
};
use crate::{
    Timestamp,
    condition::{self, Cond},
    domain::{Domain, DomainState, InterfaceFacts},
    node::SILENCE,
    object::Class,
    observe::{Phase, VmiStatus, VmiView, VolumeView},
};
use api::names;
use serde_json::{Map, Value, json};

/// Conditions of a VMI that this cell writes. All others are kept as they are.
const OWN: [&str; 9] = [
    "Ready",
    "Synchronized",
    "PodScheduled",
    "Paused",
    "AgentConnected",
    "AgentVersionNotSupported",
    "LiveMigratable",
    "StorageLiveMigratable",
    "SoftwareEmulation",
];

impl Vm {
    pub(super) fn plan_vmi(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.get().cloned() else { return };
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
        if want.node_label != vmi.node_label {
            meta.insert("labels".into(), json!({names::LABEL_NODE_NAME: want.node_label}));
        }
        let mut annotations = Map::new();
        if want.boot_id != vmi.boot_id {
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
        let status = diff(&vmi.status, &want.status);
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
        if meta.is_empty() && status.is_empty() {
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
        if !status.is_empty() {
            body["status"] = Value::Object(status);
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
                && said(want) == Some(wait.message())
                && said(&vmi.status) != said(want)
            {
                self.note(self.vmi_ref(), true, reason, &wait.message(), out);
            }
        }
    }

    fn desired_vmi(&mut self, vmi: &VmiView, next: &Next) -> Desired {
        let mut s = vmi.status.clone();
        let mut node_label = vmi.node_label.clone();
        let mut boot_id = vmi.boot_id.clone();
        let now = self.now;
        s.phase = next.phase.name().into();
        s.reason.clone_from(&next.reason);
        record_phase(&mut s, next.phase, now);
        let pod = self.current_pod().cloned();
        if next.phase == Phase::Scheduled
            && vmi.phase != Phase::Scheduled
            && let Some(p) = &pod
            && let Some(node) = &p.node
        {
            s.node_name = Some(node.0.clone());
            s.active_pods = [(p.meta.uid.0.clone(), node.0.clone())].into();
            node_label = Some(node.0.clone());
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
            boot_id = Some(boot.clone());
        }
        if let Phase::Scheduled | Phase::Running = next.phase {
            self.volumes(vmi, next.phase, &mut s);
        }
        if let Some(p) = &pod
            && p.qos_class.is_some()
        {
            s.qos_class.clone_from(&p.qos_class);
        }
        // A domain that is over says nothing new about the guest; addresses of a machine that ended are not shown.
        if next.phase == Phase::Running
            && let Some(d) = self.domain().cloned()
        {
            guest_facts(&mut s, &d);
        }
        self.conditions(vmi, next, &mut s.conditions);
        Desired { status: s, node_label, boot_id }
    }

    /// Names and claims from the moment in which the machine has its node; what the guest calls them once it runs.
    fn volumes(&self, vmi: &VmiView, phase: Phase, s: &mut VmiStatus) {
        let ran = phase == Phase::Running;
        let entry = |v: &VolumeView| {
            // Fields of others stay.
            let old = s.volume_status.iter().find(|old| old["name"] == v.name.as_str());
            let mut e = old.and_then(Value::as_object).cloned().unwrap_or_default();
            e.insert("name".into(), json!(v.name));
            e.insert("target".into(), json!(if ran { v.target.as_str() } else { "" }));
            if let Some(name) = &v.claim
                && let Some(Some(claim)) = self.claims.get(name)
                && let Ok(Value::Object(mut info)) = serde_json::to_value(&claim.info)
            {
                info.insert("claimName".into(), json!(name));
                e.insert("persistentVolumeClaimInfo".into(), Value::Object(info));
            }
            Value::Object(e)
        };
        s.volume_status = vmi.volumes.iter().map(entry).collect();
    }

    fn conditions(&mut self, vmi: &VmiView, next: &Next, conds: &mut Vec<Cond>) {
        let now = self.now;
        let mut put = |kind: &str, wish: Keep| match wish {
            Keep::AsItIs => {}
            Keep::Gone => condition::remove(conds, kind),
            Keep::This(c) => condition::set(conds, c, now),
        };
        let ready = if vmi.phase.is_final() { Keep::AsItIs } else { Keep::This(self.ready(next)) };
        let waits = self.vmi_waits(vmi, next.phase);
        let said = |kind| waits.iter().find_map(|w| w.condition(kind));
        let (sync, mut scheduled) = (said(OWN[1]), said(OWN[2]));
        if let Some(claim) = waits.iter().find(|w| matches!(w, Wait::MissingClaim { .. })) {
            // KubeVirt tells it in both places.
            scheduled = Some(Cond::new(OWN[2], false, "Unschedulable", claim.message()));
        }
        let domain = self.domain().filter(|_| next.phase == Phase::Running).cloned();
        let silence_ends = self.silence_ends(next.phase);
        put(OWN[0], ready);
        put(OWN[1], sync.map_or(Keep::Gone, Keep::This));
        put(OWN[2], scheduled.map_or(Keep::Gone, Keep::This));
        match (&domain, next.phase) {
            (Some(d), _) => {
                let paused = (d.state == DomainState::Paused).then(|| {
                    let by = if d.paused_reason.is_empty() { "PausedByUser" } else { &d.paused_reason };
                    Cond::new("Paused", true, by, paused_words(by))
                });
                let known = d.state != DomainState::Deaf;
                put(OWN[3], if known { paused.map_or(Keep::Gone, Keep::This) } else { Keep::AsItIs });
                let agent = d.guest.agent_connected.then(|| Cond::new("AgentConnected", true, "", ""));
                put(OWN[4], if known { agent.map_or(Keep::Gone, Keep::This) } else { Keep::AsItIs });
                let lacks = (d.guest.agent_connected && !d.guest.agent_lacks.is_empty()).then(|| {
                    let text = format!("the guest's agent does not have {}", d.guest.agent_lacks.join(", "));
                    Cond::new("AgentVersionNotSupported", true, "CommandsMissing", text)
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
                put(kind, Keep::This(Cond::new(kind, false, "NotMigratable", text)));
            }
            if let Some(d) = domain.filter(|d| !d.accelerator.is_empty()) {
                let text =
                    "the node has no virtualisation that works, so the guest's processors are emulated, which is slow";
                let emulated = (d.accelerator == "tcg").then(|| Cond::new(OWN[8], true, "NoAcceleration", text));
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

    fn ready(&self, next: &Next) -> Cond {
        let not = |reason: &str, message: &str| Cond::new("Ready", false, reason, message);
        match next.phase {
            Phase::Running => {}
            Phase::Failed => return not("GuestNotRunning", &next.failure_words()),
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled if self.current_pod().is_none() => {
                return not("PodNotExists", "virt-launcher pod has not yet been scheduled");
            }
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled
                if self.current_pod().is_some_and(|p| p.meta.deleting.is_some() || p.ended()) =>
            {
                return not("PodTerminating", "virt-launcher pod is terminating");
            }
            Phase::Unset
            | Phase::Pending
            | Phase::Scheduling
            | Phase::Scheduled
            | Phase::Succeeded
            | Phase::Unknown => return not("GuestNotRunning", "Guest VM is not reported as running"),
        }
        if let Some((reason, message)) = self.unreachable() {
            return not(reason, &message);
        }
        let Some(pod) = self.current_pod() else {
            return not("PodNotExists", "virt-launcher pod has not yet been scheduled");
        };
        if pod.meta.deleting.is_some() || pod.ended() {
            return not("PodTerminating", "virt-launcher pod is terminating");
        }
        match &pod.ready {
            None => not("PodConditionMissing", "virt-launcher pod is missing the Ready condition"),
            Some(c) => Cond {
                last_transition_time: c.last_transition_time.clone(),
                ..Cond::new("Ready", c.is_true(), &c.reason, c.message.clone())
            },
        }
    }
}

enum Keep {
    AsItIs,
    Gone,
    This(Cond),
}

struct Desired {
    status: VmiStatus,
    node_label: Option<String>,
    boot_id: Option<String>,
}

/// Appends the phase, and those before it that were too short to be written on their own.
fn record_phase(s: &mut VmiStatus, phase: Phase, now: Timestamp) {
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
            s.phase_transition_timestamps
                .push(api::PhaseTransition { phase: p.name().into(), phase_transition_timestamp: now.to_string() });
        }
    }
}

fn guest_facts(s: &mut VmiStatus, d: &Domain) {
    if d.state == DomainState::Deaf {
        return;
    }
    s.interfaces = d.guest.interfaces.iter().map(interface).collect();
    let os = serde_json::to_value(&d.guest.os).unwrap_or_default();
    let filled: Map<String, Value> = match os {
        Value::Object(m) => m.into_iter().filter(|(_, v)| v.as_str().is_some_and(|t| !t.is_empty())).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
    };
    s.guest_os_info = if filled.is_empty() { s.guest_os_info.take() } else { Value::Object(filled) };
    if !d.guest.machine_type.is_empty() {
        s.machine.insert("type".into(), json!(d.guest.machine_type));
    }
    s.fs_freeze_status = (d.guest.fs_freeze_status == "frozen").then(|| "frozen".to_owned());
}

fn interface(i: &InterfaceFacts) -> Value {
    let mut m = Map::new();
    let texts = [
        ("name", &i.name),
        ("mac", &i.mac),
        ("ipAddress", &i.ip),
        ("interfaceName", &i.interface_name),
        ("infoSource", &i.info_source),
        ("podInterfaceName", &i.pod_interface_name),
        ("linkState", &i.link_state),
    ];
    for (k, v) in texts {
        if !v.is_empty() {
            m.insert(k.into(), json!(v));
        }
    }
    if !i.ips.is_empty() {
        m.insert("ipAddresses".into(), json!(i.ips));
    }
    if i.queue_count > 0 {
        m.insert("queueCount".into(), json!(i.queue_count));
    }
    Value::Object(m)
}

/// The fields of a status that differ, as a merge patch.
fn diff(old: &VmiStatus, new: &VmiStatus) -> Map<String, Value> {
    if old == new {
        return Map::new();
    }
    let (Ok(Value::Object(a)), Ok(Value::Object(b))) = (serde_json::to_value(old), serde_json::to_value(new)) else {
        return Map::new();
    };
    let mut out: Map<String, Value> = b.into_iter().filter(|(k, v)| a.get(k) != Some(v)).collect();
    // A map is merged by a merge patch: pods that are no longer active have to be named.
    if let Some(Value::Object(pods)) = out.get_mut("activePods") {
        for gone in old.active_pods.keys().filter(|k| !new.active_pods.contains_key(*k)) {
            pods.insert(gone.clone(), Value::Null);
        }
    }
    if let (Some(Value::Object(os)), Value::Object(before)) = (out.get_mut("guestOSInfo"), &old.guest_os_info) {
        for gone in before.keys().filter(|k| !os.contains_key(*k)).cloned().collect::<Vec<_>>() {
            os.insert(gone, Value::Null);
        }
    }
    out
}

/// A difference within a phase that somebody waits for.
fn is_urgent(old: &VmiStatus, new: &VmiStatus, phase: Phase) -> bool {
    let ready = |s: &VmiStatus| condition::is_true(&s.conditions, "Ready");
    let paused = |s: &VmiStatus| condition::is_true(&s.conditions, "Paused");
    phase == Phase::Running && (ready(new) != ready(old) || paused(old) != paused(new))
}
