//! Who may command a node.

use std::sync::atomic::Ordering;

use proto::agent::*;

use crate::support::*;

/// Whether a Hello is accepted.
async fn accepted(world: &World, epoch: u64, instance: &str) -> bool {
    world.hello(epoch, instance).await.is_ok()
}

#[tokio::test]
async fn a_node_without_memory_asks_the_lease() {
    let mut world = World::new().await;
    world.start().await;
    assert!(!accepted(&world, 500, "B").await, "B does not hold the Lease, whatever its epoch");
    world.reachable.store(false, Ordering::Relaxed);
    let refused = world.hello(500, "A").await.err().unwrap().refused;
    assert!(refused.contains("cannot be read"), "{refused}");
    world.reachable.store(true, Ordering::Relaxed);
    assert!(accepted(&world, 500, "A").await);
    // The real leader after the Lease was deleted, or the store restored: a lower epoch, and the memory follows.
    world.set_lease("C").await;
    let session = world.hello(7, "C").await.unwrap();
    assert_eq!(session.reply.highest_epoch, 7);
    assert!(!accepted(&world, 6, "A").await);
}

#[tokio::test]
async fn a_deposed_leader_is_refused_and_a_new_one_needs_no_api_server() {
    let mut world = World::new().await;
    world.start().await;
    let mut old = world.hello(100, "A").await.unwrap();
    world.reachable.store(false, Ordering::Relaxed);
    let mut new = world.hello(101, "B").await.unwrap();
    old.ended().await;
    new.complete_inventory().await;
    for (epoch, instance) in [(100, "A"), (101, "A"), (99, "Z")] {
        let reply = world.hello(epoch, instance).await.err().unwrap();
        assert_eq!(reply.highest_epoch, 101, "{epoch} {instance}");
    }
    // Equal and the same: the session is replaced.
    let mut again = world.hello(101, "B").await.unwrap();
    new.ended().await;
    again.complete_inventory().await;
    // No common version of the protocol.
    world.reachable.store(true, Ordering::Relaxed);
}

#[tokio::test]
async fn what_was_accepted_outlives_the_agent_and_a_wiped_disk_admits_nobody() {
    let mut world = World::new().await;
    world.start().await;
    assert!(accepted(&world, 100, "A").await);
    assert!(accepted(&world, 120, "B").await);
    world.stop().await;
    world.start().await;
    world.reachable.store(false, Ordering::Relaxed);
    assert!(!accepted(&world, 100, "A").await);
    assert!(accepted(&world, 120, "B").await, "known, so nobody is asked");
    world.stop().await;
    std::fs::remove_dir_all(world.state_dir()).unwrap();
    world.start().await;
    assert!(!accepted(&world, 120, "B").await);
    world.reachable.store(true, Ordering::Relaxed);
    assert!(!accepted(&world, 120, "B").await, "A holds the Lease");
    assert!(accepted(&world, 100, "A").await);
    // A damaged file is as good as none.
    world.stop().await;
    std::fs::write(world.state_dir().join("leader.json"), b"\0\0").unwrap();
    world.start().await;
    assert!(!accepted(&world, 999, "B").await);
}

#[tokio::test]
async fn certificates_decide_who_may_call_what() {
    let mut world = World::new().await;
    world.start().await;
    assert!(world.dial("virtfold-controller", "node-2").await.is_err(), "the server is not node-2");
    let code = |r: Result<(), tonic::Status>| r.err().map(|s| s.code());
    for (name, session, verb) in [
        ("virtfold-controller", None, Some(tonic::Code::PermissionDenied)),
        ("virtfold-gateway", Some(tonic::Code::PermissionDenied), None),
        ("system:node:node-1", Some(tonic::Code::PermissionDenied), Some(tonic::Code::PermissionDenied)),
    ] {
        let mut client = world.dial(name, NODE).await.unwrap();
        let hello = Hello { epoch: 100, leader_instance: "A".into(), proto_min: 1, proto_max: 1, ..Hello::default() };
        let first = ControllerMessage { kind: Some(controller_message::Kind::Hello(hello)) };
        assert_eq!(code(client.session(tokio_stream::once(first)).await.map(drop)), session, "{name}");
        assert_eq!(code(client.verb(VerbRequest::default()).await.map(drop)), verb, "{name}");
        assert!(client.stream(tokio_stream::once(StreamChunk::default())).await.is_err());
    }
    let stranger = tempfile::tempdir().unwrap();
    let other = embedded::pki::Pki::open(stranger.path()).unwrap().client("virtfold-controller", None).unwrap();
    let strange = proto::transport::Tls { ca: world.pki.ca().into(), cert: other.cert, key: other.key };
    let address = world.address();
    let channel = proto::transport::channel(proto::transport::direct(), &strange, NODE, address).await;
    if let Ok(channel) = channel {
        let mut client = node_agent_client::NodeAgentClient::new(channel);
        assert!(client.verb(VerbRequest::default()).await.is_err());
    }
}

