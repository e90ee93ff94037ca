//! What is behind each disk: finding image files, telling their format without letting a guest decide it, overlays,
//! scratch files.
//!
//! A guest owns every byte of a raw disk. If its format were guessed from these bytes at each start, a guest could
//! write a qcow2 header that names a file of the host as its backing file and read that file after the next start. So:
//! the format of a PVC's image is told once, before the first guest runs, and kept in a file beside it that the guest
//! cannot reach; headers are read by our own code; and an image that refers to any other file is refused.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::hypervisor::StartError;
use crate::limits;
use crate::machine::{Disk, Source};

use super::args::{Format, Image};

/// The file beside `disk.img` that keeps its format.
const FORMAT_FILE: &str = "disk.img.format";
/// Bytes of a qcow2 header that we read.
const HEADER: usize = 104;
/// `incompatible_features`: the data is in another file.
const EXTERNAL_DATA: u64 = 1 << 2;

fn failed(disk: &Disk, problem: impl std::fmt::Display) -> StartError {
    StartError(format!("{} ({}): {problem}", disk.path, disk.name))
}

/// Prepares what is behind `disk`; `None`: an empty drive.
pub(super) async fn prepare(disk: &Disk, scratch: &Path, qemu_img: &Path) -> Result<Option<Image>, StartError> {
    let Some(source) = &disk.source else { return Ok(None) };
    let folder = scratch.join("disk-data").join(&disk.name);
    let image = match source {
        Source::Claim { folder: claim, device } => {
            if is_device(device) && !claim.join("disk.img").exists() {
                Image { path: device.clone(), format: Format::Raw, device: true, base: None }
            } else {
                let image = claim_image(claim).map_err(|e| failed(disk, e))?;
                check(&image, disk, qemu_img).await?;
                image
            }
        }
        Source::Image { folder: volume, file } => {
            let path = image_file(volume, file.as_deref()).map_err(|e| failed(disk, e))?;
            let format = told_by_header(&path).map_err(|e| failed(disk, e))?;
            overlay(Image { path, format, device: false, base: None }, &folder, disk, qemu_img).await?
        }
        Source::Ephemeral { folder: claim } => {
            let base = claim_image(claim).map_err(|e| failed(disk, e))?;
            overlay(base, &folder, disk, qemu_img).await?
        }
        Source::Scratch(bytes) => {
            let path = folder.join("disk.img");
            let made = std::fs::create_dir_all(&folder)
                .and_then(|()| std::fs::OpenOptions::new().create(true).truncate(true).write(true).open(&path))
                .and_then(|f| f.set_len(*bytes));
            made.map_err(|e| failed(disk, format!("creating an empty disk of {bytes} bytes: {e}")))?;
            Image { path, format: Format::Raw, device: false, base: None }
        }
        Source::CloudInit(data) => {
            let path = folder.join("cloud-init.iso");
            let image = crate::cloudinit::image(data).map_err(|e| failed(disk, e))?;
            let written = std::fs::create_dir_all(&folder).and_then(|()| private_file(&path, &image));
            written.map_err(|e| failed(disk, format!("writing the cloud-init image: {e}")))?;
            Image { path, format: Format::Raw, device: false, base: None }
        }
    };
    Ok(Some(image))
}

/// User data is often a password.
fn private_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// The image of a PVC, with its format as it was told before any guest ran.
fn claim_image(folder: &Path) -> Result<Image, String> {
    let path = folder.join("disk.img");
    if !path.is_file() {
        return Err(format!("there is no disk.img in the claim ({} is not a file)", path.display()));
    }
    let kept = folder.join(FORMAT_FILE);
    let format = match std::fs::read_to_string(&kept).ok().as_deref().map(str::trim) {
        // Whatever its bytes look like by now.
        Some("raw") => Format::Raw,
        // Only somebody with access to the claim itself can have replaced a qcow2 by something else.
        Some("qcow2") => told_by_header(&path)?,
        _ => {
            let header = told_by_header(&path)?;
            // Where the note cannot be left the header is asked each time: still harmless, since it can name no file.
            if let Err(error) = std::fs::write(&kept, format!("{}\n", header.word())) {
                tracing::debug!(%error, path = %kept.display(), "the format of an image could not be noted");
            }
            header
        }
    };
    Ok(Image { path, format, device: false, base: None })
}

