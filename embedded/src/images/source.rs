//! Where manifests and blobs come from. Whatever is read is checked: a manifest against the digest that named it, a blob
//! against the digest and size in its manifest.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use oci_client::client::{Certificate, CertificateEncoding, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::manifest::OciDescriptor;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

use super::{ImageError, Options, PullSecret, digits, hex, secret, sha256};

/// A registry that says nothing for so long has broken off.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(15);
/// Largest manifest.
const MANIFEST: usize = 4 << 20;
/// Manifests that are understood.
const TYPES: [&str; 4] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// A descriptor, as far as it is needed.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    /// Digest of what it describes.
    pub digest: String,
    /// Its length in bytes.
    pub size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// The manifest of an image.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Manifest {
    /// Its layers, the lowest first.
    pub layers: Vec<Entry>,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Entry>,
}

/// One image's source.
pub(super) struct Source {
    /// The image as it was asked for.
    named: Reference,
    kind: Kind,
}

enum Kind {
    Layout(PathBuf),
    Registry(Box<Remote>),
}

struct Remote {
    runtime: Runtime,
    client: Client,
    auth: RegistryAuth,
    /// What the registry is asked for.
    asked: Reference,
}

fn loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => registry.rsplit_once(':').map_or(registry, |(host, _)| host),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The reference to ask for, where mirrors say so. The longest that fits wins.
pub(super) fn mirrored(reference: &Reference, mirrors: &[(String, String)]) -> Option<String> {
    let whole = reference.whole();
    let fits = |from: &str| whole.strip_prefix(from).is_some_and(|rest| rest.starts_with(['/', ':', '@']));
    let (from, to) = mirrors.iter().filter(|(f, _)| fits(f.trim_end_matches('/'))).max_by_key(|(f, _)| f.len())?;
    // A scheme says whether there is TLS, which is another option's business.
    let to = to.split_once("://").map_or(to.as_str(), |(_, rest)| rest);
    Some(format!("{}{}", to.trim_end_matches('/'), whole.strip_prefix(from.trim_end_matches('/'))?))
}

impl Source {
    pub fn layout(path: &Path, named: &Reference) -> Self {
        Self { named: named.clone(), kind: Kind::Layout(path.to_owned()) }
    }

