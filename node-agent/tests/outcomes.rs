//! How a machine ended is not forgotten.

use proto::agent::*;
use serde_json::json;

use crate::support::*;

#[tokio::test]
async fn an_outcome_is_kept_until_it_is_acknowledged() {
    let mut world = World::new().await;
    let launcher = world.pod().await;
    world.vmi(json!({"phase": "Running", "activePods": {POD: NODE}})).await;
    launcher.set(DomainState::Running);
    world.start().await;
    // Nobody is there to hear it.
    let file = world.state_dir().join(format!("pods/{POD}.json"));
    launcher.end(Cause::GuestShutdown);
    eventually("the outcome on disk", async || {
        std::fs::read_to_string(&file).is_ok_and(|t| t.contains("GuestShutdown"))
    })
    .await;
    world.stop().await;
    // The launcher goes, and its pod; the agent comes back.
    drop(launcher);
    world.pods.set(Vec::clear);
    world.start().await;
    for epoch in [100, 101] {
        let mut session = world.hello(epoch, if epoch == 100 { "A" } else { "B" }).await.unwrap();
        let inventory = session.complete_inventory().await;
        assert_eq!(inventory.domains, []);
        let outcome = &inventory.outcomes[0];
        assert_eq!(
            (outcome.cause(), outcome.pod_uid.as_str(), outcome.name.as_str()),
            (Cause::GuestShutdown, POD, "guest")
        );
        if epoch == 101 {
            let ack = OutcomeAck { pod_uid: POD.into(), seq: outcome.seq };
            session.send(controller_message::Kind::OutcomeAck(ack)).await;
            eventually("forgotten", async || !file.exists()).await;
        }
    }
    let mut session = world.hello(102, "C").await.unwrap();
    assert_eq!(session.complete_inventory().await.outcomes, []);
}

#[tokio::test]
async fn an_outcome_reaches_a_session_at_once_and_an_older_acknowledgement_does_not_count() {
    let mut world = World::new().await;
    let launcher = world.pod().await;
    launcher.set(DomainState::Running);
    world.start().await;
    let (mut session, inventory) = world.lead().await;
    assert_eq!(inventory.domains[0].state(), DomainState::Running);
    launcher.end(Cause::Panicked);
    let outcome = session.outcome().await;
    assert_eq!(outcome.cause(), Cause::Panicked);
    let older = OutcomeAck { pod_uid: POD.into(), seq: outcome.seq - 1 };
    session.send(controller_message::Kind::OutcomeAck(older)).await;
    let mut again = world.hello(100, "A").await.unwrap();
    assert_eq!(again.complete_inventory().await.outcomes.len(), 1);
    let ack = OutcomeAck { pod_uid: POD.into(), seq: outcome.seq };
    again.send(controller_message::Kind::OutcomeAck(ack)).await;
    let file = world.state_dir().join(format!("pods/{POD}.json"));
    eventually("forgotten", async || !file.exists()).await;
    world.stop().await;
}

#[tokio::test]
async fn garbage_on_the_socket_is_a_deaf_machine_and_no_evidence() {
    let mut world = World::new().await;
    let facts = world.pod_facts().await;
    let listener = tokio::net::UnixListener::bind(facts.share_dir.join("launcher.sock")).unwrap();
    let garbage = tokio::spawn(async move {
        loop {
            let (mut peer, _) = listener.accept().await.unwrap();
            let _ = tokio::io::AsyncWriteExt::write_all(&mut peer, &[0xff; 4096]).await;
        }
    });
    world.pods.set(|p| p.push(facts.clone()));
    world.start().await;
    let mut session = world.hello(100, "A").await.unwrap();
    let first = session.until("an inventory", |k| match k {
        agent_message::Kind::Inventory(i) => Some(i.clone()),
        _ => None,
    });
    let first = first.await;
    assert!(!first.complete, "it is too early to say what is there");
    assert_eq!(first.domains, []);
    let complete = session.complete_inventory().await;
    assert_eq!(complete.domains.iter().map(Domain::state).collect::<Vec<_>>(), [DomainState::Deaf]);
    // The launcher comes to its senses.
    garbage.abort();
    let _ = garbage.await;
    std::fs::remove_file(facts.share_dir.join("launcher.sock")).unwrap();
    let launcher = crate::support::launcher::Launcher::start(&facts.share_dir, &world.vmi_uid, POD).await;
    launcher.set(DomainState::Running);
    session.report(DomainState::Running).await;
    // And its container ends without a word.
    world.pods.set(|p| p[0].running = false);
    drop(launcher);
    session.report(DomainState::Absent).await;
}

#[tokio::test]
async fn a_launcher_speaks_for_its_own_pod_alone() {
    let mut world = World::new().await;
    let facts = world.pod_facts().await;
    let _liar = crate::support::launcher::Launcher::start(&facts.share_dir, &world.vmi_uid, "another-pod").await;
    world.pods.set(|p| p.push(facts));
    world.start().await;
    let mut session = world.hello(100, "A").await.unwrap();
    let inventory = session.complete_inventory().await;
    assert_eq!(inventory.domains.len(), 1);
    assert_eq!((inventory.domains[0].state(), inventory.domains[0].pod_uid.as_str()), (DomainState::Deaf, POD));
}

#[tokio::test]
async fn nothing_is_complete_before_the_pods_were_enumerated() {
    let mut world = World::new().await;
    world.pods.set(|_| {});
    world.unenumerated();
    world.start().await;
    let mut session = world.hello(100, "A").await.unwrap();
    let first = session.until("an inventory", |k| match k {
        agent_message::Kind::Inventory(i) => Some(i.complete),
        _ => None,
    });
    assert!(!first.await);
    world.pods.set(|_| {});
    session.complete_inventory().await;
}
