//! Consoles, VNC and forwarded ports over websockets, through the API server.

use crate::support::{World, eventually, world, world_with};
use embedded::auth::User as Who;
use futures::{SinkExt, StreamExt};
use gateway::Authorization;
use http::{HeaderMap, StatusCode};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tower::ServiceExt;

type Socket = WebSocketStream<TcpStream>;

/// Opens a websocket, or says with which code and body it was refused.
async fn open(world: &World, path: &str, user: Option<&str>) -> Result<(Socket, HeaderMap), (StatusCode, String)> {
    let url = format!("ws://{}/apis/subresources.kubevirt.io/v1/namespaces/default/{path}", world.address);
    let mut request = url.into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", "plain.kubevirt.io".parse().unwrap());
    if let Some(u) = user {
        request.headers_mut().insert("x-test-user", u.parse().unwrap());
    }
    let stream = TcpStream::connect(world.address).await.unwrap();
    match tokio_tungstenite::client_async(request, stream).await {
        Ok((socket, response)) => Ok((socket, response.headers().clone())),
        Err(Error::Http(r)) => {
            Err((r.status(), String::from_utf8_lossy(r.body().as_deref().unwrap_or_default()).into_owned()))
        }
        Err(e) => panic!("{path}: {e}"),
    }
}

/// Bytes until a text is complete; frame boundaries mean nothing.
async fn read(socket: &mut Socket, want: &[u8]) {
    let mut got = Vec::new();
    while got.len() < want.len() {
        match tokio::time::timeout(Duration::from_secs(20), socket.next()).await.expect("nothing came") {
            Some(Ok(Message::Binary(data))) => got.extend_from_slice(&data),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            other => panic!("{other:?} after {got:?}"),
        }
    }
    assert_eq!(got, want);
}

async fn closed(socket: &mut Socket) -> Option<CloseCode> {
    how_closed(socket).await.map(|(code, _)| code)
}

/// The code and the reason of the close frame.
async fn how_closed(socket: &mut Socket) -> Option<(CloseCode, String)> {
    loop {
        match tokio::time::timeout(Duration::from_secs(20), socket.next()).await.expect("not closed") {
            Some(Ok(Message::Close(frame))) => return frame.map(|f| (f.code, f.reason.to_string())),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return None,
        }
    }
}

#[tokio::test]
async fn a_console_is_a_plain_stream() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    let (mut socket, headers) = open(&world, "virtualmachineinstances/a/console", None).await.unwrap();
    assert_eq!(headers["sec-websocket-protocol"], "plain.kubevirt.io");
    read(&mut socket, b"console:").await;
    socket.send(Message::text("ignored")).await.unwrap();
    socket.send(Message::binary(b"ls\r".to_vec())).await.unwrap();
    read(&mut socket, b"ls\r").await;
    let large = vec![7_u8; 300_000];
    socket.send(Message::binary(large.clone())).await.unwrap();
    read(&mut socket, &large).await;
    // The guest's side ends: a normal close.
    socket.send(Message::binary(b"exit".to_vec())).await.unwrap();
    assert_eq!(closed(&mut socket).await, Some(CloseCode::Normal));
    let seen = world.seen.clone();
    eventually("the agent's stream is closed", || *seen.open.lock().unwrap() == 0).await;
}

#[tokio::test]
async fn a_stream_that_fails_is_no_end_in_order() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    // A client that waits, and one that goes on typing.
    for typing in [false, true] {
        let (mut socket, _) = open(&world, "virtualmachineinstances/a/console", None).await.unwrap();
        read(&mut socket, b"console:").await;
        socket.send(Message::binary(b"fail".to_vec())).await.unwrap();
        for _ in 0..if typing { 50 } else { 0 } {
            let _ = socket.send(Message::binary(b"ls\r".to_vec())).await;
        }
        let how = how_closed(&mut socket).await;
        assert_eq!(how, Some((CloseCode::Error, "the launcher is lost".to_owned())), "typing: {typing}");
    }
    let seen = world.seen.clone();
    eventually("the agent's streams are closed", || *seen.open.lock().unwrap() == 0).await;
}

#[tokio::test]
async fn a_client_that_leaves_or_vanishes_frees_the_agent() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    let mut sockets = Vec::new();
    for _ in 0..20 {
        let (mut socket, _) = open(&world, "virtualmachineinstances/a/vnc", None).await.unwrap();
        read(&mut socket, b"vnc:").await;
        sockets.push(socket);
    }
    assert_eq!(*world.seen.open.lock().unwrap(), 20);
    for (i, mut socket) in sockets.into_iter().enumerate() {
        if i % 2 == 0 {
            socket.close(None).await.unwrap();
        }
        drop(socket);
    }
    let seen = world.seen.clone();
    eventually("all streams of the agent are closed", || *seen.open.lock().unwrap() == 0).await;
}