    pub fn registry(named: &Reference, options: &Options, secrets: &[PullSecret]) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Io { reference: named.whole(), what: "starting".into(), source };
        let asked: Reference = match mirrored(named, &options.mirrors) {
            Some(text) => text.parse().map_err(|source| ImageError::Reference { reference: text, source })?,
            None => named.clone(),
        };
        // Something else in the process may have chosen already; any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let registry = asked.resolve_registry().to_owned();
        let local = loopback(&registry) && !options.secure.contains(&registry);
        let plain = local || options.insecure.contains(&registry);
        let authorities = options.authorities.iter().flat_map(|pem| CertificateDer::pem_slice_iter(pem.as_bytes()));
        let authorities = authorities
            .filter_map(Result::ok)
            .map(|der| Certificate { encoding: CertificateEncoding::Der, data: der.to_vec() });
        let client = Client::new(ClientConfig {
            protocol: if plain { ClientProtocol::HttpsExcept(vec![registry]) } else { ClientProtocol::Https },
            read_timeout: Some(SILENCE),
            connect_timeout: Some(CONNECT),
            user_agent: "virtfold",
            extra_root_certificates: authorities.collect(),
            ..ClientConfig::default()
        });
        let netns = options.netns.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Names are looked up on threads of the pool.
            .on_thread_start(move || {
                if let Some(netns) = &netns {
                    let _ = nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET);
                }
            })
            .build()
            .map_err(failed)?;
        let own = secret::auth(secrets, named);
        let auth = if own == RegistryAuth::Anonymous { secret::auth(secrets, &asked) } else { own };
        Ok(Self { named: named.clone(), kind: Kind::Registry(Box::new(Remote { runtime, client, auth, asked })) })
    }

    fn wrong(&self, message: impl Into<String>) -> ImageError {
        ImageError::Content { reference: self.named.whole(), message: message.into() }
    }

    fn io(&self, what: &str) -> impl Fn(io::Error) -> ImageError {
        let (reference, what) = (self.named.whole(), what.to_owned());
        move |source| ImageError::Io { reference: reference.clone(), what: what.clone(), source }
    }

    fn refused(&self, source: OciDistributionError) -> ImageError {
        ImageError::Registry { reference: self.named.whole(), source: Box::new(source) }
    }

    /// The bytes of a manifest with their digest; by digest if one is given, else what the reference means.
    fn raw(&self, digest: Option<&str>) -> Result<(Vec<u8>, String), ImageError> {
        let bytes = match &self.kind {
            Kind::Layout(path) => match digest {
                Some(digest) => {
                    let name = digits(digest).ok_or_else(|| self.wrong(format!("digest {digest:?} is not sha256")))?;
                    let what = format!("manifest {digest}");
                    let file = File::open(path.join("blobs/sha256").join(name)).map_err(self.io(&what))?;
                    read_bounded(file).map_err(self.io(&what))?
                }
                None => {
                    let what = format!("the layout {}", path.display());
                    let file = File::open(path.join("index.json")).map_err(self.io(&what))?;
                    read_bounded(file).map_err(self.io(&what))?
                }
            },
            Kind::Registry(remote) => {
                let Remote { runtime, client, auth, asked } = remote.as_ref();
                let reference = digest.map_or_else(|| asked.clone(), |d| asked.clone_with_digest(d.to_owned()));
                let answer = runtime.block_on(async {
                    client.auth(&reference, auth, RegistryOperation::Pull).await?;
                    client.pull_manifest_raw(&reference, auth, &TYPES).await
                });
                let (bytes, _) = answer.map_err(|e| self.refused(e))?;
                if bytes.len() > MANIFEST {
                    return Err(self.wrong("its manifest is too large"));
                }
                bytes.to_vec()
            }
        };
        let actual = format!("sha256:{}", sha256(&bytes));
        if let Some(wanted) = digest.filter(|d| *d != actual) {
            return Err(self.wrong(format!("the manifest {wanted} has the digest {actual}")));
        }
        Ok((bytes, actual))
    }

    /// The manifest for this machine, with its digest.
    pub fn manifest(&self) -> Result<(String, Manifest), ImageError> {
        let mut wanted = self.named.digest().map(str::to_owned);
        if let (Some(_), Kind::Layout(_)) = (&wanted, &self.kind) {
            // A layout is entered by its index, which says whether it has the manifest.
            let (bytes, _) = self.raw(None)?;
            let index: Index = serde_json::from_slice(&bytes).map_err(|e| self.wrong(format!("its layout: {e}")))?;
            if !index.manifests.iter().any(|m| Some(&m.digest) == wanted.as_ref()) {
                return Err(self.wrong("the layout has no such manifest"));
            }
        }
        // An index may hold an index; no more than that.
        for _ in 0..3 {
            let (bytes, digest) = self.raw(wanted.as_deref())?;
            if let Ok(index) = serde_json::from_slice::<Index>(&bytes) {
                wanted = Some(self.choose(&index)?.digest.clone());
                continue;
            }
            let manifest: Manifest =
                serde_json::from_slice(&bytes).map_err(|e| self.wrong(format!("its manifest is none: {e}")))?;
            return Ok((digest, manifest));
        }
        Err(self.wrong("its index holds indexes without end"))
    }

    fn choose<'a>(&self, index: &'a Index) -> Result<&'a Entry, ImageError> {
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let mine = |e: &&Entry| e.platform.as_ref().is_some_and(|p| p.os == "linux" && p.architecture == architecture);
        let named = |e: &&Entry| {
            let name = e.annotations.get("org.opencontainers.image.ref.name");
            name.is_some_and(|n| Some(n.as_str()) == self.named.tag() || *n == self.named.whole())
        };
        let entries = &index.manifests;
        if let [only] = entries.as_slice()
            && (only.platform.is_none() || mine(&only))
        {
            return Ok(only);
        }
        entries
            .iter()
            .find(|e| named(e) && (e.platform.is_none() || mine(e)))
            .or_else(|| entries.iter().find(mine))
            .or_else(|| entries.iter().find(named))
            .ok_or_else(|| self.wrong(format!("it has no manifest for linux/{architecture}")))
    }

    /// A blob, checked while it is read: [`Blob::finish`] says whether it was the right one.
    pub fn blob(&self, entry: &Entry) -> Result<Blob<'_>, ImageError> {
        let what = format!("layer {}", entry.digest);
        let name =
            digits(&entry.digest).ok_or_else(|| self.wrong(format!("digest {:?} is not sha256", entry.digest)))?;
        let inner = match &self.kind {
            Kind::Layout(path) => {
                Inner::File(File::open(path.join("blobs/sha256").join(name)).map_err(self.io(&what))?)
            }
            Kind::Registry(remote) => {
                let Remote { runtime, client, asked, .. } = remote.as_ref();
                let layer = OciDescriptor {
                    digest: entry.digest.clone(),
                    size: i64::try_from(entry.size).unwrap_or(i64::MAX),
                    ..OciDescriptor::default()
                };
                let stream = runtime.block_on(client.pull_blob_stream(asked, &layer)).map_err(|e| self.refused(e))?;
                Inner::Stream { runtime, stream: stream.stream, rest: Bytes::new() }
            }
        };
        Ok(Blob { inner, digest: entry.digest.clone(), size: entry.size, read: 0, hash: Sha256::new() })
    }
}

