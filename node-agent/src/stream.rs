//! Byte streams between a gateway and a guest's serial console or VNC server.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use proto::agent::{StreamChunk, StreamOpen};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::{limits, sock};

/// Open VNC sessions by pod: one each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams {
    vnc: Arc<Mutex<HashMap<String, Session>>>,
}

#[derive(Clone, Debug)]
struct Session {
    number: u64,
    stop: CancellationToken,
}

/// Ends the session and takes it off the list.
struct Guard {
    streams: Streams,
    pod: String,
    session: Session,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.session.stop.cancel();
        let mut vnc = self.streams.vnc();
        if vnc.get(&self.pod).is_some_and(|s| s.number == self.session.number) {
            vnc.remove(&self.pod);
        }
    }
}

impl Streams {
    fn vnc(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        self.vnc.lock().unwrap_or_else(|p| p.into_inner())
    }

    /// The newest viewer wins, unless it wishes to leave the one before in peace.
    fn enter(&self, open: &StreamOpen, stop: &CancellationToken) -> Result<Option<Guard>, Status> {
        if open.device != "vnc" {
            return Ok(None);
        }
        let mut vnc = self.vnc();
        let old = vnc.get(&open.pod_uid).filter(|s| !s.stop.is_cancelled()).cloned();
        if old.is_some() && open.preserve_session {
            return Err(Status::failed_precondition("Active VNC connection. Request denied."));
        }
        if let Some(old) = &old {
            old.stop.cancel();
        }
        let number = vnc.values().map(|s| s.number).max().unwrap_or(0) + 1;
        let session = Session { number, stop: stop.clone() };
        vnc.insert(open.pod_uid.clone(), session.clone());
        Ok(Some(Guard { streams: self.clone(), pod: open.pod_uid.clone(), session }))
    }

    /// Joins the gateway's stream with the device's socket.
    pub async fn open(
        &self,
        share: &Path,
        open: &StreamOpen,
        mut incoming: Streaming<StreamChunk>,
        permit: OwnedSemaphorePermit,
        agent_stop: &CancellationToken,
    ) -> Result<ReceiverStream<Result<StreamChunk, Status>>, Status> {
        let name = match open.device.as_str() {
            "console" => "console.sock",
            "vnc" => "vnc.sock",
            other => return Err(Status::invalid_argument(format!("unknown device {other:?}"))),
        };
        let stop = agent_stop.child_token();
        let guard = self.enter(open, &stop)?;
        let socket = sock::connect(share, name).await.map_err(|e| {
            Status::failed_precondition(format!("the {} of this machine cannot be reached: {e}", open.device))
        })?;
        let (mut read, mut write) = socket.into_split();
        let (out, outgoing) = mpsc::channel(limits::CHUNKS);
        let (pod, device) = (open.pod_uid.clone(), open.device.clone());
        tracing::info!(pod, device, "a stream begins");
        tokio::spawn(async move {
            let (_guard, _permit) = (guard, permit);
            let down = async {
                while let Ok(Some(chunk)) = incoming.message().await {
                    if write.write_all(&chunk.data).await.is_err() {
                        return;
                    }
                }
            };
            let up = async {
                let mut buffer = vec![0; limits::CHUNK];
                while let Ok(n @ 1..) = read.read(&mut buffer).await {
                    let data = Bytes::copy_from_slice(buffer.get(..n).unwrap_or_default());
                    if out.send(Ok(StreamChunk { open: None, data })).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = down => {}
                () = up => {}
                () = out.closed() => {}
                () = stop.cancelled() => {}
            }
            tracing::info!(pod, device, "a stream ended");
        });
        Ok(ReceiverStream::new(outgoing))
    }
}