#[tokio::test]
async fn streams_are_refused_before_the_upgrade() {
    let world = world().await;
    let refused = |path: &'static str| {
        let world = &world;
        async move { open(world, path, None).await.map(|_| ()).unwrap_err() }
    };
    let (code, body) = refused("virtualmachineinstances/a/console").await;
    assert_eq!(code, 404);
    assert!(body.contains("\"kind\":\"Status\""), "{body}");
    world.make_vmi(json!({"phase": "Scheduled"})).await;
    assert_eq!(refused("virtualmachineinstances/a/console").await.0, 400);
    world.patch_vmi(json!({"status": {"phase": "Failed"}})).await;
    assert_eq!(refused("virtualmachineinstances/a/console").await.0, 409);
    assert_eq!(refused("virtualmachineinstances/a/vnc").await.0, 400);
    world.patch_vmi(json!({"status": {"phase": "Running"}, "spec": {"domain": {"devices": {"autoattachSerialConsole": false}}}})).await;
    let (code, body) = refused("virtualmachineinstances/a/console").await;
    assert_eq!(code, 400);
    assert!(body.contains("No serial consoles"), "{body}");
    // The agent refuses: somebody has the session.
    let (code, body) = refused("virtualmachineinstances/a/vnc?preserveSession=true").await;
    assert_eq!(code, 400);
    assert!(body.contains("active VNC connection"), "{body}");
    // Without a websocket, and without the right.
    assert_eq!(world.verb("GET", "vmi/vnc", None).await.0, 400);
    assert_eq!(open(&world, "virtualmachineinstances/a/vnc", Some("nobody")).await.map(|_| ()).unwrap_err().0, 403);
}

#[tokio::test]
async fn ports_are_forwarded() {
    let world = world().await;
    let guest = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = guest.local_addr().unwrap().port();
    let vm = world.make_vm("Manual").await;
    let path = |what: &str, tail: &str| format!("{what}/a/portforward/{tail}");
    let refused = |path: String| {
        let world = &world;
        async move { open(world, &path, None).await.map(|_| ()).unwrap_err().0 }
    };
    assert_eq!(refused(path("virtualmachines", "80")).await, 409, "not created");
    world.make_vmi(json!({})).await;
    assert_eq!(refused(path("virtualmachineinstances", "80")).await, 400, "no interface");
    world.patch_vmi(json!({"status": {"interfaces": [{"ipAddress": "127.0.0.1"}]}})).await;
    world.patch_vm_status(json!({"created": true})).await;
    assert_eq!(refused(path("virtualmachines", "80")).await, 500, "not owned");
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "a", "uid": vm["metadata"]["uid"], "controller": true});
    world.patch_vmi(json!({"metadata": {"ownerReferences": [owner]}})).await;
    assert_eq!(refused(path("virtualmachineinstances", "0")).await, 400);
    assert_eq!(refused(path("virtualmachineinstances", "x")).await, 400);
    assert_eq!(refused(path("virtualmachineinstances", "80/sctp")).await, 400);
    assert_eq!(refused(path("virtualmachineinstances", "1")).await, 500, "nobody listens");
    for way in [path("virtualmachines", &port.to_string()), path("virtualmachineinstances", &format!("{port}/tcp"))] {
        let (mut socket, _) = open(&world, &way, None).await.unwrap();
        let (mut served, _) = guest.accept().await.unwrap();
        socket.send(Message::binary(b"GET".to_vec())).await.unwrap();
        let mut buffer = [0; 3];
        served.read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"GET");
        served.write_all(b"200").await.unwrap();
        read(&mut socket, b"200").await;
        drop(served);
        assert_eq!(closed(&mut socket).await, Some(CloseCode::Normal));
    }
    // Datagrams: a frame each. Before anybody listens they are lost, as on any network.
    let vacant = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let port = vacant.local_addr().unwrap().port();
    drop(vacant);
    let (mut socket, _) = open(&world, &path("virtualmachineinstances", &format!("{port}/udp")), None).await.unwrap();
    socket.send(Message::binary(b"lost".to_vec())).await.unwrap();
    let guest = tokio::net::UdpSocket::bind(("127.0.0.1", port)).await.unwrap();
    let (mut buffer, mut from) = (vec![0; 1 << 16], None);
    while from.is_none() {
        socket.send(Message::binary(b"ask".to_vec())).await.unwrap();
        let heard = tokio::time::timeout(Duration::from_millis(200), guest.recv_from(&mut buffer)).await;
        from = heard.ok().map(|r| r.unwrap()).map(|(n, from)| (buffer[..n].to_vec(), from));
    }
    let (said, from) = from.unwrap();
    assert!(said == b"ask" || said == b"lost");
    let large = vec![5_u8; 40_000];
    guest.send_to(&large, from).await.unwrap();
    read(&mut socket, &large).await;
    socket.close(None).await.unwrap();
    world.patch_vmi(json!({"status": {"conditions": [{"type": "Paused", "status": "True"}]}})).await;
    assert_eq!(refused(path("virtualmachineinstances", "80")).await, 409);
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let world = world().await;
    let guest = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = guest.local_addr().unwrap().port();
    world.make_vmi(json!({"interfaces": [{"ipAddress": "127.0.0.1"}]})).await;
    let way = format!("virtualmachineinstances/a/portforward/{port}");
    let (slow, _) = open(&world, &way, None).await.unwrap();
    let (mut flood, _) = guest.accept().await.unwrap();
    // Fill every buffer on the way; what is not taken is not read from the guest either.
    let chunk = vec![1_u8; 1 << 16];
    let mut sent = 0_usize;
    while let Ok(r) = tokio::time::timeout(Duration::from_millis(500), flood.write_all(&chunk)).await {
        r.unwrap();
        sent += chunk.len();
        assert!(sent < 256 << 20, "nothing holds the flood back");
    }
    let (mut quick, _) = open(&world, &way, None).await.unwrap();
    let (mut served, _) = guest.accept().await.unwrap();
    served.write_all(b"hello").await.unwrap();
    read(&mut quick, b"hello").await;
    drop(slow);
}

