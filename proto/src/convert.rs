//! Between the wire and the machines' vocabulary (`state::domain`). An unknown number on the wire becomes the value that
//! promises nothing.

use crate::agent;
use state::{
    InstructionId, LauncherInstance, Millis, PodUid, ResourceVersion, Timestamp, VmiUid,
    domain::{
        AckResult, Cause, Domain, DomainState, GuestFacts, InstructKind, Instruction, InterfaceFacts, OsInfo, Outcome,
        RefusalReason,
    },
};

impl From<DomainState> for agent::DomainState {
    fn from(s: DomainState) -> Self {
        match s {
            DomainState::Absent => Self::Absent,
            DomainState::Deaf => Self::Deaf,
            DomainState::Starting => Self::Starting,
            DomainState::Running => Self::Running,
            DomainState::Paused => Self::Paused,
            DomainState::ShuttingDown => Self::ShuttingDown,
            DomainState::Stopped => Self::Stopped,
        }
    }
}

impl From<agent::DomainState> for DomainState {
    fn from(s: agent::DomainState) -> Self {
        match s {
            agent::DomainState::Absent => Self::Absent,
            // "There, and nothing is known of it" is the one that proves nothing.
            agent::DomainState::Unspecified | agent::DomainState::Deaf => Self::Deaf,
            agent::DomainState::Starting => Self::Starting,
            agent::DomainState::Running => Self::Running,
            agent::DomainState::Paused => Self::Paused,
            agent::DomainState::ShuttingDown => Self::ShuttingDown,
            agent::DomainState::Stopped => Self::Stopped,
        }
    }
}

impl From<agent::Cause> for Cause {
    fn from(c: agent::Cause) -> Self {
        match c {
            agent::Cause::Unspecified | agent::Cause::OutcomeUnknown => Self::OutcomeUnknown,
            agent::Cause::GuestShutdown => Self::GuestShutdown,
            agent::Cause::Crashed => Self::Crashed,
            agent::Cause::Panicked => Self::Panicked,
            agent::Cause::KilledAfterGrace => Self::KilledAfterGrace,
            agent::Cause::Destroyed => Self::Destroyed,
            agent::Cause::StartFailed => Self::StartFailed,
        }
    }
}

impl From<Cause> for agent::Cause {
    fn from(c: Cause) -> Self {
        match c {
            Cause::OutcomeUnknown => Self::OutcomeUnknown,
            Cause::GuestShutdown => Self::GuestShutdown,
            Cause::Crashed => Self::Crashed,
            Cause::Panicked => Self::Panicked,
            Cause::KilledAfterGrace => Self::KilledAfterGrace,
            Cause::Destroyed => Self::Destroyed,
            Cause::StartFailed => Self::StartFailed,
        }
    }
}

impl From<InstructKind> for agent::InstructKind {
    fn from(k: InstructKind) -> Self {
        match k {
            InstructKind::Start => Self::Start,
            InstructKind::Shutdown => Self::Shutdown,
            InstructKind::Kill => Self::Kill,
            InstructKind::Pause => Self::Pause,
            InstructKind::Resume => Self::Resume,
        }
    }
}

/// The kind on the wire; `None` for one that this version does not know.
pub fn instruct_kind(number: i32) -> Option<InstructKind> {
    match agent::InstructKind::try_from(number) {
        Ok(agent::InstructKind::Start) => Some(InstructKind::Start),
        Ok(agent::InstructKind::Shutdown) => Some(InstructKind::Shutdown),
        Ok(agent::InstructKind::Kill) => Some(InstructKind::Kill),
        Ok(agent::InstructKind::Pause) => Some(InstructKind::Pause),
        Ok(agent::InstructKind::Resume) => Some(InstructKind::Resume),
        Ok(agent::InstructKind::InstructUnspecified) | Err(_) => None,
    }
}

impl From<agent::Domain> for Domain {
    fn from(d: agent::Domain) -> Self {
        Self {
            state: d.state().into(),
            vmi: VmiUid(d.vmi_uid),
            pod: PodUid(d.pod_uid),
            launcher: LauncherInstance(d.launcher_instance),
            seq: d.seq,
            since: Timestamp(d.since_unix_ms),
            guest: d.guest.unwrap_or_default().into(),
            paused_reason: d.paused_reason,
            accelerator: d.accelerator,
        }
    }
}

/// What a launcher says about its domain. A state that this version does not know is no news at all: unlike in
/// [`Domain::from`], where a controller has to take the pod for something.
pub fn news(d: agent::Domain) -> Option<Domain> {
    (d.state() != agent::DomainState::Unspecified).then(|| d.into())
}

