//! From an instruction to a running machine.

use proto::agent::*;
use serde_json::json;

use crate::support::*;

#[tokio::test]
async fn a_start_goes_through_once() {
    let mut world = World::new().await;
    world.start().await;
    let launcher = world.pod().await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "virt-launcher-guest", "namespace": "ns"},
                     "spec": {"nodeName": NODE, "containers": [{"name": "compute", "image": "x"}]}});
    let pod = world.create("/api/v1/namespaces/ns/pods", pod).await;
    let vmi = world.vmi(json!({"phase": "Scheduling"})).await;
    let uid = world.vmi_uid.clone();
    assert_eq!(vmi["metadata"]["uid"], uid);
    let (mut session, inventory) = world.lead().await;
    assert_eq!(inventory.domains.iter().map(Domain::state).collect::<Vec<_>>(), [DomainState::Absent]);
    let vmi = world.patch(VMI_PATH, json!({"status": scheduled()})).await;
    session.instruct(InstructKind::Start, "start-1", &vmi).await;
    assert!(matches!(session.ack("start-1").await, ack::Result::Accepted(_)));
    let order = launcher.orders().remove(0);
    let (instruct, facts) = (order.instruct.unwrap(), order.facts.unwrap());
    assert_eq!((instruct.epoch, instruct.vmi_uid.as_str(), instruct.pod_uid.as_str()), (100, uid.as_str(), POD));
    assert_eq!(
        (facts.accelerator.as_str(), facts.cpu_model.as_str(), facts.pod_ip.as_str()),
        ("tcg", "Nehalem", "10.244.1.7")
    );
    let sent: serde_json::Value = serde_json::from_slice(&instruct.vmi).unwrap();
    assert_eq!(sent["metadata"]["uid"], vmi["metadata"]["uid"]);
    assert_eq!(sent["status"]["activePods"][POD], NODE);
    session.report(DomainState::Starting).await;
    launcher.set(DomainState::Running);
    let domain = session.report(DomainState::Running).await;
    assert_eq!((domain.namespace.as_str(), domain.name.as_str()), ("ns", "guest"));
    // Told again, by this leader and the next: the launcher's answer, and nothing more.
    session.instruct(InstructKind::Start, "start-1", &vmi).await;
    assert!(matches!(session.ack("start-1").await, ack::Result::Accepted(_)));
    let mut next = world.hello(101, "B").await.unwrap();
    let inventory = next.complete_inventory().await;
    assert_eq!(inventory.domains[0].state(), DomainState::Running);
    next.instruct(InstructKind::Start, "start-2", &vmi).await;
    assert_eq!(refused(&next.ack("start-2").await).reason, "already-started");
    // Late words of the old leader.
    session.ended().await;
    // The readiness gate follows the machine. (The pod's UID in the API is not the one the test made up, so the first
    // write was refused by its precondition.)
    let real = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    assert_ne!(real, POD);
    let pod = world.get("/api/v1/namespaces/ns/pods/virt-launcher-guest").await;
    assert!(
        pod["status"]["conditions"]
            .as_array()
            .is_none_or(|c| c.iter().all(|c| c["type"] != "kubevirt.io/virtual-machine-unpaused"))
    );
    world.stop().await;
}

#[tokio::test]
async fn the_readiness_gate_follows_the_machine() {
    let mut world = World::new().await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "virt-launcher-guest", "namespace": "ns"},
                     "spec": {"nodeName": NODE, "containers": [{"name": "compute", "image": "x"}]}});
    let pod = world.create("/api/v1/namespaces/ns/pods", pod).await;
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let mut facts = world.pod_facts().await;
    facts.pod_uid.clone_from(&uid);
    let mut launcher = crate::support::launcher::Launcher::start(&facts.share_dir, &world.vmi_uid, &uid).await;
    world.pods.set(|p| p.push(facts));
    world.vmi(json!({"phase": "Scheduled", "activePods": {uid: NODE}})).await;
    world.start().await;
    let gate = async |world: &World| {
        let pod = world.get("/api/v1/namespaces/ns/pods/virt-launcher-guest").await;
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.into_iter().find(|c| c["type"] == "kubevirt.io/virtual-machine-unpaused");
        (found.map(|c| c["status"].as_str().unwrap().to_owned()), pod["metadata"]["resourceVersion"].clone())
    };
    // Before anybody instructs: the VMI is Scheduled.
    eventually("True", async || gate(&world).await.0.as_deref() == Some("True")).await;
    let version = gate(&world).await.1;
    launcher.set(DomainState::Running);
    let (mut session, _) = world.lead().await;
    // An agent that begins again does not write what stands there.
    world.stop().await;
    session.ended().await;
    world.start().await;
    let (mut session, _) = world.lead().await;
    assert_eq!(gate(&world).await.1, version);
    launcher.set(DomainState::Paused);
    session.report(DomainState::Paused).await;
    eventually("False", async || gate(&world).await.0.as_deref() == Some("False")).await;
    launcher.set(DomainState::Running);
    eventually("True again", async || gate(&world).await.0.as_deref() == Some("True")).await;
    launcher.deaf();
}

