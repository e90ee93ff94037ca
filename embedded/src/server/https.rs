//! The server on a socket: TLS, HTTP/1.1 (with upgrades) and HTTP/2.
//!
//! A client certificate of the configured authority says who the client is; without one a bearer token does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use proto::https;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::ApiServer;
use crate::auth::{User, certificate};

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum HttpsError {
    /// Somebody else has the port.
    #[error("port {} on {} is taken by another process; choose another port", .0.port(), .0.ip())]
    PortTaken(SocketAddr),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// A certificate or key cannot be read.
    #[error("the server's {what} is not usable: {why}")]
    Pem {
        /// What it is.
        what: &'static str,
        /// Why not.
        why: String,
    },
}

/// Certificates in PEM form.
#[derive(Clone)]
pub struct Tls {
    /// The server's chain, its own certificate first.
    pub certificate_pem: Vec<u8>,
    /// The server's key.
    pub key_pem: Vec<u8>,
    /// The authority whose client certificates are believed.
    pub client_ca_pem: Vec<u8>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// Listens on an address of this process's own network namespace.
///
/// # Errors
/// [`HttpsError::PortTaken`] names the port.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, HttpsError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => HttpsError::PortTaken(address),
        _ => HttpsError::Listen { address, source },
    })
}

/// Reads certificates and key.
///
/// # Errors
/// [`HttpsError::Pem`] says which is wrong.
pub fn acceptor(tls: &Tls) -> Result<TlsAcceptor, HttpsError> {
    let wrong = |what: &'static str| move |why: String| HttpsError::Pem { what, why };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = CertificateDer::pem_slice_iter(&tls.certificate_pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| wrong("certificate")(e.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(&tls.key_pem).map_err(|e| wrong("key")(e.to_string()))?;
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(&tls.client_ca_pem) {
        let ca = ca.map_err(|e| wrong("client authority")(e.to_string()))?;
        roots.add(ca).map_err(|e| wrong("client authority")(e.to_string()))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|e| wrong("client authority")(e.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong("configuration")(e.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|e| wrong("certificate")(e.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Serves a listener until `stop`. Who answers is told who a client is by its certificate.
pub async fn serve<H, F>(listener: TcpListener, acceptor: TlsAcceptor, stop: CancellationToken, handler: H)
where
    H: Fn(http::Request<Body>, Option<User>) -> F + Clone + Send + 'static,
    F: Future<Output = super::Response> + Send + 'static,
{
    let connections = tokio_util::task::TaskTracker::new();
    loop {
        let (socket, peer) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    // Out of descriptors: give the others time to close theirs.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let (handler, acceptor, stop) = (handler.clone(), acceptor.clone(), stop.clone());
        connections.spawn(async move {
            let _ = socket.set_nodelay(true);
            let Ok(Ok(stream)) = tokio::time::timeout(https::HANDSHAKE, acceptor.accept(socket)).await else {
                tracing::debug!(%peer, "no TLS handshake");
                return;
            };
            let user =
                stream.get_ref().1.peer_certificates().and_then(|c| c.first()).and_then(|c| certificate::user(c));
            let service = service_fn(move |request: http::Request<Incoming>| {
                let answer = handler(request.map(Body::new), user.clone());
                async move { Ok::<_, std::convert::Infallible>(answer.await) }
            });
            https::connection(stream, service, &stop, peer).await;
        });
    }
    connections.close();
    let _ = tokio::time::timeout(https::DRAIN + Duration::from_secs(1), connections.wait()).await;
}

impl ApiServer {
    /// Serves a listener until `stop`. Several listeners may be served at once.
    pub async fn serve(self, listener: TcpListener, acceptor: TlsAcceptor, stop: CancellationToken) {
        let handler = move |request, user| {
            let server = self.clone();
            async move { server.handle(request, user).await }
        };
        serve(listener, acceptor, stop, handler).await;
    }
}
