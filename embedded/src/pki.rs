//! The cluster's own certificate authority, in `DATA/pki`.
//!
//! `ca.crt` and `ca.key` are made once and last ten years. Everything else can be issued again from them at any time, so a
//! leaf that is missing, damaged, near its end, or made for other names is replaced; a damaged authority is not, because
//! every kubeconfig and node that trusts it would be cut off without being told.

mod rotation;

use std::fs::OpenOptions;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use sha2::{Digest, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;

pub use rotation::Rotation;

/// Life of the authority.
const AUTHORITY_DAYS: i64 = 3650;
/// Life of everything that it issues.
const LEAF_DAYS: i64 = 365;
/// A leaf with less than this left is issued again.
const RENEW_BEFORE_DAYS: i64 = 60;

/// Names and addresses by which the API server is always reached.
pub const API_SERVER_NAMES: [&str; 8] = [
    "127.0.0.1",
    "10.244.0.1",
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "::1",
];

/// Why a certificate could not be had.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of the authority does not hold what it should.
    #[error(
        "{path} is damaged ({reason}); put back a copy of it, or remove the folder {folder} to make a new authority \
         (every kubeconfig made before stops working)",
        path = .path.display(), folder = .path.parent().unwrap_or(Path::new(".")).display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("cannot {what} {path}", path = .path.display())]
    Io {
        /// Read, write, ...
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A certificate could not be made.
    #[error("cannot issue a certificate for {0}")]
    Issue(String, #[source] rcgen::Error),
}

/// A certificate and its private key, both PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate.
    pub cert: String,
    /// The private key. A secret.
    pub key: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identity(..)")
    }
}

/// Who a certificate is for.
#[derive(Debug, Clone)]
struct Wanted<'a> {
    file: &'a str,
    common_name: &'a str,
    organisation: Option<&'a str>,
    names: Vec<String>,
    server: bool,
    client: bool,
}

