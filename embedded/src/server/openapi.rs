//! OpenAPI v3, one document for each group and version: enough for `kubectl explain`, for `kubectl apply` to know that the
//! server validates fields, and for clients that read schemas.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::respond;
use super::{Inner, Response};
use crate::kinds;
use crate::semantics::Resource;

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// OpenAPI v2, as kubectl asks for it where a kind is in no document of v3: it says that there is nothing more, so that
/// kubectl goes on to say that there is no such kind.
#[derive(prost::Message)]
struct V2 {
    #[prost(string, tag = "1")]
    swagger: String,
    #[prost(message, optional, tag = "2")]
    info: Option<V2Info>,
    #[prost(message, optional, tag = "8")]
    paths: Option<()>,
    #[prost(message, optional, tag = "9")]
    definitions: Option<()>,
}

#[derive(prost::Message)]
struct V2Info {
    #[prost(string, tag = "1")]
    title: String,
    #[prost(string, tag = "2")]
    version: String,
}

const V2_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// The document of OpenAPI v2, in the form that is asked for.
pub(super) fn v2(headers: &HeaderMap) -> Response {
    let (title, version) = ("Kubernetes", env!("CARGO_PKG_VERSION"));
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if !accept.contains("proto-openapi.spec.v2") {
        let info = json!({"title": title, "version": version});
        return respond::json(200, &json!({"swagger": "2.0", "info": info, "paths": {}, "definitions": {}}));
    }
    let info = Some(V2Info { title: title.into(), version: version.into() });
    let document = V2 { swagger: "2.0".into(), info, paths: Some(()), definitions: Some(()) };
    let mut response = Response::new(prost::Message::encode_to_vec(&document).into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(V2_PROTOBUF));
    response
}

/// The documents that there are.
pub(super) fn index(inner: &Arc<Inner>, _headers: &HeaderMap) -> Response {
    let served = inner.catalog.served();
    let mut of: BTreeMap<String, Sha256> = BTreeMap::new();
    for r in served.resources.values() {
        let digest = of.entry(path_of(&r.group, &r.version)).or_default();
        digest.update(r.plural.as_bytes());
        digest.update(r.published.to_string().as_bytes());
        digest.update(env!("CARGO_PKG_VERSION").as_bytes());
    }
    let paths: Map<String, Value> = of
        .into_iter()
        .map(|(path, digest)| {
            let hex: String = digest.finalize().iter().take(16).map(|b| format!("{b:02X}")).collect();
            let url = format!("/openapi/v3/{path}?hash={hex}");
            (path, json!({"serverRelativeURL": url}))
        })
        .collect();
    respond::json(200, &json!({"paths": paths}))
}

/// The document of one group and version (`api/v1`, `apis/apps/v1`).
pub(super) fn group(inner: &Arc<Inner>, path: &str) -> Response {
    let served = inner.catalog.served();
    let resources: Vec<_> =
        served.resources.values().filter(|r| path_of(&r.group, &r.version) == path).cloned().collect();
    if resources.is_empty() {
        let mut response = Response::new(axum::body::Body::empty());
        *response.status_mut() = http::StatusCode::NOT_FOUND;
        return response;
    }
    let mut all = kinds::definitions();
    let mut roots = BTreeSet::new();
    let mut paths = Map::new();
    for r in &resources {
        let root = match r.schema.as_ref().and_then(|s| s.root.reference.clone()) {
            Some(name) => name,
            None => {
                let name = custom_name(r);
                all.insert(name.clone(), custom_schema(r));
                name
            }
        };
        if let Some(schema) = all.get_mut(&root) {
            schema["x-kubernetes-group-version-kind"] =
                json!([{"group": r.group, "version": r.version, "kind": r.kind}]);
        }
        let list = list_name(&root);
        let item = json!({"$ref": reference(&root)});
        all.insert(
            list.clone(),
            json!({
                "description": format!("{} is a list of {}", r.list_kind, r.kind),
                "type": "object",
                "required": ["items"],
                "properties": {
                    "apiVersion": {"type": "string"}, "kind": {"type": "string"},
                    "items": {"type": "array", "items": item},
                    "metadata": {"$ref": reference(LIST_META)},
                },
                "x-kubernetes-group-version-kind": [{"group": r.group, "version": r.version, "kind": r.list_kind}],
            }),
        );
        roots.extend([root.clone(), list.clone(), LIST_META.to_owned(), STATUS.to_owned(), DELETE_OPTIONS.to_owned()]);
        operations(r, &root, &list, &mut paths);
    }
    let mut schemas = Map::new();
    let mut todo: Vec<String> = roots.into_iter().collect();
    while let Some(name) = todo.pop() {
        if schemas.contains_key(&name) {
            continue;
        }
        let Some(mut schema) = all.get(&name).cloned() else { continue };
        relink(&mut schema, &mut todo);
        schemas.insert(name, schema);
    }
    respond::json(
        200,
        &json!({
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": inner.version()["gitVersion"]},
            "paths": paths,
            "components": {"schemas": schemas},
        }),
    )
}

const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";
const STATUS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Status";
const DELETE_OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

fn reference(name: &str) -> String {
    format!("#/components/schemas/{name}")
}

fn list_name(root: &str) -> String {
    format!("{root}List")
}

fn custom_name(r: &Resource) -> String {
    let group: Vec<&str> = r.group.rsplit('.').collect();
    format!("{}.{}.{}", group.join("."), r.version, r.kind)
}

