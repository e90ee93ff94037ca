//! Sockets in a pod's share folder. The folder belongs to the launcher, which is not trusted: a name in it may have been
//! replaced by a link to somebody else's socket. So a name is opened without following links, looked at, and connected to
//! by its descriptor. That also lifts the limit on a socket's path.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, fstat};
use tokio::net::UnixStream;

/// Connects to the socket `name` in the folder.
pub(crate) async fn connect(folder: &Path, name: &str) -> io::Result<UnixStream> {
    let dir = open(folder, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let socket = openat(&dir, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let kind = SFlag::from_bits_truncate(fstat(&socket)?.st_mode) & SFlag::S_IFMT;
    if kind != SFlag::S_IFSOCK {
        return Err(io::Error::other(format!("{name} in the share folder is not a socket")));
    }
    let path: PathBuf = format!("/proc/self/fd/{}", socket.as_raw_fd()).into();
    UnixStream::connect(path).await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn links_and_files_are_not_followed_and_long_paths_work() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("x".repeat(120));
        std::fs::create_dir(&folder).unwrap();
        let real = dir.path().join("real.sock");
        let _listener = tokio::net::UnixListener::bind(&real).unwrap();
        std::os::unix::fs::symlink(&real, folder.join("link.sock")).unwrap();
        std::fs::write(folder.join("file.sock"), b"").unwrap();
        assert!(connect(&folder, "link.sock").await.is_err());
        assert!(connect(&folder, "file.sock").await.is_err());
        assert!(connect(&folder, "none.sock").await.is_err());
        std::fs::rename(&real, folder.join("real.sock")).unwrap();
        connect(&folder, "real.sock").await.unwrap();
        std::os::unix::fs::symlink(&folder, dir.path().join("dir")).unwrap();
        assert!(connect(&dir.path().join("dir"), "real.sock").await.is_err());
    }
}