/// The authority and what it has issued.
pub struct Pki {
    folder: PathBuf,
    ca: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Pki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pki").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Pki {
    /// Opens the authority in `folder`, made at the first time.
    ///
    /// # Errors
    /// [`PkiError::Damaged`] names the file that cannot be used.
    pub fn open(folder: &Path) -> Result<Self, PkiError> {
        if let Err(source) = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            return Err(PkiError::Io { what: "make", path: folder.to_owned(), source });
        }
        let (cert_path, key_path) = (folder.join("ca.crt"), folder.join("ca.key"));
        let (cert, key) = match (read(&cert_path)?, read(&key_path)?) {
            (Some(cert), Some(key)) => (cert, key),
            // The key is written first: a key without a certificate is a first start that was cut short.
            (None, _) => make_authority(&cert_path, &key_path)?,
            (Some(_), None) => {
                return Err(PkiError::Damaged {
                    path: key_path,
                    reason: "it is missing, while ca.crt is there".into(),
                });
            }
        };
        let damaged = |path: &Path, reason: String| PkiError::Damaged { path: path.to_owned(), reason };
        let pair = KeyPair::from_pem(&key).map_err(|e| damaged(&key_path, e.to_string()))?;
        let (_, pem) = parse_x509_pem(cert.as_bytes()).map_err(|e| damaged(&cert_path, e.to_string()))?;
        let x509 = pem.parse_x509().map_err(|e| damaged(&cert_path, e.to_string()))?;
        if !x509.is_ca() {
            return Err(damaged(&cert_path, "not the certificate of an authority".into()));
        }
        if x509.public_key().subject_public_key.data.as_ref() != pair.public_key_raw() {
            return Err(damaged(&key_path, "it does not belong to ca.crt".into()));
        }
        if x509.validity().not_after.timestamp() < Timestamp::now().as_second() {
            return Err(damaged(&cert_path, format!("it ended on {}", x509.validity().not_after)));
        }
        let issuer = Issuer::from_ca_cert_pem(&cert, pair).map_err(|e| damaged(&cert_path, e.to_string()))?;
        Ok(Self { folder: folder.to_owned(), ca: cert, issuer })
    }

    /// The authority's certificate, PEM.
    #[must_use]
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// A text that changes with the authority and with the certificate: who holds other ones must be told.
    #[must_use]
    pub fn fingerprint(&self, identity: &Identity) -> String {
        let digest = Sha256::new().chain_update(&self.ca).chain_update(&identity.cert).finalize();
        digest.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The API server's certificate, for [`API_SERVER_NAMES`] and `more` names or addresses.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn api_server(&self, more: &[String]) -> Result<Identity, PkiError> {
        let names = API_SERVER_NAMES.iter().map(|n| (*n).to_owned()).chain(more.iter().cloned()).collect();
        self.identity(&Wanted {
            file: "api-server",
            common_name: "virtfold-api-server",
            organisation: None,
            names,
            server: true,
            client: false,
        })
    }

    /// A client certificate: `common_name` is the user, `organisation` the group.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn client(&self, common_name: &str, organisation: Option<&str>) -> Result<Identity, PkiError> {
        let wanted = Wanted {
            file: &format!("client-{common_name}"),
            common_name,
            organisation,
            names: Vec::new(),
            server: false,
            client: true,
        };
        self.identity(&wanted)
    }

    /// A certificate of a part that asks other parts and answers them: its name is both the user and the server.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn component(&self, name: &str) -> Result<Identity, PkiError> {
        self.identity(&Wanted {
            file: &format!("component-{name}"),
            common_name: name,
            organisation: None,
            names: vec![name.to_owned()],
            server: true,
            client: true,
        })
    }

    /// The same of one that ends after so long, for whoever keeps it elsewhere: nothing is stored.
    ///
    /// # Errors
    /// When it cannot be issued.
    pub fn brief(&self, name: &str, life: std::time::Duration) -> Result<Identity, PkiError> {
        let names = vec![name.to_owned()];
        let wanted = Wanted { file: "", common_name: name, organisation: None, names, server: true, client: true };
        self.issue(&wanted, |params| {
            let seconds = Timestamp::now().as_second().saturating_add_unsigned(life.as_secs());
            let seconds = std::time::Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
            params.not_after = rcgen::date_time_ymd(1970, 1, 1) + seconds;
        })
    }

    /// A node's certificate: client of the API server as `system:node:NAME`, server for controller and gateway as `NAME`.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn node(&self, name: &str) -> Result<Identity, PkiError> {
        self.identity(&Wanted {
            file: &format!("node-{name}"),
            common_name: &format!("system:node:{name}"),
            organisation: Some("system:nodes"),
            names: vec![name.to_owned()],
            server: true,
            client: true,
        })
    }

    /// 32 random bytes, made once and kept under that name.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn secret(&self, name: &str) -> Result<Vec<u8>, PkiError> {
        let path = self.folder.join(format!("{name}.secret"));
        match std::fs::read(&path) {
            Ok(bytes) if bytes.len() == 32 => return Ok(bytes),
            Ok(_) => return Err(PkiError::Damaged { path, reason: "it is not 32 bytes long".into() }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(PkiError::Io { what: "read", path, source }),
        }
        let bytes: Vec<u8> = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].iter().flat_map(|u| *u.as_bytes()).collect();
        // The version and variant bits of a UUID are fixed; what is kept is their hash.
        let bytes = <sha2::Sha256 as sha2::Digest>::digest(&bytes).to_vec();
        write_private(&path, &bytes)?;
        Ok(bytes)
    }

    fn identity(&self, wanted: &Wanted<'_>) -> Result<Identity, PkiError> {
        let cert_path = self.folder.join(format!("{}.crt", wanted.file));
        let key_path = self.folder.join(format!("{}.key", wanted.file));
        if let (Some(cert), Some(key)) = (read(&cert_path)?, read(&key_path)?) {
            match self.usable(&cert, &key, wanted) {
                Ok(()) => return Ok(Identity { cert, key }),
                Err(reason) => tracing::warn!(file = %cert_path.display(), %reason, "issuing the certificate again"),
            }
        }
        let issued = self.issue(wanted, |_| {})?;
        write_private(&key_path, issued.key.as_bytes())?;
        write_private(&cert_path, issued.cert.as_bytes())?;
        Ok(issued)
    }

    fn issue(&self, wanted: &Wanted<'_>, more: impl FnOnce(&mut CertificateParams)) -> Result<Identity, PkiError> {
        let issue = |e| PkiError::Issue(wanted.common_name.to_owned(), e);
        let pair = KeyPair::generate().map_err(issue)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if let Some(organisation) = wanted.organisation {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        params.distinguished_name.push(DnType::CommonName, wanted.common_name);
        for name in &wanted.names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(name.as_str().try_into().map_err(issue)?),
            });
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if wanted.server {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        if wanted.client {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        params.use_authority_key_identifier_extension = true;
        validity(&mut params, LEAF_DAYS);
        more(&mut params);
        let cert = params.signed_by(&pair, &self.issuer).map_err(issue)?.pem();
        Ok(Identity { cert, key: pair.serialize_pem() })
    }

    /// Whether a stored certificate still serves; why not otherwise.
    fn usable(&self, cert: &str, key: &str, wanted: &Wanted<'_>) -> Result<(), String> {
        let pair = KeyPair::from_pem(key).map_err(|e| format!("its key does not parse: {e}"))?;
        let (_, pem) = parse_x509_pem(cert.as_bytes()).map_err(|e| format!("it does not parse: {e}"))?;
        let x509 = pem.parse_x509().map_err(|e| format!("it does not parse: {e}"))?;
        let (_, ca) = parse_x509_pem(self.ca.as_bytes()).map_err(|e| e.to_string())?;
        let ca = ca.parse_x509().map_err(|e| e.to_string())?;
        if x509.public_key().subject_public_key.data.as_ref() != pair.public_key_raw() {
            return Err("its key belongs to another certificate".into());
        }
        x509.verify_signature(Some(ca.public_key())).map_err(|_| "another authority issued it".to_owned())?;
        let renew_at = Timestamp::now().as_second() + RENEW_BEFORE_DAYS * 86_400;
        if x509.validity().not_after.timestamp() < renew_at {
            return Err(format!("it ends on {}", x509.validity().not_after));
        }
        let mut has: Vec<String> = x509
            .subject_alternative_name()
            .ok()
            .flatten()
            .map(|san| san.value.general_names.iter().filter_map(name_text).collect())
            .unwrap_or_default();
        let mut want = wanted.names.clone();
        has.sort();
        want.sort();
        if has == want { Ok(()) } else { Err("it is for other names".into()) }
    }
}

