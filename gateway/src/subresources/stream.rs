//! Websockets: console and VNC through the node agent, ports of a guest through the pod network.
//!
//! Payload travels in binary frames whose boundaries mean nothing; text frames are ignored; a normal close is the end.
//! The request is checked and the other side is reached before the client is upgraded, so that what goes wrong until
//! then is an ordinary HTTP answer. The first side to end closes both. Each frame to a UDP port is a datagram, and each
//! datagram from it a frame.

use super::Asked;
use crate::admission::{get, items, text};
use crate::kubernetes::{self, VM, VMI};
use crate::limits;
use crate::status::Status;
use axum::body::Bytes;
use axum::extract::FromRequestParts;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use futures::{SinkExt, StreamExt};
use http::request::Parts;
use proto::agent::StreamChunk;
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// The one subprotocol; a client that offers none is served, too.
const PROTOCOL: &str = "plain.kubevirt.io";

async fn upgrade(parts: &mut Parts) -> Result<WebSocketUpgrade, Status> {
    let ws = WebSocketUpgrade::from_request_parts(parts, &())
        .await
        .map_err(|e| Status::bad_request(format!("a websocket is expected: {e}")))?;
    Ok(ws
        .protocols([PROTOCOL])
        .max_message_size(limits::INCOMING)
        .max_frame_size(limits::INCOMING)
        .max_write_buffer_size(limits::INCOMING))
}

/// Serial console or VNC.
pub(super) async fn device(asked: &Asked<'_>, device: &str, parts: &mut Parts) -> Result<Response, Status> {
    let client = &asked.inner.config.client;
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await?;
    let phase = text(&vmi, &["status", "phase"]);
    let (switch, missing) = match device {
        "console" => ("autoattachSerialConsole", "No serial consoles are present."),
        _ => ("autoattachGraphicsDevice", "No graphics devices are present."),
    };
    if get(&vmi, &["spec", "domain", "devices", switch]) == false {
        return Err(Status::bad_request(missing));
    }
    if device == "console" && phase == "Failed" {
        return Err(Status::conflict(VMI.what, asked.name, "VMI has failed"));
    }
    if phase != "Running" {
        return Err(Status::bad_request(format!("VMI is in phase {phase:?}: VMI is not running")));
    }
    let preserve = asked.wants("preserveSession");
    let ws = upgrade(parts).await?;
    let (up, mut down) = asked.inner.agents.stream(client, &vmi, device, preserve).await?;
    let about = format!("{device} of {}/{}", asked.namespace, asked.name);
    let connected = asked.inner.metrics.connected(device, asked.namespace, asked.name);
    Ok(ws.on_upgrade(move |socket| async move {
        let _connected = connected;
        let (from_guest, guest) = mpsc::channel::<Result<Bytes, String>>(limits::CHUNKS);
        let mut reader = tokio::spawn(async move {
            loop {
                let next = match down.message().await {
                    Ok(Some(chunk)) => Ok(chunk.data),
                    Ok(None) => break,
                    Err(e) => Err(e.message().to_owned()),
                };
                let failed = next.is_err();
                if from_guest.send(next).await.is_err() || failed {
                    break;
                }
            }
            // A stream that is cut off costs all others of that node their connection where it happens often: it ends in order.
            while let Ok(Some(_)) = down.message().await {}
        });
        splice(socket, guest, Up::Agent(up), &about).await;
        if tokio::time::timeout(limits::FAREWELL, &mut reader).await.is_err() {
            reader.abort();
        }
    }))
}

/// Port of an instance by way of its VM.
pub(super) async fn port_of_vm(asked: &Asked<'_>, rest: &[&str], parts: &mut Parts) -> Result<Response, Status> {
    let client = &asked.inner.config.client;
    let vm = kubernetes::need(client, VM, asked.namespace, asked.name).await?;
    if get(&vm, &["status", "created"]) != true {
        return Err(Status::conflict(VM.what, asked.name, "VMI is not started"));
    }
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await?;
    let owned = items(&vmi, &["metadata", "ownerReferences"])
        .iter()
        .any(|o| o["uid"] == vm["metadata"]["uid"] && o["controller"] == true);
    if !owned {
        return Err(Status::internal(format_args!("VMI {:?} is not owned by the VM", asked.name)));
    }
    forward(asked, &vmi, rest, parts).await
}

