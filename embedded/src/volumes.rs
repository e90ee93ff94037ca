//! The files behind volumes of class `local`: `<folder>/<namespace>/<claim>/disk.img`, sparse, owned by the launchers' user.
//!
//! Beside a claim's folder, `.<claim>` says whose it is (a claim's name cannot begin with a dot). So a claim that is made again
//! under the same name never gets the data of one before, and doing a step again after a crash is harmless.

use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use api::names::LAUNCHER_UID;

/// Name of the one file of a volume.
pub const FILE: &str = "disk.img";

/// Why a volume's files could not be had.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The folder is another claim's.
    #[error("{path} still belongs to claim {owner}; remove that volume first", path = .path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
        /// UID of the claim that has it.
        owner: String,
    },
    /// There is nothing to import.
    #[error("there is no file {path} to import", path = .path.display())]
    NoImport {
        /// The file.
        path: PathBuf,
    },
    /// The name of an import is none.
    #[error("`{0}` is not the name of a file in the import folder")]
    BadImport(String),
    /// The file system says no.
    #[error("cannot {what} {path}: {source}", path = .path.display())]
    Io {
        /// What was attempted.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What a volume's file is to be.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// Namespace of the claim.
    pub namespace: &'a str,
    /// Name of the claim.
    pub claim: &'a str,
    /// UID of the claim.
    pub uid: &'a str,
    /// Size.
    pub bytes: u64,
    /// Name of a file in the import folder whose content it begins with.
    pub import: Option<&'a str>,
}

/// The folder of a claim.
#[must_use]
pub fn folder(root: &Path, namespace: &str, claim: &str) -> PathBuf {
    root.join(namespace).join(claim)
}

fn owner_file(root: &Path, namespace: &str, claim: &str) -> PathBuf {
    root.join(namespace).join(format!(".{claim}"))
}

/// Makes the folder and the file of a claim, or finds them made.
///
/// # Errors
/// See [`VolumeError`].
pub fn provision(root: &Path, imports: &Path, wanted: &Wanted<'_>) -> Result<PathBuf, VolumeError> {
    let io = |what, path: &Path| {
        let path = path.to_owned();
        move |source| VolumeError::Io { what, path, source }
    };
    let folder = folder(root, wanted.namespace, wanted.claim);
    let owner = owner_file(root, wanted.namespace, wanted.claim);
    let parent = root.join(wanted.namespace);
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(&parent).map_err(io("make", &parent))?;
    match std::fs::read_to_string(&owner) {
        Ok(uid) if uid == wanted.uid => {}
        Ok(uid) if folder.exists() => return Err(VolumeError::Taken { path: folder, owner: uid }),
        _ if folder.exists() => return Err(VolumeError::Taken { path: folder, owner: "unknown".into() }),
        _ => std::fs::write(&owner, wanted.uid).map_err(io("write", &owner))?,
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(io("make", &folder))?;
    chown(&folder, Some(LAUNCHER_UID), Some(LAUNCHER_UID)).map_err(io("give away", &folder))?;
    let file = folder.join(FILE);
    if file.exists() {
        return Ok(folder);
    }
    let fresh = folder.join(".disk.img.new");
    let _ = std::fs::remove_file(&fresh);
    if let Some(name) = wanted.import {
        if name.contains('/') || name.starts_with('.') || name.is_empty() {
            return Err(VolumeError::BadImport(name.to_owned()));
        }
        let source = imports.join(name);
        if !source.is_file() {
            return Err(VolumeError::NoImport { path: source });
        }
        // cp knows holes and reflinks.
        let copied = std::process::Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .args([&source, &fresh])
            .output()
            .map_err(io("copy", &source))?;
        if !copied.status.success() {
            let _ = std::fs::remove_file(&fresh);
            let words = String::from_utf8_lossy(&copied.stderr).trim().to_owned();
            return Err(VolumeError::Io { what: "copy", path: source, source: std::io::Error::other(words) });
        }
    }
    let disk = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&fresh)
        .map_err(io("make", &fresh))?;
    let size = disk.metadata().map_err(io("look at", &fresh))?.len();
    // What was imported in a format of its own has its size in itself; a raw image grows.
    let raw = wanted.import.is_none() || !is_qcow2(&fresh);
    if raw && size < wanted.bytes {
        disk.set_len(wanted.bytes).map_err(io("grow", &fresh))?;
    }
    disk.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(io("protect", &fresh))?;
    chown(&fresh, Some(LAUNCHER_UID), Some(LAUNCHER_UID)).map_err(io("give away", &fresh))?;
    disk.sync_all().map_err(io("write", &fresh))?;
    std::fs::rename(&fresh, &file).map_err(io("rename", &fresh))?;
    Ok(folder)
}