fn name_text(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match <[u8; 4]>::try_from(*bytes) {
            Ok(v4) => Some(IpAddr::from(v4).to_string()),
            Err(_) => <[u8; 16]>::try_from(*bytes).ok().map(|v6| IpAddr::from(v6).to_string()),
        },
        _ => None,
    }
}

fn validity(params: &mut CertificateParams, days: i64) {
    let date = |offset: i64| {
        let day = (Timestamp::now() + SignedDuration::from_hours(24 * offset)).to_zoned(jiff::tz::TimeZone::UTC).date();
        rcgen::date_time_ymd(day.year().into(), day.month().unsigned_abs(), day.day().unsigned_abs())
    };
    // A day back: clocks differ.
    params.not_before = date(-1);
    params.not_after = date(days);
}

fn make_authority(cert_path: &Path, key_path: &Path) -> Result<(String, String), PkiError> {
    let issue = |e| PkiError::Issue("the authority".to_owned(), e);
    let pair = KeyPair::generate().map_err(issue)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "virtfold-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    validity(&mut params, AUTHORITY_DAYS);
    let cert = params.self_signed(&pair).map_err(issue)?.pem();
    let key = pair.serialize_pem();
    write_private(key_path, key.as_bytes())?;
    write_private(cert_path, cert.as_bytes())?;
    Ok((cert, key))
}

fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match std::fs::read(path) {
        // Bytes that are no text are damaged PEM, which the parser says with the file's name.
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::Io { what: "read", path: path.to_owned(), source }),
    }
}

/// When the first certificate of a PEM text ends, in seconds since 1970.
pub fn not_after(pem: &[u8]) -> Option<i64> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
    Some(pem.parse_x509().ok()?.validity().not_after.timestamp())
}

/// Writes a file that only its owner may read, whole or not at all.
///
/// # Errors
/// [`PkiError::Io`] with the file's name.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let tmp = path.with_file_name(name);
    let write = || {
        let _ = std::fs::remove_file(&tmp);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&tmp)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&tmp, path)
    };
    write().map_err(|source| PkiError::Io { what: "write", path: path.to_owned(), source })
}

