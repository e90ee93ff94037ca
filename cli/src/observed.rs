//! What a process shows to those who watch over it: `/metrics` to those who may see them, `/healthz` and `/readyz` to everybody; and the
//! counting of its requests to the API server.

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use embedded::auth::User;
use embedded::server::https::{self, Tls};
use http::{Method, Request, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest, Sha256};
use telemetry::Readiness;
use telemetry::metrics::{Counter, Def, Format, Histogram, Registry, catalogue as c};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::{Layer, Service};

/// How long what the API server said of somebody is believed.
const ADMITTED: Duration = Duration::from_secs(60);
/// How long a refusal is: short, so that a role that was just given counts.
const REFUSED: Duration = Duration::from_secs(5);
/// Answers that are remembered; more, and all are forgotten.
const REMEMBERED: usize = 1_000;
/// What the API server gets for a review, and a client to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a filter of logs.
const FILTER: usize = 4 << 10;
/// Bytes of a bearer token.
const TOKEN: usize = 16 << 10;

/// Asked before each scrape, for what is not in any cache.
pub type Before = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;
/// Whether the process can do its work.
pub type Ready = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// What a part says of itself.
pub fn ready(part: &Readiness) -> Ready {
    let part = part.clone();
    Arc::new(move || part.check())
}

/// One process, as those see it who watch over it.
pub struct Observed {
    /// Its metrics.
    pub registry: Registry,
    /// Who may see them is asked here; needs the right to create TokenReviews and SubjectAccessReviews.
    pub client: Client,
    /// Asked before each scrape.
    pub before: Option<Before>,
    /// Whether its parts can do their work, and the metrics that say so.
    pub ready: Vec<(&'static Def, Ready)>,
}

/// What was said of somebody, and until when it is believed.
type Known = HashMap<[u8; 32], (Verdict, Instant)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Admitted,
    Nobody,
    Forbidden,
}

struct Inner {
    what: Observed,
    scrapes: Counter,
    known: Mutex<Known>,
}

/// Serves a listener until `stop`.
pub async fn serve(what: Observed, listener: TcpListener, tls: Tls, stop: CancellationToken) -> anyhow::Result<()> {
    let acceptor = https::acceptor(&tls)?;
    let scrapes = what.registry.counter(&c::SCRAPES);
    what.registry.source("info", |sheet| {
        let rust = concat!("rust ", env!("CARGO_PKG_RUST_VERSION"));
        sheet.tell(&c::INFO, &[rust, concat!("virtfold v", env!("CARGO_PKG_VERSION"))], 1_u64);
    });
    let parts = what.ready.clone();
    what.registry.source("ready", move |sheet| {
        parts.iter().for_each(|(def, ready)| sheet.tell(def, &[], ready().is_ok()));
    });
    if let Some(ends) = embedded::pki::not_after(&tls.certificate_pem).and_then(|t| u64::try_from(t).ok()) {
        what.registry.source("certificate", move |sheet| sheet.tell(&c::CERTIFICATE_ENDS, &[], ends));
    }
    let inner = Arc::new(Inner { what, scrapes, known: Mutex::default() });
    https::serve(listener, acceptor, stop, move |request, user| {
        let inner = inner.clone();
        async move { inner.answer(request, user).await }
    })
    .await;
    Ok(())
}

/// The same on an address of this process's own network, in a task of its own.
pub async fn spawn(what: Observed, address: SocketAddr, tls: Tls, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = https::listen(address).await?;
    tracing::info!(%address, "metrics are served");
    tokio::spawn(async move {
        if let Err(error) = serve(what, listener, tls, stop).await {
            tracing::error!(error = format!("{error:#}"), "metrics are not served");
        }
    });
    Ok(())
}

/// What a component shows, made of what it is to the others.
pub fn tls(component: &proto::transport::Tls) -> Tls {
    Tls {
        certificate_pem: component.cert.clone().into_bytes(),
        key_pem: component.key.clone().into_bytes(),
        client_ca_pem: component.ca.clone().into_bytes(),
    }
}

fn plain(code: StatusCode, text: impl Into<String>) -> Response {
    (code, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text.into() + "\n").into_response()
}

impl Inner {
    async fn answer(&self, request: Request<Body>, user: Option<User>) -> Response {
        if request.uri().path() == "/log" {
            return self.log(request, user).await;
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here");
        }
        match request.uri().path() {
            "/healthz" | "/livez" => plain(StatusCode::OK, "ok"),
            "/readyz" => match self.what.ready.iter().try_for_each(|(_, ready)| ready()) {
                Ok(()) => plain(StatusCode::OK, "ok"),
                Err(why) => plain(StatusCode::SERVICE_UNAVAILABLE, why),
            },
            "/metrics" => {
                let answer = self.metrics(request.headers(), user).await;
                self.scrapes.add(&[answer.status().as_str()]);
                answer
            }
            _ => plain(StatusCode::NOT_FOUND, "there are /metrics, /log, /healthz and /readyz"),
        }
    }