/// The file of an image volume: the named one, or the only one in its `disk` folder.
fn image_file(volume: &Path, file: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(file) = file {
        let path = volume.join(file);
        return if path.is_file() { Ok(path) } else { Err(format!("the image has no file {}", file.display())) };
    }
    let folder = volume.join("disk");
    let entries = std::fs::read_dir(&folder).map_err(|e| format!("the image has no folder disk/: {e}"))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.is_file() && !p.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.')))
        .collect();
    files.sort();
    match files.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err("the image has no file in its folder disk/".into()),
        many => {
            Err(format!("the image has {} files in its folder disk/, and containerDisk.path names none", many.len()))
        }
    }
}

/// The format by the first bytes. A qcow2 that refers to another file is an error, not a format.
fn told_by_header(path: &Path) -> Result<Format, String> {
    let mut header = Vec::with_capacity(HEADER);
    let file = std::fs::File::open(path).map_err(|e| format!("opening {}: {e}", path.display()))?;
    let read = file.take(HEADER as u64).read_to_end(&mut header);
    read.map_err(|e| format!("reading {}: {e}", path.display()))?;
    if header.is_empty() {
        return Err(format!("{} is empty", path.display()));
    }
    judge_header(&header).map_err(|e| format!("{}: {e}", path.display()))
}