#[tokio::test]
async fn the_node_says_what_it_is_and_probes_once() {
    let mut world = World::new().await;
    let path = "/api/v1/nodes/node-1";
    // What an agent on another machine has left, and what is somebody else's.
    let old = serde_json::json!({"cpu-model.node.kubevirt.io/Haswell": "true", "cpu-vendor.node.kubevirt.io/Intel": "true",
        "cpu-model.example.com/Haswell": "true"});
    world.patch(path, serde_json::json!({"metadata": {"labels": old}})).await;
    world.start().await;
    let right = async |world: &World| {
        let node = world.get(path).await;
        let (labels, notes) = (&node["metadata"]["labels"], &node["metadata"]["annotations"]);
        labels["kubevirt.io/schedulable"] == "true"
            && notes["virtfold.io/accelerator"] == "tcg"
            && notes["virtfold.io/agent-address"] == world.address().to_string()
            && notes["virtfold.io/boot-id"].as_str().is_some_and(|b| b.len() == 36)
    };
    eventually("the Node's facts", async || right(&world).await).await;
    // A controller without a session takes the label away; with one it is put back.
    world.patch(path, serde_json::json!({"metadata": {"labels": {"kubevirt.io/schedulable": "false"}}})).await;
    let (_session, inventory) = world.lead().await;
    eventually("the Node's facts again", async || right(&world).await).await;
    assert_eq!(inventory.node, NODE);
    assert!(!inventory.boot_id.is_empty() && !inventory.agent_instance.is_empty());
    let labels = async |world: &World| -> Vec<String> {
        let all = world.get(path).await["metadata"]["labels"].clone();
        let all = all.as_object().unwrap().keys().filter(|k| k.contains(".node.kubevirt.io/") || k.contains(".com/"));
        all.cloned().collect()
    };
    let all = [
        "cpu-feature.node.kubevirt.io/sse4.2",
        "cpu-model.example.com/Haswell",
        "cpu-model.node.kubevirt.io/Nehalem",
        "cpu-model.node.kubevirt.io/Penryn",
        "cpu-vendor.node.kubevirt.io/AMD",
        "host-model-cpu.node.kubevirt.io/Nehalem",
        "machine-type.node.kubevirt.io/q35",
    ];
    assert_eq!(labels(&world).await, all);
    world.stop().await;
    // Who labels the node in another way is left alone.
    let own = serde_json::json!({"labels": {"cpu-model.node.kubevirt.io/Haswell": "true", "machine-type.node.kubevirt.io/q35": null},
        "annotations": {"node-labeller.kubevirt.io/skip-node": "true", "virtfold.io/accelerator": "?"}});
    world.patch(path, serde_json::json!({"metadata": own})).await;
    let before = labels(&world).await;
    world.start().await;
    eventually("the Node's facts beside them", async || right(&world).await).await;
    assert_eq!(labels(&world).await, before);
    world.stop().await;
    world.patch(path, serde_json::json!({"metadata": {"annotations": {"virtfold.io/accelerator": "?"}}})).await;
    world.start().await;
    eventually("the Node's facts of the next agent", async || right(&world).await).await;
    assert_eq!(world.probes.load(Ordering::Relaxed), 1);
}
