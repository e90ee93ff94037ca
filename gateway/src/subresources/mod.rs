//! The aggregated API `subresources.kubevirt.io`: verbs on machines and streams to guests.
//!
//! Every path is read here, so that what is not built yet is refused by its name and everything else is a 404.

mod discovery;
mod stream;
mod usage;
mod vm;
mod vmi;

use std::sync::Arc;
use std::time::SystemTime;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{Method, Request, StatusCode, header};
use serde_json::{Value, json};
use tracing::Instrument;

use crate::admission::User;
use crate::status::Status;
use crate::{Authorization, Inner, kubernetes, limits};

/// Versions of the aggregated API, the preferred one first; they are the same.
pub const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];
/// Sets, which are explained and nothing else.
const SETS: &str = "virtualmachineinstancereplicasets";

impl IntoResponse for Status {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (code, [(header::CONTENT_TYPE, "application/json")], self.to_json().to_string()).into_response()
    }
}

/// A JSON answer.
fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

pub(crate) fn router(inner: Arc<Inner>) -> axum::Router {
    axum::Router::new().fallback(move |request: Request<Body>| {
        let inner = inner.clone();
        async move { answer(&inner, request).await.unwrap_or_else(Status::into_response) }
    })
}

/// A request about one object.
struct Asked<'a> {
    inner: &'a Inner,
    method: Method,
    resource: &'a str,
    namespace: &'a str,
    name: &'a str,
    /// The path below the object.
    rest: &'a [&'a str],
    query: &'a str,
    traceparent: String,
    /// Who asks.
    user: String,
}

impl Asked<'_> {
    /// Whether the query says that this switch is on.
    fn wants(&self, switch: &str) -> bool {
        self.query.split('&').any(|p| p.split_once('=') == Some((switch, "true")))
    }
}

fn not_found() -> Status {
    Status::new(404, "NotFound", "the server could not find the requested resource")
}

async fn answer(inner: &Inner, request: Request<Body>) -> Result<Response, Status> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let segments: Vec<&str> = path.split('/').filter(|s| !s.is_empty()).collect();
    let (version, below) = match segments[..] {
        ["apis", group] if group == api::names::SUBRESOURCE_GROUP => {
            return Ok(json_response(&discovery::group(&VERSIONS)));
        }
        ["apis", group, version, ref below @ ..]
            if group == api::names::SUBRESOURCE_GROUP && VERSIONS.contains(&version) =>
        {
            (version, below)
        }
        _ => return Err(not_found()),
    };
    let read = matches!(parts.method, Method::GET | Method::HEAD);
    match below {
        [] if read => Ok(json_response(&discovery::resources(version))),
        ["version"] if read => Ok(json_response(&discovery::version())),
        ["healthz"] if read => Ok(health(inner).await),
        [one @ ("guestfs" | "start-cluster-profiler" | "stop-cluster-profiler" | "dump-cluster-profiler")] => {
            Err(unsupported(one))
        }
        _ => of_objects(inner, parts, body, below).await,
    }
}

