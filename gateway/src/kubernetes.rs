//! Reading and patching objects as they are, through the untyped side of the client.

use crate::admission::{KUBEVIRT, Objects, PRESET, Wanted};
use crate::limits;
use crate::status::Status;
use serde_json::{Value, json};
use state::object::Pattern;

/// A kind that the gateway reads or changes, with its name in error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resource {
    pub what: &'static str,
    prefix: &'static str,
    plural: &'static str,
}

pub(crate) const VM: Resource =
    Resource { what: "virtualmachine", prefix: "/apis/kubevirt.io/v1", plural: "virtualmachines" };
pub(crate) const VMI: Resource =
    Resource { what: "virtualmachineinstance", prefix: "/apis/kubevirt.io/v1", plural: "virtualmachineinstances" };
pub(crate) const SET: Resource = Resource {
    what: "virtualmachineinstancereplicaset",
    prefix: "/apis/kubevirt.io/v1",
    plural: "virtualmachineinstancereplicasets",
};
pub(crate) const NODE: Resource = Resource { what: "node", prefix: "/api/v1", plural: "nodes" };
pub(crate) const POD: Resource = Resource { what: "pod", prefix: "/api/v1", plural: "pods" };

pub(crate) const CLUSTER: Resource = Resource { what: KUBEVIRT, prefix: "/apis/kubevirt.io/v1", plural: "kubevirts" };

pub(crate) const PRESETS: Resource =
    Resource { what: PRESET, prefix: "/apis/kubevirt.io/v1", plural: "virtualmachineinstancepresets" };

/// What admission reads by the name of a kind.
const READ: [Resource; 11] = [
    CLUSTER,
    PRESETS,
    pattern(Pattern::Instancetype),
    pattern(Pattern::ClusterInstancetype),
    pattern(Pattern::Preference),
    pattern(Pattern::ClusterPreference),
    Resource { what: "ControllerRevision", prefix: "/apis/apps/v1", plural: "controllerrevisions" },
    Resource { what: "PersistentVolumeClaim", prefix: "/api/v1", plural: "persistentvolumeclaims" },
    Resource { what: "DataVolume", prefix: "/apis/cdi.kubevirt.io/v1beta1", plural: "datavolumes" },
    Resource { what: "DataSource", prefix: "/apis/cdi.kubevirt.io/v1beta1", plural: "datasources" },
    Resource { what: "VolumeSnapshot", prefix: "/apis/snapshot.storage.k8s.io/v1", plural: "volumesnapshots" },
];

const fn pattern(p: Pattern) -> Resource {
    Resource { what: p.name(), prefix: "/apis/instancetype.kubevirt.io/v1beta1", plural: p.plural() }
}

/// Reads what admission asked for.
pub(crate) async fn find(client: &kube::Client, wanted: Vec<Wanted>, objects: &mut Objects) -> Result<(), Status> {
    for one in wanted {
        let by_name = READ.into_iter().find(|r| r.what == one.kind);
        let workload = || WORKLOADS.into_iter().find(|(kind, _)| *kind == one.kind).map(|(_, r)| r);
        let found = match by_name.or_else(workload) {
            Some(resource) if one.name.is_empty() => Some(some(client, resource).await?),
            Some(resource) => get(client, resource, &one.namespace, &one.name).await?,
            None => None,
        };
        objects.insert(one, found);
    }
    Ok(())
}

/// Kinds of which is asked whether there are any.
const WORKLOADS: [(&str, Resource); 3] =
    [("VirtualMachine", VM), ("VirtualMachineInstance", VMI), ("VirtualMachineInstanceReplicaSet", SET)];

/// The objects of a kind in all namespaces; one of a kind of which is asked whether there are any.
async fn some(client: &kube::Client, resource: Resource) -> Result<Value, Status> {
    let few = if WORKLOADS.iter().any(|(_, r)| *r == resource) { "?limit=1" } else { "" };
    call(client, "GET", &format!("{}/{}{few}", resource.prefix, resource.plural), "", Vec::new()).await
}

/// The objects of a kind in a namespace, or in all where it is empty.
pub(crate) async fn list(client: &kube::Client, resource: Resource, namespace: &str) -> Result<Value, Status> {
    call(client, "GET", resource.path(namespace, "").trim_end_matches('/'), "", Vec::new()).await
}

impl Resource {
    /// Its name in paths.
    pub(crate) fn plural(self) -> &'static str {
        self.plural
    }

    fn path(self, namespace: &str, name: &str) -> String {
        if namespace.is_empty() {
            return format!("{}/{}/{name}", self.prefix, self.plural);
        }
        format!("{}/namespaces/{namespace}/{}/{name}", self.prefix, self.plural)
    }
}

tokio::task_local! {
    /// The trace of whoever caused the requests of this task, where that is somebody outside.
    pub(crate) static CALLER: Option<String>;
}

