//! The requests that `virtctl` makes, byte by byte as far as a server can tell: paths, queries, headers, bodies, websockets.

use crate::support::{NODE, World, world};
use futures::{SinkExt, StreamExt};
use proto::agent::VerbReply;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

const SUB: &str = "/apis/subresources.kubevirt.io/v1/namespaces/default";
const CORE: &str = "/apis/kubevirt.io/v1/namespaces/default";

/// A request of Go's REST client over a real connection; an answer as code and text.
async fn request(world: &World, method: &str, path: &str, body: Option<Value>) -> (u16, String) {
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = http::Request::builder().method(method).uri(path);
    for (name, value) in [
        ("host", "api"),
        ("user-agent", "virtctl/v1.8.0 (linux/amd64) kubevirt/1234567"),
        ("accept", "application/json, */*"),
    ] {
        request = request.header(name, value);
    }
    if body.is_some() {
        request = request.header("content-type", "application/json");
    }
    let body = axum::body::Body::from(body.map(|b| b.to_string()).unwrap_or_default());
    let answer = sender.send_request(request.body(body).unwrap()).await.unwrap();
    let code = answer.status().as_u16();
    let bytes = axum::body::to_bytes(axum::body::Body::new(answer.into_body()), 1 << 20).await.unwrap();
    (code, String::from_utf8_lossy(&bytes).into_owned())
}

/// A stream as its client sees it: bytes, whatever the frames.
struct Tty(tokio_tungstenite::WebSocketStream<TcpStream>, Vec<u8>);

impl Tty {
    async fn open(world: &World, path: &str) -> Self {
        let mut request = format!("ws://{}{SUB}/{path}", world.address).into_client_request().unwrap();
        request.headers_mut().insert("sec-websocket-protocol", "plain.kubevirt.io".parse().unwrap());
        request.headers_mut().insert("user-agent", "virtctl".parse().unwrap());
        let stream = TcpStream::connect(world.address).await.unwrap();
        let (socket, answer) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        assert_eq!(answer.headers()["sec-websocket-protocol"], "plain.kubevirt.io");
        Self(socket, Vec::new())
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.0.send(Message::binary(bytes.to_vec())).await.unwrap();
    }

    async fn read(&mut self, want: &[u8]) {
        while self.1.len() < want.len() {
            match tokio::time::timeout(Duration::from_secs(20), self.0.next()).await.unwrap() {
                Some(Ok(Message::Binary(data))) => self.1.extend_from_slice(&data),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => panic!("{other:?}"),
            }
        }
        let got: Vec<u8> = self.1.drain(..want.len()).collect();
        assert_eq!(got, want);
    }
}

