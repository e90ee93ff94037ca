//! Bearer tokens.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, header};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::User;
use crate::semantics::Status;
use crate::semantics::value::{strings, text};
use crate::server::Config;

/// Who a token stands for.
#[derive(Debug, Clone, Default)]
pub struct Authenticator {
    fixed: Vec<(String, User)>,
    key: Vec<u8>,
    issuer: String,
}

/// HMAC-SHA256.
fn mac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut block = [0_u8; 64];
    if key.len() > block.len() {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let inner = Sha256::new().chain_update(block.map(|b| b ^ 0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(block.map(|b| b ^ 0x5c)).chain_update(inner).finalize().into()
}

fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y)) == 0
}

impl Authenticator {
    /// From the server's configuration. Without a key no service account token is believed.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let issuer =
            if config.issuer.is_empty() { "https://kubernetes.default.svc".to_owned() } else { config.issuer.clone() };
        Self { fixed: config.static_tokens.clone(), key: config.token_key.clone(), issuer }
    }

    /// The audience of tokens that ask for none.
    #[must_use]
    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Signs a token for a service account.
    #[must_use]
    pub fn issue(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        audiences: &[String],
        seconds: i64,
        now: i64,
    ) -> String {
        let audiences = if audiences.is_empty() { vec![self.issuer.clone()] } else { audiences.to_vec() };
        let claims = json!({
            "iss": self.issuer, "aud": audiences, "iat": now, "nbf": now, "exp": now + seconds,
            "jti": uuid::Uuid::new_v4().to_string(),
            "sub": format!("system:serviceaccount:{namespace}:{name}"),
            "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": name, "uid": uid}},
        });
        let head = URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256","typ":"JWT"}"#);
        let body = URL_SAFE_NO_PAD.encode(claims.to_string());
        let signed = format!("{head}.{body}");
        let signature = URL_SAFE_NO_PAD.encode(mac(&self.key, signed.as_bytes()));
        format!("{signed}.{signature}")
    }

    /// Who the `Authorization` header says; none without one.
    ///
    /// # Errors
    /// 401 for a token that nobody issued, or one that has expired.
    pub fn by_token(&self, headers: &HeaderMap, now: i64) -> Result<Option<User>, Status> {
        let Some(value) = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()) else { return Ok(None) };
        let Some((scheme, token)) = value.split_once(' ') else { return Err(Status::unauthorized()) };
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(Status::unauthorized());
        }
        self.user(token.trim(), &[], now).map(|(user, _)| Some(user)).ok_or_else(Status::unauthorized)
    }

    /// Who a token stands for, and for which of the asked audiences (of the server's own when none is asked).
    #[must_use]
    pub fn user(&self, token: &str, audiences: &[String], now: i64) -> Option<(User, Vec<String>)> {
        if let Some((_, user)) = self.fixed.iter().find(|(t, _)| !t.is_empty() && same(t.as_bytes(), token.as_bytes()))
        {
            return Some((
                user.clone(),
                if audiences.is_empty() { vec![self.issuer.clone()] } else { audiences.to_vec() },
            ));
        }
        if self.key.is_empty() {
            return None;
        }
        let (signed, signature) = token.rsplit_once('.')?;
        let (head, body) = signed.split_once('.')?;
        let head: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(head).ok()?).ok()?;
        if text(&head, "/alg") != "HS256"
            || !same(&URL_SAFE_NO_PAD.decode(signature).ok()?, &mac(&self.key, signed.as_bytes()))
        {
            return None;
        }
        let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).ok()?).ok()?;
        if text(&claims, "/iss") != self.issuer || claims.get("exp").and_then(Value::as_i64)? <= now {
            return None;
        }
        let said = strings(&claims, "/aud");
        let wanted = if audiences.is_empty() { vec![self.issuer.clone()] } else { audiences.to_vec() };
        let fits: Vec<String> = wanted.into_iter().filter(|a| said.contains(a)).collect();
        if fits.is_empty() {
            return None;
        }
        let own = claims.get("kubernetes.io")?;
        let user = User::service_account(
            text(own, "/namespace"),
            text(own, "/serviceaccount/name"),
            text(own, "/serviceaccount/uid"),
        );
        Some((user, fits))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_mac_is_that_of_rfc_4231() {
        let hex: String = mac(b"Jefe", b"what do ya want for nothing?").iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn tokens_stand_for_their_account_until_they_expire_and_only_here() {
        let config = Config { token_key: b"k".to_vec(), ..Config::default() };
        let a = Authenticator::new(&config);
        let token = a.issue("ns", "sa", "u", &[], 60, 100);
        let (user, _) = a.user(&token, &[], 159).unwrap();
        assert_eq!(user.name, "system:serviceaccount:ns:sa");
        assert!(user.groups.contains(&"system:serviceaccounts:ns".to_owned()));
        assert!(a.user(&token, &[], 160).is_none());
        assert!(a.user(&token, &["other".into()], 120).is_none());
        let other = Authenticator::new(&Config { token_key: b"l".to_vec(), ..Config::default() });
        assert!(other.user(&token, &[], 120).is_none());
        assert!(a.user(&token.replace('.', ".x"), &[], 120).is_none());
    }
}