/// A domain on the wire, with what people call its VMI.
pub fn domain(d: &Domain, namespace: &str, name: &str) -> agent::Domain {
    agent::Domain {
        vmi_uid: d.vmi.to_string(),
        pod_uid: d.pod.to_string(),
        launcher_instance: d.launcher.to_string(),
        seq: d.seq,
        state: agent::DomainState::from(d.state).into(),
        since_unix_ms: d.since.0,
        guest: (d.guest != GuestFacts::default()).then(|| d.guest.clone().into()),
        paused_reason: d.paused_reason.clone(),
        accelerator: d.accelerator.clone(),
        namespace: namespace.into(),
        name: name.into(),
    }
}

impl From<GuestFacts> for agent::GuestFacts {
    fn from(g: GuestFacts) -> Self {
        Self {
            agent_connected: g.agent_connected,
            agent_version: g.agent_version,
            os: (g.os != OsInfo::default()).then(|| g.os.into()),
            hostname: g.hostname,
            interfaces: g.interfaces.into_iter().map(Into::into).collect(),
            machine_type: g.machine_type,
            fs_freeze_status: g.fs_freeze_status,
            agent_lacks: g.agent_lacks,
            agent_first_unix_ms: g.agent_first.map_or(0, |t| t.0),
        }
    }
}

impl From<OsInfo> for agent::OsInfo {
    fn from(os: OsInfo) -> Self {
        Self {
            name: os.name,
            kernel_release: os.kernel_release,
            version: os.version,
            pretty_name: os.pretty_name,
            version_id: os.version_id,
            kernel_version: os.kernel_version,
            machine: os.machine,
            id: os.id,
        }
    }
}

impl From<InterfaceFacts> for agent::Interface {
    fn from(i: InterfaceFacts) -> Self {
        Self {
            name: i.name,
            mac: i.mac,
            ip: i.ip,
            ips: i.ips,
            interface_name: i.interface_name,
            info_source: i.info_source,
            queue_count: i.queue_count,
            pod_interface_name: i.pod_interface_name,
            link_state: i.link_state,
        }
    }
}

impl From<agent::GuestFacts> for GuestFacts {
    fn from(g: agent::GuestFacts) -> Self {
        let os = g.os.unwrap_or_default();
        Self {
            agent_connected: g.agent_connected,
            agent_version: g.agent_version,
            os: OsInfo {
                name: os.name,
                kernel_release: os.kernel_release,
                version: os.version,
                pretty_name: os.pretty_name,
                version_id: os.version_id,
                kernel_version: os.kernel_version,
                machine: os.machine,
                id: os.id,
            },
            hostname: g.hostname,
            interfaces: g.interfaces.into_iter().map(Into::into).collect(),
            machine_type: g.machine_type,
            fs_freeze_status: g.fs_freeze_status,
            agent_lacks: g.agent_lacks,
            agent_first: (g.agent_first_unix_ms > 0).then_some(Timestamp(g.agent_first_unix_ms)),
        }
    }
}

impl From<agent::Interface> for InterfaceFacts {
    fn from(i: agent::Interface) -> Self {
        Self {
            name: i.name,
            mac: i.mac,
            ip: i.ip,
            ips: i.ips,
            interface_name: i.interface_name,
            info_source: i.info_source,
            queue_count: i.queue_count,
            pod_interface_name: i.pod_interface_name,
            link_state: i.link_state,
        }
    }
}

impl From<agent::Outcome> for Outcome {
    fn from(o: agent::Outcome) -> Self {
        Self {
            cause: o.cause().into(),
            vmi: VmiUid(o.vmi_uid),
            pod: PodUid(o.pod_uid),
            exit: o.exit,
            seq: o.seq,
            message: o.message,
            at: Timestamp(o.at_unix_ms),
        }
    }
}

/// An outcome on the wire, with what people call its VMI.
pub fn outcome(o: &Outcome, namespace: &str, name: &str) -> agent::Outcome {
    agent::Outcome {
        vmi_uid: o.vmi.to_string(),
        pod_uid: o.pod.to_string(),
        cause: agent::Cause::from(o.cause).into(),
        exit: o.exit,
        seq: o.seq,
        message: o.message.clone(),
        at_unix_ms: o.at.0,
        namespace: namespace.into(),
        name: name.into(),
    }
}

/// The answer to an instruction on the wire.
pub fn ack(id: &str, vmi: &str, result: AckResult) -> agent::Ack {
    agent::Ack { id: id.into(), vmi_uid: vmi.into(), result: Some(result.into()) }
}

