//! The wire's messages as facts of the machines, and back.

use proto::agent as wire;
use state::domain::{AckResult, Cause, Domain, GuestFacts, InstructKind, Instruction, OsInfo, Outcome, RefusalReason};
use state::{Millis, ResourceVersion, Timestamp};

/// `None` where the state is unknown to this version.
pub(crate) fn domain(d: wire::Domain) -> Option<Domain> {
    // The conversion takes an unknown state for `Deaf`; here it is no news at all.
    (d.state() != wire::DomainState::Unspecified).then(|| d.into())
}

/// With the VMI's namespace and name.
pub(crate) fn to_domain(d: &Domain, namespace: &str, name: &str) -> wire::Domain {
    let g = &d.guest;
    let os = g.os.clone();
    let guest = wire::GuestFacts {
        agent_connected: g.agent_connected,
        agent_version: g.agent_version.clone(),
        os: (g.os != OsInfo::default()).then_some(wire::OsInfo {
            name: os.name,
            kernel_release: os.kernel_release,
            version: os.version,
            pretty_name: os.pretty_name,
            version_id: os.version_id,
            kernel_version: os.kernel_version,
            machine: os.machine,
            id: os.id,
        }),
        hostname: g.hostname.clone(),
        interfaces: g
            .interfaces
            .iter()
            .cloned()
            .map(|i| wire::Interface {
                name: i.name,
                mac: i.mac,
                ip: i.ip,
                ips: i.ips,
                interface_name: i.interface_name,
                info_source: i.info_source,
                queue_count: i.queue_count,
                pod_interface_name: i.pod_interface_name,
                link_state: i.link_state,
            })
            .collect(),
        machine_type: g.machine_type.clone(),
        fs_freeze_status: g.fs_freeze_status.clone(),
    };
    wire::Domain {
        vmi_uid: d.vmi.0.clone(),
        pod_uid: d.pod.0.clone(),
        launcher_instance: d.launcher.0.clone(),
        seq: d.seq,
        state: wire::DomainState::from(d.state) as i32,
        since_unix_ms: d.since.0,
        guest: (d.guest != GuestFacts::default()).then_some(guest),
        paused_reason: d.paused_reason.clone(),
        accelerator: d.accelerator.clone(),
        namespace: namespace.into(),
        name: name.into(),
    }
}

pub(crate) fn outcome(o: wire::Outcome) -> Outcome {
    let cause = match o.cause() {
        wire::Cause::GuestShutdown => Cause::GuestShutdown,
        wire::Cause::Crashed => Cause::Crashed,
        wire::Cause::Panicked => Cause::Panicked,
        wire::Cause::KilledAfterGrace => Cause::KilledAfterGrace,
        wire::Cause::Destroyed => Cause::Destroyed,
        wire::Cause::StartFailed => Cause::StartFailed,
        wire::Cause::OutcomeUnknown | wire::Cause::Unspecified => Cause::OutcomeUnknown,
    };
    Outcome {
        vmi: o.vmi_uid.into(),
        pod: o.pod_uid.into(),
        cause,
        exit: o.exit,
        seq: o.seq,
        message: o.message,
        at: Timestamp(o.at_unix_ms),
    }
}

/// With the VMI's namespace and name.
pub(crate) fn to_outcome(o: &Outcome, namespace: &str, name: &str) -> wire::Outcome {
    let cause = match o.cause {
        Cause::GuestShutdown => wire::Cause::GuestShutdown,
        Cause::Crashed => wire::Cause::Crashed,
        Cause::Panicked => wire::Cause::Panicked,
        Cause::KilledAfterGrace => wire::Cause::KilledAfterGrace,
        Cause::Destroyed => wire::Cause::Destroyed,
        Cause::StartFailed => wire::Cause::StartFailed,
        Cause::OutcomeUnknown => wire::Cause::OutcomeUnknown,
    };
    wire::Outcome {
        vmi_uid: o.vmi.0.clone(),
        pod_uid: o.pod.0.clone(),
        cause: cause as i32,
        exit: o.exit,
        seq: o.seq,
        message: o.message.clone(),
        at_unix_ms: o.at.0,
        namespace: namespace.into(),
        name: name.into(),
    }
}

