//! The production clients and servers on the simulated network: only the sockets are other ones.

use super::truth::{self, ORIGIN, Origin};
use crate::world::{mutants::Mutant, swarm::Fault};
use axum::body::Body;
use embedded::{auth::User, semantics::Status, server::ApiServer};
use futures::{FutureExt, StreamExt};
use hyper_util::{
    client::legacy::{
        Client as Http,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use kube::client::ConfigExt;
use proto::transport::{self, Dial, Incoming};
use serde_json::Value;
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tower::{ServiceBuilder, timeout::TimeoutLayer};
use turmoil::net::{TcpListener, TcpStream};

/// Where the API server listens.
pub const API_PORT: u16 = 8080;
/// Where agents listen.
pub const AGENT_PORT: u16 = 9443;
/// As in production.
const CONNECT: Duration = Duration::from_secs(5);
/// As in production.
const ANSWER: Duration = Duration::from_secs(30);

/// A stream of the simulated network, as hyper's client wants it.
struct Wire(TokioIo<TcpStream>);

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, to)
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The Kubernetes client of the host that asks for it: the layers of production over hyper's client over this network.
pub fn client(host: &str) -> Result<kube::Client, http::uri::InvalidUri> {
    let config = kube::Config::new(format!("http://api:{API_PORT}").parse()?);
    let connector = tower::service_fn(|_: http::Uri| {
        let connecting = async {
            let connected = tokio::time::timeout(CONNECT, TcpStream::connect(("api", API_PORT))).await?;
            connected.map(|stream| Wire(TokioIo::new(stream)))
        };
        connecting.boxed()
    });
    let http = Http::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
    let controller = Origin(host.to_owned()).is_controller();
    let told = move |request: http::Request<kube::client::Body>| {
        if controller {
            truth::sends(request.method(), request.uri().path());
        }
        request
    };
    let service = ServiceBuilder::new()
        .map_request(told)
        .layer(TimeoutLayer::new(ANSWER))
        .layer(config.base_uri_layer())
        .service(http);
    Ok(kube::Client::new(service, "default"))
}

/// How controllers reach agents.
pub fn dial() -> Dial {
    Arc::new(|address: SocketAddr| {
        async move { TcpStream::connect(address).await.map(transport::Connection::new) }.boxed()
    })
}

/// Connections to the agent on the host of this name, and where controllers find it.
pub async fn incoming(host: &str) -> io::Result<(Incoming, SocketAddr)> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, AGENT_PORT)).await?;
    let accepted = futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| transport::Connection::new(stream));
        Some((accepted, listener))
    });
    Ok((accepted.boxed(), SocketAddr::new(turmoil::lookup(host), AGENT_PORT)))
}

/// Serves the API until the host dies.
pub async fn serve(server: ApiServer) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, API_PORT)).await?;
    loop {
        let (stream, peer) = listener.accept().await?;
        let name = turmoil::reverse_lookup(peer.ip()).unwrap_or_default();
        let (server, origin, user) = (server.clone(), Origin(name.clone()), user(&name));
        let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let (server, origin, user) = (server.clone(), origin.clone(), user.clone());
            async move { answer(&server, &origin, user, request.map(Body::new)).await }
        });
        tokio::spawn(async move {
            let builder = auto::Builder::new(TokioExecutor::new());
            // A connection that ends badly is the client's to notice.
            let _ = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
        });
    }
}

/// The identity of a host's certificate, in production.
fn user(host: &str) -> User {
    match host.split_once('-') {
        Some(("controller", _)) => User::new("virtfold-controller", &[]),
        Some(("node" | "pods", n)) => User::new(&format!("system:node:node-{n}"), &["system:nodes"]),
        _ => User::system(host),
    }
}

/// The connection ends without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the answer is lost")]
pub struct Lost;

/// Answers a request, with what a bad network and a busy server make of it.
async fn answer(
    server: &ApiServer,
    origin: &Origin,
    user: User,
    request: http::Request<Body>,
) -> Result<http::Response<Body>, Lost> {
    truth::asked(origin, request.method(), request.uri());
    let ours = origin.is_ours();
    let mutant = truth::with(|t| t.mutant);
    let request = bend(mutant, request).await?;
    let watch = request.uri().query().unwrap_or_default().contains("watch=");
    let writes = request.method() != http::Method::GET;
    if !ours {
        return Ok(ORIGIN.scope(origin.clone(), server.handle(request, Some(user))).await);
    }
    if truth::hit(Fault::Slow) {
        tokio::time::sleep(Duration::from_millis(truth::between(100, 4000))).await;
    }
    if truth::hit(Fault::LostRequest) {
        return lose().await;
    }
    if truth::hit(Fault::Busy) {
        return Ok(refusal(&Status::new(429, "TooManyRequests", "busy, on purpose")));
    }
    if writes && truth::hit(Fault::Refused) {
        return Ok(refusal(&Status::new(403, "Forbidden", "refused, on purpose")));
    }
    if writes && truth::hit(Fault::LateWrite) {
        // Beyond the patience of the client.
        let (server, origin, late) = (server.clone(), origin.clone(), truth::between(31_000, 45_000));
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.map_err(|_| Lost)?;
        let request = http::Request::from_parts(parts, Body::from(body));
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(late)).await;
            ORIGIN.scope(origin, server.handle(request, Some(user))).await
        });
        return std::future::pending().await;
    }
    let lost = writes && truth::hit(Fault::LostReply);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = ORIGIN.scope(origin.clone(), server.handle(request, Some(user))).await;
    if writes && response.status().is_success() {
        truth::done(origin, &method, &path);
    }
    if lost {
        return lose().await;
    }
    if truth::hit(Fault::ServerError) {
        return Ok(refusal(&Status::new(500, "InternalError", "failed, on purpose")));
    }
    if watch && mutant == Some(Mutant::DeletionsUnheard) {
        return Ok(response.map(|body| {
            let heard = body.into_data_stream().filter(|frame| {
                let deletion = frame.as_ref().is_ok_and(|f| f.starts_with(br#"{"type":"DELETED""#));
                std::future::ready(!deletion)
            });
            Body::from_stream(heard)
        }));
    }
    if watch && truth::hit(Fault::WatchDropped) {
        // Ends without a word, in a while.
        let end = tokio::time::sleep(Duration::from_millis(truth::between(0, 60_000)));
        return Ok(response.map(|body| Body::from_stream(body.into_data_stream().take_until(end))));
    }
    Ok(response)
}

/// What a mutant makes of a request: the Lease is taken without saying which version was read.
async fn bend(mutant: Option<Mutant>, request: http::Request<Body>) -> Result<http::Request<Body>, Lost> {
    let lease = request.method() == http::Method::PUT && request.uri().path().ends_with("/virtfold-controller");
    if mutant != Some(Mutant::LeaseWithoutVersion) || !lease {
        return Ok(request);
    }
    let (mut parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.map_err(|_| Lost)?;
    let mut object: Value = serde_json::from_slice(&body).map_err(|_| Lost)?;
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.remove("resourceVersion");
    }
    parts.headers.remove(http::header::CONTENT_LENGTH);
    Ok(http::Request::from_parts(parts, Body::from(object.to_string())))
}

/// Nothing comes back: at once, or never.
async fn lose() -> Result<http::Response<Body>, Lost> {
    if truth::between(0, 1) == 0 { Err(Lost) } else { std::future::pending().await }
}

fn refusal(status: &Status) -> http::Response<Body> {
    let mut response = http::Response::new(Body::from(status.to_value().to_string()));
    *response.status_mut() = http::StatusCode::from_u16(status.code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}
