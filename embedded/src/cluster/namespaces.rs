//! Namespaces: emptied before they go, and with a service account `default` while they live.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Namespace, ServiceAccount};
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams, Preconditions, PropagationPolicy};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::gc::Graph;
use super::{Caches, Controller};

/// What is left although it is being deleted is looked at again after this.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The controller.
pub struct Namespaces {
    client: Client,
    caches: Caches,
    graph: Graph,
}

impl Namespaces {
    /// A controller over shared caches and the graph of all objects.
    #[must_use]
    pub fn new(client: Client, caches: Caches, graph: Graph) -> Self {
        Self { client, caches, graph }
    }

    async fn account(&self, namespace: &str) -> Result<(), kube::Error> {
        if self.caches.accounts.get(namespace, "default").is_some() {
            return Ok(());
        }
        let account = ServiceAccount {
            metadata: ObjectMeta { name: Some("default".into()), ..ObjectMeta::default() },
            ..ServiceAccount::default()
        };
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        match api.create(&PostParams::default(), &account).await {
            // There already, or the namespace is going.
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Deletes what is in the namespace; whether it is empty.
    async fn empty(&self, namespace: &str) -> Result<bool, kube::Error> {
        let items = self.graph.in_namespace(namespace);
        for item in items.iter().filter(|i| !i.deleting) {
            let params = DeleteParams {
                propagation_policy: Some(PropagationPolicy::Background),
                preconditions: Some(Preconditions { uid: Some(item.uid.clone()), resource_version: None }),
                ..DeleteParams::default()
            };
            match item.resource.api(&self.client, namespace).delete(&item.name, &params).await {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 405 | 409) => {}
                other => drop(other?),
            }
        }
        if !items.is_empty() {
            return Ok(false);
        }
        // Events are not in the graph: there are many, and nothing hangs on them.
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        events.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        // The graph has none; the server is asked, because it may be ahead.
        for served in self.graph.namespaced() {
            let list = served.api(&self.client, namespace).list(&ListParams::default().limit(1)).await;
            match list {
                Ok(list) if list.items.is_empty() => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Ok(_) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    async fn finalize(&self, namespace: &Namespace) -> Result<(), kube::Error> {
        let name = namespace.name_any();
        let mut body = json!(namespace);
        let finalizers = namespace.spec.as_ref().and_then(|s| s.finalizers.clone()).unwrap_or_default();
        let left: Vec<_> = finalizers.into_iter().filter(|f| f != "kubernetes").collect();
        body["apiVersion"] = "v1".into();
        body["kind"] = "Namespace".into();
        body["spec"] = json!({"finalizers": left});
        let request = http::Request::put(format!("/api/v1/namespaces/{name}/finalize"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(serde_json::to_vec(&body).map_err(kube::Error::SerdeError)?)
            .map_err(|e| kube::Error::Service(Box::new(e)))?;
        self.client.request::<serde_json::Value>(request).await.map(drop)
    }
}

impl Controller for Namespaces {
    const NAME: &'static str = "namespaces";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        let mut again = None;
        let mut failed = None;
        let mut done = BTreeSet::new();
        for namespace in self.caches.namespaces.all() {
            let name = namespace.name_any();
            if namespace.metadata.deletion_timestamp.is_none() {
                self.account(&name).await?;
                continue;
            }
            let held = namespace.spec.as_ref().and_then(|s| s.finalizers.as_ref());
            if !held.is_some_and(|f| f.iter().any(|f| f == "kubernetes")) || !done.insert(name.clone()) {
                continue;
            }
            if !self.graph.ready() {
                again = Some(LOOK_AGAIN);
                continue;
            }
            // One namespace that resists does not hold up the others.
            let result = match self.empty(&name).await {
                Ok(true) => self.finalize(&namespace).await,
                Ok(false) => {
                    again = Some(LOOK_AGAIN);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            match result {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => again = Some(LOOK_AGAIN),
                Err(error) => failed = Some(error),
                Ok(()) => {}
            }
        }
        failed.map_or(Ok(again), Err)
    }
}
