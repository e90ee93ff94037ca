//! What an agent does on its own: downwards only, and never because something is missing.

use std::sync::atomic::Ordering;

use proto::agent::*;
use serde_json::{Value, json};

use crate::support::launcher::Launcher;
use crate::support::*;

/// A machine that runs, without a controller.
async fn running() -> (World, Launcher) {
    let mut world = World::new().await;
    let launcher = world.pod().await;
    world.vmi(json!({"phase": "Running", "activePods": {POD: NODE}})).await;
    launcher.set(DomainState::Running);
    world.start().await;
    // The agent knows the machine and the VMI.
    let (session, inventory) = world.lead().await;
    assert_eq!(inventory.domains[0].state(), DomainState::Running);
    drop(session);
    (world, launcher)
}

/// The agent has read the VMI live for the nth time, and its hub has gone on since.
async fn asked(world: &World, times: usize) {
    eventually("a live read", async || world.reads.load(Ordering::Relaxed) >= times).await;
    for _ in 0..3 {
        let (_session, inventory) = world.lead().await;
        assert_eq!(inventory.domains[0].state(), DomainState::Running);
    }
}

fn stopped(launcher: &Launcher) -> bool {
    launcher.order(InstructKind::Shutdown).is_some() || launcher.order(InstructKind::Kill).is_some()
}

#[tokio::test]
async fn a_vmi_that_is_seen_being_deleted_is_shut_down_within_its_grace() {
    let (mut world, launcher) = running().await;
    world.request("DELETE", VMI_PATH, "application/json", &Value::Null).await.unwrap();
    eventually("a shutdown", async || launcher.order(InstructKind::Shutdown).is_some()).await;
    let shutdown = launcher.order(InstructKind::Shutdown).unwrap();
    assert_eq!(shutdown.deadline_ms, 7000);
    // The controller's own instruction is the same one.
    let vmi = world.get(VMI_PATH).await;
    let (mut session, _) = world.lead().await;
    session.instruct(InstructKind::Shutdown, &shutdown.id, &vmi).await;
    assert!(matches!(session.ack(&shutdown.id).await, ack::Result::Accepted(_)));
    // Somebody loses patience.
    world.patch(VMI_PATH, json!({"spec": {"terminationGracePeriodSeconds": 0}})).await;
    eventually("a kill", async || launcher.order(InstructKind::Kill).is_some()).await;
    assert!(launcher.order(InstructKind::Start).is_none());
    world.stop().await;
}

#[tokio::test]
async fn an_edited_label_an_emptied_status_and_a_lost_vmi_stop_nobody() {
    let (world, launcher) = running().await;
    world.patch(VMI_PATH, json!({"metadata": {"labels": {"kubevirt.io/nodeName": null}}})).await;
    asked(&world, 1).await;
    let patch = json!({"metadata": {"labels": {"kubevirt.io/nodeName": NODE}}, "status": {"activePods": null}});
    let emptied = world.patch(VMI_PATH, patch).await;
    let (mut session, _) = world.lead().await;
    eventually("the watch shows it", async || {
        session.instruct(InstructKind::Start, "s", &emptied).await;
        matches!(session.ack("s").await, ack::Result::Refused(r) if r.rv_seen == emptied["metadata"]["resourceVersion"])
    })
    .await;
    let unlabelled = json!({"metadata": {"finalizers": [], "labels": {"kubevirt.io/nodeName": null}}});
    world.patch(VMI_PATH, unlabelled).await;
    world.request("DELETE", VMI_PATH, "application/json", &Value::Null).await.unwrap();
    asked(&world, 2).await;
    assert!(!stopped(&launcher));
}

#[tokio::test]
async fn a_stray_is_destroyed_after_a_live_read() {
    for status in [json!({"phase": "Failed"}), json!({"activePods": {POD: null, "other": "node-2"}})] {
        let (world, launcher) = running().await;
        world.patch(VMI_PATH, json!({"status": status})).await;
        eventually("destroyed", async || launcher.order(InstructKind::Kill).is_some()).await;
    }
}

#[tokio::test]
async fn without_an_answer_of_the_api_server_nothing_is_destroyed() {
    let (mut world, launcher) = running().await;
    world.stop().await;
    world
        .patch(VMI_PATH, json!({"status": {"phase": "Failed"}, "metadata": {"labels": {"kubevirt.io/nodeName": null}}}))
        .await;
    world.reachable.store(false, Ordering::Relaxed);
    world.start().await;
    let mut session = world.hello(100, "A").await.unwrap();
    session.complete_inventory().await;
    eventually("some tries", async || world.lost.load(Ordering::Relaxed) > 6).await;
    assert!(!stopped(&launcher));
    // It is not in the watch; a live read tells that it has ended.
    world.reachable.store(true, Ordering::Relaxed);
    eventually("destroyed", async || launcher.order(InstructKind::Kill).is_some()).await;
}
