//! What is asked before a write is stored: the server's own rules, then the plugins.

use std::sync::{Arc, PoisonError};

use futures::future::BoxFuture;
use serde_json::{Value, json};

use super::request::Call;
use super::{Inner, storage_status};
use crate::auth::User;
use crate::semantics::value::{child, default, deleting, items, name, namespace, object, text};
use crate::semantics::{Resource, Status};

/// What is to happen to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// It is created.
    Create,
    /// It is changed.
    Update,
    /// It is deleted.
    Delete,
}

/// A write that is about to happen.
#[derive(Debug, Clone)]
pub struct AdmissionRequest {
    /// What is to happen.
    pub operation: Operation,
    /// API group.
    pub group: String,
    /// API version of the objects below.
    pub version: String,
    /// Plural name of the resource.
    pub resource: String,
    /// Kind.
    pub kind: String,
    /// Subresource, "" for the object itself.
    pub subresource: String,
    /// Namespace, "" for none.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// The object as it would be stored (of a deletion: null).
    pub object: Value,
    /// The object as it is stored (of a creation: null).
    pub old_object: Value,
    /// Who asks.
    pub user: User,
    /// Nothing will be stored.
    pub dry_run: bool,
    /// The trace that the request belongs to, as its `traceparent` header says.
    pub traceparent: Option<String>,
}

impl AdmissionRequest {
    /// The question about a write that `call` asks for. Of a deletion `object` is null, of a creation `old`.
    pub(super) fn new(resource: &Resource, call: &Call, operation: Operation, object: Value, old: Value) -> Self {
        let about = if object.is_null() { &old } else { &object };
        Self {
            operation,
            group: resource.group.clone(),
            version: resource.version.clone(),
            resource: resource.plural.clone(),
            kind: resource.kind.clone(),
            subresource: call.target.subresource.clone(),
            namespace: if resource.namespaced { namespace(about).to_owned() } else { String::new() },
            name: name(about).to_owned(),
            user: call.user.clone(),
            dry_run: false,
            traceparent: call.headers.get("traceparent").and_then(|v| v.to_str().ok()).map(str::to_owned),
            object,
            old_object: old,
        }
    }
}

/// What a plugin says when it does not refuse.
#[derive(Debug, Clone, Default)]
pub struct AdmissionResponse {
    /// The object instead of the one that was asked about.
    pub object: Option<Value>,
    /// What the user is told.
    pub warnings: Vec<String>,
}

/// A plugin that changes or refuses writes.
pub trait Admission: Send + Sync + 'static {
    /// Judges a write.
    fn admit<'a>(&'a self, request: &'a AdmissionRequest) -> BoxFuture<'a, Result<AdmissionResponse, Status>>;
}

/// Namespaces that every cluster keeps.
const KEPT: [&str; 3] = ["default", "kube-system", "kube-public"];
/// How long a pod stays on a node that is not ready, when it does not say.
const TOLERATION_SECONDS: i64 = 300;

impl Inner {
    /// Asks the server's own rules and all plugins; the object may change on the way.
    pub(super) async fn admit(
        self: &Arc<Self>,
        resource: &Resource,
        mut request: AdmissionRequest,
    ) -> Result<(Value, Vec<String>), Status> {
        self.own_rules(resource, &mut request).await?;
        let plugins = self.admission.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut warnings = Vec::new();
        for plugin in plugins {
            let response = plugin.admit(&request).await?;
            warnings.extend(response.warnings);
            if let Some(object) = response.object {
                request.object = object;
            }
        }
        Ok((request.object, warnings))
    }