fn judge_header(header: &[u8]) -> Result<Format, String> {
    if !header.starts_with(b"QFI\xfb") {
        return Ok(Format::Raw);
    }
    let number = |at: usize, len: usize| -> Result<u64, String> {
        let bytes = header.get(at..at + len).ok_or("the qcow2 image is cut off within its header")?;
        Ok(bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
    };
    let version = number(4, 4)?;
    if version != 2 && version != 3 {
        return Err(format!("qcow2 version {version} is not supported"));
    }
    if number(8, 8)? != 0 {
        return Err("the qcow2 image has a backing file, which is not supported".into());
    }
    if number(32, 4)? != 0 {
        return Err("the qcow2 image is encrypted, which is not supported".into());
    }
    number(64, 8)?;
    if version == 3 && number(72, 8)? & EXTERNAL_DATA != 0 {
        return Err("the qcow2 image keeps its data in another file, which is not supported".into());
    }
    Ok(Format::Qcow2)
}

/// Metadata of a qcow2 image that points beyond its end means that the image was cut off.
async fn check(image: &Image, disk: &Disk, qemu_img: &Path) -> Result<(), StartError> {
    if image.format == Format::Raw {
        return Ok(());
    }
    let path = image.path.to_string_lossy();
    let done =
        run(qemu_img, &["check", "-q", "-f", "qcow2", "--output=json", &path]).await.map_err(|e| failed(disk, e))?;
    // 0: sound. 3: leaked clusters, harmless. 2: damaged. 1: could not be checked.
    match done.code {
        Some(0 | 3) => Ok(()),
        Some(2) => Err(failed(disk, format!("the qcow2 image {path} is damaged or cut off: {}", done.summary()))),
        _ => Err(failed(disk, format!("the qcow2 image {path} cannot be read: {}", done.summary()))),
    }
}

async fn overlay(base: Image, folder: &Path, disk: &Disk, qemu_img: &Path) -> Result<Image, StartError> {
    check(&base, disk, qemu_img).await?;
    let path = folder.join("disk.qcow2");
    std::fs::create_dir_all(folder).map_err(|e| failed(disk, format!("creating {}: {e}", folder.display())))?;
    let (below, above) = (base.path.to_string_lossy(), path.to_string_lossy());
    let done = run(qemu_img, &["create", "-q", "-f", "qcow2", "-F", base.format.word(), "-b", &below, &above])
        .await
        .map_err(|e| failed(disk, e))?;
    if done.code != Some(0) {
        return Err(failed(disk, format!("creating an overlay of {below}: {}", done.summary())));
    }
    Ok(Image { path, format: Format::Qcow2, device: false, base: Some(Box::new(base)) })
}

struct Ran {
    code: Option<i32>,
    stderr: String,
}

impl Ran {
    /// The first words of the tool, in one line.
    fn summary(&self) -> String {
        let lines: Vec<&str> = self.stderr.lines().map(str::trim).filter(|l| !l.is_empty()).take(2).collect();
        if lines.is_empty() { "no reason given".into() } else { lines.join("; ") }
    }
}

async fn run(program: &Path, arguments: &[&str]) -> Result<Ran, String> {
    let mut command = tokio::process::Command::new(program);
    command.args(arguments).stdin(std::process::Stdio::null()).kill_on_drop(true);
    let name = program.display();
    match tokio::time::timeout(limits::QEMU_IMG, command.output()).await {
        Err(_) => Err(format!("{name} did not end within {:?}", limits::QEMU_IMG)),
        Ok(Err(e)) => Err(format!("running {name}: {e}")),
        Ok(Ok(out)) => Ok(Ran { code: out.status.code(), stderr: String::from_utf8_lossy(&out.stderr).into_owned() }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn header(version: u32, patch: &[(usize, &[u8])]) -> Vec<u8> {
        let mut h = vec![0; HEADER];
        h[..4].copy_from_slice(b"QFI\xfb");
        h[4..8].copy_from_slice(&version.to_be_bytes());
        for (at, bytes) in patch {
            h[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        h
    }

    #[test]
    fn headers() {
        assert_eq!(judge_header(b"\xeb\x3c\x90"), Ok(Format::Raw));
        assert_eq!(judge_header(&header(3, &[])), Ok(Format::Qcow2));
        assert_eq!(judge_header(&header(2, &[])), Ok(Format::Qcow2));
        for (bytes, word) in [
            (header(3, &[(8, &[0, 0, 0, 0, 0, 0, 1, 0])]), "backing file"),
            (header(3, &[(32, &[0, 0, 0, 1])]), "encrypted"),
            (header(3, &[(72, &[0, 0, 0, 0, 0, 0, 0, 4])]), "another file"),
            (header(9, &[]), "version 9"),
            (header(3, &[])[..20].to_vec(), "cut off"),
        ] {
            let e = judge_header(&bytes).unwrap_err();
            assert!(e.contains(word), "{e}");
        }
    }

    #[test]
    fn a_guest_cannot_change_the_format_of_its_disk() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("disk.img"), [0u8; 4096]).unwrap();
        assert_eq!(claim_image(dir.path()).unwrap().format, Format::Raw);
        // The guest writes a qcow2 header over the start of its disk.
        std::fs::write(dir.path().join("disk.img"), header(3, &[])).unwrap();
        assert_eq!(claim_image(dir.path()).unwrap().format, Format::Raw);
        // On a claim that no guest has seen the same bytes are an image.
        std::fs::remove_file(dir.path().join(FORMAT_FILE)).unwrap();
        assert_eq!(claim_image(dir.path()).unwrap().format, Format::Qcow2);
        assert_eq!(claim_image(dir.path()).unwrap().format, Format::Qcow2);
    }

    #[test]
    fn a_backing_file_on_a_raw_disk_is_refused_only_where_it_could_matter() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("disk.img"), header(3, &[(8, &[0, 0, 0, 0, 0, 0, 1, 0])])).unwrap();
        assert!(claim_image(dir.path()).unwrap_err().contains("backing file"));
    }

    #[test]
    fn which_file_of_an_image() {
        let dir = tempfile::tempdir().unwrap();
        assert!(image_file(dir.path(), None).unwrap_err().contains("no folder"));
        std::fs::create_dir(dir.path().join("disk")).unwrap();
        assert!(image_file(dir.path(), None).unwrap_err().contains("no file"));
        std::fs::write(dir.path().join("disk/a.qcow2"), b"x").unwrap();
        std::fs::write(dir.path().join("disk/.hidden"), b"x").unwrap();
        assert!(image_file(dir.path(), None).unwrap().ends_with("a.qcow2"));
        std::fs::write(dir.path().join("disk/b"), b"x").unwrap();
        assert!(image_file(dir.path(), None).unwrap_err().contains("2 files"));
        assert!(image_file(dir.path(), Some(Path::new("disk/b"))).unwrap().ends_with("b"));
        assert!(image_file(dir.path(), Some(Path::new("disk/c"))).is_err());
    }
}
