//! Failures that the protocol between controllers, agents and launchers is there to prevent.

use super::{pod_uid, running, vmi};
use crate::vm::{
    Input, Report,
    model::{World, vm},
};
use crate::{
    LauncherInstance, ResourceVersion, Timestamp, VmiUid,
    domain::{Cause, Domain, DomainState, GuestFacts},
    object::{Kind, Settled},
};
use std::sync::Arc;

#[test]
fn what_a_deposed_leader_makes_late_for_a_halted_machine_never_starts() {
    let mut made = World::with(vm("Always"));
    while made.get(Kind::Pod).is_none() {
        assert!(made.settle_one(), "{:?}", made.writes);
    }
    let (late_vmi, late_pod) = (vmi(&made), made.get(Kind::Pod).unwrap().clone());
    // Its instance, its pod, or both land after the machine was halted.
    for (with_vmi, with_pod) in [(true, false), (false, true), (true, true)] {
        let mut w = World::with(vm("Halted"));
        w.settle(5_000);
        if with_vmi {
            w.put(Kind::VirtualMachineInstance, late_vmi.clone());
        }
        if with_pod {
            w.put(Kind::Pod, late_pod.clone());
        }
        w.settle(120_000);
        assert!(w.launchers.values().all(|l| l.starts == 0), "{with_vmi} {with_pod}: {:?}", w.writes);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"), "{with_vmi} {with_pod}");
    }
}

#[test]
fn a_new_leader_believes_no_absence_before_the_inventory_is_complete() {
    let mut w = running("Always");
    let pod = pod_uid(&w);
    let uid = vmi(&w)["metadata"]["uid"].as_str().unwrap().to_owned();
    w.restart();
    // An agent that has just begun: it has not reached the launcher yet.
    w.reports.clear();
    let domain = Arc::new(Domain {
        vmi: VmiUid(uid.clone()),
        pod: pod.as_str().into(),
        launcher: LauncherInstance::default(),
        seq: 0,
        state: DomainState::Absent,
        since: Timestamp(w.now),
        guest: GuestFacts::default(),
        paused_reason: String::new(),
        accelerator: String::new(),
    });
    w.feed(Input::Reported(Report::Domain { node: "n1".into(), domain }));
    w.feed(Input::Reported(Report::Inventory {
        node: "n1".into(),
        session: w.session,
        complete: false,
        reflector_rv: ResourceVersion(w.rv),
        boot_id: w.boot_id.clone(),
    }));
    w.settle(120_000);
    assert_eq!((w.phase().as_str(), w.pods_ever.len()), ("Running", 1), "{:?}", w.writes);
    w.connect();
    w.settle(10_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
    assert_eq!(vmi(&w)["metadata"]["uid"], uid.as_str());
}

#[test]
fn an_outcome_is_acknowledged_only_after_the_write_that_records_it() {
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.kubelet = false;
    for answer in [Settled::Unknown, Settled::Conflict] {
        w.answers.insert(Kind::VirtualMachineInstance, answer.clone());
        w.end(&pod, Cause::GuestShutdown);
        w.settle(20_000);
        assert!(!w.launchers[&pod].acknowledged, "{answer:?}");
        assert_eq!(w.phase(), "Running");
    }
    w.answers.clear();
    w.settle(60_000);
    assert_eq!(w.phase(), "Succeeded");
    assert!(w.launchers[&pod].acknowledged);
}