/// Gives a user a role in a namespace.
async fn bind(world: &World, namespace: &str, role: &str, user: &str) {
    let binding = json!({"metadata": {"name": user}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]});
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings");
    let (code, made) = world.ask("POST", &path, Some(binding)).await;
    assert_eq!(code, 201, "{made}");
}

#[tokio::test]
async fn who_may_look_may_not_touch_and_nobody_reaches_another_namespace() {
    let world = world_with(Authorization::Review).await;
    world.make_vm("Manual").await;
    world.make_vmi(json!({"interfaces": [{"ipAddress": "127.0.0.1"}], "conditions": [{"type": "AgentConnected", "status": "True"}]})).await;
    assert_eq!(world.ask("POST", "/api/v1/namespaces", Some(json!({"metadata": {"name": "other"}}))).await.0, 201);
    bind(&world, "default", "kubevirt.io:view", "viewer").await;
    bind(&world, "default", "kubevirt.io:edit", "editor").await;
    bind(&world, "other", "kubevirt.io:edit", "neighbour").await;
    let info = proto::agent::VerbReply { ok: true, body: b"{}".to_vec().into(), ..Default::default() };
    world.seen.replies.lock().unwrap().insert("guestosinfo".into(), info);

    let streams = [
        "virtualmachineinstances/a/console",
        "virtualmachineinstances/a/vnc",
        "virtualmachineinstances/a/portforward/1/tcp",
    ];
    let puts =
        [("virtualmachines", "start"), ("virtualmachineinstances", "pause"), ("virtualmachineinstances", "freeze")];
    for (user, reads) in [("viewer", 200), ("neighbour", 403)] {
        let who = Who::new(user, &[]);
        let of = |group: &str, what: &str| format!("/apis/{group}/v1/namespaces/default/{what}");
        let get = |path: String| {
            let (world, who) = (&world, who.clone());
            async move { world.ask_as(&who, "GET", &path, None).await.0 }
        };
        assert_eq!(get(of("kubevirt.io", "virtualmachineinstances/a")).await, reads, "{user}");
        assert_eq!(get(of("subresources.kubevirt.io", "virtualmachineinstances/a/guestosinfo")).await, reads, "{user}");
        for path in streams {
            let refused = open(&world, path, Some(user)).await.map(|_| ()).unwrap_err();
            assert_eq!(refused.0, 403, "{user}: {path}: {}", refused.1);
            // Where the gateway is asked by a front proxy it decides itself.
            let request = http::Request::get(of("subresources.kubevirt.io", path)).header("x-remote-user", user);
            let request = request.header("connection", "upgrade").body(axum::body::Body::empty()).unwrap();
            assert_eq!(world.gateway.router().oneshot(request).await.unwrap().status(), 401, "{user}: {path}");
        }
        for (resource, verb) in puts {
            let path = of("subresources.kubevirt.io", &format!("{resource}/a/{verb}"));
            assert_eq!(world.ask_as(&who, "PUT", &path, None).await.0, 403, "{user}: {verb}");
        }
    }
    assert!(world.seen.verbs.lock().unwrap().iter().all(|(verb, _)| verb == "guestosinfo"), "nothing was done");
    let (mut socket, _) = open(&world, streams[0], Some("editor")).await.unwrap();
    read(&mut socket, b"console:").await;
    // What is not built is refused as such to those who may ask for it.
    let (code, said) =
        open(&world, "virtualmachineinstances/a/usbredir", Some("editor")).await.map(|_| ()).unwrap_err();
    assert_eq!((code.as_u16(), said.contains("usbredir is not supported yet")), (409, true), "{said}");
    let cancel = "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines/a/evacuate/cancel";
    let body = json!({"evacuationNodeName": "n"});
    let (code, said) = world.ask_as(&Who::new("editor", &[]), "PUT", cancel, Some(body)).await;
    assert_eq!(code, 200, "{said}");
}

