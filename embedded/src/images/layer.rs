//! Unpacking a layer. Folders and regular files alone: links, devices and pipes have no use in a disk image and are where
//! archives escape from. Since no symbolic link is ever made, a path of plain names cannot leave the root.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use tar::EntryType;

/// Files of one image at most.
const FILES: u64 = 1 << 20;
/// Bytes of one image at most, holes included.
const BYTES: u64 = 4 << 40;
/// Zeros in blocks of this size become holes.
const BLOCK: usize = 64 << 10;

/// What one image may still use.
#[derive(Debug)]
pub(super) struct Budget {
    files: u64,
    bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { files: FILES, bytes: BYTES }
    }
}

fn bad(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// The path below the root; none for the root itself.
fn plain(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(bad(format!("path {} leaves the image", path.display())));
            }
        }
    }
    Ok((!out.as_os_str().is_empty()).then_some(out))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Makes a folder and those above it, in place of files that are in the way.
fn folder(root: &Path, below: &Path) -> io::Result<()> {
    let mut here = root.to_owned();
    for part in below.components() {
        here.push(part);
        match fs::symlink_metadata(&here) {
            Ok(meta) if meta.is_dir() => continue,
            Ok(_) => fs::remove_file(&here)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        fs::create_dir(&here)?;
        fs::set_permissions(&here, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Copies with holes for zeros.
fn copy(from: &mut impl Read, path: &Path, budget: &mut Budget) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut buffer = vec![0; BLOCK];
    let mut length: u64 = 0;
    loop {
        let mut filled = 0;
        while let Some(space) = buffer.get_mut(filled..).filter(|s| !s.is_empty()) {
            match from.read(space)? {
                0 => break,
                read => filled += read,
            }
        }
        let Some(block) = buffer.get(..filled).filter(|b| !b.is_empty()) else { break };
        length += block.len() as u64;
        budget.bytes = budget.bytes.checked_sub(block.len() as u64).ok_or_else(|| bad("the image is too large"))?;
        if block.iter().all(|b| *b == 0) {
            file.seek(SeekFrom::Current(i64::try_from(block.len()).unwrap_or(0)))?;
        } else {
            file.write_all(block)?;
        }
    }
    file.set_len(length)?;
    fs::set_permissions(path, Permissions::from_mode(0o444))
}

/// Applies one layer (tar, plain or compressed by gzip or zstd; its first bytes say which) to `root`.
pub(super) fn unpack(blob: &mut impl Read, root: &Path, budget: &mut Budget) -> io::Result<()> {
    let mut head = Vec::new();
    blob.by_ref().take(4).read_to_end(&mut head)?;
    let gzip = head.starts_with(&[0x1f, 0x8b]);
    let zstd = head == [0x28, 0xb5, 0x2f, 0xfd];
    let whole = BufReader::with_capacity(BLOCK, io::Cursor::new(head).chain(blob));
    if gzip {
        apply(flate2::bufread::MultiGzDecoder::new(whole), root, budget)
    } else if zstd {
        apply(zstd::stream::read::Decoder::with_buffer(whole)?, root, budget)
    } else {
        apply(whole, root, budget)
    }
}

fn apply(reader: impl Read, root: &Path, budget: &mut Budget) -> io::Result<()> {
    let mut archive = tar::Archive::new(reader);
    // What this layer brought: its own opaque marks do not hide that.
    let mut own: BTreeSet<PathBuf> = BTreeSet::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let Some(path) = plain(&entry.path()?)? else { continue };
        budget.files = budget.files.checked_sub(1).ok_or_else(|| bad("the image has too many files"))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let above = path.parent().unwrap_or(Path::new("")).to_owned();
        if name == ".wh..wh..opq" {
            if let Ok(children) = fs::read_dir(root.join(&above)) {
                for child in children {
                    let below = above.join(child?.file_name());
                    if !own.iter().any(|o| o.starts_with(&below)) {
                        remove(&root.join(below))?;
                    }
                }
            }
            continue;
        }
        if let Some(hidden) = name.strip_prefix(".wh.") {
            if matches!(hidden, "" | "." | "..") {
                return Err(bad(format!("whiteout {name:?} names nothing")));
            }
            if !own.contains(&above.join(hidden)) {
                remove(&root.join(above.join(hidden)))?;
            }
            continue;
        }
        match entry.header().entry_type() {
            EntryType::Directory => {
                folder(root, &path)?;
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                folder(root, &above)?;
                let target = root.join(&path);
                remove(&target)?;
                copy(&mut entry, &target, budget)?;
            }
            EntryType::Link => {
                let Some(link) = entry.link_name()?.map(|l| plain(&l)).transpose()?.flatten() else { continue };
                let from = root.join(link);
                if fs::symlink_metadata(&from).is_ok_and(|m| m.is_file()) && from != root.join(&path) {
                    folder(root, &above)?;
                    let target = root.join(&path);
                    remove(&target)?;
                    fs::hard_link(from, target)?;
                }
            }
            _ => continue,
        }
        own.insert(path);
    }
    Ok(())
}