/// `None` where the kind is unknown to this version.
pub(crate) fn instruction(i: &wire::Instruct) -> Option<Instruction> {
    let kind = match i.kind() {
        wire::InstructKind::InstructUnspecified => return None,
        wire::InstructKind::Start => InstructKind::Start,
        wire::InstructKind::Shutdown => InstructKind::Shutdown,
        wire::InstructKind::Kill => InstructKind::Kill,
        wire::InstructKind::Pause => InstructKind::Pause,
        wire::InstructKind::Resume => InstructKind::Resume,
    };
    Some(Instruction {
        id: i.id.as_str().into(),
        kind,
        vmi: i.vmi_uid.as_str().into(),
        pod: i.pod_uid.as_str().into(),
        vmi_rv: ResourceVersion::parse(&i.vmi_rv),
        deadline: Millis(i.deadline_ms),
    })
}

pub(crate) fn to_kind(kind: InstructKind) -> wire::InstructKind {
    match kind {
        InstructKind::Start => wire::InstructKind::Start,
        InstructKind::Shutdown => wire::InstructKind::Shutdown,
        InstructKind::Kill => wire::InstructKind::Kill,
        InstructKind::Pause => wire::InstructKind::Pause,
        InstructKind::Resume => wire::InstructKind::Resume,
    }
}

pub(crate) fn ack(a: wire::Ack) -> Option<AckResult> {
    Some(match a.result? {
        wire::ack::Result::Accepted(_) => AckResult::Accepted,
        wire::ack::Result::Done(d) => AckResult::Done { detail: d.detail },
        wire::ack::Result::Refused(r) => AckResult::Refused {
            reason: RefusalReason::parse(&r.reason),
            message: r.message,
            rv_seen: ResourceVersion::parse(&r.rv_seen),
        },
    })
}

pub(crate) fn to_ack(id: &str, vmi: &str, result: &AckResult) -> wire::Ack {
    let result = match result {
        AckResult::Accepted => wire::ack::Result::Accepted(wire::Accepted {}),
        AckResult::Done { detail } => wire::ack::Result::Done(wire::Done { detail: detail.clone() }),
        AckResult::Refused { reason, message, rv_seen } => wire::ack::Result::Refused(wire::Refused {
            reason: reason.name().into(),
            message: message.clone(),
            rv_seen: rv_seen.to_string(),
        }),
    };
    wire::Ack { id: id.into(), vmi_uid: vmi.into(), result: Some(result) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nothing_is_lost_between_the_launcher_and_the_controller() {
        for state in 1..=7 {
            let d = wire::Domain {
                vmi_uid: "v".into(),
                pod_uid: "p".into(),
                launcher_instance: "l".into(),
                seq: 3,
                state,
                since_unix_ms: 9,
                guest: Some(wire::GuestFacts {
                    agent_connected: true,
                    agent_version: "7".into(),
                    os: Some(wire::OsInfo { id: "debian".into(), ..wire::OsInfo::default() }),
                    hostname: "h".into(),
                    interfaces: vec![wire::Interface {
                        name: "default".into(),
                        ips: vec!["10.0.0.1".into()],
                        ..wire::Interface::default()
                    }],
                    machine_type: "q35".into(),
                    fs_freeze_status: "thawed".into(),
                }),
                paused_reason: "PausedByUser".into(),
                accelerator: "tcg".into(),
                namespace: "ns".into(),
                name: "n".into(),
            };
            assert_eq!(to_domain(&domain(d.clone()).unwrap(), "ns", "n"), d);
        }
        assert_eq!(domain(wire::Domain { state: 99, ..wire::Domain::default() }), None);
        for cause in 1..=7 {
            let o = wire::Outcome {
                cause,
                exit: 137,
                seq: 4,
                message: "m".into(),
                namespace: "ns".into(),
                name: "n".into(),
                ..wire::Outcome::default()
            };
            assert_eq!(to_outcome(&outcome(o.clone()), "ns", "n"), o);
        }
        for result in [AckResult::Accepted, AckResult::Done { detail: "d".into() }] {
            assert_eq!(ack(to_ack("i", "v", &result)), Some(result));
        }
    }
}
