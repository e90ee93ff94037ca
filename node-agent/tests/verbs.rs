//! Verbs and byte streams of the gateway.

use proto::agent::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::support::*;

fn verb(pod: &str, vmi: &str) -> VerbRequest {
    VerbRequest {
        id: "r-1".into(),
        vmi_uid: vmi.into(),
        pod_uid: pod.into(),
        verb: "pause".into(),
        ttl_ms: 20_000,
        ..VerbRequest::default()
    }
}

#[tokio::test]
async fn verbs_reach_their_launcher_without_a_controller() {
    let mut world = World::new().await;
    let mut launcher = world.pod().await;
    launcher.set(DomainState::Running);
    world.start().await;
    let mut gateway = world.gateway().await;
    eventually("linked", async || world.gateway().await.verb(verb(POD, &world.vmi_uid)).await.unwrap().into_inner().ok)
        .await;
    let seen = launcher.verbs().pop().unwrap();
    assert_eq!((seen.id.as_str(), seen.verb.as_str()), ("r-1", "pause"));
    assert!(seen.ttl_ms <= 20_000 && seen.ttl_ms > 1_000);
    for (pod, vmi) in [("no-pod", world.vmi_uid.as_str()), (POD, "another")] {
        let reply = gateway.verb(verb(pod, vmi)).await.unwrap().into_inner();
        assert_eq!((reply.ok, reply.reason.as_str()), (false, "not-found"), "{pod} {vmi}");
    }
    launcher.deaf();
    eventually("deaf", async || {
        let reply = world.gateway().await.verb(verb(POD, &world.vmi_uid)).await.unwrap().into_inner();
        (reply.ok, reply.reason.as_str()) == (false, "not-ready")
    })
    .await;
    world.pods.set(|p| p[0].running = false);
    eventually("not running", async || {
        world.gateway().await.verb(verb(POD, &world.vmi_uid)).await.unwrap().into_inner().reason == "not-running"
    })
    .await;
}

struct Viewer {
    up: mpsc::Sender<StreamChunk>,
    down: tonic::Streaming<StreamChunk>,
}

async fn view(world: &World, device: &str, preserve: bool) -> Result<Viewer, tonic::Status> {
    let (up, chunks) = mpsc::channel(4);
    let open = StreamOpen {
        vmi_uid: world.vmi_uid.clone(),
        pod_uid: POD.into(),
        device: device.into(),
        preserve_session: preserve,
    };
    up.send(StreamChunk { open: Some(open), ..StreamChunk::default() }).await.unwrap();
    let down = world.gateway().await.stream(ReceiverStream::new(chunks)).await?.into_inner();
    Ok(Viewer { up, down })
}

#[tokio::test]
async fn console_and_vnc_are_spliced_and_a_viewer_can_be_left_in_peace() {
    let mut world = World::new().await;
    let _launcher = world.pod().await;
    world.start().await;
    let share = world.dir.path().join("share");
    let console = UnixListener::bind(share.join("console.sock")).unwrap();
    let vnc = UnixListener::bind(share.join("vnc.sock")).unwrap();
    eventually("linked", async || world.gateway().await.verb(verb(POD, &world.vmi_uid)).await.unwrap().into_inner().ok)
        .await;

    let mut viewer = view(&world, "console", false).await.unwrap();
    let (mut guest, _) = console.accept().await.unwrap();
    guest.write_all(b"login: ").await.unwrap();
    assert_eq!(viewer.down.message().await.unwrap().unwrap().data, "login: ");
    viewer.up.send(StreamChunk { open: None, data: "root\n".into() }).await.unwrap();
    let mut typed = [0; 5];
    guest.read_exact(&mut typed).await.unwrap();
    assert_eq!(&typed, b"root\n");
    // The guest ends: so does the stream.
    drop(guest);
    assert!(viewer.down.message().await.unwrap().is_none());

    let mut first = view(&world, "vnc", true).await.unwrap();
    let (mut peer, _) = vnc.accept().await.unwrap();
    assert_eq!(view(&world, "vnc", true).await.err().unwrap().code(), tonic::Code::FailedPrecondition);
    let second = view(&world, "vnc", false).await.unwrap();
    assert!(first.down.message().await.unwrap().is_none(), "the newest wins");
    assert_eq!(peer.read(&mut [0]).await.unwrap(), 0);
    // Who leaves makes room.
    let (mut peer, _) = vnc.accept().await.unwrap();
    drop(second);
    assert_eq!(peer.read(&mut [0]).await.unwrap(), 0);
    view(&world, "vnc", true).await.unwrap();

    assert_eq!(view(&world, "floppy", false).await.err().unwrap().code(), tonic::Code::InvalidArgument);
}
