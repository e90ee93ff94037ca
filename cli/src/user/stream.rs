//! Byte streams to a machine: a websocket with KubeVirt's `plain.kubevirt.io` subprotocol.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures::{SinkExt, StreamExt};
use http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use kube::Client;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::{client::generate_key, derive_accept_key};
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};

use super::cluster::plain;

/// An open stream.
pub type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Pause between two tries.
const AGAIN: Duration = Duration::from_millis(250);

/// Opens a stream subresource. What is refused (the machine does not run yet) is tried again for `wait`.
pub async fn open(client: &Client, path: &str, wait: Duration) -> anyhow::Result<Socket> {
    let begun = Instant::now();
    loop {
        let error = match once(client, path).await {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        if begun.elapsed() >= wait {
            return Err(error);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn once(client: &Client, path: &str) -> anyhow::Result<Socket> {
    let key = generate_key();
    let request = http::Request::get(path)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key)
        .header(SEC_WEBSOCKET_PROTOCOL, "plain.kubevirt.io")
        .body(kube::client::Body::empty())?;
    let response = client.send(request).await.map_err(plain)?;
    let status = response.status();
    if status != http::StatusCode::SWITCHING_PROTOCOLS {
        let body = response.into_body().collect_bytes().await.unwrap_or_default();
        let text = serde_json::from_slice::<serde_json::Value>(&body)
            .ok()
            .and_then(|v| v["message"].as_str().map(str::to_owned))
            .unwrap_or_else(|| String::from_utf8_lossy(&body).trim().to_owned());
        match text.as_str() {
            "" => bail!("the API server answered {status}"),
            said => bail!("{said}"),
        }
    }
    let accepted = response.headers().get(SEC_WEBSOCKET_ACCEPT).map(|v| v.as_bytes().to_vec());
    if accepted.as_deref() != Some(derive_accept_key(key.as_bytes()).as_bytes()) {
        bail!("the API server did not accept the websocket");
    }
    let upgraded = hyper::upgrade::on(response).await.context("the connection was not upgraded")?;
    Ok(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await)
}

/// What a stream's end means: the guest's side ended, or something went wrong between it and us.
pub fn closed(frame: Option<CloseFrame>) -> anyhow::Result<()> {
    match frame {
        Some(frame) if frame.code == CloseCode::Normal => Ok(()),
        Some(frame) if !frame.reason.is_empty() => bail!("the stream was closed: {}", frame.reason),
        Some(frame) => bail!("the stream was closed with code {}", frame.code),
        None => bail!("the stream was cut off"),
    }
}

/// Copies both ways until one side ends.
pub async fn copy<S>(socket: Socket, stream: S) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (mut to, mut from) = socket.split();
    let (mut read, mut write) = tokio::io::split(stream);
    let up = async {
        let mut buffer = vec![0; 32 << 10];
        loop {
            let n = read.read(&mut buffer).await?;
            if n == 0 {
                let _ = to.send(Message::Close(None)).await;
                return Ok::<_, anyhow::Error>(());
            }
            to.send(Message::Binary(buffer.get(..n).unwrap_or_default().to_vec().into())).await?;
        }
    };
    let down = async {
        while let Some(message) = from.next().await {
            match message? {
                Message::Binary(bytes) => write.write_all(&bytes).await?,
                Message::Text(text) => write.write_all(text.as_bytes()).await?,
                Message::Close(frame) => {
                    write.shutdown().await?;
                    return closed(frame);
                }
                _ => {}
            }
        }
        write.shutdown().await?;
        closed(None)
    };
    tokio::select! {
        result = up => result,
        result = down => result,
    }
}