#[tokio::test]
async fn the_newest_vmi_decides() {
    let mut world = World::new().await;
    world.start().await;
    let launcher = world.pod().await;
    let scheduled = world.vmi(scheduled()).await;
    let (mut session, _) = world.lead().await;
    // Another pod was chosen after the instruction was written; the agent's own watch knows.
    let newer = world.patch(VMI_PATH, json!({"status": {"activePods": {POD: null, "other": NODE}}})).await;
    eventually("the watch", async || {
        session.instruct(InstructKind::Start, "s", &scheduled).await;
        let r = session.ack("s").await;
        refused(&r).reason == "superseded" && refused(&r).rv_seen == newer["metadata"]["resourceVersion"]
    })
    .await;
    // Older than the instruction itself asks for.
    let mut i = session.instruction(InstructKind::Start, "t", &scheduled);
    i.vmi_rv = "999999999".into();
    session.send(controller_message::Kind::Instruct(i)).await;
    assert_eq!(refused(&session.ack("t").await).reason, "older-vmi");
    // Another VMI's.
    let mut i = session.instruction(InstructKind::Start, "u", &scheduled);
    i.vmi_uid = "another".into();
    session.send(controller_message::Kind::Instruct(i)).await;
    assert_eq!(refused(&session.ack("u").await).reason, "superseded");
    // Another leader's.
    for epoch in [99, 101] {
        let mut i = session.instruction(InstructKind::Start, "v", &scheduled);
        i.epoch = epoch;
        session.send(controller_message::Kind::Instruct(i)).await;
        assert_eq!(refused(&session.ack("v").await).reason, "lower-epoch");
    }
    // Of no kind that is known.
    let mut i = session.instruction(InstructKind::Start, "w", &scheduled);
    i.kind = 77;
    session.send(controller_message::Kind::Instruct(i)).await;
    assert_eq!(refused(&session.ack("w").await).reason, "unsupported");
    assert!(launcher.orders().is_empty());
}

#[tokio::test]
async fn a_pod_that_is_not_here_starts_nothing() {
    let mut world = World::new().await;
    world.start().await;
    let vmi = world.vmi(scheduled()).await;
    let (mut session, inventory) = world.lead().await;
    assert!(inventory.domains.is_empty());
    session.instruct(InstructKind::Start, "s", &vmi).await;
    let result = session.ack("s").await;
    assert_eq!(refused(&result).reason, "failed");
    assert!(refused(&result).message.contains("is not on node"), "{result:?}");
}

#[tokio::test]
async fn a_machine_whose_network_cannot_be_made_is_refused_by_name() {
    let mut world = World::new().await;
    world.start().await;
    let launcher = world.pod().await;
    world.vmi(scheduled()).await;
    let (mut session, _) = world.lead().await;
    let spec = json!({"networks": [{"name": "default", "pod": {}}],
                      "domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}}});
    let vmi = world.patch(VMI_PATH, json!({"spec": spec})).await;
    session.instruct(InstructKind::Start, "s", &vmi).await;
    let result = session.ack("s").await;
    assert_eq!(refused(&result).reason, "unsupported");
    assert!(refused(&result).message.contains("interfaces[0]"), "{result:?}");
    assert!(launcher.orders().is_empty());
}

#[tokio::test]
async fn an_epoch_that_the_lease_lowered_reaches_launchers_that_heard_a_higher_one() {
    let mut world = World::new().await;
    let launcher = world.pod().await;
    launcher.heard_epoch(5000);
    let vmi = world.vmi(scheduled()).await;
    world.start().await;
    let (mut session, _) = world.lead().await;
    session.instruct(InstructKind::Start, "s", &vmi).await;
    assert!(matches!(session.ack("s").await, ack::Result::Accepted(_)));
    assert_eq!(launcher.orders()[0].instruct.as_ref().unwrap().epoch, 5000);
}

#[tokio::test]
async fn a_closed_session_voids_what_it_has_not_started() {
    let mut world = World::new().await;
    world.start().await;
    let mut launcher = world.pod().await;
    let vmi = world.vmi(scheduled()).await;
    launcher.deaf();
    let mut old = world.hello(100, "A").await.unwrap();
    old.instruct(InstructKind::Start, "s", &vmi).await;
    let mut new = world.hello(101, "B").await.unwrap();
    old.ended().await;
    launcher.listen();
    let inventory = new.complete_inventory().await;
    assert_eq!(inventory.domains[0].state(), DomainState::Absent);
    // Something that comes after whatever was left of the start.
    new.instruct(InstructKind::Pause, "p", &vmi).await;
    new.ack("p").await;
    assert!(launcher.order(InstructKind::Start).is_none());
}
