//! Who may speak for others: the aggregation layer of a Kubernetes, as it says itself in
//! `kube-system/extension-apiserver-authentication`.
//!
//! A request through it carries the user in headers. They are believed on a connection whose client certificate was
//! issued by the authority that is named there, to one of the names that are listed there, and on no other.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};

use crate::User;

/// What the API server says of its aggregation layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Front {
    /// The authority, PEM; empty where there is no aggregation layer.
    pub authority: String,
    names: Vec<String>,
    user: Vec<String>,
    groups: Vec<String>,
    extra: Vec<String>,
}

/// As the rest of the gateway knows the headers of extra fields.
const EXTRA: &str = "x-remote-extra-";

impl Front {
    /// Reads it.
    pub async fn read(client: &Client) -> Result<Self, kube::Error> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
        Ok(Self::of(&maps.get("extension-apiserver-authentication").await?))
    }

    fn of(map: &ConfigMap) -> Self {
        let text = |key: &str| map.data.as_ref().and_then(|d| d.get(key)).cloned().unwrap_or_default();
        let list = |key: &str| -> Vec<String> {
            let all: Vec<String> = serde_json::from_str(&text(key)).unwrap_or_default();
            all.into_iter().map(|name| name.to_lowercase()).collect()
        };
        Self {
            authority: text("requestheader-client-ca-file"),
            // Names of certificates, unlike headers, are as they are.
            names: serde_json::from_str(&text("requestheader-allowed-names")).unwrap_or_default(),
            user: list("requestheader-username-headers"),
            groups: list("requestheader-group-headers"),
            extra: list("requestheader-extra-headers-prefix"),
        }
    }

    /// Whether a client certificate of the authority may speak for others. No name listed means any.
    pub fn believes(&self, certificate: &[u8]) -> bool {
        if self.names.is_empty() {
            return true;
        }
        let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else { return false };
        let mut names = parsed.subject().iter_common_name().filter_map(|n| n.as_str().ok());
        names.any(|name| self.names.iter().any(|n| n == name))
    }

    /// The user in the headers of a request that is believed; extra fields get the headers that the gateway reads.
    pub fn user(&self, headers: &mut http::HeaderMap) -> User {
        let all = |names: &[String]| -> Vec<String> {
            let values = names.iter().flat_map(|name| headers.get_all(name));
            values.filter_map(|v| v.to_str().ok()).map(str::to_owned).collect()
        };
        let user = User { name: all(&self.user).into_iter().next().unwrap_or_default(), groups: all(&self.groups) };
        let mut extra = Vec::new();
        for (name, value) in headers.iter() {
            let key = self.extra.iter().filter(|p| *p != EXTRA).find_map(|p| name.as_str().strip_prefix(p.as_str()));
            if let Some(name) = key.and_then(|k| http::HeaderName::try_from(format!("{EXTRA}{k}")).ok()) {
                extra.push((name, value.clone()));
            }
        }
        headers.extend(extra);
        user
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_are_those_that_the_api_server_names() {
        let data = [
            ("requestheader-client-ca-file", "PEM"),
            ("requestheader-allowed-names", "[\"front-proxy\"]"),
            ("requestheader-username-headers", "[\"X-Remote-User\", \"X-User\"]"),
            ("requestheader-group-headers", "[\"X-Remote-Group\"]"),
            ("requestheader-extra-headers-prefix", "[\"X-More-\"]"),
        ];
        let data = data.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let front = Front::of(&ConfigMap { data: Some(data), ..ConfigMap::default() });
        let mut headers = http::HeaderMap::new();
        headers.insert("x-user", "ann".parse().unwrap());
        headers.append("x-remote-group", "a".parse().unwrap());
        headers.append("x-remote-group", "b".parse().unwrap());
        headers.insert("x-more-scopes", "all".parse().unwrap());
        let user = front.user(&mut headers);
        assert_eq!(user, User { name: "ann".into(), groups: vec!["a".into(), "b".into()] });
        assert_eq!(headers.get("x-remote-extra-scopes").unwrap(), "all");
        assert_eq!(front.authority, "PEM");
        assert!(!front.believes(b"no certificate"));
        assert!(Front::of(&ConfigMap::default()).authority.is_empty());
    }
}