fn is_qcow2(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0_u8; 4];
    std::fs::File::open(path).is_ok_and(|mut f| f.read_exact(&mut magic).is_ok()) && &magic == b"QFI\xfb"
}

/// Removes what belongs to the claim with that UID, and nothing else.
///
/// # Errors
/// What the file system says.
pub fn reclaim(root: &Path, namespace: &str, claim: &str, uid: &str) -> Result<(), VolumeError> {
    let owner = owner_file(root, namespace, claim);
    match std::fs::read_to_string(&owner) {
        Ok(found) if found == uid => {}
        _ => return Ok(()),
    }
    let folder = folder(root, namespace, claim);
    for removed in [std::fs::remove_dir_all(&folder), std::fs::remove_file(&owner)] {
        match removed {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(VolumeError::Io { what: "remove", path: folder, source });
            }
            _ => {}
        }
    }
    // Only if it is empty.
    let _ = std::fs::remove_dir(root.join(namespace));
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_volume_is_sparse_the_launchers_and_never_inherited() {
        let root = tempfile::tempdir().unwrap();
        let imports = tempfile::tempdir().unwrap();
        let wanted = Wanted { namespace: "default", claim: "data", uid: "u1", bytes: 8 << 20, import: None };
        let folder = provision(root.path(), imports.path(), &wanted).unwrap();
        std::fs::write(folder.join("mark"), b"x").unwrap();
        assert_eq!(provision(root.path(), imports.path(), &wanted).unwrap(), folder);
        let file = std::fs::metadata(folder.join(FILE)).unwrap();
        assert_eq!((file.len(), file.uid(), file.mode() & 0o777), (8 << 20, LAUNCHER_UID, 0o600));
        assert!(file.blocks() * 512 < 1 << 20);
        let other = Wanted { uid: "u2", ..wanted.clone() };
        assert!(provision(root.path(), imports.path(), &other).unwrap_err().to_string().contains("still belongs"));
        reclaim(root.path(), "default", "data", "u2").unwrap();
        assert!(folder.join("mark").exists());
        reclaim(root.path(), "default", "data", "u1").unwrap();
        assert!(!root.path().join("default").exists());
        provision(root.path(), imports.path(), &other).unwrap();
    }

    #[test]
    fn an_import_is_copied_and_grown_and_a_missing_one_is_named() {
        let root = tempfile::tempdir().unwrap();
        let imports = tempfile::tempdir().unwrap();
        std::fs::write(imports.path().join("os.img"), b"boot").unwrap();
        let mut wanted = Wanted { namespace: "default", claim: "os", uid: "u1", bytes: 4096, import: Some("none.img") };
        assert!(provision(root.path(), imports.path(), &wanted).unwrap_err().to_string().contains("none.img"));
        wanted.import = Some("../os.img");
        assert!(matches!(provision(root.path(), imports.path(), &wanted), Err(VolumeError::BadImport(_))));
        wanted.import = Some("os.img");
        let folder = provision(root.path(), imports.path(), &wanted).unwrap();
        let content = std::fs::read(folder.join(FILE)).unwrap();
        assert_eq!((&content[..4], content.len()), (b"boot".as_slice(), 4096));
    }
}