fn custom_schema(r: &Resource) -> Value {
    let mut schema = Value::clone(&r.published);
    if !schema.is_object() {
        schema = json!({"type": "object"});
    }
    let properties = crate::semantics::value::child(&mut schema, "properties");
    for (key, text) in [
        ("apiVersion", "APIVersion defines the versioned schema of this representation of an object."),
        ("kind", "Kind is a string value representing the REST resource this object represents."),
    ] {
        properties.insert(key.into(), json!({"type": "string", "description": text}));
    }
    properties.insert(
        "metadata".into(),
        json!({"description": "Standard object's metadata.", "allOf": [{"$ref": reference(OBJECT_META)}]}),
    );
    schema
}

/// Points references at the document's own place and collects them. A reference with a description beside it becomes
/// `allOf`, as OpenAPI 3.0 ignores siblings of `$ref`.
fn relink(schema: &mut Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::String(target)) = map.get("$ref") {
                let name = target.rsplit('/').next().unwrap_or_default().to_owned();
                let pointer = json!({"$ref": reference(&name)});
                found.push(name);
                if map.len() > 1 {
                    map.remove("$ref");
                    map.insert("allOf".into(), json!([pointer]));
                } else {
                    *map = Map::from_iter([("$ref".to_owned(), pointer["$ref"].clone())]);
                }
                return;
            }
            map.values_mut().for_each(|v| relink(v, found));
        }
        Value::Array(list) => list.iter_mut().for_each(|v| relink(v, found)),
        _ => {}
    }
}

fn query(name: &str, kind: &str) -> Value {
    json!({"name": name, "in": "query", "schema": {"type": kind, "uniqueItems": true}})
}

fn operations(r: &Resource, root: &str, list: &str, paths: &mut Map<String, Value>) {
    let gvk = json!({"group": r.group, "version": r.version, "kind": r.kind});
    let base = format!("/{}", path_of(&r.group, &r.version));
    let place = if r.namespaced {
        format!("{base}/namespaces/{{namespace}}/{}", r.plural)
    } else {
        format!("{base}/{}", r.plural)
    };
    let answer = |name: &str| json!({"200": {"description": "OK", "content": {"application/json": {"schema": {"$ref": reference(name)}}}}});
    let body = |kinds: &[&str], name: &str| {
        let content: Map<String, Value> =
            kinds.iter().map(|k| ((*k).to_owned(), json!({"schema": {"$ref": reference(name)}}))).collect();
        json!({"required": true, "content": content})
    };
    let id = |verb: &str, what: &str| {
        let scope = if r.namespaced { "Namespaced" } else { "" };
        let mut group = r.group.split('.').next().unwrap_or_default().to_owned();
        if group.is_empty() {
            group = "core".into();
        }
        let capital = |s: &str| {
            let mut c = s.chars();
            c.next().map(|f| f.to_uppercase().collect::<String>() + c.as_str()).unwrap_or_default()
        };
        format!("{verb}{}{}{scope}{}{what}", capital(&group), capital(&r.version), r.kind)
    };
    let operation = |verb: &str, action: &str, parameters: Vec<Value>, request: Option<Value>, result: &str| {
        let mut v = json!({
            "description": format!("{action} {}", r.kind),
            "operationId": id(verb, ""),
            "tags": [if r.group.is_empty() { format!("core_{}", r.version) } else { format!("{}_{}", r.group, r.version) }],
            "parameters": parameters,
            "responses": answer(result),
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": gvk,
        });
        if let Some(request) = request {
            v["requestBody"] = request;
        }
        v
    };
    let writes =
        || vec![query("dryRun", "string"), query("fieldManager", "string"), query("fieldValidation", "string")];
    let json_only = ["application/json", "application/yaml"];
    let mut scope = Vec::new();
    if r.namespaced {
        scope.push(json!({"name": "namespace", "in": "path", "required": true, "schema": {"type": "string", "uniqueItems": true}}));
    }
    let mut collection = json!({
        "parameters": scope,
        "post": operation("create", "post", writes(), Some(body(&json_only, root)), root),
    });
    if r.virtual_only {
        paths.insert(place, collection);
        return;
    }
    let reads = vec![
        query("allowWatchBookmarks", "boolean"),
        query("continue", "string"),
        query("fieldSelector", "string"),
        query("labelSelector", "string"),
        query("limit", "integer"),
        query("resourceVersion", "string"),
        query("resourceVersionMatch", "string"),
        query("sendInitialEvents", "boolean"),
        query("timeoutSeconds", "integer"),
        query("watch", "boolean"),
    ];
    collection["get"] = operation("list", "list", reads, None, list);
    collection["delete"] =
        operation("deleteCollection", "deletecollection", vec![query("dryRun", "string")], None, STATUS);
    paths.insert(place.clone(), collection);
    let mut named = scope;
    named.push(
        json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string", "uniqueItems": true}}),
    );
    let patches = crate::semantics::patch::Kind::media_types(r);
    let patch = json!({"required": true, "content": patches.iter().map(|k| ((*k).to_owned(), json!({"schema": {"type": "object"}}))).collect::<Map<_, _>>()});
    let options = json!({"content": {"application/json": {"schema": {"$ref": reference(DELETE_OPTIONS)}}}});
    let object = |suffix: &str| {
        let mut v = json!({
            "parameters": named,
            "get": operation("read", "get", Vec::new(), None, root),
            "put": operation("replace", "put", writes(), Some(body(&json_only, root)), root),
            "patch": operation("patch", "patch", writes(), Some(patch.clone()), root),
        });
        if suffix.is_empty() {
            v["delete"] = operation(
                "delete",
                "delete",
                vec![
                    query("dryRun", "string"),
                    query("gracePeriodSeconds", "integer"),
                    query("propagationPolicy", "string"),
                ],
                Some(options.clone()),
                STATUS,
            );
        }
        v
    };
    paths.insert(format!("{place}/{{name}}"), object(""));
    if r.status {
        paths.insert(format!("{place}/{{name}}/status"), object("status"));
    }
}