/// Port of an instance.
pub(super) async fn port(asked: &Asked<'_>, rest: &[&str], parts: &mut Parts) -> Result<Response, Status> {
    let vmi = kubernetes::need(&asked.inner.config.client, VMI, asked.namespace, asked.name).await?;
    forward(asked, &vmi, rest, parts).await
}

async fn forward(asked: &Asked<'_>, vmi: &Value, rest: &[&str], parts: &mut Parts) -> Result<Response, Status> {
    let (port, protocol) = match rest {
        [port] => (*port, "tcp"),
        [port, protocol] => (*port, *protocol),
        _ => return Err(super::not_found()),
    };
    let port: u16 =
        port.parse().ok().filter(|p| *p > 0).ok_or_else(|| Status::bad_request(format!("not a port: {port}")))?;
    if !["tcp", "udp"].contains(&protocol) {
        return Err(Status::bad_request(format!("unknown protocol {protocol:?}, only tcp or udp allowed")));
    }
    if items(vmi, &["status", "conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == "Paused" && text(c, &["status"]) == "True")
    {
        return Err(Status::conflict(VMI.what, asked.name, "VMI is paused"));
    }
    let address = items(vmi, &["status", "interfaces"]).first().map(|i| text(i, &["ipAddress"])).unwrap_or_default();
    let Ok(ip) = address.parse::<IpAddr>() else {
        return Err(Status::bad_request(format!("VMI {:?} has no network interface with an address", asked.name)));
    };
    let target = SocketAddr::new(ip, port);
    let config = &asked.inner.config;
    let dialling = async {
        Ok::<_, std::io::Error>(match protocol {
            "udp" => {
                let socket = Arc::new((config.datagrams)(target).await?);
                (Down::Datagrams(socket.clone()), Up::Datagrams(socket))
            }
            _ => {
                let (read, write) = tokio::io::split((config.dial)(target).await?);
                (Down::Port(read), Up::Port(write))
            }
        })
    };
    let (mut down, up) = match tokio::time::timeout(limits::PORT, dialling).await {
        Ok(Ok(both)) => both,
        Ok(Err(e)) => return Err(Status::internal(format_args!("dialling VM: {target}: {e}"))),
        Err(_) => return Err(Status::internal(format_args!("dialling VM: {target}: no answer"))),
    };
    let ws = upgrade(parts).await?;
    let about = format!("port {port}/{protocol} of {}/{}", asked.namespace, asked.name);
    let connected = asked.inner.metrics.connected("portforward", asked.namespace, asked.name);
    Ok(ws.on_upgrade(move |socket| async move {
        let _connected = connected;
        let (from_guest, guest) = mpsc::channel::<Result<Bytes, String>>(limits::CHUNKS);
        let reader = tokio::spawn(async move {
            let mut buffer = vec![0; down.buffer()];
            loop {
                let next = match down.read(&mut buffer).await {
                    Ok(None) => break,
                    Ok(Some(n)) => Ok(Bytes::copy_from_slice(&buffer[..n])),
                    Err(e) => Err(e.to_string()),
                };
                let failed = next.is_err();
                if from_guest.send(next).await.is_err() || failed {
                    break;
                }
            }
        });
        splice(socket, guest, up, &about).await;
        reader.abort();
    }))
}

/// Where a guest's bytes come from, if that is one of its ports.
enum Down {
    Port(tokio::io::ReadHalf<proto::transport::Connection>),
    Datagrams(Arc<UdpSocket>),
}

impl Down {
    /// Room for what comes at once: of a datagram that does not fit, the rest would be lost.
    fn buffer(&self) -> usize {
        match self {
            Down::Port(_) => limits::FRAME,
            Down::Datagrams(_) => limits::DATAGRAM,
        }
    }

    /// How much has come; `None`: nothing will any more.
    async fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<Option<usize>> {
        match self {
            Down::Port(from) => from.read(buffer).await.map(|n| (n > 0).then_some(n)),
            Down::Datagrams(from) => loop {
                match from.recv(buffer).await {
                    // Nothing to pass on, and no end either.
                    Ok(0) => {}
                    // Nobody listens at that port, which a guest may change at any time.
                    Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {}
                    other => return other.map(Some),
                }
            },
        }
    }
}

/// Where a client's bytes go.
enum Up {
    Agent(mpsc::Sender<StreamChunk>),
    Port(tokio::io::WriteHalf<proto::transport::Connection>),
    Datagrams(Arc<UdpSocket>),
}

impl Up {
    async fn send(&mut self, data: Bytes) -> Result<(), String> {
        match self {
            Up::Agent(to) => to.send(StreamChunk { open: None, data }).await.map_err(|e| e.to_string()),
            Up::Port(to) => to.write_all(&data).await.map_err(|e| e.to_string()),
            Up::Datagrams(to) => match to.send(&data).await {
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => Ok(()),
                sent => sent.map(|_| ()).map_err(|e| e.to_string()),
            },
        }
    }
}

/// Copies both ways until one side ends, and tells the client how; each direction waits for its own receiver alone, so a
/// client that does not read holds up nobody but itself.
async fn splice(socket: WebSocket, mut guest: mpsc::Receiver<Result<Bytes, String>>, mut up: Up, about: &str) {
    let (mut sink, mut stream) = socket.split();
    let (heard, last_heard) = tokio::sync::watch::channel(Instant::now());
    let to_guest = async {
        while let Some(message) = stream.next().await {
            heard.send_replace(Instant::now());
            match message {
                Ok(Message::Binary(data)) if data.is_empty() => {}
                Ok(Message::Binary(data)) => {
                    if let Err(why) = up.send(data).await {
                        // Why nothing is taken any more, the other direction knows best.
                        tokio::time::sleep(limits::FAREWELL).await;
                        return Some(Err(why));
                    }
                }
                Ok(Message::Close(_)) | Err(_) => return None,
                Ok(Message::Text(_) | Message::Ping(_) | Message::Pong(_)) => {}
            }
        }
        None
    };
    let to_client = async {
        let mut ping = tokio::time::interval(limits::PING);
        ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let frame = tokio::select! {
                chunk = guest.recv() => match chunk {
                    Some(Ok(data)) => Message::Binary(data),
                    Some(Err(why)) => return Some(Err(why)),
                    None => return Some(Ok(())),
                },
                _ = ping.tick() => Message::Ping(Bytes::from_static(b"keep alive")),
            };
            if sink.send(frame).await.is_err() {
                return None;
            }
        }
    };
    let silence = async {
        loop {
            let until = *last_heard.borrow() + limits::SILENCE;
            if until <= Instant::now() {
                return Some(Err("the client is silent".to_owned()));
            }
            tokio::time::sleep_until(until).await;
        }
    };
    // `None`: the client has ended it, which is answered, or is gone.
    let ending: Option<Result<(), String>> = tokio::select! {
        e = to_guest => e,
        e = to_client => e,
        e = silence => e,
    };
    let frame = ending.as_ref().map(|ending| match ending {
        Ok(()) => CloseFrame { code: close_code::NORMAL, reason: String::new().into() },
        Err(why) => CloseFrame { code: close_code::ERROR, reason: why.chars().take(100).collect::<String>().into() },
    });
    let _ = tokio::time::timeout(limits::FAREWELL, sink.send(Message::Close(frame))).await;
    let ending = match ending {
        Some(Err(why)) => why,
        Some(Ok(())) => "the guest's side ended".into(),
        None => "the client is gone".into(),
    };
    tracing::debug!(about, ending, "stream ended");
}
