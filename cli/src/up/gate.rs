//! Puts the gateway into the API server of this process: admission of KubeVirt's kinds and the aggregated API.

use std::sync::Arc;

use axum::body::Body;
use embedded::auth::User;
use embedded::cluster::bootstrap::GATEWAY;
use embedded::semantics::Status;
use embedded::server::{Admission, AdmissionRequest, AdmissionResponse, Aggregated, ApiServer, Operation, Response};
use futures::future::BoxFuture;
use gateway::{AdmissionInput, Authorization, Gateway, Leader};
use reconcilers::{ExplainError, Explainer, LeaseConfig, Subject};
use tower::ServiceExt;

use super::Site;

struct Gate(Gateway);

/// Installs the gateway.
pub fn install(site: &Site<'_>, server: &ApiServer) -> anyhow::Result<()> {
    let (client, tls) = (server.client(User::new(GATEWAY, &[])), site.component(GATEWAY)?);
    let explain: Arc<dyn gateway::Explain> = if site.options.no_controller {
        let lease = LeaseConfig::default();
        Arc::new(Leader::new(client.clone(), site.dial.clone(), tls.clone(), (lease.namespace, lease.name)))
    } else {
        Arc::new(Why(site.explainer.clone()))
    };
    let gateway = Gateway::new(gateway::Config {
        client,
        dial: site.dial.clone(),
        datagrams: site.datagrams.clone(),
        tls,
        settings: gateway::Settings { trusted: crate::gateway::trusted(), ..gateway::Settings::default() },
        authorization: Authorization::Forwarded,
        explain: Some(explain),
        patience: gateway::PATIENCE,
        metrics: site.metrics.clone(),
        readiness: site.gateway.clone(),
    });
    let (followed, stop) = (gateway.clone(), site.controllers.clone());
    site.controller_tasks.spawn(async move { stop.run_until_cancelled(followed.follow()).await });
    let gate = Arc::new(Gate(gateway));
    server.add_admission(gate.clone());
    for version in gateway::VERSIONS {
        server.add_aggregated(api::names::SUBRESOURCE_GROUP, version, gate.clone());
    }
    Ok(())
}

/// The controller of this process explains.
pub struct Why(pub Explainer);

impl gateway::Explain for Why {
    fn explain(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<serde_json::Value, gateway::Status>> {
        let explainer = self.0.clone();
        let subject = Subject::of(resource, namespace, name);
        Box::pin(async move {
            let failed = |code, reason, error: &dyn std::fmt::Display| {
                Err(gateway::Status::new(code, reason, error.to_string()))
            };
            match explainer.explain(&subject).await {
                Ok(e) => serde_json::to_value(e).or_else(|e| failed(500, "InternalError", &e)),
                Err(e @ (ExplainError::NotLeading(_) | ExplainError::Unknown(_))) => {
                    failed(503, "ServiceUnavailable", &e)
                }
                Err(ExplainError::Journal(e)) => {
                    failed(500, "InternalError", &format!("cannot read the controller's journal: {e}"))
                }
            }
        })
    }
}

/// A refusal of the gateway's in the words of the server.
fn refusal(refused: gateway::Status) -> Status {
    let mut status = Status::new(refused.code, &refused.reason, refused.message);
    status.details = refused.details;
    status
}

impl Admission for Gate {
    fn admit<'a>(&'a self, request: &'a AdmissionRequest) -> BoxFuture<'a, Result<AdmissionResponse, Status>> {
        Box::pin(async move {
            if request.resource == "pods" && request.subresource == "eviction" {
                let pod = Some(request.old_object.clone());
                let (namespace, name) = (&request.namespace, &request.name);
                let judged = self.0.admit_eviction(namespace, name, pod, &request.object, request.dry_run).await;
                return judged.map(|()| AdmissionResponse::default()).map_err(refusal);
            }
            if !api::crd::is_own(&request.group) {
                return Ok(AdmissionResponse::default());
            }
            let input = AdmissionInput {
                operation: match request.operation {
                    Operation::Create => gateway::Operation::Create,
                    Operation::Update => gateway::Operation::Update,
                    Operation::Delete => gateway::Operation::Delete,
                },
                kind: request.kind.clone(),
                subresource: request.subresource.clone(),
                namespace: request.namespace.clone(),
                name: request.name.clone(),
                user: gateway::User { name: request.user.name.clone(), groups: request.user.groups.clone() },
                object: request.object.clone(),
                old_object: (!request.old_object.is_null()).then(|| request.old_object.clone()),
                traceparent: request.traceparent.clone(),
            };
            match self.0.admit(input).await {
                Ok(output) => Ok(AdmissionResponse {
                    object: (request.operation != Operation::Delete).then_some(output.object),
                    warnings: output.warnings,
                }),
                Err(refused) => Err(refusal(refused)),
            }
        })
    }
}

impl Aggregated for Gate {
    fn call(&self, mut request: http::Request<Body>, user: User) -> BoxFuture<'static, Response> {
        let router = self.0.router();
        request.extensions_mut().insert(gateway::User { name: user.name, groups: user.groups });
        Box::pin(async move {
            match router.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        })
    }
}
