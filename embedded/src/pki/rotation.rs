//! A server's certificate that replaces itself, for clients that can be told whom to trust.
//!
//! A generation is an authority and the one certificate that it ever issued; the authority's key is thrown away. At half of a
//! generation's life the next one is made. It is shown to nobody before its authority was [published](Rotation::published) to
//! those who check, and the old authority is trusted until its end: whoever knows either list, gets through.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde::{Deserialize, Serialize};

use super::{Identity, PkiError, write_private};

/// A clock that is behind by this much still takes a certificate that was just made.
const SKEW: i64 = 300;

#[derive(Serialize, Deserialize)]
struct Generation {
    authority: String,
    cert: String,
    key: String,
    /// Seconds since 1970.
    from: i64,
    until: i64,
    names: Vec<String>,
    published: bool,
}

/// The generations that live, oldest first; there is always one.
pub struct Rotation {
    file: PathBuf,
    names: Vec<String>,
    life: i64,
    generations: Vec<Generation>,
}

impl std::fmt::Debug for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotation").field("file", &self.file).field("names", &self.names).finish_non_exhaustive()
    }
}

impl Rotation {
    /// Opens what is kept in a file, or begins anew where there is nothing or nothing that can be read: whoever checks is
    /// told of a new authority anyway.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn open(file: &Path, names: Vec<String>, life: Duration, now: Timestamp) -> Result<Self, PkiError> {
        let kept = std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let life = i64::try_from(life.as_secs()).unwrap_or(i64::MAX);
        let mut rotation = Self { file: file.to_owned(), names, life, generations: kept.unwrap_or_default() };
        rotation.advance(now)?;
        Ok(rotation)
    }

    /// Lets go what has ended, and makes the next generation when it is time.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn advance(&mut self, now: Timestamp) -> Result<(), PkiError> {
        let now = now.as_second();
        self.generations.retain(|g| g.until > now);
        let fresh = |g: &Generation| g.names == self.names && now < g.from + (g.until - g.from) / 2;
        if !self.generations.last().is_some_and(fresh) {
            let next = self.make(now).map_err(|e| PkiError::Issue(self.names.join(", "), e))?;
            self.generations.push(next);
            self.save()?;
        }
        Ok(())
    }

    /// Certificates of all authorities, PEM, the newest first.
    #[must_use]
    pub fn authorities(&self) -> String {
        self.generations.iter().rev().map(|g| g.authority.as_str()).collect()
    }

    /// [`authorities`](Self::authorities) is known to those who check.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn published(&mut self) -> Result<(), PkiError> {
        if self.generations.iter().all(|g| g.published) {
            return Ok(());
        }
        for generation in &mut self.generations {
            generation.published = true;
        }
        self.save()
    }

    /// What to show: the newest that is published, or else the newest.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let published = self.generations.iter().rev().find(|g| g.published && g.names == self.names);
        let shown = published.or(self.generations.last());
        shown.map_or_else(
            || Identity { cert: String::new(), key: String::new() },
            |g| Identity { cert: g.cert.clone(), key: g.key.clone() },
        )
    }

    /// When [`advance`](Self::advance) has something to do next.
    #[must_use]
    pub fn next(&self, now: Timestamp) -> Duration {
        let half = self.generations.last().map_or(0, |g| g.from + (g.until - g.from) / 2);
        let ends = self.generations.iter().map(|g| g.until).min().unwrap_or(0);
        Duration::from_secs(u64::try_from(half.min(ends) - now.as_second()).unwrap_or(0))
    }

    fn make(&self, now: i64) -> Result<Generation, rcgen::Error> {
        let until = now.saturating_add(self.life);
        let named = |params: &mut CertificateParams, name: &str| {
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            let moment = |seconds: i64| {
                rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
            };
            params.not_before = moment(now - SKEW);
            params.not_after = moment(until);
        };
        let pair = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        // Two authorities of one name would be taken for one by those who look for the issuer.
        named(&mut params, &format!("virtfold-gateway-ca@{now}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = params.self_signed(&pair)?.pem();
        let issuer = Issuer::new(params, pair);

        let pair = KeyPair::generate()?;
        let mut params = CertificateParams::new(self.names.clone())?;
        named(&mut params, self.names.first().map_or("virtfold", String::as_str));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let cert = params.signed_by(&pair, &issuer)?.pem();
        let names = self.names.clone();
        Ok(Generation { authority, cert, key: pair.serialize_pem(), from: now, until, names, published: false })
    }

    fn save(&self) -> Result<(), PkiError> {
        let text = serde_json::to_vec_pretty(&self.generations).unwrap_or_default();
        write_private(&self.file, &text)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use x509_parser::pem::Pem;

    fn verifies(identity: &Identity, authorities: &str) -> bool {
        let leaf = x509_parser::pem::parse_x509_pem(identity.cert.as_bytes()).unwrap().1;
        let leaf = leaf.parse_x509().unwrap();
        Pem::iter_from_buffer(authorities.as_bytes()).any(|ca| {
            let ca = ca.unwrap();
            let ca = ca.parse_x509().unwrap();
            ca.subject() == leaf.issuer() && leaf.verify_signature(Some(ca.public_key())).is_ok()
        })
    }

    #[test]
    fn nobody_is_shown_what_he_cannot_know_and_everybody_gets_through_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gateway.json");
        let at = |seconds: i64| Timestamp::from_second(1_800_000_000 + seconds).unwrap();
        let open =
            |seconds| Rotation::open(&file, vec!["gateway.svc".into()], Duration::from_secs(100), at(seconds)).unwrap();
        let mut rotation = open(0);
        let first = rotation.authorities();
        assert!(verifies(&rotation.identity(), &first), "the first one is shown at once");
        rotation.published().unwrap();
        assert_eq!(rotation.next(at(10)), Duration::from_secs(40));
        rotation.advance(at(49)).unwrap();
        assert_eq!(rotation.authorities(), first, "nothing happens before its time");

        rotation.advance(at(50)).unwrap();
        let both = rotation.authorities();
        assert!(both.len() > first.len() && both.ends_with(&first));
        assert!(verifies(&rotation.identity(), &first), "the next one is not known yet");
        // The process dies here.
        let mut rotation = open(51);
        assert_eq!(rotation.authorities(), both);
        rotation.published().unwrap();
        assert!(verifies(&rotation.identity(), &both) && !verifies(&rotation.identity(), &first));
        rotation.advance(at(100)).unwrap();
        assert!(!rotation.authorities().contains(&first), "its time is over");
        assert!(verifies(&rotation.identity(), &rotation.authorities()));

        // Other names: shown when known, and until then what there is.
        let renamed =
            Rotation::open(&file, vec!["other.svc".into()], Duration::from_secs(100), at(101)).unwrap().identity();
        assert_ne!(renamed.cert, open(101).identity().cert);
        // Nonsense in the file is a new beginning.
        std::fs::write(&file, "nonsense").unwrap();
        let anew = open(102);
        assert!(verifies(&anew.identity(), &anew.authorities()));
    }
}
