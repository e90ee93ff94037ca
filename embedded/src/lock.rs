//! One owner per data folder, by `flock`. The kernel lets go of it when the owner dies, however it dies.

use std::fs::OpenOptions;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Why the folder could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error("{folder} is in use by {holder}", folder = .folder.display())]
    Held {
        /// The data folder.
        folder: PathBuf,
        /// Who, as they wrote it down themselves.
        holder: String,
    },
    /// The lock file cannot be used.
    #[error("cannot lock {path}", path = .path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// The lock of a data folder, held as long as this lives.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<std::fs::File>,
}

impl Lock {
    /// Takes the lock `DATA/lock` or says who has it. Never waits.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process has it.
    pub fn take(folder: &Path) -> Result<Self, LockError> {
        let path = folder.join("lock");
        let io = |source| LockError::Io { path: path.clone(), source };
        // Not truncated on opening: the content is the present holder's.
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                let words =
                    format!("process {} since {}", std::process::id(), jiff::Timestamp::now().strftime("%FT%TZ"));
                file.set_len(0).map_err(io)?;
                file.rewind().map_err(io)?;
                file.write_all(words.as_bytes()).map_err(io)?;
                Ok(Self { _file: file })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                if holder.is_empty() {
                    holder.push_str("another process");
                }
                Err(LockError::Held { folder: folder.to_owned(), holder })
            }
            Err((_, errno)) => Err(io(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_second_is_told_who_has_it_and_the_third_gets_it() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(dir.path()).unwrap();
        let text = Lock::take(dir.path()).unwrap_err().to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        drop(first);
        Lock::take(dir.path()).unwrap();
    }
}
