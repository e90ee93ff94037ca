//! Servers for tests.

use std::path::Path;
use std::sync::Arc;

use embedded::auth::User;
use embedded::etcd;
use embedded::pki::{self, Pki};
use embedded::server::https::{self, Tls};
use embedded::server::{ApiServer, Config};
use embedded::storage::{self, Memory, Storage};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

pub use crate::eventually::eventually;

/// A server on a memory store.
pub async fn server() -> ApiServer {
    over(Arc::new(Memory::new())).await
}

/// A server on a store.
pub async fn over(storage: Arc<dyn Storage>) -> ApiServer {
    let config = Config {
        token_key: b"a key for tests".to_vec(),
        static_tokens: vec![("reader-token".into(), User::new("reader", &["readers"]))],
        ..Config::default()
    };
    ApiServer::new(storage, config).await.unwrap()
}

/// A real etcd in a folder.
pub async fn etcd_in(folder: &Path) -> (Arc<etcd::Etcd>, storage::Etcd) {
    let config =
        etcd::Config { data: folder.join("etcd"), run: folder.join("r"), log: folder.join("etcd.log"), program: None };
    let process = etcd::Etcd::start(config).await.unwrap();
    let store = storage::Etcd::new(&process.endpoint()).unwrap();
    (process, store)
}

/// A server that listens with TLS; its kubeconfig lies in the folder.
pub struct Listening {
    pub address: std::net::SocketAddr,
    pub kubeconfig: std::path::PathBuf,
    pub pki: Pki,
    stop: CancellationToken,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub async fn listening(server: &ApiServer, folder: &Path) -> Listening {
    let pki = Pki::open(&folder.join("pki")).unwrap();
    let identity = pki.api_server(&[]).unwrap();
    let tls = Tls {
        certificate_pem: identity.cert.into_bytes(),
        key_pem: identity.key.into_bytes(),
        client_ca_pem: pki.ca().as_bytes().to_vec(),
    };
    let listener = https::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(server.clone().serve(listener, https::acceptor(&tls).unwrap(), stop.clone()));
    let kubeconfig = folder.join("kubeconfig");
    let admin = pki.client("admin", Some("system:masters")).unwrap();
    std::fs::write(&kubeconfig, pki::kubeconfig(&format!("https://{address}"), pki.ca(), &admin)).unwrap();
    Listening { address, kubeconfig, pki, stop }
}

/// One request in the server's own process.
pub async fn ask(server: &ApiServer, user: &User, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
    ask_with(server, user, method, path, "application/json", body.map(|b| b.to_string()).unwrap_or_default()).await
}

/// One request with a content type of its own.
pub async fn ask_with(
    server: &ApiServer,
    user: &User,
    method: &str,
    path: &str,
    kind: &str,
    body: String,
) -> (u16, Value) {
    let request = ::http::Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", kind)
        .body(axum::body::Body::from(body))
        .unwrap();
    let response = server.handle(request, Some(user.clone())).await;
    let code = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), 64 << 20).await.unwrap();
    let value = serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into_owned().into());
    (code, value)
}

/// Somebody who may do everything.
pub fn admin() -> User {
    User::system("admin")
}
