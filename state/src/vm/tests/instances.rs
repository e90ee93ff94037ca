//! What happens to a VMI when: section 2 of the behaviour reference.

use super::{condition, pod_uid, running, vmi, vmobj};
use crate::vm::{
    Command, Input, Order, Report, Sight,
    model::{Launcher, World, vm},
};
use crate::{
    Timestamp,
    domain::{Cause, DomainState, InterfaceFacts, OsInfo, Outcome},
    object::{Kind, Settled},
    observe::Phase,
};
use serde_json::{Value, json};

fn yes(reason: &str) -> Option<(String, String)> {
    Some(("True".into(), reason.into()))
}

fn no(reason: &str) -> Option<(String, String)> {
    Some(("False".into(), reason.into()))
}

fn phases(w: &World) -> Vec<String> {
    let all = vmi(w)["status"]["phaseTransitionTimestamps"].as_array().cloned().unwrap_or_default();
    all.iter().map(|t| t["phase"].as_str().unwrap().to_owned()).collect()
}

/// A VMI of a VM that runs once, at the point where its pod exists and no node has it.
fn scheduling() -> World {
    let mut w = World::with(vm("Once"));
    w.kubelet = false;
    w.settle(2_000);
    assert_eq!(w.phase(), "Scheduling");
    w
}

fn compute(state: Value) -> Value {
    json!({"status": {"phase": "Running", "containerStatuses": [{"name": "compute", "state": state}]}})
}

#[test]
fn rule_2_3_each_phase_has_its_trigger_and_is_recorded_once() {
    let mut m = vm("Once");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    w.kubelet = false;
    w.settle(5_000);
    assert_eq!(w.phase(), "Pending", "no pod without its claim");
    w.put(Kind::PersistentVolumeClaim, json!({"metadata": {"name": "c1", "namespace": "ns", "uid": "c"}}));
    w.settle(5_000);
    assert_eq!(w.phase(), "Scheduling", "the pod exists");
    w.edit(Kind::Pod, json!({"spec": {"nodeName": "n1"}}));
    w.settle(5_000);
    assert_eq!(w.phase(), "Scheduling", "it is placed, and does not run");
    w.agent_up = false;
    w.edit(Kind::Pod, compute(json!({"running": {}})));
    w.settle(5_000);
    assert_eq!(w.phase(), "Scheduled", "the launcher runs");
    w.kubelet = true;
    w.edit(Kind::Pod, json!({"status": null}));
    w.settle(1_000);
    w.connect();
    w.settle(20_000);
    assert_eq!(w.phase(), "Running", "the domain runs");
    let pod = pod_uid(&w);
    w.end(&pod, Cause::GuestShutdown);
    w.settle(20_000);
    assert_eq!(w.phase(), "Succeeded");
    assert_eq!(phases(&w), ["Pending", "Scheduling", "Scheduled", "Running", "Succeeded"]);
    let times: Vec<Value> = vmi(&w)["status"]["phaseTransitionTimestamps"].as_array().unwrap().clone();
    let times: Vec<_> = times.iter().map(|t| t["phaseTransitionTimestamp"].as_str().unwrap().to_owned()).collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn rule_2_3_what_befalls_the_pod_before_the_start_fails_the_vmi() {
    let terminated = json!({"terminated": {"exitCode": 1, "reason": "Error"}});
    for (pod, reason) in [
        (json!({"status": {"phase": "Failed", "reason": "Evicted"}}), "LauncherFailed"),
        (json!({"status": {"phase": "Succeeded"}}), "LauncherFailed"),
        (compute(terminated), "LauncherFailed"),
        (json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}), "PodTerminating"),
    ] {
        let mut w = scheduling();
        w.edit(Kind::Pod, pod.clone());
        w.settle(2_000);
        assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some(reason)), "{pod}");
        assert_eq!(phases(&w), ["Pending", "Scheduling", "Failed"], "{pod}");
    }
    // The pod is gone, and a live read says so.
    let mut w = scheduling();
    let pod = w.get(Kind::Pod).unwrap().clone();
    w.objects.retain(|(kind, _), _| *kind != Kind::Pod);
    w.sights.push(Sight::Vanished(crate::observe::object(Kind::Pod, &pod).unwrap().reference()));
    w.settle(2_000);
    assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some("PodRemoved")));
}

