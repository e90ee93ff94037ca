//! The gateway: what users reach beside plain objects.
//!
//! * [`admission`] changes and refuses VirtualMachines and VirtualMachineInstances before they are stored;
//! * [`subresources`] is the aggregated API `subresources.kubevirt.io`: start, stop, console and the like.
//!
//! The embedded API server calls both in its own process. For a Kubernetes that is somewhere else they are served by HTTPS
//! ([`Gateway::serve`]), and [`registration`] is what that Kubernetes is told.
//!
//! It owns what users ask for: `status.stateChangeRequests` of a VM, a VMI's grace period, the trace context written with
//! a spec. Beside settings and presets, which it follows, it keeps nothing: any number of gateways may run, and one that dies costs the connections through it. A
//! request that changes an object is decided on what was read and written on the condition that it is still so; a
//! request to a guest goes to its node's agent with an id of its own and is carried out at most once.

pub mod admission;
mod agent;
mod cluster;
mod front;
mod kubernetes;
mod leader;
mod limits;
mod metrics;
pub mod policy;
pub mod registration;
mod server;
pub mod status;
pub mod subresources;
mod webhook;

use std::sync::Arc;

use admission::Objects;
use futures::future::BoxFuture;

pub use admission::{AdmissionInput, AdmissionOutput, Operation, ReferencePolicy, Settings, User};
pub use leader::Leader;
pub use limits::{PATIENCE, REGISTERED};
pub use proto::transport::{Datagrams, Dial, Tls};
pub use server::{ServeError, Serving};
pub use status::Status;
pub use subresources::VERSIONS;

/// Who decides whether a user may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Authorization {
    /// The API server that forwards the request has done so (embedded cluster).
    #[default]
    Forwarded,
    /// A SubjectAccessReview for the user in `X-Remote-User` (a real cluster's aggregation layer; the listener must have
    /// verified the front proxy's certificate).
    Review,
}

/// Answers "why": the leading controller, wherever it is.
pub trait Explain: Send + Sync {
    /// The explanation of what exists, as JSON, or what to say instead. The resource is `virtualmachines`,
    /// `virtualmachineinstances`, `virtualmachineinstancereplicasets` or `nodes`, which have no namespace.
    fn explain(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<serde_json::Value, Status>>;
}

/// What a gateway is told when it is made.
#[derive(Clone)]
pub struct Config {
    /// The API server, with the rights of the gateway.
    pub client: kube::Client,
    /// The way to node agents and pods.
    pub dial: Dial,
    /// The way to ports of guests that speak UDP.
    pub datagrams: Datagrams,
    /// Identity towards node agents.
    pub tls: Tls,
    /// What the cluster decides for its machines.
    pub settings: Settings,
    /// Who authorises.
    pub authorization: Authorization,
    /// Who explains; `None` where no controller can be asked.
    pub explain: Option<Arc<dyn Explain>>,
    /// How long a verb or a stream waits for a node agent that is not ready; [`PATIENCE`] unless somebody is in a hurry.
    pub patience: std::time::Duration,
    /// Where it counts.
    pub metrics: telemetry::metrics::Registry,
    /// Says what it lacks: the settings of the cluster, as long as they cannot be followed.
    pub readiness: telemetry::Readiness,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("settings", &self.settings)
            .field("authorization", &self.authorization)
            .finish_non_exhaustive()
    }
}

/// The gateway. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gateway {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    config: Config,
    agents: agent::Agents,
    metrics: metrics::Metrics,
    cluster: cluster::Cluster,
}

/// A trace that begins with a write of a spec: the write is its root, and what follows from it hangs below.
fn new_trace(write: &AdmissionInput) -> String {
    let (context, now) = (telemetry::begin(), std::time::SystemTime::now());
    let attributes = vec![
        ("k8s.namespace.name", write.namespace.clone()),
        ("kubevirt.kind", write.kind.clone()),
        ("kubevirt.vm.name", write.name.clone()),
        ("enduser.id", write.user.name.clone()),
    ];
    let kind = telemetry::Kind::Server;
    telemetry::emit(telemetry::Step {
        begins: true,
        attributes,
        kind,
        ..telemetry::Step::of(context, "", "write", now)
    });
    context.to_string()
}

impl Inner {
    /// What a pure function answers once it has the objects that it asks for.
    pub(crate) async fn among_objects<R>(&self, ask: impl Fn(&Objects) -> R) -> Result<R, Status> {
        let mut objects = self.cluster.objects();
        // Each round reads what the one before asked for.
        for _ in 0..limits::LOOKUPS {
            let answer = ask(&objects);
            let missing = objects.missing();
            if missing.is_empty() {
                return Ok(answer);
            }
            kubernetes::find(&self.config.client, missing, &mut objects).await?;
        }
        Err(Status::internal("the answer depends on ever more objects"))
    }
}

impl Gateway {
    /// Makes a gateway; nothing is connected before it is needed.
    pub fn new(config: Config) -> Self {
        let agents = agent::Agents::new(config.dial.clone(), config.tls.clone(), config.patience);
        let metrics = metrics::Metrics::new(&config.metrics);
        let cluster = cluster::Cluster::new(config.settings.clone(), &config.readiness);
        Self { inner: Arc::new(Inner { config, agents, metrics, cluster }) }
    }

    /// Keeps the settings as the cluster's KubeVirt object says, and its presets at hand. Never ends; without it the settings of
    /// the configuration hold.
    pub async fn follow(&self) {
        self.inner.cluster.follow(&self.inner.config.client, &self.inner.config.readiness).await;
    }

    /// Admits a write, or says why not.
    ///
    /// # Errors
    /// 422 with causes for wrong fields; 400 for what is no object.
    pub async fn admit(&self, input: AdmissionInput) -> Result<AdmissionOutput, Status> {
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        // One write is one trace, however often it is asked.
        let trace = std::sync::OnceLock::new();
        let settings = self.inner.cluster.settings();
        let answer = self.inner.among_objects(|objects| {
            let context = admission::Context {
                settings: &settings,
                now: &now,
                uuid: &|| uuid::Uuid::new_v4().to_string(),
                trace: &|| trace.get_or_init(|| new_trace(&input)).clone(),
                objects,
            };
            admission::admit(input.clone(), &context)
        });
        let answer = answer.await.and_then(|answer| answer);
        self.inner.metrics.judged(&input, answer.is_ok());
        answer
    }

    /// Judges the eviction of a pod, as a webhook on `pods/eviction` is asked: `pod` is the pod itself, where whoever asks has
    /// it at hand.
    ///
    /// # Errors
    /// 429 for a machine that has to be moved away first, or that cannot be.
    pub async fn admit_eviction(
        &self,
        namespace: &str,
        name: &str,
        pod: Option<serde_json::Value>,
        eviction: &serde_json::Value,
        dry_run: bool,
    ) -> Result<(), Status> {
        admission::eviction::admit(&self.inner.config.client, namespace, name, pod, eviction, dry_run).await
    }

    /// The aggregated API, to be called with full paths (`/apis/subresources.kubevirt.io/...`). The user is an extension
    /// ([`User`]) or in `X-Remote-User` and `X-Remote-Group`; hyper's `OnUpgrade` extension has to be kept.
    pub fn router(&self) -> axum::Router {
        subresources::router(self.inner.clone())
    }
}