#[tokio::test]
async fn verbs_as_virtctl_asks_for_them() {
    let world = world().await;
    world.make_vm("Halted").await;
    let ask = |method: &'static str, path: String, body: Option<Value>| {
        request(&world, method, Box::leak(path.into_boxed_str()), body)
    };
    let put = |what: &str, body: Option<Value>| ask("PUT", format!("{SUB}/{what}"), body);

    // version: the group, then the version that it prefers.
    let (code, group) = ask("GET", "/apis/subresources.kubevirt.io".into(), None).await;
    let group: Value = serde_json::from_str(&group).unwrap();
    assert_eq!((code, &group["preferredVersion"]["groupVersion"]), (200, &json!("subresources.kubevirt.io/v1")));
    let (code, version) = ask("GET", "/apis/subresources.kubevirt.io/v1/version".into(), None).await;
    let version: Value = serde_json::from_str(&version).unwrap();
    assert_eq!(code, 200);
    for field in ["gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform"] {
        assert!(version[field].is_string(), "{field}: {version}");
    }

    // start, stop, restart.
    assert_eq!(put("virtualmachines/a/start", Some(json!({}))).await, (202, String::new()));
    let vmi = world.make_vmi(json!({"interfaces": [{"ipAddress": "127.0.0.1"}], "conditions": [{"type": "AgentConnected", "status": "True"}]})).await;
    assert_eq!(put("virtualmachines/a/restart", Some(json!({}))).await, (202, String::new()));
    let stop = json!({"action": "Stop", "uid": vmi["metadata"]["uid"], "data": {"virtfold.io/requested-by": "admin"}});
    let mut asked = world.vm().await["status"]["stateChangeRequests"][0].take();
    assert!(asked["data"].as_object_mut().unwrap().remove("virtfold.io/traceparent").is_some());
    assert_eq!(asked, stop);
    assert_eq!(put("virtualmachines/a/restart", Some(json!({"gracePeriodSeconds": 5}))).await.0, 400);
    assert_eq!(
        put("virtualmachines/a/stop", Some(json!({"gracePeriod": 0, "dryRun": ["All"]}))).await,
        (202, String::new())
    );
    assert_eq!(put("virtualmachines/a/stop", Some(json!({}))).await, (202, String::new()));
    assert_eq!(world.vm().await["spec"]["runStrategy"], "Halted");

    // pause vm: the machine is looked up, its instance is paused; without a body where there is nothing to say.
    assert_eq!(ask("GET", format!("{CORE}/virtualmachines/a"), None).await.0, 200);
    assert_eq!(put("virtualmachineinstances/a/pause", Some(json!({}))).await, (200, String::new()));
    world.patch_vmi(json!({"status": {"conditions": [{"type": "Paused", "status": "True"}, {"type": "AgentConnected", "status": "True"}]}})).await;
    assert_eq!(put("virtualmachineinstances/a/unpause", Some(json!({}))).await, (200, String::new()));
    world.patch_vmi(json!({"status": {"conditions": [{"type": "AgentConnected", "status": "True"}]}})).await;
    for verb in ["softreboot", "reset", "unfreeze"] {
        assert_eq!(put(&format!("virtualmachineinstances/a/{verb}"), None).await, (200, String::new()), "{verb}");
    }

    // guestosinfo, userlist, fslist: JSON, whatever its kind is called.
    for (verb, body) in [
        ("guestosinfo", json!({"guestAgentVersion": "7", "os": {"id": "debian"}})),
        ("userlist", json!({"items": [{"userName": "root"}]})),
        ("filesystemlist", json!({"items": [{"diskName": "vda1"}]})),
    ] {
        let reply = VerbReply { ok: true, body: body.to_string().into_bytes().into(), ..VerbReply::default() };
        world.seen.replies.lock().unwrap().insert(verb.into(), reply);
        let (code, text) = ask("GET", format!("{SUB}/virtualmachineinstances/a/{verb}"), None).await;
        assert_eq!((code, serde_json::from_str::<Value>(&text).unwrap()), (200, body), "{verb}");
    }

    // expand, of a machine that there is and of one in a file.
    let (code, expanded) = ask("GET", format!("{SUB}/virtualmachines/a/expand-spec"), None).await;
    let expanded: Value = serde_json::from_str(&expanded).unwrap();
    assert_eq!((code, &expanded["kind"]), (200, &json!("VirtualMachine")));

    // evacuate-cancel names the node of the instance.
    assert_eq!(put("virtualmachines/a/evacuate/cancel", Some(json!({"evacuationNodeName": NODE}))).await.0, 200);

    // addvolume looks for a DataVolume and for a claim; what is not built says so by name, in a Status that Go's client reads.
    let add = json!({"name": "v", "disk": {"disk": {"bus": "scsi"}, "name": "v"}, "volumeSource": {"persistentVolumeClaim": {"claimName": "v", "hotpluggable": true}}});
    for (verb, body) in [
        ("addvolume", add),
        ("removevolume", json!({"name": "v"})),
        ("migrate", json!({})),
        ("memorydump", json!({"claimName": "c"})),
    ] {
        let (code, text) = put(&format!("virtualmachines/a/{verb}"), Some(body)).await;
        let status: Value = serde_json::from_str(&text).unwrap();
        let said = status["message"].as_str().unwrap_or_default();
        assert_eq!((code, &status["kind"]), (400, &json!("Status")));
        assert!(said.starts_with(&format!("{verb} is not supported yet: ")), "{said}");
    }

    // create vm prints a manifest and asks nobody: what it prints is taken.
    let made = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "made"}, "spec": {
        "runStrategy": "Always", "template": {"metadata": {}, "spec": {
            "domain": {"devices": {"disks": [{"name": "made-containerdisk-0", "bootOrder": 1, "disk": {}}]}, "memory": {"guest": "512Mi"}, "resources": {}},
            "terminationGracePeriodSeconds": 180,
            "volumes": [{"name": "made-containerdisk-0", "containerDisk": {"image": "registry/image:1"}}, {"name": "cloudinitdisk", "cloudInitNoCloud": {"userData": "#cloud-config\n"}}]}}}});
    assert_eq!(ask("POST", format!("{CORE}/virtualmachines"), Some(made)).await.0, 201);
}