#[test]
fn rule_2_3_a_vmi_that_is_deleted_before_it_has_a_pod_fails_and_goes() {
    let mut m = vm("Manual");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
    w.settle(5_000);
    assert_eq!(w.phase(), "Pending");
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(20_000);
    assert!(w.writes.iter().any(|x| x == "patch VirtualMachineInstance Failed"), "{:?}", w.writes);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"));
}

#[test]
fn rule_2_3_every_container_of_the_pod_has_to_be_ready_before_the_start() {
    for (other, phase) in [
        (json!({"name": "sidecar", "ready": false, "state": {"running": {}}}), "Scheduling"),
        (json!({"name": "sidecar", "ready": true, "state": {"running": {}}}), "Scheduled"),
        // It is ready only once it has reached somebody, perhaps the guest.
        (json!({"name": "istio-proxy", "ready": false, "state": {"running": {}}}), "Scheduled"),
        (json!({"name": "istio-proxy", "ready": false, "state": {"waiting": {}}}), "Scheduling"),
    ] {
        let mut w = scheduling();
        w.agent_up = false;
        let statuses = json!([{"name": "compute", "ready": false, "state": {"running": {}}}, other]);
        w.edit(
            Kind::Pod,
            json!({"spec": {"nodeName": "n1"}, "status": {"phase": "Running", "containerStatuses": statuses}}),
        );
        w.settle(5_000);
        assert_eq!(w.phase(), phase, "{other}");
    }
}

#[test]
fn rule_2_3_the_cause_of_the_end_decides_between_succeeded_and_failed() {
    use Cause::*;
    let table: &[(Cause, i64, bool, Phase)] = &[
        (GuestShutdown, 5, true, Phase::Succeeded),
        (GuestShutdown, 0, true, Phase::Succeeded),
        (Crashed, 5, true, Phase::Failed),
        (Panicked, 0, true, Phase::Failed),
        (OutcomeUnknown, 5, true, Phase::Failed),
        (StartFailed, 5, true, Phase::Failed),
        // Killed although a shutdown in order was promised; or because nothing was.
        (KilledAfterGrace, 5, true, Phase::Failed),
        (KilledAfterGrace, 5, false, Phase::Succeeded),
        (Destroyed, 5, true, Phase::Failed),
        (Destroyed, 0, true, Phase::Succeeded),
        (Destroyed, 5, false, Phase::Succeeded),
    ];
    for (cause, grace, acpi, phase) in table {
        let mut m = vm("Once");
        m["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        if !acpi {
            m["spec"]["template"]["spec"]["domain"]["features"] = json!({"acpi": {"enabled": false}});
        }
        let mut w = World::with(m);
        w.settle(10_000);
        assert_eq!(w.phase(), "Running");
        let pod = pod_uid(&w);
        w.end(&pod, *cause);
        w.settle(10_000);
        assert_eq!(w.phase(), phase.name(), "{cause:?} with grace {grace} and ACPI {acpi}");
        let reason = (*phase == Phase::Failed).then(|| json!(cause.name()));
        assert_eq!(vmi(&w)["status"].get("reason").filter(|r| !r.is_null()).cloned(), reason, "{cause:?}");
    }
}

#[test]
fn rule_2_3_a_final_phase_absorbs_whatever_comes_later() {
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.end(&pod, Cause::GuestShutdown);
    w.settle(10_000);
    assert_eq!(w.phase(), "Succeeded");
    let n = w.writes.len();
    w.say(&pod, |l| l.state = Some(DomainState::Running));
    w.settle(10_000);
    w.say(&pod, |l| l.state = Some(DomainState::Absent));
    w.connect();
    w.settle(60_000);
    assert_eq!(w.phase(), "Succeeded");
    assert!(w.writes[n..].iter().all(|x| !x.contains("VirtualMachineInstance")), "{:?}", &w.writes[n..]);
}

