//! OCI images for image volumes: pulled once, unpacked once, shared read-only by all pods of the machine.
//!
//! An image is found by a reference, in an OCI layout on this machine that was named for it (`--image REF=LAYOUT`), or in a
//! registry (`--registry-mirror FROM=TO` says which instead of the one that the reference names). Everything is checked against its
//! digest while it is read. An image appears in the store whole or not at all: it is unpacked into `tmp/` and renamed to
//! `unpacked/<digest>` after the last check, on a file system that was synced. A lock file per digest lets one pull happen at a
//! time, across processes; whoever waited finds the image there.
//!
//! Pulls run on threads of their own, in the machine's network namespace: node agents live in others, from where no
//! registry can be reached.

mod layer;
mod secret;
mod source;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, oneshot};

pub use oci_client::Reference;
pub use secret::PullSecret;
use source::{Manifest, Source};

/// Pulls at a time in one process.
const PULLS: usize = 4;

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The reference is none.
    #[error("invalid image reference {reference:?}")]
    Reference {
        /// As it was given.
        reference: String,
        /// Why.
        #[source]
        source: oci_client::ParseError,
    },
    /// It is not here, and may not be pulled.
    #[error("container image {reference:?} is not present with pull policy of Never")]
    Never {
        /// The image.
        reference: String,
    },
    /// The registry.
    #[error("failed to pull image {reference:?}")]
    Registry {
        /// The image.
        reference: String,
        /// Why.
        #[source]
        source: Box<oci_client::errors::OciDistributionError>,
    },
    /// The connection broke off, the disk is full, a file cannot be written.
    #[error("failed to pull image {reference:?}: {what}")]
    Io {
        /// The image.
        reference: String,
        /// What was read or written.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("failed to pull image {reference:?}: {message}")]
    Content {
        /// The image.
        reference: String,
        /// What is wrong.
        message: String,
    },
}

impl ImageError {
    /// The image that was asked for.
    #[must_use]
    pub fn reference(&self) -> &str {
        match self {
            Self::Reference { reference, .. }
            | Self::Never { reference }
            | Self::Registry { reference, .. }
            | Self::Io { reference, .. }
            | Self::Content { reference, .. } => reference,
        }
    }

    /// The reason that a container waits for with this error.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Reference { .. } => "InvalidImageName",
            Self::Never { .. } => "ErrImageNeverPull",
            _ => "ErrImagePull",
        }
    }
}

/// When a registry is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullPolicy {
    /// Each time: what the reference means may have changed.
    Always,
    /// When the image is not here.
    IfNotPresent,
    /// Not at all.
    Never,
}

impl PullPolicy {
    /// What a pod says; what Kubernetes takes when it says nothing: Always for the tag `latest`, else IfNotPresent.
    #[must_use]
    pub fn of(policy: Option<&str>, reference: &str) -> Self {
        match policy {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            Some("IfNotPresent") => Self::IfNotPresent,
            _ => match reference.parse::<Reference>() {
                Ok(r) if r.digest().is_none() && r.tag().is_none_or(|t| t == "latest") => Self::Always,
                _ => Self::IfNotPresent,
            },
        }
    }
}

/// An image that is here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: String,
    /// Folder with its files; read-only, readable for everybody who gets there.
    pub root: PathBuf,
}

/// How a store is set up.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `DATA/images`.
    pub root: PathBuf,
    /// `--image REF=LAYOUT`: references that are OCI layouts on this machine.
    pub local: Vec<(String, PathBuf)>,
    /// `--registry-mirror FROM=TO`: a registry, with the beginning of a repository if wanted, and what to ask instead.
    pub mirrors: Vec<(String, String)>,
    /// Registries without TLS beside those on a loopback address.
    pub insecure: Vec<String>,
    /// Registries on a loopback address that have TLS all the same.
    pub secure: Vec<String>,
    /// Certificates, in PEM, that may vouch for registries beside those that the machine trusts.
    pub authorities: Vec<String>,
    /// Network namespace that registries are reached from (an open `/proc/self/ns/net` of before the process left it); none
    /// for the process's own.
    pub netns: Option<Arc<File>>,
}