/// What is below an object; nodes have no namespace.
async fn of_objects(inner: &Inner, mut parts: Parts, body: Body, below: &[&str]) -> Result<Response, Status> {
    let place: Vec<&str> = match below {
        ["namespaces", rest @ ..] => rest.to_vec(),
        rest => [&[""][..], rest].concat(),
    };
    match &place[..] {
        [namespace, resource @ ("expand-vm-spec" | "usage")] if !namespace.is_empty() || *resource == "usage" => {
            let asked = Asked {
                inner,
                method: parts.method.clone(),
                resource,
                namespace,
                name: "",
                rest: &[],
                query: "",
                user: user(&parts).name,
                traceparent: String::new(),
            };
            authorize(&asked, &parts).await?;
            if *resource == "usage" {
                of_method(&asked, Method::GET)?;
                return usage::list(&asked).await.map(|v| json_response(&v));
            }
            of_method(&asked, Method::PUT)?;
            vm::expand_body(&asked, body).await.map(|v| json_response(&v))
        }
        [namespace, resource @ ("virtualmachines" | "virtualmachineinstances" | SETS), name, rest @ ..]
        | [namespace @ "", resource @ "nodes", name, rest @ ..]
            if !rest.is_empty() =>
        {
            let query = parts.uri.query().unwrap_or_default().to_owned();
            let span = Span::begin(&parts, rest[0]);
            let asked = Asked {
                inner,
                method: parts.method.clone(),
                resource,
                namespace,
                name,
                rest,
                query: &query,
                user: user(&parts).name,
                traceparent: span.own().to_string(),
            };
            let answer = async {
                authorize(&asked, &parts).await?;
                object(&asked, &mut parts, body).await
            };
            // What is changed on the way belongs to the caller's trace; without one it is an operation of its own.
            let caller = (!span.context.is_root()).then(|| asked.traceparent.clone());
            let said = tracing::info_span!("request", cell = %format_args!("{namespace}/{name}"), trace = span.context.trace());
            let answer = kubernetes::CALLER.scope(caller, answer).instrument(said).await;
            let refused = answer.as_ref().err();
            let took = span.start.elapsed().unwrap_or_default();
            inner.metrics.answered(resource, span.operation.as_str(), refused, took, span.context);
            span.end(&asked, &answer);
            answer
        }
        _ => Err(not_found()),
    }
}

/// Everything about one machine or instance.
async fn object(asked: &Asked<'_>, parts: &mut Parts, body: Body) -> Result<Response, Status> {
    let of = |method: Method| of_method(asked, method);
    let accepted = |()| StatusCode::ACCEPTED.into_response();
    match (asked.resource, asked.rest) {
        ("virtualmachines", [verb @ ("start" | "stop" | "restart")]) => {
            of(Method::PUT)?;
            let options = options(body).await?;
            match *verb {
                "start" => vm::start(asked, &options).await.map(accepted),
                "stop" => vm::stop(asked, &options).await.map(accepted),
                _ => vm::restart(asked, &options).await.map(accepted),
            }
        }
        ("virtualmachines", ["expand-spec"]) => {
            of(Method::GET)?;
            vm::expand(asked).await.map(|v| json_response(&v))
        }
        (_, ["explain"]) => {
            of(Method::GET)?;
            let of = match asked.resource {
                "virtualmachines" => kubernetes::VM,
                "virtualmachineinstances" => kubernetes::VMI,
                SETS => kubernetes::SET,
                _ => kubernetes::NODE,
            };
            kubernetes::need(&asked.inner.config.client, of, asked.namespace, asked.name).await?;
            match &asked.inner.config.explain {
                Some(explain) => {
                    let mut explanation = explain.explain(asked.resource, asked.namespace, asked.name).await?;
                    if asked.wants("spans") && matches!(asked.resource, "virtualmachines" | "virtualmachineinstances") {
                        usage::steps(asked, &mut explanation).await;
                    }
                    Ok(json_response(&explanation))
                }
                None => {
                    Err(Status::new(503, "ServiceUnavailable", "this gateway knows no controller that it could ask"))
                }
            }
        }
        ("virtualmachines", ["portforward", port @ ..]) => {
            of(Method::GET)?;
            stream::port_of_vm(asked, port, parts).await
        }
        ("virtualmachines", ["migrate"]) => {
            of(Method::PUT)?;
            Err(vm::stays(asked).await?)
        }
        ("virtualmachines", [one @ ("memorydump" | "removememorydump")])
        | (
            "virtualmachines" | "virtualmachineinstances",
            [one @ ("addvolume" | "removevolume" | "addresourceclaim" | "removeresourceclaim")],
        ) => {
            of(Method::PUT)?;
            Err(unsupported(one))
        }
        ("virtualmachines" | "virtualmachineinstances", [one @ "objectgraph"]) => {
            of(Method::GET)?;
            Err(unsupported(one))
        }
        (
            "virtualmachineinstances",
            [verb @ ("pause" | "unpause" | "freeze" | "unfreeze" | "reset" | "softreboot")],
        ) => {
            of(Method::PUT)?;
            let options = options(body).await?;
            vmi::verb(asked, verb, &options).await
        }
        ("virtualmachineinstances", [verb @ ("guestosinfo" | "userlist" | "filesystemlist")]) => {
            of(Method::GET)?;
            Ok(vmi::guest(asked, verb).await)
        }
        ("virtualmachineinstances", [device @ ("console" | "vnc")]) => {
            of(Method::GET)?;
            stream::device(asked, device, parts).await
        }
        ("virtualmachineinstances", ["portforward", port @ ..]) => {
            of(Method::GET)?;
            stream::port(asked, port, parts).await
        }
        ("virtualmachineinstances", [one @ ("usbredir" | "vsock" | "backup" | "redefine-checkpoint")]) => {
            of(if matches!(*one, "usbredir" | "vsock") { Method::GET } else { Method::PUT })?;
            Err(vmi::lacks(asked, one).await?)
        }
        ("virtualmachineinstances", ["vnc", "screenshot"]) => {
            of(Method::GET)?;
            Ok(vmi::screenshot(asked).await)
        }
        ("virtualmachineinstances", ["sev", one @ ..]) => Err(unsupported(&format!("sev/{}", one.join("/")))),
        ("virtualmachines" | "virtualmachineinstances", ["evacuate", "cancel"]) => {
            of(Method::PUT)?;
            vmi::cancel_evacuation(asked, body).await
        }
        _ => Err(not_found()),
    }
}