#[test]
fn rule_2_5_ready_says_what_is_missing() {
    // No pod.
    let mut m = vm("Once");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    w.settle(5_000);
    assert_eq!(condition(&vmi(&w), "Ready"), no("PodNotExists"));
    // A pod, and no guest.
    let w = scheduling();
    assert_eq!(condition(&vmi(&w), "Ready"), no("GuestNotRunning"));
    // A guest: the pod's own word, whatever it is.
    let mut w = running("Once");
    assert_eq!(condition(&vmi(&w), "Ready"), yes(""));
    w.kubelet = false;
    for (pod, want) in [
        (json!([{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]), no("ContainersNotReady")),
        (json!([]), no("PodConditionMissing")),
        (json!([{"type": "Ready", "status": "True"}]), yes("")),
    ] {
        w.edit(Kind::Pod, json!({"status": {"conditions": pod}}));
        w.settle(5_000);
        assert_eq!(condition(&vmi(&w), "Ready"), want, "{pod}");
        assert_eq!(condition(&vmobj(&w), "Ready"), want, "{pod}: and the VM says the same");
    }
    w.edit(Kind::Pod, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(5_000);
    assert_eq!(condition(&vmi(&w), "Ready"), no("PodTerminating"));
    assert_eq!(w.phase(), "Running", "the guest shuts down");
    // It ended.
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.end(&pod, Cause::Panicked);
    w.settle(10_000);
    assert_eq!(condition(&vmi(&w), "Ready"), no("GuestNotRunning"));
    let ready = vmi(&w)["status"]["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Ready").cloned();
    assert!(ready.unwrap()["message"].as_str().unwrap().contains("Panicked"));
}

#[test]
fn rule_2_5_a_text_that_changes_is_written_although_status_and_reason_stay() {
    let mut w = scheduling();
    for text in ["0/1 nodes are available: 1 Insufficient memory", "0/2 nodes are available: 2 Insufficient cpu"] {
        let cond = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}]);
        w.edit(Kind::Pod, json!({"status": {"conditions": cond}}));
        w.settle(5_000);
        let v = vmi(&w);
        let c = v["status"]["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "PodScheduled").unwrap();
        assert_eq!(c["message"], text);
    }
    // It is a copy of what is wrong, and gone with it.
    w.kubelet = true;
    w.edit(Kind::Pod, json!({"status": null}));
    w.settle(10_000);
    assert_eq!(w.phase(), "Running");
    assert_eq!(condition(&vmi(&w), "PodScheduled"), None);
}

#[test]
fn rule_2_5_paused_and_agent_conditions_come_and_go_with_their_cause() {
    let mut w = running("Always");
    let pod = pod_uid(&w);
    for (reason, want) in [("PausedByUser", "PausedByUser"), ("PausedIOError", "PausedIOError"), ("", "PausedByUser")] {
        w.say(&pod, |l| (l.state, l.paused_reason) = (Some(DomainState::Paused), reason.into()));
        w.settle(3_000);
        assert_eq!(condition(&vmi(&w), "Paused"), yes(want), "{reason}");
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Paused"));
        // Nobody knows better while nobody can be asked.
        w.say(&pod, |l| l.state = Some(DomainState::Deaf));
        w.settle(3_000);
        assert_eq!(condition(&vmi(&w), "Paused"), yes(want), "{reason}");
        assert_eq!(condition(&vmi(&w), "Ready"), no("NodeUnresponsive"));
        assert_eq!(w.phase(), "Running", "a launcher that does not answer is not dead");
        w.say(&pod, |l| (l.state, l.paused_reason) = (Some(DomainState::Running), String::new()));
        w.settle(3_000);
        assert_eq!(condition(&vmi(&w), "Paused"), None, "{reason}");
        assert_eq!(w.printable(), "Running");
    }
    w.say(&pod, |l| l.guest.agent_connected = true);
    w.settle(3_000);
    assert_eq!(condition(&vmi(&w), "AgentConnected"), yes(""));
    assert_eq!(condition(&vmi(&w), "AgentVersionNotSupported"), None);
    w.say(&pod, |l| l.guest.agent_lacks = vec!["guest-get-users".into()]);
    w.settle(3_000);
    assert_eq!(condition(&vmi(&w), "AgentVersionNotSupported"), yes("CommandsMissing"));
    assert_eq!(condition(&vmobj(&w), "AgentConnected"), yes(""), "the VM mirrors it");
    w.say(&pod, |l| l.guest.agent_connected = false);
    w.settle(3_000);
    assert_eq!(condition(&vmi(&w), "AgentConnected"), None);
    assert_eq!(condition(&vmi(&w), "AgentVersionNotSupported"), None, "of no agent nothing is known");
    for kind in ["LiveMigratable", "StorageLiveMigratable"] {
        assert_eq!(condition(&vmi(&w), kind), no("NotMigratable"));
    }
}

