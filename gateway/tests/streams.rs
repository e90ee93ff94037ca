//! Consoles, VNC and forwarded ports over websockets, through the API server.

use crate::support::{World, eventually, world};
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, StatusCode};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};

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
    loop {
        match tokio::time::timeout(Duration::from_secs(20), socket.next()).await.expect("not closed") {
            Some(Ok(Message::Close(frame))) => return frame.map(|f| f.code),
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
    assert_eq!(refused(path("virtualmachineinstances", "80/udp")).await, 400);
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
