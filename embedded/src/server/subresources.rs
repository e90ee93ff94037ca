//! Subresources of stored objects.

use std::sync::{Arc, PoisonError};

use axum::body::Body;
use http::{HeaderValue, header};
use serde_json::{Value, json};

use super::admission::Operation;
use super::request::{Call, LogOptions};
use super::respond;
use super::write::{Writing, admission_request, patch_kind};
use super::{Inner, Response, convert, now};
use crate::semantics::owners;
use crate::semantics::value::{self, child, deleting, items, meta, name, text, uid};
use crate::semantics::write::{self, DeleteOptions, Part};
use crate::semantics::{FieldError, Resource, Status, patch, rfc3339};

/// The shortest life that a token may be asked for.
const TOKEN_SECONDS_MIN: i64 = 600;
/// The life of a token that asks for none.
const TOKEN_SECONDS: i64 = 3600;

/// The answer to a creation that makes no object.
fn done() -> Response {
    let mut v = Status::new(201, "", "").to_value();
    value::object(&mut v).insert("status".into(), "Success".into());
    respond::json(201, &v)
}

impl Inner {
    pub(super) async fn subresource(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        let known = |s: &str| resource.subresources.contains(&s);
        match (call.target.subresource.as_str(), call.verb) {
            ("status", verb) if resource.status => match verb {
                "get" => self.get(resource, call).await,
                "update" => self.update_part(resource, call, body, Part::Status).await,
                "patch" => self.patch_part(resource, call, body, Part::Status).await,
                _ => Err(Status::method_not_allowed()),
            },
            ("scale", verb) if resource.scale.is_some() => self.scale(resource, call, body, verb).await,
            ("finalize", "update") if known("finalize") => self.finalize(resource, call, body).await,
            ("binding", "create") if known("binding") => self.bind(resource, call, body).await,
            ("eviction", "create") if known("eviction") => self.evict(resource, call, body).await,
            ("log", "get") if known("log") => self.log(resource, call).await,
            ("token", "create") if known("token") => self.token(resource, call, body).await,
            (other, _) if known(other) => Err(Status::method_not_allowed()),
            _ if resource.custom => Err(Status::not_found(&resource.group, &resource.plural, &call.target.name)),
            _ => Err(Status::no_such_path()),
        }
    }

    async fn sent(&self, call: &Call, body: Body) -> Result<Value, Status> {
        let bytes = respond::body(body).await?;
        Ok(respond::decode(&call.headers, &bytes)?.0)
    }

    async fn current(&self, resource: &Resource, call: &Call) -> Result<Value, Status> {
        let kv = self.find(resource, &call.target.namespace, &call.target.name).await?;
        convert::read(resource, &kv.value, kv.revision)
    }

    async fn scale(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
        verb: &str,
    ) -> Result<Response, Status> {
        let mut writing = Writing::new(resource, call, Part::Main)?;
        let show = |o: &Value| write::scale_of(resource, o).ok_or_else(Status::no_such_path);
        let object = match verb {
            "get" => self.current(resource, call).await?,
            "update" => {
                let scale = self.sent(call, body).await?;
                self.change_by(&mut writing, &|old| write::with_scale(resource, old, &scale)).await?
            }
            "patch" => {
                let plain = Resource::default();
                let kind = patch_kind(call, &plain)?;
                let bytes = respond::body(body).await?;
                self.change_by(&mut writing, &|old| {
                    let scale = write::scale_of(resource, old).ok_or_else(Status::no_such_path)?;
                    let patched = patch::apply(kind, &plain, &scale, &bytes)?;
                    write::with_scale(resource, old, &patched)
                })
                .await?
            }
            _ => return Err(Status::method_not_allowed()),
        };
        Ok(respond::json(200, &show(&object)?))
    }

    async fn finalize(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call, body: Body) -> Result<Response, Status> {
        let sent = self.sent(call, body).await?;
        for _ in 0..super::write::ATTEMPTS {
            let kv = self.find(resource, "", &call.target.name).await?;
            let old = convert::read(resource, &kv.value, kv.revision)?;
            let version = value::resource_version(&sent);
            if !version.is_empty() && version != value::resource_version(&old) {
                return Err(Status::modified("", "namespaces", name(&old)));
            }
            let mut new = old.clone();
            let finalizers = sent.pointer("/spec/finalizers").cloned().unwrap_or_else(|| json!([]));
            child(&mut new, "spec").insert("finalizers".into(), finalizers);
            if let Some(object) = self.store_over(resource, &kv, &old, new).await? {
                return Ok(respond::json(200, &object));
            }
        }
        Err(Status::modified("", "namespaces", &call.target.name))
    }