#[test]
fn rule_2_7_and_2_11_the_status_tells_what_the_guest_and_its_pod_are() {
    let mut m = vm("Always");
    m["spec"]["template"]["spec"]["volumes"] = json!([
        {"name": "system", "containerDisk": {"image": "i:1"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "c1"}},
        {"name": "cd", "emptyDisk": {"capacity": "1Gi"}}]);
    m["spec"]["template"]["spec"]["domain"]["devices"]["disks"] = json!([
        {"name": "system", "disk": {"bus": "virtio"}}, {"name": "cd", "cdrom": {"bus": "sata"}},
        {"name": "data", "disk": {"bus": "virtio"}}]);
    let mut w = World::with(m);
    w.put(
        Kind::PersistentVolumeClaim,
        json!({"metadata": {"name": "c1", "namespace": "ns", "uid": "c"},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}}),
    );
    w.settle(10_000);
    assert_eq!(w.phase(), "Running");
    let writes = w.writes.len();
    let s = vmi(&w)["status"].clone();
    let claim = json!({"claimName": "c1", "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
        "capacity": {"storage": "2Gi"}, "requests": {"storage": "1Gi"}});
    assert_eq!(
        s["volumeStatus"],
        json!([{"name": "cd", "target": "sda"}, {"name": "data", "target": "vdb", "persistentVolumeClaimInfo": claim},
            {"name": "system", "target": "vda"}])
    );
    let overhead = w.get(Kind::Pod).unwrap()["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].clone();
    assert!(overhead.as_str().unwrap().parse::<u64>().unwrap() > 0);
    assert_eq!(s["memory"]["memoryOverhead"], overhead);
    assert_eq!(s["launcherContainerImageVersion"], w.get(Kind::Pod).unwrap()["spec"]["containers"][0]["image"]);
    assert_eq!(vmi(&w)["metadata"]["annotations"]["virtfold.io/boot-id"], "boot-1");
    let pod = pod_uid(&w);
    w.say(&pod, |l| {
        l.guest.machine_type = "pc-q35-9.2".into();
        l.guest.os = OsInfo { id: "debian".into(), version_id: "13".into(), ..OsInfo::default() };
        l.guest.fs_freeze_status = "frozen".into();
        l.guest.interfaces = vec![InterfaceFacts {
            name: "default".into(),
            mac: "02:00:00:00:00:01".into(),
            ip: "10.1.0.2".into(),
            ips: vec!["10.1.0.2".into()],
            interface_name: "eth0".into(),
            info_source: "domain, guest-agent".into(),
            queue_count: 1,
            pod_interface_name: "eth0".into(),
            link_state: "up".into(),
        }];
    });
    w.settle(5_000);
    let s = vmi(&w)["status"].clone();
    assert_eq!(s["machine"], json!({"type": "pc-q35-9.2"}));
    assert_eq!(s["guestOSInfo"], json!({"id": "debian", "versionId": "13"}));
    assert_eq!(s["fsFreezeStatus"], "frozen");
    assert_eq!(
        s["interfaces"],
        json!([{"name": "default", "mac": "02:00:00:00:00:01", "ipAddress": "10.1.0.2", "ipAddresses": ["10.1.0.2"],
            "interfaceName": "eth0", "infoSource": "domain, guest-agent", "queueCount": 1, "podInterfaceName": "eth0",
            "linkState": "up"}])
    );
    assert_eq!(w.writes.len(), writes + 1, "in one write: {:?}", &w.writes[writes..]);
}