/// A kubeconfig with everything in it.
#[must_use]
pub fn kubeconfig(server: &str, ca: &str, identity: &Identity) -> String {
    let b64 = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: virtfold\nclusters:\n- name: virtfold\n  cluster:\n    \
         server: {server}\n    certificate-authority-data: {ca}\nusers:\n- name: admin\n  user:\n    \
         client-certificate-data: {cert}\n    client-key-data: {key}\ncontexts:\n- name: virtfold\n  context:\n    \
         cluster: virtfold\n    user: admin\n    namespace: default\n",
        ca = b64(ca),
        cert = b64(&identity.cert),
        key = b64(&identity.key),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_was_issued_is_used_again_and_keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(&dir.path().join("pki")).unwrap();
        let server = pki.api_server(&["192.0.2.7".into()]).unwrap();
        let node = pki.node("node-0").unwrap();
        let again = Pki::open(&dir.path().join("pki")).unwrap();
        assert_eq!(again.ca(), pki.ca());
        assert_eq!(again.api_server(&["192.0.2.7".into()]).unwrap().cert, server.cert);
        assert_ne!(again.api_server(&[]).unwrap().cert, server.cert, "other names: another certificate");
        assert_eq!(again.node("node-0").unwrap().cert, node.cert);
        for entry in std::fs::read_dir(dir.path().join("pki")).unwrap() {
            let mode = entry.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let (_, pem) = parse_x509_pem(node.cert.as_bytes()).unwrap();
        let x509 = pem.parse_x509().unwrap();
        assert_eq!(x509.subject().to_string(), "O=system:nodes, CN=system:node:node-0");
    }

    #[test]
    fn a_new_authority_issues_everything_again_and_that_can_be_told() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let node = pki.node("node-1").unwrap();
        let before = pki.fingerprint(&node);
        assert_eq!(Pki::open(dir.path()).unwrap().fingerprint(&node), before);
        for file in ["ca.crt", "ca.key"] {
            std::fs::remove_file(dir.path().join(file)).unwrap();
        }
        let pki = Pki::open(dir.path()).unwrap();
        let again = pki.node("node-1").unwrap();
        assert_ne!(pki.fingerprint(&again), before);
        assert_ne!(again.cert, node.cert);
        let (_, authority) = parse_x509_pem(pki.ca().as_bytes()).unwrap();
        let (_, leaf) = parse_x509_pem(again.cert.as_bytes()).unwrap();
        let authority = authority.parse_x509().unwrap();
        leaf.parse_x509().unwrap().verify_signature(Some(authority.public_key())).unwrap();
    }

    #[test]
    fn a_damaged_authority_is_named_and_a_damaged_leaf_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let admin = pki.client("admin", Some("system:masters")).unwrap();
        std::fs::write(dir.path().join("client-admin.crt"), b"\xff\xfe nonsense").unwrap();
        let other = pki.client("admin", Some("system:masters")).unwrap();
        assert_ne!(admin.cert, other.cert);
        for (file, content) in [("ca.key", "nonsense"), ("ca.crt", "nonsense")] {
            let path = dir.path().join(file);
            let kept = std::fs::read(&path).unwrap();
            std::fs::write(&path, content).unwrap();
            let text = Pki::open(dir.path()).unwrap_err().to_string();
            assert!(text.starts_with(&format!("{} is damaged", path.display())), "{text}");
            std::fs::write(&path, kept).unwrap();
        }
        let strange = tempfile::tempdir().unwrap();
        Pki::open(strange.path()).unwrap();
        std::fs::copy(strange.path().join("ca.key"), dir.path().join("ca.key")).unwrap();
        assert!(Pki::open(dir.path()).unwrap_err().to_string().contains("does not belong to ca.crt"));
        std::fs::remove_file(dir.path().join("ca.key")).unwrap();
        assert!(Pki::open(dir.path()).unwrap_err().to_string().contains("ca.key is damaged"));
    }

    #[test]
    fn a_kubeconfig_is_one_that_clients_read() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let text =
            kubeconfig("https://127.0.0.1:6443", pki.ca(), &pki.client("admin", Some("system:masters")).unwrap());
        let parsed = kube::config::Kubeconfig::from_yaml(&text).unwrap();
        assert_eq!(parsed.current_context.as_deref(), Some("virtfold"));
    }
}
