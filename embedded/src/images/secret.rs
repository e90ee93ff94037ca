//! Credentials for registries, as pull secrets have them (`.dockerconfigjson`, `.dockercfg`).

use std::collections::BTreeMap;

use base64::Engine;
use oci_client::Reference;
use oci_client::secrets::RegistryAuth;
use serde::Deserialize;

/// The credentials of one pull secret. Its `Debug` form names registries alone.
#[derive(Clone)]
pub struct PullSecret {
    auths: BTreeMap<String, Auth>,
}

impl std::fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.auths.keys()).finish()
    }
}

#[derive(Clone, Deserialize)]
struct Auth {
    #[serde(default)]
    auth: String,
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    registrytoken: String,
}

#[derive(Deserialize)]
struct File {
    auths: BTreeMap<String, Auth>,
}

/// Without scheme and the version at the end; Docker's own registry has one name.
fn normal(server: &str) -> String {
    let server = server.split_once("://").map_or(server, |(_, rest)| rest).trim_end_matches('/');
    let server = server.strip_suffix("/v1").or_else(|| server.strip_suffix("/v2")).unwrap_or(server);
    let (host, path) = server.split_once('/').map_or((server, ""), |(h, p)| (h, p));
    let host = if matches!(host, "index.docker.io" | "registry-1.docker.io") { "docker.io" } else { host };
    if path.is_empty() { host.to_owned() } else { format!("{host}/{path}") }
}

impl PullSecret {
    /// Reads the content of a pull secret, of the present or of the old form.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let auths = match serde_json::from_slice::<File>(bytes) {
            Ok(file) => file.auths,
            Err(_) => serde_json::from_slice(bytes).ok()?,
        };
        Some(Self { auths: auths.into_iter().map(|(server, auth)| (normal(&server), auth)).collect() })
    }

    /// How well this fits a repository (`registry/path`), and what to say.
    fn find(&self, repository: &str) -> Option<(usize, RegistryAuth)> {
        let fits =
            |server: &str| repository.strip_prefix(server).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let (server, auth) = self.auths.iter().filter(|(s, _)| fits(s)).max_by_key(|(s, _)| s.len())?;
        if !auth.registrytoken.is_empty() {
            return Some((server.len(), RegistryAuth::Bearer(auth.registrytoken.clone())));
        }
        let decoded = base64::engine::general_purpose::STANDARD
            .decode(&auth.auth)
            .ok()
            .and_then(|b| String::from_utf8(b).ok())
            .and_then(|t| t.split_once(':').map(|(u, p)| (u.to_owned(), p.trim_end_matches('\0').to_owned())));
        let (user, password) = match decoded {
            Some(pair) => pair,
            None if !auth.username.is_empty() => (auth.username.clone(), auth.password.clone()),
            None => return None,
        };
        Some((server.len(), RegistryAuth::Basic(user, password)))
    }
}

/// The credentials that fit an image best; none means anonymous.
pub(super) fn auth(secrets: &[PullSecret], reference: &Reference) -> RegistryAuth {
    let repository = format!("{}/{}", normal(reference.registry()), reference.repository());
    secrets
        .iter()
        .filter_map(|s| s.find(&repository))
        .max_by_key(|(length, _)| *length)
        .map_or(RegistryAuth::Anonymous, |(_, auth)| auth)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_best_fit_is_taken_and_nothing_is_shown() {
        let secret = PullSecret::parse(
            br#"{"auths": {"https://index.docker.io/v1/": {"auth": "dTpw"}, "quay.io": {"username": "a", "password": "hush"},
                "quay.io/team": {"username": "b", "password": "hush"}}}"#,
        )
        .unwrap();
        let of = |r: &str| auth(std::slice::from_ref(&secret), &r.parse().unwrap());
        assert_eq!(of("fedora"), RegistryAuth::Basic("u".into(), "p".into()));
        assert_eq!(of("quay.io/x/y:1"), RegistryAuth::Basic("a".into(), "hush".into()));
        assert_eq!(of("quay.io/team/y"), RegistryAuth::Basic("b".into(), "hush".into()));
        assert_eq!(of("quay.io/teams/y"), RegistryAuth::Basic("a".into(), "hush".into()));
        assert_eq!(of("elsewhere.io/y"), RegistryAuth::Anonymous);
        assert!(!format!("{secret:?}").contains("hush"));
        let old = PullSecret::parse(br#"{"r.io": {"auth": "dTpw"}}"#).unwrap();
        assert_eq!(auth(&[old], &"r.io/x".parse().unwrap()), RegistryAuth::Basic("u".into(), "p".into()));
        assert!(PullSecret::parse(b"no").is_none());
    }
}