#[test]
fn rule_2_9_a_deletion_shuts_the_guest_down_within_its_grace_or_kills_at_once() {
    for (grace, kind) in [(5, "shutdown"), (0, "kill")] {
        let mut m = vm("Always");
        m["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        let mut w = World::with(m);
        w.settle(10_000);
        w.edit(Kind::VirtualMachine, json!({"spec": {"runStrategy": "Halted"}}));
        let mut told = vec![];
        for _ in 0..20 {
            for c in &w.flying {
                if let Command::Instruct { order: Order::Do(i), .. } = c {
                    told.push((i.kind.name(), i.deadline.0));
                }
            }
            if !told.is_empty() {
                break;
            }
            w.settle_one();
        }
        assert_eq!(told, [(kind, grace * 1000)]);
        w.settle(30_000);
        assert_eq!(w.phase(), "", "{kind}");
    }
}

#[test]
fn rule_2_9_a_pod_that_somebody_deletes_ends_its_guest_in_order() {
    for (obeys, phase) in [(true, "Succeeded"), (false, "Failed")] {
        let mut w = running("Once");
        w.guest_obeys = obeys;
        w.edit(Kind::Pod, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
        w.settle(90_000);
        assert_eq!(w.phase(), phase);
    }
}

#[test]
fn rule_2_9_a_node_that_was_booted_again_has_ended_what_ran_there() {
    let reboot = |w: &mut World| {
        w.launchers.clear();
        w.boot_id = "boot-2".into();
        w.connect();
    };
    let mut w = running("Once");
    assert_eq!(vmi(&w)["metadata"]["annotations"]["virtfold.io/boot-id"], "boot-1");
    w.kubelet = false;
    w.connect();
    w.settle(60_000);
    assert_eq!(w.phase(), "Running", "a session of the same boot says nothing");
    reboot(&mut w);
    w.settle(1_000);
    assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some("NodeRebooted")));
    // Also to a controller that was not there.
    let mut w = running("Once");
    w.kubelet = false;
    w.launchers.clear();
    w.boot_id = "boot-2".into();
    w.restart();
    w.settle(1_000);
    assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some("NodeRebooted")));
    // A guest that is seen running is not over, whatever stands in the VMI.
    let mut w = running("Once");
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"annotations": {"virtfold.io/boot-id": "another"}}}));
    w.restart();
    w.settle(60_000);
    assert_eq!(w.phase(), "Running");
    // How it ended is better known where it was told: a machine that is shut down in order shuts its guests down.
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.agent_up = false;
    w.end(&pod, Cause::GuestShutdown);
    w.boot_id = "boot-2".into();
    w.connect();
    w.settle(10_000);
    assert_eq!(w.phase(), "Succeeded");
    // And a strategy that restarts does so elsewhere or there.
    let mut w = running("Always");
    let first = vmi(&w)["metadata"]["uid"].clone();
    reboot(&mut w);
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "{:?}", w.writes);
    assert_ne!(vmi(&w)["metadata"]["uid"], first);
    w.check();
}

#[test]
fn rule_2_9_a_launcher_that_speaks_in_the_new_boot_is_not_of_the_one_before() {
    // The node is booted again before its agent's session is known to be over, and the pod begins in the new boot.
    let mut w = World::with(vm("Once"));
    while w.get(Kind::Pod).is_none_or(|p| p["spec"].get("nodeName").is_none()) || w.told_interests.is_empty() {
        assert!(w.settle_one(), "{:?}", w.writes);
    }
    w.agent_up = false;
    w.boot_id = "boot-2".into();
    w.settle(30_000);
    assert_eq!(w.phase(), "Scheduled");
    assert_eq!(vmi(&w)["metadata"].get("annotations").and_then(|a| a.get("virtfold.io/boot-id")), None);
    w.connect();
    w.settle(30_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    assert_eq!(vmi(&w)["metadata"]["annotations"]["virtfold.io/boot-id"], "boot-2");
    // Whatever the VMI says, and before the guest is started, too.
    let mut w = World::with(vm("Once"));
    while w.phase() != "Scheduled" {
        assert!(w.settle_one(), "{:?}", w.writes);
    }
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"annotations": {"virtfold.io/boot-id": "another"}}}));
    w.restart();
    w.settle(30_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
}

