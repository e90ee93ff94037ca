//! What there is: `/api`, `/apis`, their groups, in the old and in the aggregated form.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use axum::body::Body;
use http::{HeaderMap, HeaderValue, header};
use serde_json::{Value, json};

use super::catalog::Served;
use super::respond::{self, nowhere};
use super::{AggregatedApi, Inner, Response};
use crate::auth::User;
use crate::semantics::value::{items, text};
use crate::semantics::{Resource, Status};

/// The version that is served when the configuration says none.
const GIT_VERSION: &str = "v1.36.0+virtfold";

const AGGREGATED: &str = "apidiscovery.k8s.io";

fn verbs(r: &Resource) -> Vec<&'static str> {
    if r.virtual_only {
        return vec!["create"];
    }
    if r.custom {
        return vec!["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];
    }
    vec!["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
}

fn subresources(r: &Resource) -> Vec<(&'static str, String, String, String, Vec<&'static str>)> {
    let mut out = Vec::new();
    let own =
        |s: &'static str, verbs: Vec<&'static str>| (s, r.group.clone(), r.version.clone(), r.kind.clone(), verbs);
    for s in &r.subresources {
        out.push(match *s {
            "eviction" => (*s, "policy".into(), "v1".into(), "Eviction".into(), vec!["create"]),
            "token" => (*s, "authentication.k8s.io".into(), "v1".into(), "TokenRequest".into(), vec!["create"]),
            "binding" => (*s, String::new(), "v1".into(), "Binding".into(), vec!["create"]),
            "log" => own(s, vec!["get"]),
            other => own(other, vec!["update"]),
        });
    }
    if r.scale.is_some() {
        out.push(("scale", "autoscaling".into(), "v1".into(), "Scale".into(), vec!["get", "patch", "update"]));
    }
    if r.status {
        // Of custom resources it comes first.
        let place = if r.custom { 0 } else { out.len() };
        out.insert(place, own("status", vec!["get", "patch", "update"]));
    }
    out
}

fn resource_list(served: &Served, group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for r in served.resources.values().filter(|r| r.group == group && r.version == version) {
        let mut v = json!({
            "name": r.plural, "singularName": r.singular, "namespaced": r.namespaced, "kind": r.kind, "verbs": verbs(r),
        });
        if !r.short_names.is_empty() {
            v["shortNames"] = r.short_names.clone().into();
        }
        if !r.categories.is_empty() {
            v["categories"] = r.categories.clone().into();
        }
        if !r.virtual_only {
            v["storageVersionHash"] = hash(r).into();
        }
        list.push(v);
        for (s, g, ver, kind, verbs) in subresources(r) {
            let mut v = json!({
                "name": format!("{}/{s}", r.plural), "singularName": "", "namespaced": r.namespaced, "kind": kind,
                "verbs": verbs,
            });
            if g != r.group || ver != r.version {
                v["group"] = g.into();
                v["version"] = ver.into();
            }
            list.push(v);
        }
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (!list.is_empty()).then(
        || json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": list}),
    )
}

fn hash(r: &Resource) -> String {
    use base64::Engine;
    use sha2::{Digest, Sha256};
    let text = format!("{}/{}/{}", r.stored_as.0, r.stored_version, r.kind);
    let digest = Sha256::digest(text.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(digest.get(..8).unwrap_or_default())
}

/// The order of versions: stable before beta before alpha, higher first.
fn rank(version: &str) -> (u8, i64, i64) {
    let rest = version.strip_prefix('v').unwrap_or(version);
    let (major, stage) = rest.find(|c: char| !c.is_ascii_digit()).map_or((rest, ""), |i| rest.split_at(i));
    let (class, minor) = if let Some(n) = stage.strip_prefix("beta") {
        (1, n)
    } else if let Some(n) = stage.strip_prefix("alpha") {
        (2, n)
    } else {
        (0, "")
    };
    (class, -major.parse::<i64>().unwrap_or(0), -minor.parse::<i64>().unwrap_or(0))
}

impl Inner {
    /// Who answers for a path instead of the server.
    pub(super) fn aggregated(&self, path: &str) -> Option<Arc<AggregatedApi>> {
        let rest = path.strip_prefix("/apis/")?;
        let mut parts = rest.split('/');
        let (group, version) = (parts.next()?, parts.next()?);
        let all = self.aggregated.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|a| a.group == group && a.version == version).cloned()
    }

    /// All groups with their versions, best first.
    fn groups(&self, served: &Served) -> BTreeMap<String, Vec<String>> {
        let mut out: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut add = |group: &str, version: &str| {
            let versions = out.entry(group.to_owned()).or_default();
            if !versions.iter().any(|v| v == version) {
                versions.push(version.to_owned());
            }
        };
        for (group, version, _) in served.resources.keys() {
            add(group, version);
        }
        for a in self.aggregated.read().unwrap_or_else(PoisonError::into_inner).iter() {
            add(&a.group, &a.version);
        }
        out.remove("");
        out.values_mut().for_each(|v| v.sort_by_key(|v| rank(v)));
        out
    }

    pub(super) fn version(&self) -> Value {
        let git = if self.config.version.is_empty() { GIT_VERSION } else { &self.config.version };
        let mut numbers = git.trim_start_matches('v').split('.');
        json!({
            "major": numbers.next().unwrap_or("1"), "minor": numbers.next().unwrap_or("36"), "gitVersion": git,
            "gitCommit": "", "gitTreeState": "clean", "buildDate": "", "goVersion": "", "compiler": "rustc",
            "platform": format!("linux/{}", std::env::consts::ARCH),
        })
    }

    pub(super) async fn health(&self, query: &str) -> Response {
        let store = tokio::time::timeout(std::time::Duration::from_secs(2), self.storage.revision()).await;
        let good = matches!(store, Ok(Ok(_)));
        if good && !query.contains("verbose") {
            return respond::text(200, "ok");
        }
        let mark = if good { "[+]etcd ok" } else { "[-]etcd failed: reason withheld" };
        let end = if good { "healthz check passed" } else { "healthz check failed" };
        respond::text(if good { 200 } else { 500 }, format!("[+]ping ok\n{mark}\n{end}\n"))
    }

    /// The resource list of an API that somebody else answers for.
    async fn foreign_list(&self, api: &AggregatedApi) -> Option<Value> {
        let path = format!("/apis/{}/{}", api.group, api.version);
        let request = http::Request::get(path).header(header::ACCEPT, "application/json").body(Body::empty()).ok()?;
        let response = api.handler.call(request, User::system("system:apiserver")).await;
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    async fn list_of(&self, served: &Served, group: &str, version: &str) -> Option<Value> {
        match self.aggregated(&format!("/apis/{group}/{version}")) {
            Some(api) if !group.is_empty() => self.foreign_list(&api).await,
            _ => resource_list(served, group, version),
        }
    }
}

fn group_entry(group: &str, versions: &[String]) -> Value {
    let list: Vec<Value> =
        versions.iter().map(|v| json!({"groupVersion": format!("{group}/{v}"), "version": v})).collect();
    json!({"name": group, "versions": list, "preferredVersion": list.first()})
}

/// An `APIResourceList` in the aggregated form.
///
/// Of built-in kinds it is not said again whose they are, of others it is.
fn aggregate(list: &Value, group: &str, version: &str, builtin: bool) -> Value {
    let mut out: Vec<Value> = Vec::new();
    let kind_of = |r: &Value| {
        let or = |key: &str, own: &str| match r.get(key).and_then(Value::as_str) {
            Some(v) if !v.is_empty() => v.to_owned(),
            _ => own.to_owned(),
        };
        let foreign = r.get("version").is_some();
        if builtin && !foreign {
            return json!({"group": "", "version": "", "kind": text(r, "/kind")});
        }
        let g = if foreign { text(r, "/group").to_owned() } else { or("group", group) };
        json!({"group": g, "version": or("version", version), "kind": text(r, "/kind")})
    };
    for r in items(list, "/resources") {
        let name = text(r, "/name");
        if let Some((parent, sub)) = name.split_once('/') {
            let entry = json!({"subresource": sub, "responseKind": kind_of(r), "verbs": r["verbs"]});
            match out.iter_mut().find(|o| text(o, "/resource") == parent) {
                Some(o) => {
                    if let Some(Value::Array(list)) = o.get_mut("subresources") {
                        list.push(entry);
                    } else {
                        o["subresources"] = json!([entry]);
                    }
                }
                None => {
                    let scope = if r["namespaced"] == true { "Namespaced" } else { "Cluster" };
                    out.push(json!({
                        "resource": parent, "scope": scope, "singularResource": "", "verbs": [],
                        "responseKind": {"group": "", "version": "", "kind": ""}, "subresources": [entry],
                    }));
                }
            }
            continue;
        }
        let mut v = json!({
            "resource": name, "responseKind": kind_of(r),
            "scope": if r["namespaced"] == true { "Namespaced" } else { "Cluster" },
            "singularResource": text(r, "/singularName"), "verbs": r["verbs"],
        });
        for key in ["shortNames", "categories"] {
            if let Some(list) = r.get(key) {
                v[key] = list.clone();
            }
        }
        match out.iter_mut().find(|o| text(o, "/resource") == name) {
            Some(o) => {
                v["subresources"] = o["subresources"].take();
                *o = v;
            }
            None => out.push(v),
        }
    }
    json!({"version": version, "freshness": "Current", "resources": out})
}

/// Answers a discovery path.
pub(super) async fn answer(inner: &Arc<Inner>, path: &str, headers: &HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let wanted = accept.split(',').find(|p| p.contains(AGGREGATED) && p.contains("as=APIGroupDiscoveryList"));
    let form = wanted.and_then(|p| {
        ["v2", "v2beta1"]
            .into_iter()
            .find(|v| p.contains(&format!("v={v};")) || p.trim_end().ends_with(&format!("v={v}")))
    });
    let served = inner.catalog.served();
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    match (parts.as_slice(), form) {
        (["api"] | ["apis"], Some(form)) => {
            let groups = if parts == ["api"] {
                BTreeMap::from([(String::new(), vec!["v1".to_owned()])])
            } else {
                inner.groups(&served)
            };
            let mut out = Vec::new();
            for (group, versions) in groups {
                let mut lists = Vec::new();
                for v in &versions {
                    if let Some(list) = inner.list_of(&served, &group, v).await {
                        let builtin = served.resources.values().any(|r| r.group == group && !r.custom);
                        lists.push(aggregate(&list, &group, v, builtin));
                    }
                }
                let mut metadata = json!({});
                if !group.is_empty() {
                    metadata["name"] = group.into();
                }
                out.push(json!({"metadata": metadata, "versions": lists}));
            }
            let body = json!({
                "kind": "APIGroupDiscoveryList", "apiVersion": format!("{AGGREGATED}/{form}"), "metadata": {}, "items": out,
            });
            let mut response = respond::json(200, &body);
            let kind = format!("application/json;g={AGGREGATED};v={form};as=APIGroupDiscoveryList");
            if let Ok(kind) = HeaderValue::from_str(&kind) {
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
            }
            response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
            response
        }
        (["api"], None) => respond::json(
            200,
            &json!({
                "kind": "APIVersions", "versions": ["v1"],
                "serverAddressByClientCIDRs": [],
            }),
        ),
        (["apis"], None) => {
            let groups: Vec<Value> = inner.groups(&served).iter().map(|(g, v)| group_entry(g, v)).collect();
            respond::json(200, &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        (["api", version], _) => {
            let unknown = || respond::refuse(&Status::no_such_path());
            resource_list(&served, "", version).map_or_else(unknown, |list| respond::json(200, &list))
        }
        (["apis", group], _) => match inner.groups(&served).get(*group) {
            Some(versions) => {
                let mut v = group_entry(group, versions);
                v["kind"] = "APIGroup".into();
                v["apiVersion"] = "v1".into();
                respond::json(200, &v)
            }
            None => nowhere(),
        },
        (["apis", group, version], _) if !group.is_empty() => {
            let known = served.resources.values().any(|r| r.group == *group && !r.custom);
            let unknown = || if known { respond::refuse(&Status::no_such_path()) } else { nowhere() };
            resource_list(&served, group, version).map_or_else(unknown, |list| respond::json(200, &list))
        }
        ([], _) => {
            let mut paths = vec!["/api".to_owned(), "/api/v1".into(), "/apis".into()];
            for (g, versions) in inner.groups(&served) {
                paths.push(format!("/apis/{g}"));
                paths.extend(versions.iter().map(|v| format!("/apis/{g}/{v}")));
            }
            paths.extend(["/healthz", "/livez", "/openapi/v3", "/readyz", "/version"].map(str::to_owned));
            respond::json(200, &json!({"paths": paths}))
        }
        _ => nowhere(),
    }
}
