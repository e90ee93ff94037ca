//! The life of a machine, for benchmarks.

use serde_json::{Value, json};
use state::{
    Event,
    domain::{GuestFacts, InterfaceFacts, OsInfo},
    object::Kind,
    vm::{Input, model::World},
};

/// A machine as people write it: two volumes, a network, a guest agent.
pub fn vm() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "0d2ba0a1-6f3a-4d6c-8f63-0b8fd0b4f001", "generation": 1,
            "creationTimestamp": "1970-01-01T00:00:00Z", "finalizers": [api::names::FINALIZER_VM],
            "annotations": {"virtfold.io/traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
        "spec": {"runStrategy": "Always", "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
            "domain": {
                "memory": {"guest": "1Gi"}, "cpu": {"cores": 2},
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}, {"name": "init", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                }},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "containerDisk": {"image": "registry.local/linux:1"}},
                {"name": "init", "cloudInitNoCloud": {"userData": "#cloud-config"}}],
            "terminationGracePeriodSeconds": 5}}},
    })
}

/// The guest agent connects and tells what it knows.
pub fn connect_guest(w: &mut World) {
    let text = |t: &str| t.to_owned();
    let pods: Vec<_> = w.launchers.iter().filter(|(_, l)| l.outcome.is_none()).map(|(pod, _)| pod.clone()).collect();
    for pod in pods {
        w.say(&pod, |l| {
            l.guest = GuestFacts {
                agent_connected: true,
                agent_version: text("9.2"),
                os: OsInfo { name: text("Linux"), id: text("linux"), version: text("1"), ..OsInfo::default() },
                hostname: text("web"),
                interfaces: vec![InterfaceFacts {
                    name: text("default"),
                    mac: text("52:54:00:00:00:01"),
                    ip: text("10.0.0.2"),
                    ips: vec![text("10.0.0.2"), text("fd00::2")],
                    interface_name: text("eth0"),
                    info_source: text("domain, guest-agent"),
                    queue_count: 1,
                    pod_interface_name: text("eth0"),
                    link_state: text("up"),
                }],
                machine_type: text("q35"),
                ..GuestFacts::default()
            };
        });
    }
}

/// Everything until nothing moves. As a driver hears it: the answer to a write before the watch that shows the same.
pub fn settle(w: &mut World, horizon: u64) {
    let end = w.now + horizon;
    loop {
        if !w.settled.is_empty() {
            let (id, result) = w.settled.remove(0);
            w.feed(Input::Settled { id, result });
        } else if let Some(at) = w.flying.iter().position(|c| c.id().is_some()) {
            let command = w.flying.remove(at);
            let settled = w.carry_out(command);
            w.settled.extend(settled);
        } else if w.settle_one() {
        } else if let Some(at) = w.wake.filter(|at| *at <= end) {
            w.now = w.now.max(at);
            w.wake = None;
            w.feed(Input::Elapsed);
        } else {
            w.now = end;
            return;
        }
    }
}

/// What a driver hears in one life: created, runs, its guest agent connects, the controller is taken over by another, it is stopped,
/// started again, restarted, deleted. With each, whether another controller begins there.
// Not every benchmark needs whole lives.
#[allow(dead_code)]
pub fn lives() -> Vec<(bool, Event<Input>)> {
    let mut w = World::with(vm());
    settle(&mut w, 10_000);
    assert_eq!(w.printable(), "Running");
    connect_guest(&mut w);
    settle(&mut w, 10_000);
    w.restart();
    settle(&mut w, 10_000);
    w.edit(Kind::VirtualMachine, json!({"metadata": {"generation": 2}, "spec": {"runStrategy": "Halted"}}));
    settle(&mut w, 30_000);
    assert_eq!(w.printable(), "Stopped");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"generation": 3}, "spec": {"runStrategy": "Always"}}));
    settle(&mut w, 30_000);
    assert_eq!(w.printable(), "Running");
    connect_guest(&mut w);
    settle(&mut w, 30_000);
    let again = w.restart_request();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": again}}));
    settle(&mut w, 60_000);
    assert_eq!(w.printable(), "Running");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:20:00Z"}}));
    settle(&mut w, 60_000);
    assert!(w.cell.is_empty());
    w.tape
}