#[test]
fn the_outcome_of_an_instance_that_is_over_is_acknowledged_although_another_one_is_made() {
    let mut w = World::with(vm("Always"));
    w.settle_one();
    let outcome = Outcome {
        vmi: "before".into(),
        pod: "pod-before".into(),
        cause: Cause::GuestShutdown,
        exit: 0,
        seq: 3,
        message: String::new(),
        at: Timestamp(w.now),
    };
    let launcher = Launcher { vmi: "before".into(), outcome: Some(outcome.clone()), lost: true, ..Launcher::default() };
    w.launchers.insert("pod-before".into(), launcher);
    // A new leader hears it while its creation of the next one is on its way.
    assert!(w.flying.iter().any(|c| matches!(c, Command::Create { .. })), "{:?}", w.flying);
    w.feed(Input::Reported(Report::Outcome { node: "n1".into(), outcome }));
    w.settle(30_000);
    assert_eq!(w.phase(), "Running");
    assert!(w.launchers["pod-before"].acknowledged, "{:?}", w.writes);
    assert!(w.cell.outcomes.is_empty(), "nothing of it is left");
}

#[test]
fn nothing_is_started_that_is_about_to_be_called_failed() {
    let mut w = World::with(vm("Once"));
    while w.phase() != "Scheduled" {
        assert!(w.settle_one(), "{:?}", w.writes);
    }
    // Its agent cannot start it, and the write that says so is late.
    let pod = pod_uid(&w);
    w.kubelet = false;
    w.launchers.get_mut(&pod).unwrap().lost = true;
    w.answers.insert(Kind::VirtualMachineInstance, Settled::Unknown);
    w.settle(5_000);
    assert_eq!(w.phase(), "Scheduled");
    // The next session would find that it can be started, after all.
    w.launchers.get_mut(&pod).unwrap().lost = false;
    w.connect();
    w.settle(5_000);
    assert_eq!(w.launchers[&pod].starts, 0);
    w.answers.clear();
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some("StartFailed")));
    assert_eq!(w.launchers[&pod].starts, 0);
}

#[test]
fn rule_2_9_a_bare_vmi_stays_as_it_ended_until_somebody_deletes_it() {
    let mut w = World::with_bare();
    w.settle(5_000);
    let pod = pod_uid(&w);
    w.end(&pod, Cause::Crashed);
    w.settle(24 * 3_600_000);
    assert_eq!(w.phase(), "Failed");
    assert!(vmi(&w)["metadata"].get("deletionTimestamp").is_none() && w.get(Kind::Pod).is_some());
    assert!(w.launchers[&pod].acknowledged);
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(30_000);
    assert!(w.objects.is_empty() && w.cell.is_empty(), "{:?}", w.writes);
}

#[test]
fn rule_2_3_a_panic_of_the_guest_is_told_in_event_and_condition() {
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.end_with(&pod, Cause::Panicked, "the guest's kernel panicked");
    w.settle(10_000);
    assert_eq!((w.phase().as_str(), vmi(&w)["status"]["reason"].as_str()), ("Failed", Some("Panicked")));
    let v = vmi(&w);
    let ready = v["status"]["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Ready").unwrap();
    assert!(ready["message"].as_str().unwrap().contains("the guest's kernel panicked"), "{ready}");
    assert!(w.texts.iter().any(|t| t.contains("the guest's kernel panicked")), "{:?}", w.texts);
}

