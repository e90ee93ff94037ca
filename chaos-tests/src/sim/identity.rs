//! Certificates that are valid in the simulated time, which begins in 1970.

use proto::transport::Tls;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use std::collections::BTreeMap;

/// The identities of a run, made before it begins.
pub struct Identities(BTreeMap<String, Tls>);

fn params(common_name: &str, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = rcgen::date_time_ymd(1970, 1, 1);
    params.not_after = rcgen::date_time_ymd(2040, 1, 1);
    Ok(params)
}

impl Identities {
    /// Of the controllers, and of these nodes.
    ///
    /// # Errors
    /// No key or certificate can be made.
    pub fn make(nodes: &[String]) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut authority = params("virtfold-ca", vec![])?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let ca = authority.self_signed(&key)?.pem();
        let issuer = Issuer::new(authority, key);
        let issue = |common_name: &str, names: Vec<String>| -> Result<Tls, rcgen::Error> {
            let key = KeyPair::generate()?;
            let mut params = params(common_name, names)?;
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let cert = params.signed_by(&key, &issuer)?.pem();
            Ok(Tls { ca: ca.clone(), cert, key: key.serialize_pem() })
        };
        let mut all = BTreeMap::from([(String::new(), issue(node_agent::CONTROLLER, vec![])?)]);
        for node in nodes {
            all.insert(node.clone(), issue(&format!("system:node:{node}"), vec![node.clone()])?);
        }
        Ok(Self(all))
    }

    /// That of controllers.
    pub fn controller(&self) -> Tls {
        self.node("")
    }

    /// That of a node.
    pub fn node(&self, name: &str) -> Tls {
        self.0.get(name).cloned().unwrap_or(Tls { ca: String::new(), cert: String::new(), key: String::new() })
    }
}
