//! The server on a socket: TLS, HTTP/1.1 (with upgrades) and HTTP/2.
//!
//! A client certificate of the configured authority says who the client is; without one a bearer token does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::ApiServer;
use crate::auth::{User, certificate};

/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take for the head of a request, its idle time before it with it.
const HEADER_TIMEOUT: Duration = Duration::from_secs(90);
/// How often a client is asked whether it is still there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// How long open requests may go on after the end was asked for.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

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

/// Serves one connection until it ends, or until `stop` with a moment for what is open.
async fn connection<IO, S>(io: IO, service: S, stop: &CancellationToken, peer: SocketAddr)
where
    IO: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    S: hyper::service::Service<http::Request<Incoming>, Response = super::Response, Error = std::convert::Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // A client that never ends its request, or that is gone without a word, holds nothing for ever.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(io), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(%peer, %error, "a connection ended");
            }
        }
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, connection).await;
        }
    }
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
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(socket)).await else {
                tracing::debug!(%peer, "no TLS handshake");
                return;
            };
            let user =
                stream.get_ref().1.peer_certificates().and_then(|c| c.first()).and_then(|c| certificate::user(c));
            let service = service_fn(move |request: http::Request<Incoming>| {
                let answer = handler(request.map(Body::new), user.clone());
                async move { Ok::<_, std::convert::Infallible>(answer.await) }
            });
            connection(stream, service, &stop, peer).await;
        });
    }
    connections.close();
    let _ = tokio::time::timeout(DRAIN_TIMEOUT + Duration::from_secs(1), connections.wait()).await;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_that_never_ends_is_cut_off() {
        for begun in ["GET /healthz HTT", "GET /healthz HTTP/1.1\r\nhost: a\r\nx-endless: "] {
            let (mut client, server) = tokio::io::duplex(1 << 16);
            let service = service_fn(|_: http::Request<Incoming>| async {
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::from("ok")))
            });
            let stop = CancellationToken::new();
            let peer = SocketAddr::from(([127, 0, 0, 1], 1));
            let served = tokio::spawn(async move { connection(server, service, &stop, peer).await });
            client.write_all(begun.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.unwrap();
            served.await.unwrap();
            assert!(!String::from_utf8_lossy(&answer).contains("200"), "{begun}");
        }
    }
}
