//! The API server: a service from HTTP requests to responses over a [`Storage`].
//!
//! It owns every stored object: nobody else writes to the store. What an object may become is decided in
//! [`semantics`](crate::semantics); here requests are read, authorised, admitted, written by compare-and-swap and answered.
//!
//! * GET, and LIST without resourceVersion, are quorum reads. A LIST at an exact revision or a continued one is a snapshot.
//! * One watch on the store feeds all watches of clients ([`hub`]); who asks for more history than is kept in memory reads
//!   the store's; who asks for more than that gets 410.
//! * Every write is a compare-and-swap against what was read; who did not state a resourceVersion is retried.
//! * Definitions of custom resources are served from the moment that their creation is answered.
//!
//! [`ApiServer::service`] is the way in for the same process, [`https`] for everybody else; both end in [`ApiServer::handle`].

mod admission;
mod catalog;
mod convert;
mod delete;
mod discovery;
mod housekeeping;
pub mod https;
mod hub;
mod openapi;
mod protobuf;
mod read;
mod request;
mod respond;
mod reviews;
mod room;
mod subresources;
mod table;
mod watch;
mod write;

use std::sync::{Arc, PoisonError, RwLock};

use axum::body::Body;
use futures::future::BoxFuture;
use serde_json::Value;

use crate::auth::{Authenticator, Rbac, User};
use crate::semantics::{Moment, SUFFIX_ALPHABET, Status};
use crate::storage::{Storage, StorageError};

pub use admission::{Admission, AdmissionRequest, AdmissionResponse, Operation};
pub use request::LogOptions;

/// A response of the server.
pub type Response = http::Response<Body>;

/// An API that somebody else answers for, behind the server's authentication and authorisation.
pub trait Aggregated: Send + Sync + 'static {
    /// Answers a request. Its path is unchanged; hyper's `OnUpgrade` extension is still there.
    fn call(&self, request: http::Request<Body>, user: User) -> BoxFuture<'static, Response>;
}

/// Whoever has the logs of containers.
pub trait PodLogs: Send + Sync + 'static {
    /// The log of a container of a pod, as a stream of bytes.
    fn logs(&self, pod: Value, options: LogOptions) -> BoxFuture<'static, Result<Body, Status>>;
}

/// What the server is told when it starts.
#[derive(Clone, Default)]
pub struct Config {
    /// Bearer tokens that stand for somebody.
    pub static_tokens: Vec<(String, User)>,
    /// Key that service account tokens are signed with. Tokens of other keys are refused.
    pub token_key: Vec<u8>,
    /// The `iss` of tokens and the audience that they have when none is asked for.
    pub issuer: String,
    /// What `/version` says as git version (`v1.36.0+virtfold` when empty).
    pub version: String,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").field("issuer", &self.issuer).finish_non_exhaustive()
    }
}

struct AggregatedApi {
    group: String,
    version: String,
    handler: Arc<dyn Aggregated>,
}

struct Inner {
    storage: Arc<dyn Storage>,
    config: Config,
    catalog: catalog::Catalog,
    hub: hub::Hub,
    rbac: Rbac,
    authenticator: Authenticator,
    admission: RwLock<Vec<Arc<dyn Admission>>>,
    aggregated: RwLock<Vec<Arc<AggregatedApi>>>,
    logs: RwLock<Option<Arc<dyn PodLogs>>>,
    namespaces: std::sync::Mutex<std::collections::HashMap<String, bool>>,
    remembered: std::sync::Mutex<room::Remembered>,
    room: room::Room,
    cleanup: tokio::sync::Notify,
    /// A cluster role has changed since the roles that gather others were looked at.
    roles_changed: std::sync::atomic::AtomicBool,
    stop: tokio_util::sync::CancellationToken,
}

