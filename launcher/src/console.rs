//! The serial console: read always, so that the guest never waits for a reader; logged within bounds; offered to one
//! client at a time on `console.sock`, where the newest client displaces the one before it.
//!
//! A new client is first shown the backlog. A client that does not read loses what the backlog loses; the guest does
//! not notice.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::limits;

/// The last bytes of the console. Offsets count from the first byte ever written.
#[derive(Default)]
struct Backlog {
    bytes: VecDeque<u8>,
    end: u64,
}

impl Backlog {
    fn push(&mut self, part: &[u8]) {
        self.bytes.extend(part);
        self.end += part.len() as u64;
        let excess = self.bytes.len().saturating_sub(limits::CONSOLE_BACKLOG);
        self.bytes.drain(..excess);
    }

    /// What comes at `from` or, where that is lost, at the oldest byte; with the offset after it.
    fn after(&self, from: u64, most: usize) -> (Vec<u8>, u64) {
        let start = self.end - self.bytes.len() as u64;
        let skip = usize::try_from(from.max(start) - start).unwrap_or(usize::MAX);
        let part: Vec<u8> = self.bytes.iter().skip(skip).take(most).copied().collect();
        let next = from.max(start) + part.len() as u64;
        (part, next)
    }
}

struct Log {
    path: PathBuf,
    file: Option<File>,
    size: u64,
}

impl Log {
    fn open(path: PathBuf) -> Self {
        let file =
            File::create(&path).map_err(|error| tracing::warn!(%error, path = %path.display(), "no console log")).ok();
        Self { path, file, size: 0 }
    }

    fn push(&mut self, part: &[u8]) {
        if self.size >= limits::CONSOLE_LOG {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            self.file = std::fs::rename(&self.path, old).and_then(|()| File::create(&self.path)).ok();
            self.size = 0;
        }
        // A full disk costs the log, not the console.
        if let Some(file) = &mut self.file
            && file.write_all(part).is_ok()
        {
            self.size += part.len() as u64;
        }
    }
}

struct Shared {
    backlog: Mutex<Backlog>,
    /// Offset of the end; changes wake the client.
    end: watch::Sender<u64>,
    input: tokio::sync::Mutex<OwnedWriteHalf>,
}

impl Shared {
    fn backlog(&self) -> MutexGuard<'_, Backlog> {
        self.backlog.lock().unwrap_or_else(|p| p.into_inner())
    }
}

/// Serves the console until the guest's end of `serial` closes.
pub(crate) fn serve(serial: UnixStream, socket: &Path, log: PathBuf) -> std::io::Result<()> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let (mut read, write) = serial.into_split();
    let shared =
        Arc::new(Shared { backlog: Mutex::default(), end: watch::channel(0).0, input: tokio::sync::Mutex::new(write) });
    let clients = tokio::spawn(accept(listener, shared.clone()));
    let mut log = Log::open(log);
    tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        while let Ok(n @ 1..) = read.read(&mut buffer).await {
            let part = buffer.get(..n).unwrap_or_default();
            log.push(part);
            let end = {
                let mut backlog = shared.backlog();
                backlog.push(part);
                backlog.end
            };
            shared.end.send_replace(end);
        }
        clients.abort();
    });
    Ok(())
}

async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    let mut current: Option<tokio::task::JoinHandle<()>> = None;
    loop {
        match listener.accept().await {
            Ok((client, _)) if !crate::is_from(&client, crate::is_agent) => {}
            Ok((client, _)) => {
                if let Some(old) = current.take() {
                    old.abort();
                }
                current = Some(tokio::spawn(client_session(client, shared.clone())));
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a console client");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn client_session(client: UnixStream, shared: Arc<Shared>) {
    let (mut read, mut write) = client.into_split();
    let output = async {
        let mut ends = shared.end.subscribe();
        let mut at = 0;
        loop {
            let (part, next) = shared.backlog().after(at, 4096);
            at = next;
            if part.is_empty() {
                if ends.changed().await.is_err() {
                    return;
                }
            } else if write.write_all(&part).await.is_err() {
                return;
            }
        }
    };
    let input = async {
        let mut buffer = [0; 1024];
        while let Ok(n @ 1..) = read.read(&mut buffer).await {
            let part = buffer.get(..n).unwrap_or_default();
            if shared.input.lock().await.write_all(part).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = output => {}
        () = input => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_backlog_is_bounded_and_counts_on() {
        let mut b = Backlog::default();
        b.push(&vec![b'a'; limits::CONSOLE_BACKLOG]);
        b.push(b"xyz");
        assert_eq!(b.bytes.len(), limits::CONSOLE_BACKLOG);
        let (part, next) = b.after(limits::CONSOLE_BACKLOG as u64, 2);
        assert_eq!((part.as_slice(), next), (b"xy".as_slice(), limits::CONSOLE_BACKLOG as u64 + 2));
        assert_eq!(b.after(next + 1, 9), (Vec::new(), next + 1));
        let (_, next) = b.after(0, 1);
        assert_eq!(next, 4, "what is lost is skipped");
    }

    #[test]
    fn the_log_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = Log::open(path.clone());
        for _ in 0..5 * limits::CONSOLE_LOG / 4096 {
            log.push(&[b'x'; 4096]);
        }
        let total: u64 = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(total <= 2 * limits::CONSOLE_LOG + 4096, "{total}");
    }

    #[tokio::test]
    async fn the_newest_client_wins_and_sees_the_past() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("console.sock");
        let (ours, mut guest) = UnixStream::pair().unwrap();
        serve(ours, &socket, dir.path().join("console.log")).unwrap();
        guest.write_all(b"boot\n").await.unwrap();
        let mut first = UnixStream::connect(&socket).await.unwrap();
        let mut seen = [0; 5];
        first.read_exact(&mut seen).await.unwrap();
        assert_eq!(&seen, b"boot\n");
        first.write_all(b"one").await.unwrap();
        let mut got = [0; 3];
        guest.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"one");
        let mut second = UnixStream::connect(&socket).await.unwrap();
        second.read_exact(&mut seen).await.unwrap();
        assert_eq!(first.read(&mut seen).await.unwrap(), 0, "the first was displaced");
        guest.write_all(b"login").await.unwrap();
        second.read_exact(&mut seen).await.unwrap();
        assert_eq!(&seen, b"login");
        assert_eq!(std::fs::read(dir.path().join("console.log")).unwrap(), b"boot\nlogin");
    }
}