fn of_method(asked: &Asked<'_>, method: Method) -> Result<(), Status> {
    if asked.method == method { Ok(()) } else { Err(method_not_allowed(&asked.method)) }
}

/// Known to KubeVirt, not built here: refused as KubeVirt refuses what a feature gate closes, and the gate is named.
fn unsupported(name: &str) -> Status {
    let gate = match name {
        "addvolume" | "removevolume" | "memorydump" | "removememorydump" => "HotplugVolumes",
        "addresourceclaim" | "removeresourceclaim" => "HotplugHostDevicesWithDRA",
        "objectgraph" => "ObjectGraph",
        _ if name.starts_with("sev/") => "WorkloadEncryptionSEV",
        _ => return Status::bad_request(format!("{name} is not supported yet")),
    };
    Status::bad_request(format!("{name} is not supported yet: the {gate} feature gate is not enabled"))
}

fn method_not_allowed(method: &Method) -> Status {
    Status::new(
        405,
        "MethodNotAllowed",
        format!("the server does not allow this method on the requested resource: {method}"),
    )
}

/// The options in a body: JSON or YAML, empty for none.
async fn options(body: Body) -> Result<Value, Status> {
    let bytes: Bytes = axum::body::to_bytes(body, limits::BODY)
        .await
        .map_err(|e| Status::bad_request(format!("reading the body: {e}")))?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(json!({}));
    }
    let value: Value = match serde_json::from_slice(&bytes) {
        Ok(v) => v,
        Err(_) => {
            let text = std::str::from_utf8(&bytes)
                .map_err(|_| Status::bad_request("Can not unmarshal Request body to struct, error: not UTF-8"))?;
            serde_saphyr::from_str(text)
                .map_err(|e| Status::bad_request(format!("Can not unmarshal Request body to struct, error: {e}")))?
        }
    };
    match value {
        Value::Object(_) => Ok(value),
        Value::Null => Ok(json!({})),
        _ => Err(Status::bad_request("Can not unmarshal Request body to struct, error: not an object")),
    }
}

/// `dryRun: ["All"]`; any other value is refused, as Kubernetes does.
fn dry_run(options: &Value) -> Result<bool, Status> {
    match &options["dryRun"] {
        Value::Null => Ok(false),
        Value::Array(a) if a.is_empty() => Ok(false),
        Value::Array(a) if a.len() == 1 && a[0] == "All" => Ok(true),
        other => Err(Status::bad_request(format!("dryRun: unsupported value {other}, supported is \"All\""))),
    }
}

/// One request as a span: below the caller's where the request names one, else a trace of its own.
struct Span {
    context: telemetry::TraceContext,
    id: String,
    operation: String,
    start: SystemTime,
}