#[tokio::test]
async fn streams_as_virtctl_opens_them() {
    let world = world().await;
    let vm = world.make_vm("Manual").await;
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "a", "uid": vm["metadata"]["uid"], "controller": true});
    world.make_vmi(json!({"interfaces": [{"ipAddress": "127.0.0.1"}]})).await;
    world.patch_vmi(json!({"metadata": {"ownerReferences": [owner]}})).await;
    world.patch_vm_status(json!({"created": true})).await;

    let mut console = Tty::open(&world, "virtualmachineinstances/a/console").await;
    console.read(b"console:").await;
    console.write(b"root\r").await;
    console.read(b"root\r").await;
    let mut vnc = Tty::open(&world, "virtualmachineinstances/a/vnc?preserveSession=false").await;
    vnc.read(b"vnc:").await;
    vnc.write(b"RFB 003.008\n").await;
    vnc.read(b"RFB 003.008\n").await;

    // ssh: its client speaks through a forwarded port, of the machine or of the instance; both sides talk at once.
    let sshd = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = sshd.local_addr().unwrap().port();
    for resource in ["virtualmachines", "virtualmachineinstances"] {
        let mut ssh = Tty::open(&world, &format!("{resource}/a/portforward/{port}/tcp")).await;
        let (mut server, _) = sshd.accept().await.unwrap();
        server.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await.unwrap();
        ssh.write(b"SSH-2.0-Go\r\n").await;
        ssh.read(b"SSH-2.0-OpenSSH_9.2\r\n").await;
        let mut hello = [0; 12];
        server.read_exact(&mut hello).await.unwrap();
        assert_eq!(&hello, b"SSH-2.0-Go\r\n");
        // A megabyte each way, in pieces that are none of the other side's business.
        let bulk: Vec<u8> = (0..1_u32 << 20).map(|i| (i % 251) as u8).collect();
        let (sent, wanted) = (bulk.clone(), bulk.clone());
        let there = tokio::spawn(async move {
            let mut got = vec![0; wanted.len()];
            let (mut read, mut write) = server.split();
            let (took, _) = tokio::join!(read.read_exact(&mut got), write.write_all(&wanted));
            took.unwrap();
            assert!(got == wanted);
        });
        let (mut sink, mut stream) = ssh.0.split();
        let up = async {
            for part in sent.chunks(7001) {
                sink.send(Message::binary(part.to_vec())).await.unwrap();
            }
        };
        let down = async {
            let mut got = Vec::new();
            while got.len() < bulk.len() {
                match tokio::time::timeout(Duration::from_secs(20), stream.next()).await.unwrap() {
                    Some(Ok(Message::Binary(data))) => got.extend_from_slice(&data),
                    Some(Ok(Message::Ping(_))) => {}
                    other => panic!("{other:?}"),
                }
            }
            assert!(got == bulk);
        };
        tokio::join!(up, down);
        there.await.unwrap();
    }
}
