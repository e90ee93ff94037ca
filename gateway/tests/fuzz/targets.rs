//! What is asked of admission and of the websocket bridge, with bytes that may be anything.

use crate::admission::{ask, input};
use crate::support::World;
use gateway::{AdmissionInput, Operation};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Places of `given` that `stored` does not have as they were: what a user set and does not get back. What asks for nothing may be
/// filled in.
fn lost(given: &Value, stored: &Value, at: &str, out: &mut Vec<String>) {
    match (given, stored) {
        (Value::Object(g), Value::Object(s)) => {
            g.iter().for_each(|(k, v)| lost(v, s.get(k).unwrap_or(&Value::Null), &format!("{at}.{k}"), out));
        }
        (Value::Array(g), Value::Array(s)) => {
            g.iter()
                .enumerate()
                .for_each(|(i, v)| lost(v, s.get(i).unwrap_or(&Value::Null), &format!("{at}[{i}]"), out));
        }
        (Value::Null, _) => {}
        (Value::String(s), _) if s.is_empty() => {}
        (Value::Number(n), _) if n.as_i64() == Some(0) => {}
        // No value of this type comes here: the schema has refused it before.
        (g, Value::Object(_)) if !g.is_object() => {}
        (g, Value::Array(_)) if !g.is_array() => {}
        (g, s) if g == s => {}
        _ => out.push(format!("{at}: {given} became {stored}")),
    }
}

/// An object with its kind: it is refused with a reason, or admitted so that nothing of it is lost and asking again changes nothing.
pub fn admission(bytes: &[u8]) {
    let Ok(object) = serde_json::from_slice::<Value>(bytes) else { return };
    let Some(kind) = object["kind"].as_str().map(str::to_owned) else { return };
    match ask(input(&kind, object.clone())) {
        Err(status) => {
            assert!(status.code == 422 || status.code == 400, "{status}");
            let causes = status.causes();
            assert!(causes.len() <= 10 && (status.code == 400 || !causes.is_empty()), "{causes:?}");
            assert!(causes.iter().all(|(_, field, message)| field.len() < 20_000 && !message.is_empty()), "{causes:?}");
        }
        Ok(out) => {
            let mut gone = Vec::new();
            lost(&object["spec"], &out.object["spec"], "spec", &mut gone);
            assert!(gone.is_empty(), "{gone:?}");
            // The same again changes nothing, nor does who only puts a label on it.
            let again = ask(input(&kind, out.object.clone())).unwrap_or_else(|e| panic!("again: {e}"));
            assert_eq!(again.object["spec"], out.object["spec"]);
            let mut labelled = out.object.clone();
            if let Some(metadata) = labelled["metadata"].as_object_mut() {
                metadata.insert("labels".into(), json!({"note": "x"}));
            }
            let update = AdmissionInput {
                operation: Operation::Update,
                old_object: Some(out.object.clone()),
                ..input(&kind, labelled.clone())
            };
            let updated = ask(update).unwrap_or_else(|e| panic!("with a label: {e}"));
            assert_eq!(updated.object, labelled);
        }
    }
}

/// Opens a console by hand, says something that may be no websocket at all, and reads until the other side has had enough or nothing
/// comes.
pub async fn say(world: &World, bytes: &[u8]) {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let hello = "GET /apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/a/console HTTP/1.1\r\nHost: a\r\n\
                 Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(hello.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    if !head.starts_with(b"HTTP/1.1 101") {
        let mut why = vec![0; 1024];
        let n = stream.read(&mut why).await.unwrap_or(0);
        panic!("{}{}", String::from_utf8_lossy(&head), String::from_utf8_lossy(&why[..n]));
    }
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut rest = Vec::new();
    let mut bounded = stream.take(1 << 22);
    let read = tokio::time::timeout(std::time::Duration::from_secs(20), bounded.read_to_end(&mut rest));
    assert!(read.await.is_ok(), "the bridge does not end with its client");
}