    async fn own_rules(&self, resource: &Resource, request: &mut AdmissionRequest) -> Result<(), Status> {
        match request.operation {
            Operation::Create if resource.namespaced && request.subresource.is_empty() => {
                self.namespace_takes(resource, request).await?;
            }
            Operation::Delete if resource.kind == "Namespace" && KEPT.contains(&request.name.as_str()) => {
                let why = "this namespace may not be deleted";
                return Err(Status::forbidden("", "namespaces", &request.name, why));
            }
            _ => {}
        }
        if request.operation == Operation::Create && request.subresource.is_empty() && resource.group.is_empty() {
            match resource.kind.as_str() {
                "Pod" => self.complete_pod(request).await?,
                "PersistentVolumeClaim" if request.object.pointer("/spec/storageClassName").is_none() => {
                    if let Some(class) = self.default_class().await? {
                        child(&mut request.object, "spec").insert("storageClassName".into(), class.into());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Forgets what is known of a namespace.
    pub(super) fn forget_namespace(&self, name: &str) {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    async fn namespace_takes(&self, resource: &Resource, request: &AdmissionRequest) -> Result<(), Status> {
        let there = &request.namespace;
        let known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).get(there).copied();
        let open = match known {
            Some(open) => open,
            None => {
                let key = format!("/registry/core/namespaces/{there}");
                let (kv, revision) = self.storage.get(&key, 0).await.map_err(storage_status)?;
                let Some(kv) = kv else { return Err(Status::not_found("", "namespaces", there)) };
                let open = !super::hub::decode(&kv.value, kv.revision).is_some_and(|v| deleting(&v));
                // Kept only if the hub has yet to tell of every later change; it takes the same lock to forget.
                let mut known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
                if self.hub.head() <= revision {
                    known.insert(there.clone(), open);
                }
                open
            }
        };
        if open {
            return Ok(());
        }
        let why = format!("unable to create new content in namespace {there} because it is being terminated");
        let mut status = Status::forbidden(&resource.group, &resource.plural, &request.name, &why);
        status.details["causes"] = json!([{
            "reason": "NamespaceTerminating", "field": "metadata.namespace",
            "message": format!("namespace {there} is being terminated"),
        }]);
        Err(status)
    }

    /// The storage class of claims that ask for none: the newest default one.
    async fn default_class(&self) -> Result<Option<String>, Status> {
        let marked = |o: &Value| {
            o.pointer("/metadata/annotations/storageclass.kubernetes.io~1is-default-class").and_then(Value::as_str)
                == Some("true")
        };
        let classes = self.remembered("/registry/storage.k8s.io/storageclasses/").await?;
        let newest =
            classes.iter().filter(|o| marked(o)).max_by_key(|o| text(o, "/metadata/creationTimestamp").to_owned());
        Ok(newest.map(|o| name(o).to_owned()))
    }

    async fn complete_pod(&self, request: &mut AdmissionRequest) -> Result<(), Status> {
        let pod = &mut request.object;
        self.complete_by_limits(pod).await?;
        let there = namespace(pod).to_owned();
        let named = text(pod, "/spec/serviceAccountName").to_owned();
        default(pod, &["spec", "serviceAccountName"], "default");
        default(pod, &["spec", "serviceAccount"], "default");
        let account = if named.is_empty() { "default" } else { &named };
        let key = format!("/registry/core/serviceaccounts/{there}/{account}");
        let found = self.storage.get(&key, 0).await.map_err(storage_status)?.0;
        if found.is_none() && !named.is_empty() {
            let why =
                format!("error looking up service account {there}/{account}: serviceaccount {account:?} not found");
            return Err(Status::forbidden("", "pods", name(pod), &why));
        }
        // An account's credentials for registries are its pods', unless they name others.
        let account = found.and_then(|kv| super::hub::decode(&kv.value, kv.revision));
        if let Some(secrets) = account.as_ref().and_then(|a| a.get("imagePullSecrets"))
            && items(pod, "/spec/imagePullSecrets").is_empty()
        {
            child(pod, "spec").insert("imagePullSecrets".into(), secrets.clone());
        }
        let wanted = text(pod, "/spec/priorityClassName").to_owned();
        let classes = self.remembered("/registry/scheduling.k8s.io/priorityclasses/").await?;
        let class = if wanted.is_empty() {
            classes.iter().find(|c| c.get("globalDefault").and_then(Value::as_bool) == Some(true))
        } else {
            let found = classes.iter().find(|c| name(c) == wanted);
            if found.is_none() {
                let why = format!("no PriorityClass with name {wanted} was found");
                return Err(Status::forbidden("", "pods", name(pod), &why));
            }
            found
        };
        let spec = child(pod, "spec");
        let value = class.and_then(|c| c.get("value")).cloned().unwrap_or(0.into());
        spec.insert("priority".into(), value);
        if let Some(class) = class {
            spec.insert("priorityClassName".into(), name(class).into());
        }
        let policy = class.map_or("PreemptLowerPriority", |c| text(c, "/preemptionPolicy"));
        default(pod, &["spec", "preemptionPolicy"], policy);
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            let there = items(pod, "/spec/tolerations").iter().any(|t| {
                (text(t, "/key") == key || text(t, "/key").is_empty()) && matches!(text(t, "/effect"), "NoExecute" | "")
            });
            if !there {
                let list = child(pod, "spec").entry("tolerations").or_insert_with(|| json!([]));
                if let Value::Array(list) = list {
                    list.push(json!({
                        "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATION_SECONDS,
                    }));
                }
            }
        }
        let class = crate::kinds::pod::qos(pod);
        object(pod).entry("status").or_insert_with(|| json!({}))["qosClass"] = class.into();
        Ok(())
    }
}
