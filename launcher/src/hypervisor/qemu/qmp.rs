//! A client of QEMU's machine protocol: one JSON object a line, replies found by id, events in between.
//!
//! The other side is trusted only as far as it goes: lines that are no JSON are skipped, lines without end are cut,
//! replies that nobody waits for are dropped, and the end of the stream ends all that wait.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::hypervisor::Error;
use crate::limits;

/// An event of the monitor.
#[derive(Clone, Debug)]
pub(crate) struct QmpEvent {
    pub name: String,
    pub data: Value,
}

struct Call {
    command: String,
    arguments: Value,
    reply: oneshot::Sender<Result<Value, String>>,
}

/// The client: clones share one connection.
#[derive(Clone)]
pub(crate) struct Qmp {
    calls: mpsc::Sender<Call>,
}

impl Qmp {
    /// Serves `stream` until its end. `capabilities` (the greeting's counterpart) must be the first command.
    pub fn connect(stream: UnixStream) -> (Self, mpsc::Receiver<QmpEvent>) {
        let (calls, asked) = mpsc::channel(limits::ASKS);
        let (events, heard) = mpsc::channel(limits::EVENTS);
        tokio::spawn(serve(stream, asked, events));
        (Self { calls }, heard)
    }

    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, Error> {
        self.execute_within(command, arguments, limits::QMP_TIMEOUT).await
    }

    pub async fn execute_within(&self, command: &str, arguments: Value, limit: Duration) -> Result<Value, Error> {
        let (reply, answer) = oneshot::channel();
        let call = Call { command: command.into(), arguments, reply };
        let exchange = async {
            self.calls.send(call).await.map_err(|_| Error::Deaf("the monitor is closed".into()))?;
            answer.await.map_err(|_| Error::Deaf("the monitor was closed".into()))
        };
        match tokio::time::timeout(limit, exchange).await {
            Err(_) => Err(Error::Deaf(format!("no answer to {command} within {limit:?}"))),
            Ok(Err(e)) => Err(e),
            Ok(Ok(Err(message))) => Err(Error::Refused { command: command.into(), message }),
            Ok(Ok(Ok(value))) => Ok(value),
        }
    }
}

async fn serve(stream: UnixStream, mut asked: mpsc::Receiver<Call>, events: mpsc::Sender<QmpEvent>) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut waiting: BTreeMap<u64, oneshot::Sender<Result<Value, String>>> = BTreeMap::new();
    let mut next = 0u64;
    let mut line = Vec::new();
    loop {
        tokio::select! {
            end = read_line(&mut read, &mut line, limits::QMP_LINE) => {
                match end {
                    Ok(true) => take(&line, &mut waiting, &events),
                    Ok(false) | Err(_) => return,
                }
                line.clear();
            }
            call = asked.recv() => {
                let Some(call) = call else { return };
                waiting.retain(|_, w| !w.is_closed());
                next += 1;
                let mut request = json!({"execute": call.command, "id": next});
                if !call.arguments.is_null() {
                    request["arguments"] = call.arguments;
                }
                waiting.insert(next, call.reply);
                if write.write_all(format!("{request}\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn take(
    line: &[u8],
    waiting: &mut BTreeMap<u64, oneshot::Sender<Result<Value, String>>>,
    events: &mpsc::Sender<QmpEvent>,
) {
    let Ok(value) = serde_json::from_slice::<Value>(line) else {
        if !line.iter().all(u8::is_ascii_whitespace) {
            tracing::warn!(bytes = line.len(), "the monitor sent a line that is no JSON");
        }
        return;
    };
    if let Some(name) = value.get("event").and_then(Value::as_str) {
        let data = value.get("data").cloned().unwrap_or(Value::Null);
        // Never wait here: the consumer asks questions over this very connection. What is lost shows in the next poll.
        if events.try_send(QmpEvent { name: name.into(), data }).is_err() {
            tracing::warn!(event = name, "an event of the monitor was dropped");
        }
        return;
    }
    let Some(reply) = value.get("id").and_then(Value::as_u64).and_then(|id| waiting.remove(&id)) else { return };
    let result = match (value.get("return"), value.get("error")) {
        (Some(r), _) => Ok(r.clone()),
        (None, error) => {
            let desc = error.and_then(|e| e.get("desc")).and_then(Value::as_str);
            Err(desc.unwrap_or("neither a result nor an error").to_owned())
        }
    };
    let _ = reply.send(result);
}

/// Appends to `line` up to a newline; false at the end of the stream. May be dropped at any time: what was read stays
/// in `line`. A line beyond `limit` loses its beginning.
pub(crate) async fn read_line(
    read: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    limit: usize,
) -> std::io::Result<bool> {
    loop {
        let available = read.fill_buf().await?;
        if available.is_empty() {
            return Ok(false);
        }
        let end = available.iter().position(|b| *b == b'\n');
        let part = available.get(..end.unwrap_or(available.len())).unwrap_or_default();
        if line.len() + part.len() > limit {
            line.clear();
        }
        line.extend_from_slice(part.get(part.len().saturating_sub(limit)..).unwrap_or_default());
        let used = end.map_or(part.len(), |e| e + 1);
        read.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tokio::io::AsyncReadExt;

    async fn request(peer: &mut UnixStream) -> Value {
        let mut bytes = Vec::new();
        loop {
            let b = peer.read_u8().await.unwrap();
            if b == b'\n' {
                return serde_json::from_slice(&bytes).unwrap();
            }
            bytes.push(b);
        }
    }

    #[tokio::test]
    async fn replies_are_found_by_id_and_garbage_is_skipped() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let (qmp, mut events) = Qmp::connect(ours);
        let both = tokio::spawn(async move {
            let (a, b) = tokio::join!(qmp.execute("a", Value::Null), qmp.execute("b", json!({"x": 1})));
            (a, b, qmp)
        });
        let (first, second) = (request(&mut peer).await, request(&mut peer).await);
        assert_eq!((first["execute"].as_str(), second["arguments"]["x"].as_i64()), (Some("a"), Some(1)));
        peer.write_all(b"\xff\xfenonsense\n\n{\"return\":1,\"id\":99}\n{\"event\":\"STOP\",\"data\":{\"y\":2}}\n")
            .await
            .unwrap();
        peer.write_all(
            format!(
                "{}\n{}\n",
                json!({"error": {"desc": "no"}, "id": second["id"]}),
                json!({"return": 7, "id": first["id"]})
            )
            .as_bytes(),
        )
        .await
        .unwrap();
        let (a, b, qmp) = both.await.unwrap();
        assert_eq!(a.unwrap(), 7);
        assert!(matches!(b, Err(Error::Refused { message, .. }) if message == "no"));
        let event = events.recv().await.unwrap();
        assert_eq!((event.name.as_str(), event.data["y"].as_i64()), ("STOP", Some(2)));
        drop(peer);
        assert!(matches!(qmp.execute("c", Value::Null).await, Err(Error::Deaf(_))));
        assert!(events.recv().await.is_none());
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let writer = tokio::spawn(async move {
            for _ in 0..100 {
                peer.write_all(&[b'x'; 100]).await.unwrap();
            }
            peer.write_all(b"\n{}\n").await.unwrap();
        });
        let mut read = BufReader::new(ours);
        let mut line = Vec::new();
        assert!(read_line(&mut read, &mut line, 512).await.unwrap());
        assert!(line.len() <= 512);
        line.clear();
        assert!(read_line(&mut read, &mut line, 512).await.unwrap());
        assert_eq!(line, b"{}");
        writer.await.unwrap();
    }
}
