//! From a request to who, what and where; then to whoever answers.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, Method};

use super::respond::{nowhere, refuse};
use super::{Inner, Response, discovery, openapi, respond};
use crate::auth::{Attributes, User};
use crate::semantics::{Resource, Status};

/// What a request is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Target {
    pub group: String,
    pub version: String,
    pub namespace: String,
    pub plural: String,
    pub name: String,
    pub subresource: String,
    /// What follows the subresource.
    pub rest: String,
}

/// The query of a request.
#[derive(Debug, Clone, Default)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(text: &str) -> Self {
        let part = |s: &str| {
            let plus = s.replace('+', " ");
            percent(&plus)
        };
        Self(
            text.split('&')
                .filter(|p| !p.is_empty())
                .map(|p| p.split_once('=').map_or_else(|| (part(p), String::new()), |(k, v)| (part(k), part(v))))
                .collect(),
        )
    }
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
    pub fn text(&self, key: &str) -> &str {
        self.get(key).unwrap_or_default()
    }
    pub fn flag(&self, key: &str) -> bool {
        // As Kubernetes reads it: there, and not denied.
        self.get(key).is_some_and(|v| !matches!(v.to_ascii_lowercase().as_str(), "false" | "0"))
    }
    /// A whole number.
    pub fn number(&self, key: &str) -> Result<Option<i64>, Status> {
        match self.get(key) {
            None | Some("") => Ok(None),
            Some(t) => t
                .parse()
                .map(Some)
                .map_err(|_| Status::bad_request(format!("strconv.ParseInt: parsing {t:?}: invalid syntax"))),
        }
    }
    /// Whether nothing is to be stored.
    pub fn dry_run(&self, options: &str) -> Result<bool, Status> {
        match self.text("dryRun") {
            "" => Ok(false),
            "All" => Ok(true),
            other => {
                let sent = serde_json::json!([other]);
                let error = crate::semantics::FieldError::unsupported("dryRun", &sent, &["All".to_owned()]);
                Err(Status::invalid("meta.k8s.io", options, "", &[error]))
            }
        }
    }
}