fn read_bounded(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MANIFEST as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MANIFEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too large for a manifest"));
    }
    Ok(bytes)
}

enum Inner<'a> {
    File(File),
    Stream { runtime: &'a Runtime, stream: BoxStream<'static, io::Result<Bytes>>, rest: Bytes },
}

/// A blob that is being read.
pub(super) struct Blob<'a> {
    inner: Inner<'a>,
    digest: String,
    size: u64,
    read: u64,
    hash: Sha256,
}

impl Read for Blob<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match &mut self.inner {
            Inner::File(file) => file.read(buffer)?,
            Inner::Stream { runtime, stream, rest } => {
                while rest.is_empty() {
                    match runtime.block_on(stream.next()) {
                        Some(bytes) => *rest = bytes?,
                        None => break,
                    }
                }
                let read = rest.len().min(buffer.len());
                let (now, later) = (rest.slice(..read), rest.slice(read..));
                if let Some(space) = buffer.get_mut(..read) {
                    space.copy_from_slice(&now);
                }
                *rest = later;
                read
            }
        };
        self.read += read as u64;
        if self.read > self.size {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than its {} bytes", self.size)));
        }
        self.hash.update(buffer.get(..read).unwrap_or_default());
        Ok(read)
    }
}

impl Blob<'_> {
    /// Reads what is left and compares.
    pub fn finish(mut self) -> io::Result<()> {
        io::copy(&mut self, &mut io::sink())?;
        if self.read != self.size {
            let words = format!("broke off after {} of {} bytes", self.read, self.size);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, words));
        }
        let actual = format!("sha256:{}", hex(&self.hash.finalize()));
        if actual != self.digest {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("has the digest {actual}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn mirrors_replace_the_beginning_of_a_reference() {
        let mirrors = [
            ("quay.io".to_owned(), "127.0.0.1:5000/q".to_owned()),
            ("quay.io/team".into(), "http://localhost:1/".into()),
        ];
        let of = |r: &str| mirrored(&r.parse().unwrap(), &mirrors);
        assert_eq!(of("quay.io/x/y:1").unwrap(), "127.0.0.1:5000/q/x/y:1");
        assert_eq!(of("quay.io/team/y:1").unwrap(), "localhost:1/y:1");
        assert_eq!(of("quay.io/teams/y:1").unwrap(), "127.0.0.1:5000/q/teams/y:1");
        assert_eq!(of("docker.io/x"), None);
    }

    #[test]
    fn loopback_registries_are_known() {
        for yes in ["localhost:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "localhost"] {
            assert!(loopback(yes), "{yes}");
        }
        for no in ["quay.io", "10.0.0.1:5000", "localhost.evil.io", "127.0.0.1.evil.io:80"] {
            assert!(!loopback(no), "{no}");
        }
    }
}