/// How a patch ended.
#[derive(Debug)]
pub(crate) enum Patched {
    /// Done; the object as it is now.
    Done(Value),
    /// The object is not any more what was read.
    Changed,
}

/// The object, or `None` where there is none.
pub(crate) async fn get(
    client: &kube::Client,
    resource: Resource,
    namespace: &str,
    name: &str,
) -> Result<Option<Value>, Status> {
    match call(client, "GET", &resource.path(namespace, name), "", Vec::new()).await {
        Ok(v) => Ok(Some(v)),
        Err(s) if s.code == 404 => Ok(None),
        Err(s) => Err(Status::internal(format_args!("reading {} {namespace}/{name}: {}", resource.what, s.message))),
    }
}

/// The object, or the 404 of the subresource API.
pub(crate) async fn need(
    client: &kube::Client,
    resource: Resource,
    namespace: &str,
    name: &str,
) -> Result<Value, Status> {
    let found = get(client, resource, namespace, name).await?;
    found.ok_or_else(|| match resource.prefix.starts_with("/apis/") {
        true => Status::not_found(resource.what, name),
        // The core group has no name.
        false => Status::new(404, "NotFound", format!("{} {name:?} not found", resource.plural)),
    })
}

/// A node.
pub(crate) async fn node(client: &kube::Client, name: &str) -> Result<Option<Value>, Status> {
    get(client, NODE, "", name).await
}

/// Applies a JSON patch on the condition that `object` is still what is stored.
pub(crate) async fn patch(
    client: &kube::Client,
    resource: Resource,
    object: &Value,
    subresource: &str,
    operations: Vec<Value>,
    dry_run: bool,
) -> Result<Patched, Status> {
    let meta = |key: &str| object["metadata"][key].as_str().unwrap_or_default();
    let (namespace, name) = (meta("namespace"), meta("name"));
    let mut all = vec![
        json!({"op": "test", "path": "/metadata/uid", "value": meta("uid")}),
        json!({"op": "test", "path": "/metadata/resourceVersion", "value": meta("resourceVersion")}),
    ];
    all.extend(operations);
    let mut path = resource.path(namespace, name);
    if !subresource.is_empty() {
        path = format!("{path}/{subresource}");
    }
    if dry_run {
        path.push_str("?dryRun=All");
    }
    let body = serde_json::to_vec(&all).map_err(Status::internal)?;
    match call(client, "PATCH", &path, "application/json-patch+json", body).await {
        Ok(v) => Ok(Patched::Done(v)),
        Err(s) if s.code == 404 => Err(Status::not_found(resource.what, name)),
        // A failed test: kube-apiserver says 422 without causes, or 409 where the write itself lost.
        Err(s) if s.code == 409 || (s.code == 422 && s.causes().is_empty()) => Ok(Patched::Changed),
        Err(s) if s.code == 422 || s.code == 403 => Err(s),
        Err(s) => Err(Status::internal(format_args!("patching {} {namespace}/{name}: {}", resource.what, s.message))),
    }
}

/// Whether a user may do something, by SubjectAccessReview. `Err` carries the reason for people.
pub(crate) async fn review(client: &kube::Client, spec: Value) -> Result<Result<(), String>, Status> {
    let body = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
    let body = serde_json::to_vec(&body).map_err(Status::internal)?;
    let answer =
        call(client, "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", "application/json", body).await?;
    if answer["status"]["allowed"] == true {
        return Ok(Ok(()));
    }
    Ok(Err(answer["status"]["reason"].as_str().unwrap_or("not allowed").to_owned()))
}

/// What the API server says about itself.
pub(crate) async fn version(client: &kube::Client) -> Result<Value, Status> {
    call(client, "GET", "/version", "", Vec::new()).await
}

pub(crate) async fn call(
    client: &kube::Client,
    method: &str,
    path: &str,
    content: &str,
    body: Vec<u8>,
) -> Result<Value, Status> {
    let mut request = http::Request::builder().method(method).uri(path);
    if !content.is_empty() {
        request = request.header("content-type", content);
    }
    if let Ok(Some(trace)) = CALLER.try_with(Clone::clone) {
        request = request.header("traceparent", trace);
    }
    let request = request.body(body).map_err(|e| Status::bad_request(format!("not a valid name: {e}")))?;
    let answer = tokio::time::timeout(limits::API, client.request::<Value>(request)).await;
    match answer.map_err(|_| Status::new(504, "Timeout", "the API server did not answer"))? {
        Ok(v) => Ok(v),
        Err(kube::Error::Api(s)) => Err(Status {
            code: s.code,
            reason: s.reason.clone(),
            message: s.message.clone(),
            details: s.details.as_ref().and_then(|d| serde_json::to_value(d).ok()).unwrap_or(Value::Null),
        }),
        Err(e) => Err(Status::new(500, "InternalError", e.to_string())),
    }
}
