//! `fd.sock`: descriptors that the node agent hands over before it starts the domain. One message carries one
//! descriptor, and its payload is the descriptor's name; one byte `k` is the answer. A name that comes again replaces
//! the first (the agent was restarted in between).

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};

use crate::limits;

/// What was handed over and not used yet.
#[derive(Clone, Default)]
pub(crate) struct Descriptors(Arc<Mutex<BTreeMap<String, OwnedFd>>>);

impl Descriptors {
    pub fn take(&self) -> BTreeMap<String, OwnedFd> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|p| p.into_inner()))
    }

    fn put(&self, name: String, fd: OwnedFd) -> bool {
        let mut all = self.0.lock().unwrap_or_else(|p| p.into_inner());
        if all.len() >= limits::DESCRIPTORS && !all.contains_key(&name) {
            return false;
        }
        all.insert(name, fd);
        true
    }
}

/// Listens until the runtime ends.
pub(crate) fn serve(socket: &Path) -> std::io::Result<Descriptors> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let descriptors = Descriptors::default();
    let into = descriptors.clone();
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((peer, _)) if !crate::is_from(&peer, crate::is_agent) => {}
                Ok((peer, _)) => drop(tokio::spawn(session(peer, into.clone()))),
                Err(error) => {
                    tracing::warn!(%error, "accepting on fd.sock");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
    });
    Ok(descriptors)
}

async fn session(mut peer: UnixStream, into: Descriptors) {
    loop {
        let mut name = [0; limits::DESCRIPTOR_NAME];
        let received =
            peer.async_io(Interest::READABLE, || crate::sys::receive_descriptor(peer.as_raw_fd(), &mut name)).await;
        let (length, fd) = match received {
            Ok((0, _)) => return,
            Ok(r) => r,
            Err(error) => {
                tracing::warn!(%error, "receiving a descriptor");
                return;
            }
        };
        let name = name.get(..length).and_then(|n| std::str::from_utf8(n).ok()).map(str::to_owned);
        let (Some(name), Some(fd)) = (name, fd) else {
            tracing::warn!("a message on fd.sock without a name or a descriptor");
            return;
        };
        if !into.put(name, fd) {
            tracing::warn!("too many descriptors on fd.sock");
            return;
        }
        if peer.write_all(b"k").await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn descriptors_arrive_under_their_names_and_garbage_closes_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("fd.sock");
        let descriptors = serve(&socket).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut peer = UnixStream::connect(&socket).await.unwrap();
        for name in ["tap0", "dhcp0", "tap0"] {
            crate::sys::send_descriptor(&peer, name, &file).unwrap();
            assert_eq!(peer.read_u8().await.unwrap(), b'k');
        }
        peer.write_all(b"no descriptor").await.unwrap();
        assert!(peer.read_u8().await.is_err());
        assert_eq!(descriptors.take().into_keys().collect::<Vec<_>>(), ["dhcp0", "tap0"]);
        assert!(descriptors.take().is_empty());
    }
}