#[test]
fn rule_1_13_annotations_for_a_descheduler_follow_the_template_into_instance_and_pod() {
    let (evict, other) = ("descheduler.alpha.kubernetes.io/evict", "example.com/other");
    let mut w = running("Always");
    let pod = pod_uid(&w);
    let seen = |w: &World, kind: Kind, key: &str| w.get(kind).unwrap()["metadata"]["annotations"].get(key).cloned();
    let template = |value: Value| json!({"template": {"metadata": {"annotations": {evict: value, other: "x"}}}});
    for (value, shown) in
        [(json!("true"), Some(json!("true"))), (json!("false"), Some(json!("false"))), (Value::Null, None)]
    {
        let n = w.writes.len();
        w.edit_spec(template(value));
        w.settle(10_000);
        for kind in [Kind::VirtualMachineInstance, Kind::Pod] {
            assert_eq!(seen(&w, kind, evict), shown, "{kind:?}");
            assert_eq!(seen(&w, kind, other), None, "the rest comes with the next start");
        }
        let pods = w.writes[n..].iter().filter(|x| x.starts_with("patch Pod")).count();
        assert_eq!((pods, pod_uid(&w)), (1, pod.clone()), "{:?}", &w.writes[n..]);
        let n = w.writes.len();
        w.restart();
        w.settle(60_000);
        assert_eq!(w.writes[n..], [] as [&str; 0]);
    }
    // With the start it is there from the beginning.
    let mut m = vm("Always");
    m["spec"]["template"]["metadata"] = json!({"annotations": {evict: "true"}});
    let mut w = World::with(m);
    w.settle(10_000);
    assert_eq!(seen(&w, Kind::Pod, evict), Some(json!("true")));
    assert!(!w.writes.iter().any(|x| x.starts_with("patch Pod")), "{:?}", w.writes);
}

#[test]
fn rule_3_8_an_instance_that_has_to_leave_its_node_says_so_and_its_pod_too() {
    let key = "descheduler.alpha.kubernetes.io/eviction-in-progress";
    let mut w = running("Always");
    let seen = |w: &World| w.get(Kind::Pod).unwrap()["metadata"]["annotations"].get(key).cloned();
    for (node, told, marked) in
        [(json!("n1"), yes("EvictionRequested"), Some(json!("true"))), (Value::Null, None, None)]
    {
        w.edit(Kind::VirtualMachineInstance, json!({"status": {"evacuationNodeName": node}}));
        w.settle(10_000);
        assert_eq!(condition(&vmi(&w), "EvictionRequested"), told);
        assert_eq!(condition(&vmobj(&w), "EvictionRequested"), told);
        assert_eq!(seen(&w), marked);
        assert_eq!(vmi(&w)["status"].get("evacuationNodeName").cloned().unwrap_or_default(), node, "the gateway's");
        assert_eq!(w.phase(), "Running");
    }
}

#[test]
fn rule_2_11_a_launcher_of_another_image_is_labelled() {
    use crate::vm::{ClusterConfig, Fact, Input};
    let mut w = running("Always");
    let label = |w: &World| vmi(w)["metadata"]["labels"].get("kubevirt.io/outdatedLauncherImage").cloned();
    let image = vmi(&w)["status"]["launcherContainerImageVersion"].as_str().unwrap().to_owned();
    for (today, shown) in [("virtfold/launcher:next", Some(json!(""))), (&image, None)] {
        let n = w.writes.len();
        w.feed(Input::Configured(Fact::Cluster(ClusterConfig { launcher_image: today.into(), ..Default::default() })));
        w.settle(10_000);
        assert_eq!((label(&w), w.writes.len()), (shown, n + 1), "{today}: {:?}", &w.writes[n..]);
        assert_eq!(w.phase(), "Running");
    }
}

#[test]
fn rule_2_5_emulation_is_told() {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    let (pod, now) = (pod_uid(&w), w.now);
    assert_eq!(condition(&vmi(&w), "SoftwareEmulation"), yes("NoAcceleration"));
    assert_eq!(condition(&vmobj(&w), "SoftwareEmulation"), yes("NoAcceleration"));
    let accelerated = crate::domain::Domain {
        accelerator: "kvm".into(),
        seq: 1_000,
        since: crate::Timestamp(now),
        ..w.cell.domain().cloned().unwrap()
    };
    assert_eq!(accelerated.pod.as_str(), pod);
    w.feed(crate::vm::Input::Reported(crate::vm::Report::Domain { node: "n1".into(), domain: accelerated.into() }));
    w.settle(10_000);
    assert_eq!(condition(&vmi(&w), "SoftwareEmulation"), None);
}