impl From<agent::Ack> for AckResult {
    fn from(a: agent::Ack) -> Self {
        match a.result {
            Some(agent::ack::Result::Accepted(_)) => Self::Accepted,
            Some(agent::ack::Result::Done(d)) => Self::Done { detail: d.detail },
            Some(agent::ack::Result::Refused(r)) => Self::Refused {
                reason: RefusalReason::parse(&r.reason),
                message: r.message,
                rv_seen: ResourceVersion::parse(&r.rv_seen),
            },
            None => Self::Refused {
                reason: RefusalReason::Failed,
                message: "an answer that this version does not know".into(),
                rv_seen: ResourceVersion(0),
            },
        }
    }
}

impl From<AckResult> for agent::ack::Result {
    fn from(r: AckResult) -> Self {
        match r {
            AckResult::Accepted => Self::Accepted(agent::Accepted {}),
            AckResult::Done { detail } => Self::Done(agent::Done { detail }),
            AckResult::Refused { reason, message, rv_seen } => {
                Self::Refused(agent::Refused { reason: reason.name().into(), message, rv_seen: rv_seen.to_string() })
            }
        }
    }
}

/// An instruction on the wire, with what the driver adds: the epoch, the VMI's bytes, the trace.
pub fn instruct(i: &Instruction, epoch: state::Epoch, vmi: bytes::Bytes, traceparent: String) -> agent::Instruct {
    agent::Instruct {
        epoch: epoch.0,
        id: i.id.to_string(),
        kind: agent::InstructKind::from(i.kind).into(),
        vmi_uid: i.vmi.to_string(),
        pod_uid: i.pod.to_string(),
        vmi_rv: i.vmi_rv.to_string(),
        vmi,
        config_digest: String::new(),
        deadline_ms: i.deadline.0,
        traceparent,
    }
}

/// The instruction in a message; `None` where its kind is not known here.
pub fn instruction(m: &agent::Instruct) -> Option<Instruction> {
    Some(Instruction {
        id: InstructionId(m.id.clone()),
        kind: instruct_kind(m.kind)?,
        vmi: VmiUid(m.vmi_uid.clone()),
        pod: PodUid(m.pod_uid.clone()),
        vmi_rv: ResourceVersion::parse(&m.vmi_rv),
        deadline: Millis(m.deadline_ms),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nothing_is_lost_between_the_launcher_and_the_controller() {
        for state in 1..=7 {
            let d = agent::Domain {
                vmi_uid: "v".into(),
                pod_uid: "p".into(),
                launcher_instance: "l".into(),
                seq: 3,
                state,
                since_unix_ms: 9,
                guest: Some(agent::GuestFacts {
                    agent_connected: true,
                    agent_version: "7".into(),
                    os: Some(agent::OsInfo { id: "debian".into(), ..agent::OsInfo::default() }),
                    hostname: "h".into(),
                    interfaces: vec![agent::Interface {
                        name: "default".into(),
                        ips: vec!["10.0.0.1".into()],
                        ..agent::Interface::default()
                    }],
                    machine_type: "q35".into(),
                    fs_freeze_status: "thawed".into(),
                    agent_lacks: vec!["guest-get-users".into()],
                    agent_first_unix_ms: 8,
                }),
                paused_reason: "PausedByUser".into(),
                accelerator: "tcg".into(),
                namespace: "ns".into(),
                name: "n".into(),
            };
            assert_eq!(domain(&news(d.clone()).unwrap(), "ns", "n"), d);
        }
        assert_eq!(news(agent::Domain { state: 99, ..agent::Domain::default() }), None);
        for cause in 1..=7 {
            let o = agent::Outcome {
                cause,
                exit: 137,
                seq: 4,
                message: "m".into(),
                namespace: "ns".into(),
                name: "n".into(),
                ..agent::Outcome::default()
            };
            assert_eq!(outcome(&o.clone().into(), "ns", "n"), o);
        }
        let refused =
            AckResult::Refused { reason: RefusalReason::OlderVmi, message: "m".into(), rv_seen: ResourceVersion(7) };
        for result in [AckResult::Accepted, AckResult::Done { detail: "d".into() }, refused] {
            assert_eq!(AckResult::from(ack("i", "v", result.clone())), result);
        }
        for kind in 1..=5 {
            assert_eq!(i32::from(agent::InstructKind::from(instruct_kind(kind).unwrap())), kind);
        }
        assert_eq!(instruct_kind(99), None);
    }
}