    /// Shows what is logged, or changes it.
    async fn log(&self, request: Request<Body>, user: Option<User>) -> Response {
        let verb = match *request.method() {
            Method::GET | Method::HEAD => "get",
            Method::PUT => "put",
            _ => return plain(StatusCode::METHOD_NOT_ALLOWED, "GET shows what is logged, PUT changes it"),
        };
        let (head, body) = request.into_parts();
        // Read before anything is answered: some clients take an answer that comes before they have said all for a broken stream.
        let read = tokio::time::timeout(PATIENCE, axum::body::to_bytes(body, FILTER)).await;
        if let Some(refused) = self.refused(&head.headers, user, verb, "/log").await {
            return refused;
        }
        if verb == "get" {
            return plain(StatusCode::OK, telemetry::logs::filter());
        }
        let wanted = read.ok().and_then(Result::ok);
        let wanted = wanted.as_ref().and_then(|bytes| std::str::from_utf8(bytes).ok()).map(str::trim);
        let Some(wanted) = wanted.filter(|wanted| !wanted.is_empty()) else {
            return plain(StatusCode::BAD_REQUEST, "the body is to be a filter, such as info,reconcilers=debug");
        };
        match telemetry::logs::set_filter(wanted) {
            Ok(()) => {
                tracing::info!(filter = wanted, "what is logged was changed");
                plain(StatusCode::OK, wanted)
            }
            Err(error) => plain(StatusCode::BAD_REQUEST, error.to_string()),
        }
    }

    /// What somebody gets who may not; nothing for those who may.
    async fn refused(&self, headers: &http::HeaderMap, user: Option<User>, verb: &str, path: &str) -> Option<Response> {
        let text = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).unwrap_or("");
        let bearer = text.split_once(' ').filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
        let verdict = match (user, bearer.map(|(_, token)| token.trim())) {
            (Some(user), _) => {
                let id = format!("{verb} {path} certificate {} {:?}", user.name, user.groups);
                self.known(&id, async || self.allowed(&user, verb, path).await).await
            }
            (None, Some(token)) if !token.is_empty() && token.len() <= TOKEN => {
                let id = format!("{verb} {path} token {token}");
                self.known(&id, async || match self.user_of(token).await? {
                    Some(user) => self.allowed(&user, verb, path).await,
                    None => Ok(Verdict::Nobody),
                })
                .await
            }
            (None, Some(_) | None) => Ok(Verdict::Nobody),
        };
        match verdict {
            Ok(Verdict::Admitted) => None,
            Ok(Verdict::Nobody) => {
                let why = format!(
                    "{path} is for those who are known: by a bearer token, or a client certificate of the cluster"
                );
                Some(plain(StatusCode::UNAUTHORIZED, why))
            }
            Ok(Verdict::Forbidden) => {
                Some(plain(StatusCode::FORBIDDEN, format!("this is for those who may {verb} the path {path}")))
            }
            Err(why) => Some(plain(StatusCode::SERVICE_UNAVAILABLE, format!("the API server cannot be asked: {why}"))),
        }
    }

    async fn metrics(&self, headers: &http::HeaderMap, user: Option<User>) -> Response {
        if let Some(refused) = self.refused(headers, user, "get", "/metrics").await {
            return refused;
        }
        if let Some(before) = &self.what.before {
            before().await;
        }
        let format = Format::negotiate(headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or(""));
        match self.what.registry.scrape(format) {
            Ok(page) => (StatusCode::OK, [(header::CONTENT_TYPE, format.content_type())], page).into_response(),
            Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR, "a value cannot be written"),
        }
    }

    /// What was said of somebody not long ago, or is said now. Failures of the API server are not remembered.
    async fn known<F>(&self, id: &str, ask: impl FnOnce() -> F) -> Result<Verdict, String>
    where
        F: Future<Output = Result<Verdict, String>>,
    {
        let id: [u8; 32] = Sha256::digest(id).into();
        let now = Instant::now();
        let known = self.lock().get(&id).filter(|(_, until)| *until > now).map(|(verdict, _)| *verdict);
        if let Some(verdict) = known {
            return Ok(verdict);
        }
        let verdict = tokio::time::timeout(PATIENCE, ask()).await.map_err(|_| "it does not answer".to_owned())??;
        let life = if verdict == Verdict::Admitted { ADMITTED } else { REFUSED };
        let mut all = self.lock();
        if all.len() >= REMEMBERED {
            all.clear();
        }
        all.insert(id, (verdict, now + life));
        Ok(verdict)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose token it is.
    async fn user_of(&self, token: &str) -> Result<Option<User>, String> {
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), audiences: None },
            ..TokenReview::default()
        };
        let review = Api::<TokenReview>::all(self.what.client.clone()).create(&PostParams::default(), &review).await;
        let status = review.map_err(|e| e.to_string())?.status.unwrap_or_default();
        let info = status.user.filter(|_| status.authenticated == Some(true));
        Ok(info.map(|info| {
            let groups = info.groups.unwrap_or_default();
            User::new(&info.username.unwrap_or_default(), &groups.iter().map(String::as_str).collect::<Vec<_>>())
        }))
    }

    /// Whether somebody may.
    async fn allowed(&self, user: &User, verb: &str, path: &str) -> Result<Verdict, String> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.name.clone()),
                groups: Some(user.groups.clone()),
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some(path.to_owned()),
                    verb: Some(verb.to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let api = Api::<SubjectAccessReview>::all(self.what.client.clone());
        let answer = api.create(&PostParams::default(), &review).await.map_err(|e| e.to_string())?;
        let allowed = answer.status.is_some_and(|s| s.allowed);
        Ok(if allowed { Verdict::Admitted } else { Verdict::Forbidden })
    }
}

