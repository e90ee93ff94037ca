//! From a client certificate, which TLS has verified, to a user.

use x509_parser::prelude::{FromDer, X509Certificate};

use super::User;

/// Reads the user from the certificate's subject: CN is the name, each O a group. None when there is no CN.
#[must_use]
pub fn user(der: &[u8]) -> Option<User> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let groups: Vec<&str> = subject.iter_organization().filter_map(|o| o.as_str().ok()).collect();
    (!name.is_empty()).then(|| User::new(&name, &groups))
}