    async fn bind(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call, body: Body) -> Result<Response, Status> {
        let binding = self.sent(call, body).await?;
        if name(&binding) != call.target.name {
            return Err(Status::bad_request("name in URL does not match name in Binding object"));
        }
        let node = text(&binding, "/target/name").to_owned();
        if node.is_empty() {
            let error = FieldError::required("target.name", "");
            return Err(Status::invalid("", "Binding", &call.target.name, &[error]));
        }
        let time = rfc3339(now());
        for _ in 0..super::write::ATTEMPTS {
            let kv = self.find(resource, &call.target.namespace, &call.target.name).await?;
            let old = convert::read(resource, &kv.value, kv.revision)?;
            let n = name(&old);
            let conflict = |why: &str| Err(Status::conflict("", "pods/binding", n, why));
            let wanted_uid = uid(&binding);
            if !wanted_uid.is_empty() && wanted_uid != uid(&old) {
                let why = format!(
                    "Precondition failed: UID in precondition: {wanted_uid}, UID in object meta: {}",
                    uid(&old)
                );
                return conflict(&why);
            }
            if deleting(&old) {
                return conflict(&format!("pod {n} is being deleted, cannot be assigned to a host"));
            }
            let there = text(&old, "/spec/nodeName");
            if !there.is_empty() {
                return conflict(&format!("pod {n} is already assigned to node {there:?}"));
            }
            if !items(&old, "/spec/schedulingGates").is_empty() {
                return conflict(&format!("pod {n} has non-empty .spec.schedulingGates"));
            }
            let mut new = old.clone();
            child(&mut new, "spec").insert("nodeName".into(), node.clone().into());
            for key in ["annotations", "labels"] {
                if let Some(more) = binding.pointer(&format!("/metadata/{key}")).and_then(Value::as_object) {
                    let map = meta(&mut new).entry(key).or_insert_with(|| json!({}));
                    value::object(map).extend(more.clone());
                }
            }
            let status = child(&mut new, "status");
            let conditions = status.entry("conditions").or_insert_with(|| json!([]));
            if let Value::Array(list) = conditions {
                list.retain(|c| text(c, "/type") != "PodScheduled");
                list.push(json!({
                    "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": time,
                }));
            }
            if self.store_over(resource, &kv, &old, new).await?.is_some() {
                return Ok(done());
            }
        }
        Err(Status::modified("", "pods", &call.target.name))
    }

    async fn evict(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call, body: Body) -> Result<Response, Status> {
        let eviction = self.sent(call, body).await?;
        let pod = self.current(resource, call).await?;
        let said = name(&eviction);
        if !said.is_empty() && said != name(&pod) {
            return Err(Status::bad_request("name in URL does not match name in Eviction object"));
        }
        let wanted = eviction.get("deleteOptions").cloned().unwrap_or_default();
        let mut options = DeleteOptions::parse(&wanted, &|_| None)?;
        options.dry_run |= call.query.dry_run(call.options())?;
        let mut writing = Writing::new(resource, call, Part::Main)?;
        writing.dry_run = options.dry_run;
        let mut request = admission_request(&writing, Operation::Create, eviction, Value::Null);
        request.kind = "Eviction".into();
        request.group = "policy".into();
        request.namespace.clone_from(&call.target.namespace);
        request.name.clone_from(&call.target.name);
        request.old_object = pod;
        // Matched as KubeVirt's webhook is: by the resource (pods), not by the kind.
        request.group = String::new();
        let (_, warnings) = self.admit(resource, request).await?;
        if !options.dry_run {
            self.disrupted(resource, call).await?;
        }
        let place = &call.target.namespace;
        self.delete_one(resource, call, place, &call.target.name, &options, "eviction").await?;
        let mut response = done();
        respond::warn(&mut response, &warnings);
        Ok(response)
    }