/// Counts the requests of a client.
#[derive(Clone)]
pub struct Counting {
    host: String,
    requests: Counter,
    latency: Histogram,
}

impl Counting {
    /// For the API server at that host.
    pub fn new(registry: &Registry, host: impl Into<String>) -> Self {
        let (requests, latency) = (registry.counter(&c::REST_REQUESTS), registry.histogram(&c::REST_LATENCY));
        Self { host: host.into(), requests, latency }
    }
}

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;
    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, counting: self.clone() }
    }
}

/// A client whose requests are counted.
#[derive(Clone)]
pub struct Counted<S> {
    inner: S,
    counting: Counting,
}

impl<S, B, A> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = http::Response<A>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    A: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let asked = Asked::of(&request);
        let (counting, began) = (self.counting.clone(), Instant::now());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().map_or("<error>".to_owned(), |a| a.status().as_u16().to_string());
            let Asked { method, resource, verb, url } = asked;
            counting.requests.add(&[&code, &method, &counting.host, &resource, verb]);
            counting.latency.observe(&[verb, &url], began.elapsed(), None);
            answer
        })
    }
}

/// What a request asks for, without names.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    method: String,
    resource: String,
    verb: &'static str,
    url: String,
}

impl Asked {
    fn of<B>(request: &Request<B>) -> Self {
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
        let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        let head = match parts[..] {
            ["api", _, ..] => 2,
            ["apis", _, _, ..] => 3,
            _ => parts.len(),
        };
        let (prefix, rest) = parts.split_at(head.min(parts.len()));
        let (namespaced, rest) = match rest {
            ["namespaces", _, rest @ ..] if !rest.is_empty() => (true, rest),
            rest => (false, rest),
        };
        let (resource, named, sub) = match rest {
            [] => ("", false, ""),
            [resource] => (*resource, false, ""),
            [resource, _] => (*resource, true, ""),
            [resource, _, sub, ..] => (*resource, true, *sub),
        };
        let watch = query.split('&').any(|p| matches!(p, "watch" | "watch=true" | "watch=1"));
        let verb = match *request.method() {
            Method::GET | Method::HEAD if watch => "WATCH",
            Method::GET | Method::HEAD if named || resource.is_empty() => "GET",
            Method::GET | Method::HEAD => "LIST",
            Method::POST => "CREATE",
            Method::PUT => "UPDATE",
            Method::PATCH => "PATCH",
            Method::DELETE if named => "DELETE",
            Method::DELETE => "DELETE_COLLECTION",
            _ => "OTHER",
        };
        let mut url = format!("/{}", prefix.join("/"));
        if namespaced {
            url += "/namespaces/{namespace}";
        }
        for part in [resource, if named { "{name}" } else { "" }, sub].into_iter().filter(|p| !p.is_empty()) {
            url = format!("{url}/{part}");
        }
        let resource = if sub.is_empty() { resource.to_owned() } else { format!("{resource}/{sub}") };
        Self { method: request.method().to_string(), resource, verb, url }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn requests_are_told_without_names() {
        for (method, path, resource, verb, url) in [
            ("GET", "/api/v1/nodes/node-1", "nodes", "GET", "/api/v1/nodes/{name}"),
            ("GET", "/api/v1/pods?watch=true&a=b", "pods", "WATCH", "/api/v1/pods"),
            ("GET", "/api/v1/namespaces/x", "namespaces", "GET", "/api/v1/namespaces/{name}"),
            ("POST", "/api/v1/namespaces/x/pods", "pods", "CREATE", "/api/v1/namespaces/{namespace}/pods"),
            (
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/x/virtualmachines/y/status",
                "virtualmachines/status",
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{name}/status",
            ),
            ("DELETE", "/apis/a/v1/things/x", "things", "DELETE", "/apis/a/v1/things/{name}"),
            ("GET", "/version", "", "GET", "/version"),
        ] {
            let request = Request::builder().method(method).uri(path).body(()).unwrap();
            let asked = Asked { method: method.into(), resource: resource.into(), verb, url: url.into() };
            assert_eq!(Asked::of(&request), asked, "{path}");
        }
    }
}