/// Resident memory of this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Runs a test again in a process of its own, whose memory no other test changes; whether this is that process.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "VIRTFOLD_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    let ran = again.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    print!("{said}");
    false
}

/// Gateway, API server, agent and clients are one process here, so what is seen is the upper bound of what the gateway takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_consoles_a_slow_reader_and_clients_that_vanish() {
    const CONSOLES: usize = 200;
    if !is_alone("streams::two_hundred_consoles_a_slow_reader_and_clients_that_vanish") {
        return;
    }
    let world = std::sync::Arc::new(world().await);
    world.make_vmi(json!({})).await;
    let (before, began) = (resident(), std::time::Instant::now());
    let mut sockets = Vec::new();
    for _ in 0..CONSOLES {
        let (mut socket, _) = open(&world, "virtualmachineinstances/a/console", None).await.unwrap();
        read(&mut socket, b"console:").await;
        sockets.push(socket);
    }
    assert_eq!(*world.seen.open.lock().unwrap(), CONSOLES as i32);
    let opened = began.elapsed();
    // The guest of one prints and prints, and nobody reads it: what fills the buffers on the way has to end.
    let mut slow = sockets.pop().unwrap();
    slow.send(Message::binary(b"flood".to_vec())).await.unwrap();
    // Twenty vanish without a word.
    sockets.truncate(CONSOLES - 21);
    let left = sockets.len();
    let seen = world.seen.clone();
    eventually("the agent's streams of those that vanished are closed", || {
        *seen.open.lock().unwrap() as usize <= left + 1
    })
    .await;

    // The others talk as if nothing were.
    let mut memory = Vec::new();
    let mut worst = Duration::ZERO;
    for _ in 0..3 {
        let talks = sockets.drain(..).map(|mut socket| {
            let talk = async move {
                let (line, mut worst) = (vec![b'y'; 2000], Duration::ZERO);
                for _ in 0..50 {
                    let asked = std::time::Instant::now();
                    socket.send(Message::binary(line.clone())).await.unwrap();
                    read(&mut socket, &line).await;
                    worst = worst.max(asked.elapsed());
                }
                (socket, worst)
            };
            tokio::spawn(tokio::time::timeout(Duration::from_secs(60), talk))
        });
        for talk in futures::future::join_all(talks.collect::<Vec<_>>()).await {
            let (socket, slowest) = talk.unwrap().expect("one that is asleep holds up another");
            sockets.push(socket);
            worst = worst.max(slowest);
        }
        memory.push(resident());
    }
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{CONSOLES} consoles opened in {opened:.1?}; memory {} MiB before, {:?} MiB after each of 3 rounds of {} round trips beside a \
         reader that is asleep; the slowest took {worst:.1?}; all in {:.1?}",
        mib(before),
        memory.iter().map(|m| mib(*m)).collect::<Vec<_>>(),
        left * 50,
        began.elapsed()
    );
    assert!(memory[2] < memory[0] + (16 << 20), "memory grows with what flows: {memory:?}");
    assert!(memory[2] < before + (256 << 20), "{} MiB for {CONSOLES} consoles", mib(memory[2] - before));
    // What waited for the sleeper was bounded, and is still there for it.
    let mut woken = 0;
    while woken < 1 << 20 {
        match tokio::time::timeout(Duration::from_secs(20), slow.next()).await.unwrap() {
            Some(Ok(Message::Binary(data))) => woken += data.len(),
            Some(Ok(Message::Ping(_))) => {}
            other => panic!("{other:?}"),
        }
    }
    drop((sockets, slow));
    eventually("all streams of the agent are closed", || *seen.open.lock().unwrap() == 0).await;
}