impl Span {
    fn begin(parts: &Parts, operation: &str) -> Self {
        let header = parts.headers.get("traceparent").and_then(|v| v.to_str().ok());
        Self {
            context: header.and_then(telemetry::TraceContext::parse).unwrap_or_else(telemetry::begin),
            id: uuid::Uuid::new_v4().to_string(),
            operation: operation.to_owned(),
            start: SystemTime::now(),
        }
    }

    /// What follows from the request hangs under this.
    fn own(&self) -> telemetry::TraceContext {
        if self.context.is_root() { self.context } else { self.context.operation(&self.id, &self.operation) }
    }

    fn end(self, asked: &Asked<'_>, answer: &Result<Response, Status>) {
        let code = answer.as_ref().map_or_else(|refused| refused.code, |response| response.status().as_u16());
        let group = api::names::SUBRESOURCE_GROUP;
        let place = if asked.namespace.is_empty() { "" } else { "namespaces/{namespace}/" };
        telemetry::emit(telemetry::Step {
            begins: self.context.is_root(),
            kind: telemetry::Kind::Server,
            attributes: vec![
                ("k8s.namespace.name", asked.namespace.to_owned()),
                ("kubevirt.resource", asked.resource.to_owned()),
                ("kubevirt.vm.name", asked.name.to_owned()),
                ("http.request.method", asked.method.to_string()),
                ("http.route", format!("/apis/{group}/v1/{place}{}/{{name}}/{}", asked.resource, self.operation)),
                ("http.response.status_code", code.to_string()),
                ("enduser.id", asked.user.clone()),
            ],
            error: answer
                .as_ref()
                .err()
                .map(|s| telemetry::Failure { reason: s.reason.clone(), message: s.message.clone() }),
            ..telemetry::Step::of(self.context, &self.id, &self.operation, self.start)
        });
    }
}

fn user(parts: &Parts) -> User {
    if let Some(u) = parts.extensions.get::<User>() {
        return u.clone();
    }
    let all = |name: &str| {
        parts.headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).map(str::to_owned).collect::<Vec<_>>()
    };
    User { name: all("x-remote-user").into_iter().next().unwrap_or_default(), groups: all("x-remote-group") }
}

/// Asks the API server, where nobody has done so before.
async fn authorize(asked: &Asked<'_>, parts: &Parts) -> Result<(), Status> {
    if asked.inner.config.authorization == Authorization::Forwarded {
        return Ok(());
    }
    let user = user(parts);
    let verb = match asked.method {
        // What has no name is a list, as Kubernetes reads a path.
        Method::GET | Method::HEAD if asked.name.is_empty() => "list",
        Method::GET | Method::HEAD => "get",
        Method::PUT => "update",
        Method::POST => "create",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => return Err(method_not_allowed(&asked.method)),
    };
    let ports = asked.rest.first() == Some(&"portforward");
    let subresource = if ports { "portforward".into() } else { asked.rest.join("/") };
    let mut extra = serde_json::Map::new();
    for (name, value) in &parts.headers {
        if let (Some(key), Ok(value)) = (name.as_str().strip_prefix("x-remote-extra-"), value.to_str()) {
            match extra.entry(key).or_insert_with(|| json!([])) {
                Value::Array(a) => a.push(json!(value)),
                other => *other = json!([value]),
            }
        }
    }
    let spec = json!({
        "user": user.name, "groups": user.groups, "extra": extra,
        "resourceAttributes": {"namespace": asked.namespace, "verb": verb, "group": api::names::SUBRESOURCE_GROUP, "version": "v1",
            "resource": asked.resource, "subresource": subresource, "name": asked.name},
    });
    if user.name.is_empty() {
        return Err(Status::new(401, "Unauthorized", "no user in the request"));
    }
    match kubernetes::review(&asked.inner.config.client, spec).await? {
        Ok(()) => Ok(()),
        Err(reason) => Err(Status::new(401, "Unauthorized", reason)),
    }
}

async fn health(inner: &Inner) -> Response {
    match kubernetes::version(&inner.config.client).await {
        Ok(version) => json_response(&json!({"apiserver": {"connectivity": "ok", "version": version}})),
        Err(e) => {
            let body = json!({"apiserver": {"connectivity": "failed", "error": e.message}});
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "application/json")], body.to_string())
                .into_response()
        }
    }
}