/// Reads a file with certificates that may vouch for registries, as PEM.
///
/// # Errors
/// When it cannot be read or there is no certificate in it.
pub fn authorities(file: &Path) -> io::Result<String> {
    use rustls::pki_types::pem::PemObject;
    let text = std::fs::read_to_string(file)?;
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let mut some = false;
    for certificate in rustls::pki_types::CertificateDer::pem_slice_iter(text.as_bytes()) {
        let der = certificate.map_err(|e| invalid(&e.to_string()))?;
        x509_parser::parse_x509_certificate(&der)
            .map_err(|e| invalid(&format!("a certificate in it is damaged: {e}")))?;
        some = true;
    }
    if some { Ok(text) } else { Err(invalid("it holds no certificate in PEM")) }
}

/// The images of a machine.
#[derive(Debug)]
pub struct ImageStore {
    inner: Arc<Inner>,
    pulls: Arc<Semaphore>,
}

#[derive(Debug)]
struct Inner {
    options: Options,
    local: Vec<(String, PathBuf)>,
}

/// What is kept of an image beside its files; its presence says that the image is whole.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    digest: String,
    layers: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Known {
    reference: String,
    digest: String,
}

impl ImageStore {
    /// Opens the store and removes what pulls of processes that died left behind.
    ///
    /// # Errors
    /// When its folders cannot be made, or a local reference is none.
    pub fn new(options: Options) -> io::Result<Self> {
        for folder in ["tmp", "unpacked", "references", "locks"] {
            std::fs::create_dir_all(options.root.join(folder))?;
        }
        let mut local = Vec::new();
        for (reference, layout) in &options.local {
            let parsed: Reference = reference.parse().map_err(|e| {
                io::Error::new(io::ErrorKind::InvalidInput, format!("image reference {reference:?}: {e}"))
            })?;
            local.push((parsed.whole(), layout.clone()));
        }
        let inner = Inner { options, local };
        for entry in std::fs::read_dir(inner.path("tmp"))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Ok(_lock) = inner.lock(&name, FlockArg::LockExclusiveNonblock) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        Ok(Self { inner: Arc::new(inner), pulls: Arc::new(Semaphore::new(PULLS)) })
    }

    /// The image, pulled if need be.
    ///
    /// # Errors
    /// [`ImageError`]; nothing half-made stays behind.
    pub async fn ensure(
        &self,
        reference: &str,
        policy: PullPolicy,
        secrets: &[PullSecret],
    ) -> Result<Image, ImageError> {
        let parsed: Reference =
            reference.parse().map_err(|source| ImageError::Reference { reference: reference.to_owned(), source })?;
        if policy != PullPolicy::Always
            && let Some(image) = self.inner.present(&parsed)
        {
            return Ok(image);
        }
        if policy == PullPolicy::Never {
            return Err(ImageError::Never { reference: parsed.whole() });
        }
        let io = |source| ImageError::Io { reference: parsed.whole(), what: "starting".into(), source };
        let permit = self.pulls.clone().acquire_owned().await.map_err(|e| io(io::Error::other(e)))?;
        let (inner, secrets, wanted) = (self.inner.clone(), secrets.to_vec(), parsed.clone());
        let (done, result) = oneshot::channel();
        // Goes on when nobody waits any more: the image will be wanted again.
        std::thread::Builder::new()
            .name("image-pull".into())
            .spawn(move || {
                let _permit = permit;
                let _ = done.send(inner.pull(&wanted, &secrets));
            })
            .map_err(io)?;
        result.await.map_err(|e| io(io::Error::other(e)))?
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The hex digits of a sha256 digest.
fn digits(digest: &str) -> Option<&str> {
    digest
        .strip_prefix("sha256:")
        .filter(|d| d.len() == 64 && d.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()))
}

impl Inner {
    fn path(&self, folder: &str) -> PathBuf {
        self.options.root.join(folder)
    }

    fn lock(&self, name: &str, how: FlockArg) -> io::Result<Flock<File>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(self.path("locks").join(name))?;
        Flock::lock(file, how).map_err(|(_, errno)| errno.into())
    }

    fn known(&self, reference: &str) -> PathBuf {
        self.path("references").join(sha256(reference.as_bytes()))
    }

    fn unpacked(&self, digest: &str) -> Option<Image> {
        let folder = self.path("unpacked").join(digits(digest)?);
        let marker: Marker = serde_json::from_slice(&std::fs::read(folder.join("image.json")).ok()?).ok()?;
        (marker.digest == digest).then(|| Image { digest: digest.to_owned(), root: folder.join("root") })
    }