/// The API server. Cheap to clone; the last clone stops its background work.
#[derive(Clone)]
pub struct ApiServer {
    inner: Arc<Inner>,
    _guard: Arc<tokio_util::sync::DropGuard>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Starts on a store: reads the definitions that are there, writes the built-in roles and namespaces that are missing.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn new(storage: Arc<dyn Storage>, config: Config) -> Result<Self, Status> {
        let revision = storage.revision().await.map_err(storage_status)?;
        let stop = tokio_util::sync::CancellationToken::new();
        let inner = Arc::new(Inner {
            catalog: catalog::Catalog::new(),
            hub: hub::Hub::new(revision),
            rbac: Rbac::default(),
            authenticator: Authenticator::new(&config),
            admission: RwLock::default(),
            aggregated: RwLock::default(),
            logs: RwLock::default(),
            namespaces: std::sync::Mutex::default(),
            remembered: std::sync::Mutex::default(),
            room: room::Room::default(),
            cleanup: tokio::sync::Notify::new(),
            roles_changed: std::sync::atomic::AtomicBool::new(true),
            storage,
            config,
            stop: stop.clone(),
        });
        inner.load_definitions().await?;
        inner.bootstrap().await?;
        tokio::spawn(hub::feed(Arc::downgrade(&inner), inner.storage.clone(), stop.clone()));
        tokio::spawn(room::run(Arc::downgrade(&inner), stop.clone()));
        tokio::spawn(housekeeping::run(Arc::downgrade(&inner), stop.clone()));
        Ok(Self { inner, _guard: Arc::new(stop.drop_guard()) })
    }

    /// Adds a plugin that changes and refuses writes. Plugins are asked in the order in which they came.
    pub fn add_admission(&self, plugin: Arc<dyn Admission>) {
        self.inner.admission.write().unwrap_or_else(PoisonError::into_inner).push(plugin);
    }

    /// Gives everything under `/apis/<group>/<version>` to somebody else, who also answers its discovery.
    pub fn add_aggregated(&self, group: &str, version: &str, handler: Arc<dyn Aggregated>) {
        let api = Arc::new(AggregatedApi { group: group.into(), version: version.into(), handler });
        self.inner.aggregated.write().unwrap_or_else(PoisonError::into_inner).push(api);
    }

    /// Says who has the logs of containers.
    pub fn set_logs(&self, logs: Arc<dyn PodLogs>) {
        *self.inner.logs.write().unwrap_or_else(PoisonError::into_inner) = Some(logs);
    }

    /// Answers one request of `user`; without one, of whoever the request's token says.
    pub async fn handle(&self, request: http::Request<Body>, user: Option<User>) -> Response {
        Box::pin(request::route(&self.inner, request, user)).await
    }

    /// The server as a service for callers in this process, who act as `user`.
    #[must_use]
    pub fn service(&self, user: User) -> InProcess {
        InProcess { server: self.clone(), user }
    }

    /// A `kube` client in this process that acts as `user`.
    #[must_use]
    pub fn client(&self, user: User) -> kube::Client {
        kube::Client::new(self.service(user), "default")
    }

    /// Issues a token for a service account that exists (`system:serviceaccount:<namespace>:<name>`).
    #[must_use]
    pub fn service_account_token(&self, namespace: &str, name: &str, uid: &str, seconds: i64) -> String {
        self.inner.authenticator.issue(namespace, name, uid, &[], seconds, now())
    }
}

/// The server as a `tower::Service` for callers in this process.
#[derive(Clone, Debug)]
pub struct InProcess {
    server: ApiServer,
    user: User,
}

impl<B> tower::Service<http::Request<B>> for InProcess
where
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<'static, Result<Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let (server, user) = (self.server.clone(), self.user.clone());
        Box::pin(async move { Ok(server.handle(request.map(Body::new), Some(user)).await) })
    }
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

/// The present moment with fresh randomness.
fn moment() -> Moment {
    let random = uuid::Uuid::new_v4();
    let suffix = uuid::Uuid::new_v4();
    let suffix = suffix
        .as_bytes()
        .iter()
        .take(5)
        .filter_map(|b| SUFFIX_ALPHABET.get(usize::from(*b) % SUFFIX_ALPHABET.len()))
        .map(|b| char::from(*b))
        .collect();
    Moment { seconds: now(), uid: random.to_string(), suffix }
}

/// What a client is told who asks for a revision that has not happened.
fn too_large(asked: crate::storage::Revision, newest: crate::storage::Revision) -> Status {
    let mut s = Status::timeout(format!("Timeout: Too large resource version: {asked}, current: {newest}"));
    s.details = serde_json::json!({
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    });
    s
}

/// What a client is told when the store does not do what it should.
fn storage_status(error: StorageError) -> Status {
    match error {
        StorageError::Compacted { .. } => Status::expired("The resourceVersion for the provided list is too old."),
        StorageError::Future { asked } => too_large(asked, 0),
        StorageError::NoSpace => Status::new(500, "InternalError", "etcdserver: mvcc: database space exceeded"),
        StorageError::Unavailable(why) => Status::timeout(format!("the store did not answer: {why}")),
        StorageError::Broken(why) => Status::internal(why),
    }
}