pub(super) fn percent(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while let Some(b) = bytes.get(i) {
        let hex = (*b == b'%').then(|| text.get(i + 1..i + 3)).flatten().and_then(|h| u8::from_str_radix(h, 16).ok());
        match hex {
            Some(v) => {
                out.push(v);
                i += 3;
            }
            None => {
                out.push(*b);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// What the log of a container is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Name of the container, "" for the only one.
    pub container: String,
    /// Go on with what comes.
    pub follow: bool,
    /// The instance before this one.
    pub previous: bool,
    /// Only the last lines.
    pub tail_lines: Option<i64>,
    /// Only what is younger.
    pub since_seconds: Option<i64>,
    /// A time before each line.
    pub timestamps: bool,
    /// At most so many bytes.
    pub limit_bytes: Option<i64>,
}

/// A request in parts, with who sent it.
pub(super) struct Call {
    pub target: Target,
    pub query: Query,
    pub headers: HeaderMap,
    pub user: User,
    pub verb: &'static str,
}

impl Call {
    /// What kube-apiserver calls the query of a write.
    pub fn options(&self) -> &'static str {
        match self.verb {
            "update" => "UpdateOptions",
            "patch" => "PatchOptions",
            "delete" | "deletecollection" => "DeleteOptions",
            _ => "CreateOptions",
        }
    }
}

/// Splits a path; none when it is no resource's.
fn parse(path: &str) -> Option<(Target, bool)> {
    let parts: Vec<String> = path.split('/').filter(|p| !p.is_empty()).map(percent).collect();
    let mut parts = parts.into_iter();
    let mut target = Target::default();
    match parts.next()?.as_str() {
        "api" => {}
        "apis" => target.group = parts.next()?,
        _ => return None,
    }
    target.version = parts.next()?;
    let mut rest: Vec<String> = parts.collect();
    let mut watch = false;
    if rest.first().is_some_and(|p| p == "watch") && rest.len() > 1 {
        rest.remove(0);
        watch = true;
    }
    if rest.is_empty() {
        return None;
    }
    let own = rest.len() > 2 && matches!(rest.get(2).map(String::as_str), Some("status" | "finalize"));
    if rest.first().is_some_and(|p| p == "namespaces") && rest.len() > 2 && !(own && rest.len() == 3) {
        rest.remove(0);
        target.namespace = rest.remove(0);
    }
    let mut rest = rest.into_iter();
    target.plural = rest.next().unwrap_or_default();
    target.name = rest.next().unwrap_or_default();
    target.subresource = rest.next().unwrap_or_default();
    target.rest = rest.collect::<Vec<_>>().join("/");
    if target.group.is_empty() && target.plural == "namespaces" && !target.name.is_empty() {
        target.namespace.clone_from(&target.name);
    }
    Some((target, watch))
}

fn verb(method: &Method, target: &Target, watch: bool) -> Option<&'static str> {
    let named = !target.name.is_empty();
    Some(match *method {
        Method::GET | Method::HEAD if watch => "watch",
        Method::GET | Method::HEAD if named => "get",
        Method::GET | Method::HEAD => "list",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if named => "delete",
        Method::DELETE => "deletecollection",
        _ => return None,
    })
}

/// Answers a request, whatever it is.
pub(super) async fn route(inner: &Arc<Inner>, request: http::Request<Body>, user: Option<User>) -> Response {
    let user = match user {
        Some(user) => user,
        None => match inner.authenticator.by_token(request.headers(), super::now()) {
            Ok(Some(user)) => user,
            Ok(None) => User::anonymous(),
            Err(status) => return refuse(&status),
        },
    };
    let user = match inner.impersonate(user, request.headers()).await {
        Ok(user) => user,
        Err(status) => return refuse(&status),
    };
    let path = request.uri().path().to_owned();
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let parsed = parse(&path).map(|(mut t, watch)| {
        let watch = watch || query.flag("watch") && t.subresource.is_empty() && t.name.is_empty();
        if let (true, true, Some(name)) = (
            watch || *request.method() == Method::GET,
            t.name.is_empty(),
            query.get("fieldSelector").and_then(|f| f.strip_prefix("metadata.name=")),
        ) && !name.contains(',')
        {
            // Only for authorisation, as kube-apiserver does; taken out again below.
            t.rest = format!("name={name}");
        }
        (t, watch)
    });
    let verb = match &parsed {
        Some((target, watch)) => match verb(request.method(), target, *watch) {
            Some(v) => v,
            None => return refuse(&Status::method_not_allowed()),
        },
        None => match *request.method() {
            Method::GET | Method::HEAD => "get",
            Method::POST => "post",
            Method::PUT => "put",
            Method::DELETE => "delete",
            _ => "patch",
        },
    };
    let attributes = match &parsed {
        Some((t, _)) => Attributes {
            verb: verb.into(),
            group: t.group.clone(),
            resource: t.plural.clone(),
            subresource: t.subresource.clone(),
            namespace: t.namespace.clone(),
            name: match t.rest.strip_prefix("name=") {
                Some(name) if t.name.is_empty() => name.to_owned(),
                _ => t.name.clone(),
            },
            path: String::new(),
        },
        None => Attributes { verb: verb.into(), path: path.clone(), ..Attributes::default() },
    };
    if let Err(status) = inner.authorize(&user, &attributes).await {
        return refuse(&status);
    }
    if let Some(handler) = inner.aggregated(&path) {
        return handler.handler.call(request, user).await;
    }
    let Some((mut target, _)) = parsed else {
        return other(inner, &path, request).await;
    };
    if target.rest.starts_with("name=") && target.name.is_empty() {
        target.rest.clear();
    }
    let served = inner.catalog.served();
    let Some(resource) = served.find(&target.group, &target.version, &target.plural) else {
        let known = served.resources.values().any(|r| r.group == target.group && !r.custom);
        return if known { refuse(&Status::no_such_path()) } else { nowhere() };
    };
    if target.rest.is_empty() && resource.namespaced == target.namespace.is_empty() {
        let across = resource.namespaced
            && target.name.is_empty()
            && matches!(verb, "list" | "watch" | "deletecollection" | "create");
        if !across && resource.kind != "Namespace" {
            return refuse(&Status::no_such_path());
        }
        if verb == "create" && across {
            return refuse(&Status::method_not_allowed());
        }
    }
    let (parts, body) = request.into_parts();
    let call = Call { target, query, headers: parts.headers, user, verb };
    let mut response = match answer(inner, &resource, &call, body).await {
        Ok(response) => response,
        Err(status) => refuse(&status),
    };
    if !resource.deprecation.is_empty() {
        respond::warn(&mut response, std::slice::from_ref(&resource.deprecation));
    }
    response
}

async fn answer(inner: &Arc<Inner>, resource: &Arc<Resource>, call: &Call, body: Body) -> Result<Response, Status> {
    if resource.virtual_only {
        return if call.verb == "create" {
            inner.review(resource, call, body).await
        } else {
            Err(Status::method_not_allowed())
        };
    }
    if !call.target.subresource.is_empty() {
        return inner.subresource(resource, call, body).await;
    }
    match call.verb {
        "get" => inner.get(resource, call).await,
        "list" => inner.list(resource, call).await,
        "watch" => inner.watch(resource, call).await,
        "create" if call.target.name.is_empty() => inner.create(resource, call, body).await,
        "update" if !call.target.name.is_empty() => inner.update(resource, call, body).await,
        "patch" if !call.target.name.is_empty() => inner.patch(resource, call, body).await,
        "delete" => inner.delete(resource, call, body).await,
        "deletecollection" => inner.delete_collection(resource, call, body).await,
        _ => Err(Status::method_not_allowed()),
    }
}

async fn other(inner: &Arc<Inner>, path: &str, request: http::Request<Body>) -> Response {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return refuse(&Status::method_not_allowed());
    }
    match path.trim_end_matches('/') {
        "/healthz" | "/livez" | "/readyz" | "/healthz/ping" | "/livez/ping" | "/readyz/ping" => {
            inner.health(request.uri().query().unwrap_or_default()).await
        }
        "/version" => respond::json(200, &inner.version()),
        "/openapi/v2" => openapi::v2(request.headers()),
        "/openapi/v3" => openapi::index(inner, request.headers()),
        p if p.starts_with("/openapi/v3/") => openapi::group(inner, p.trim_start_matches("/openapi/v3/")),
        _ => discovery::answer(inner, path, request.headers()).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_kube_apiserver_reads_them() {
        for (path, want) in [
            ("/api/v1/pods", ("", "v1", "", "pods", "", "")),
            ("/api/v1/namespaces", ("", "v1", "", "namespaces", "", "")),
            ("/api/v1/namespaces/a", ("", "v1", "a", "namespaces", "a", "")),
            ("/api/v1/namespaces/a/finalize", ("", "v1", "a", "namespaces", "a", "finalize")),
            ("/api/v1/namespaces/a/pods", ("", "v1", "a", "pods", "", "")),
            ("/api/v1/namespaces/a/pods/p/log", ("", "v1", "a", "pods", "p", "log")),
            ("/apis/g/v2/namespaces/a/things/t", ("g", "v2", "a", "things", "t", "")),
            ("/apis/g/v2/things/t/status", ("g", "v2", "", "things", "t", "status")),
        ] {
            let (t, watch) = parse(path).unwrap_or_default();
            let got = (&*t.group, &*t.version, &*t.namespace, &*t.plural, &*t.name, &*t.subresource);
            assert_eq!((got, watch), (want, false), "{path}");
        }
        assert_eq!(parse("/apis/g/v1"), None);
        assert_eq!(parse("/healthz"), None);
        assert_eq!(Query::parse("a=b%3Dc+d&e").text("a"), "b=c d");
    }
}
