//! The gateway on a socket of its own, for an API server that is somewhere else: webhooks, and the aggregated API behind the
//! aggregation layer.
//!
//! Its certificates are replaced while it serves: connections that are open go on with the old ones. What the API server says of
//! its aggregation layer is read again now and then, since its authority rotates, too.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{Method, Request};
use hyper::body::Incoming;
use hyper::service::service_fn;
use proto::https;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::front::Front;
use crate::{Gateway, Status, limits, webhook};

/// What the gateway shows to those who connect, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Serving {
    /// Its certificate chain.
    pub cert: String,
    /// The key.
    pub key: String,
}

impl std::fmt::Debug for Serving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Serving(..)")
    }
}

/// A certificate, key or authority is not usable.
#[derive(Debug, thiserror::Error)]
#[error("the gateway's {what} is not usable: {why}")]
pub struct ServeError {
    what: &'static str,
    why: String,
}

fn wrong<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> ServeError {
    move |e| ServeError { what, why: e.to_string() }
}

/// One way to serve: certificates and whom they are shown to.
#[derive(Clone)]
struct Door {
    acceptor: TlsAcceptor,
    front: Arc<Front>,
}

impl Door {
    fn new(serving: &Serving, front: Front) -> Result<Self, ServeError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain: Vec<_> = CertificateDer::pem_slice_iter(serving.cert.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(wrong("certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(serving.key.as_bytes()).map_err(wrong("key"))?;
        let config = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(wrong("configuration"))?;
        let authority = "authority of the aggregation layer";
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(front.authority.as_bytes()) {
            roots.add(ca.map_err(wrong(authority))?).map_err(wrong(authority))?;
        }
        let config = if roots.is_empty() {
            config.with_no_client_auth()
        } else {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated()
                .build()
                .map_err(wrong(authority))?;
            config.with_client_cert_verifier(verifier)
        };
        let mut config = config.with_single_cert(chain, key).map_err(wrong("certificate"))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), front: Arc::new(front) })
    }
}

impl Gateway {
    /// Serves a listener until `stop`, with the certificates that `serving` has at the moment.
    ///
    /// # Errors
    /// When the first certificates are not usable; later ones that are not are left out, and said in the log.
    pub async fn serve(
        self,
        listener: TcpListener,
        mut serving: watch::Receiver<Serving>,
        stop: CancellationToken,
    ) -> Result<(), ServeError> {
        let client = self.inner.config.client.clone();
        let mut front = read_front(&client).await.unwrap_or_default();
        let mut door = Door::new(&serving.borrow_and_update().clone(), front.clone())?;
        let connections = TaskTracker::new();
        let mut look = tokio::time::interval(limits::FRONT);
        look.reset();
        loop {
            let wanted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => {
                    match accepted {
                        Ok((socket, peer)) => {
                            let served = connection(self.clone(), door.clone(), socket, peer, stop.clone());
                            connections.spawn(served);
                        }
                        Err(error) => {
                            tracing::warn!(%error, "a connection could not be accepted");
                            // Out of descriptors: give the others time to close theirs.
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                    }
                    continue;
                }
                Ok(()) = serving.changed() => front.clone(),
                _ = look.tick() => match read_front(&client).await {
                    Some(new) if new != front => new,
                    _ => continue,
                },
            };
            match Door::new(&serving.borrow_and_update().clone(), wanted.clone()) {
                Ok(new) => (door, front) = (new, wanted),
                Err(error) => tracing::error!(%error, "serving on with what was there"),
            }
        }
        connections.close();
        let _ = tokio::time::timeout(https::DRAIN, connections.wait()).await;
        Ok(())
    }

    async fn handle(&self, front: Option<&Front>, mut request: Request<Body>) -> Response {
        let path = request.uri().path();
        match path {
            webhook::MUTATE | webhook::VALIDATE if request.method() == Method::POST => {
                let mutating = path == webhook::MUTATE;
                let body = axum::body::to_bytes(request.into_body(), limits::REVIEW).await;
                let answer = match body {
                    Ok(bytes) => webhook::answer(self, &bytes, mutating).await,
                    Err(e) => Err(Status::bad_request(format!("reading the body: {e}"))),
                };
                answer.map_or_else(Status::into_response, |v| axum::Json(v).into_response())
            }
            "/healthz" | "/readyz" | "/livez" => "ok".into_response(),
            path if path.starts_with("/apis/") => match front {
                Some(front) => {
                    let user = front.user(request.headers_mut());
                    request.extensions_mut().insert(user);
                    match self.router().oneshot(request).await {
                        Ok(response) => response,
                        Err(never) => match never {},
                    }
                }
                None => Status::new(
                    401,
                    "Unauthorized",
                    "only the aggregation layer of the API server is served here, known by its client certificate",
                )
                .into_response(),
            },
            _ => Status::new(404, "NotFound", "the server could not find the requested resource").into_response(),
        }
    }
}

async fn read_front(client: &kube::Client) -> Option<Front> {
    match tokio::time::timeout(limits::API, Front::read(client)).await {
        Ok(Ok(front)) => Some(front),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot read who the aggregation layer is");
            None
        }
        Err(_) => None,
    }
}

/// Serves one connection until it ends, or until `stop` with a moment for what is open.
async fn connection(gateway: Gateway, door: Door, socket: TcpStream, peer: SocketAddr, stop: CancellationToken) {
    let _ = socket.set_nodelay(true);
    let Ok(Ok(stream)) = tokio::time::timeout(https::HANDSHAKE, door.acceptor.accept(socket)).await else {
        tracing::debug!(%peer, "no TLS handshake");
        return;
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|all| all.first());
    let front = certificate.is_some_and(|c| door.front.believes(c)).then(|| door.front.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let (gateway, front) = (gateway.clone(), front.clone());
        async move { Ok::<_, Infallible>(gateway.handle(front.as_deref(), request.map(Body::new)).await) }
    });
    https::connection(stream, service, &stop, peer).await;
}