    /// What a reference meant when it was last pulled, if that is here.
    fn present(&self, reference: &Reference) -> Option<Image> {
        let whole = reference.whole();
        if let Some(image) = reference.digest().and_then(|d| self.unpacked(d)) {
            return Some(image);
        }
        let known: Known = serde_json::from_slice(&std::fs::read(self.known(&whole)).ok()?).ok()?;
        (known.reference == whole).then(|| self.unpacked(&known.digest)).flatten()
    }

    fn source(&self, reference: &Reference, secrets: &[PullSecret]) -> Result<Source, ImageError> {
        let whole = reference.whole();
        if let Some((_, layout)) = self.local.iter().find(|(r, _)| *r == whole) {
            return Ok(Source::layout(layout, reference));
        }
        Source::registry(reference, &self.options, secrets)
    }

    /// Runs on a thread of its own.
    fn pull(&self, reference: &Reference, secrets: &[PullSecret]) -> Result<Image, ImageError> {
        if let Some(netns) = &self.options.netns {
            nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET)
                .map_err(|e| self.io(reference, "entering the machine's network")(e.into()))?;
        }
        let source = self.source(reference, secrets)?;
        let (digest, manifest) = source.manifest()?;
        let Some(name) = digits(&digest) else {
            return Err(ImageError::Content {
                reference: reference.whole(),
                message: format!("digest {digest:?} is not sha256"),
            });
        };
        let _lock = self.lock(name, FlockArg::LockExclusive).map_err(self.io(reference, "its lock"))?;
        let image = match self.unpacked(&digest) {
            Some(image) => image,
            None => {
                let tmp = self.path("tmp").join(name);
                let made = self.make(reference, &source, &digest, &manifest, &tmp);
                if made.is_err() {
                    let _ = std::fs::remove_dir_all(&tmp);
                }
                made?
            }
        };
        let known = Known { reference: reference.whole(), digest };
        let bytes = serde_json::to_vec(&known).unwrap_or_default();
        write_whole(&self.known(&known.reference), &bytes).map_err(self.io(reference, "its reference"))?;
        Ok(image)
    }

    fn io<'a>(&self, reference: &'a Reference, what: &'a str) -> impl Fn(io::Error) -> ImageError + use<'a> {
        move |source| ImageError::Io { reference: reference.whole(), what: what.to_owned(), source }
    }

    fn make(
        &self,
        reference: &Reference,
        source: &Source,
        digest: &str,
        manifest: &Manifest,
        tmp: &Path,
    ) -> Result<Image, ImageError> {
        let io = |what| self.io(reference, what);
        let _ = std::fs::remove_dir_all(tmp);
        let root = tmp.join("root");
        std::fs::create_dir_all(&root).map_err(io("a folder"))?;
        let mut budget = layer::Budget::default();
        for entry in &manifest.layers {
            let mut blob = source.blob(entry)?;
            let what = format!("layer {}", entry.digest);
            let failed = |source| ImageError::Io { reference: reference.whole(), what: what.clone(), source };
            layer::unpack(&mut blob, &root, &mut budget).map_err(failed)?;
            blob.finish().map_err(failed)?;
        }
        let marker =
            Marker { digest: digest.to_owned(), layers: manifest.layers.iter().map(|l| l.digest.clone()).collect() };
        let bytes = serde_json::to_vec(&marker).unwrap_or_default();
        std::fs::write(tmp.join("image.json"), bytes).map_err(io("its marker"))?;
        let folder = File::open(tmp).map_err(io("a folder"))?;
        nix::unistd::syncfs(&folder).map_err(|e| io("syncing")(e.into()))?;
        let target = self.path("unpacked").join(digits(digest).unwrap_or_default());
        // Whatever is there has no valid marker.
        let _ = std::fs::remove_dir_all(&target);
        std::fs::rename(tmp, &target).map_err(io("a folder"))?;
        Ok(Image { digest: digest.to_owned(), root: target.join("root") })
    }
}

fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let tmp = path.with_extension(format!("{}.tmp", uuid::Uuid::new_v4()));
    std::fs::write(&tmp, bytes)?;
    std::fs::rename(tmp, path)
}