    /// Writes into a pod's status why it goes.
    async fn disrupted(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call) -> Result<(), Status> {
        for _ in 0..super::write::ATTEMPTS {
            let kv = self.find(resource, &call.target.namespace, &call.target.name).await?;
            let old = convert::read(resource, &kv.value, kv.revision)?;
            if deleting(&old) || matches!(text(&old, "/status/phase"), "Succeeded" | "Failed") {
                return Ok(());
            }
            let mut new = old.clone();
            let conditions = child(&mut new, "status").entry("conditions").or_insert_with(|| json!([]));
            if let Value::Array(list) = conditions {
                list.retain(|c| text(c, "/type") != "DisruptionTarget");
                list.push(json!({
                    "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                    "message": "Eviction API: evicting", "lastProbeTime": null, "lastTransitionTime": rfc3339(now()),
                }));
            }
            if self.store_over(resource, &kv, &old, new).await?.is_some() {
                return Ok(());
            }
        }
        Err(Status::modified("", "pods", &call.target.name))
    }

    async fn log(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call) -> Result<Response, Status> {
        let pod = self.current(resource, call).await?;
        let q = &call.query;
        let names: Vec<&str> = ["containers", "initContainers"]
            .iter()
            .flat_map(|l| items(&pod, &format!("/spec/{l}")))
            .map(|c| text(c, "/name"))
            .collect();
        let mut container = q.text("container").to_owned();
        if container.is_empty() {
            let annotated = text(&pod, "/metadata/annotations/kubectl.kubernetes.io~1default-container");
            let own: Vec<&str> = items(&pod, "/spec/containers").iter().map(|c| text(c, "/name")).collect();
            container = match (annotated, own.as_slice()) {
                ("", [only]) => (*only).to_owned(),
                ("", many) => {
                    return Err(Status::bad_request(format!(
                        "a container name must be specified for pod {}, choose one of: [{}]",
                        name(&pod),
                        many.join(" ")
                    )));
                }
                (annotated, _) => annotated.to_owned(),
            };
        } else if !names.contains(&container.as_str()) {
            return Err(Status::bad_request(format!("container {container} is not valid for pod {}", name(&pod))));
        }
        if text(&pod, "/spec/nodeName").is_empty() {
            return Err(Status::bad_request(format!("pod {} does not have a host assigned", name(&pod))));
        }
        let options = LogOptions {
            container,
            follow: q.flag("follow"),
            previous: q.flag("previous"),
            tail_lines: q.number("tailLines")?,
            since_seconds: q.number("sinceSeconds")?,
            timestamps: q.flag("timestamps"),
            limit_bytes: q.number("limitBytes")?,
        };
        let logs = self.logs.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(logs) = logs else { return Err(Status::internal("nobody here has the logs of pods")) };
        let body = logs.logs(pod, options).await?;
        let mut response = http::Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        Ok(response)
    }

    async fn token(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call, body: Body) -> Result<Response, Status> {
        let account = self.current(resource, call).await?;
        let mut request = self.sent(call, body).await?;
        let seconds = request.pointer("/spec/expirationSeconds").and_then(Value::as_i64).unwrap_or(TOKEN_SECONDS);
        if seconds < TOKEN_SECONDS_MIN {
            let why = "may not specify a duration less than 10 minutes";
            let error = FieldError::invalid("spec.expirationSeconds", &seconds.into(), why);
            return Err(Status::invalid("authentication.k8s.io", "TokenRequest", "", &[error]));
        }
        // Nothing is stored, but who asks is told what is his, as of everything.
        child(&mut request, "spec").insert("expirationSeconds".into(), seconds.into());
        let kind = Resource {
            group: "authentication.k8s.io".into(),
            blank: Arc::new(json!({"metadata": {}, "spec": {}})),
            ..Resource::default()
        };
        owners::track(&kind, None, None, &mut request, &Writing::new(resource, call, Part::Main)?.writer());
        let mut audiences = value::strings(&request, "/spec/audiences");
        if audiences.is_empty() {
            audiences.push(self.authenticator.issuer().to_owned());
        }
        let at = now();
        let token =
            self.authenticator.issue(&call.target.namespace, name(&account), uid(&account), &audiences, seconds, at);
        let spec = child(&mut request, "spec");
        spec.insert("audiences".into(), audiences.into());
        spec.entry("boundObjectRef").or_insert(Value::Null);
        let map = value::object(&mut request);
        map.insert("apiVersion".into(), "authentication.k8s.io/v1".into());
        map.insert("kind".into(), "TokenRequest".into());
        map.insert("status".into(), json!({"token": token, "expirationTimestamp": rfc3339(at + seconds)}));
        let m = meta(&mut request);
        m.insert("name".into(), name(&account).into());
        m.insert("uid".into(), uid(&account).into());
        m.insert("namespace".into(), call.target.namespace.clone().into());
        m.insert("creationTimestamp".into(), rfc3339(at).into());
        Ok(respond::json(201, &request))
    }
}
