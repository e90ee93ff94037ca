//! CustomResourceDefinitions and what they define.

use embedded::auth::User;
use embedded::server::ApiServer;
use serde_json::{Value, json};

use crate::support::{admin, ask, ask_with, eventually, server};

const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const THINGS: &str = "/apis/example.com/v1/namespaces/default/things";

pub fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "shortNames": ["th"], "categories": ["all"]},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
                "additionalPrinterColumns": [
                    {"name": "Size", "type": "string", "jsonPath": ".spec.size"},
                    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
                "schema": {"openAPIV3Schema": {
                    "description": "Thing is a thing.", "type": "object", "required": ["spec"],
                    "properties": {
                        "spec": {
                            "description": "What is wanted.", "type": "object", "required": ["size"],
                            "properties": {
                                "size": {"type": "string", "enum": ["small", "large"], "description": "How large it is."},
                                "running": {"type": "boolean"},
                                "replicas": {"type": "integer", "minimum": 0, "default": 1},
                                "memory": {"anyOf": [{"type": "integer"}, {"type": "string"}],
                                    "x-kubernetes-int-or-string": true, "pattern": "^[0-9]+(Mi|Gi)?$"},
                                "disks": {"type": "array", "x-kubernetes-list-type": "map",
                                    "x-kubernetes-list-map-keys": ["name"],
                                    "items": {"type": "object", "required": ["name"], "properties": {
                                        "name": {"type": "string"}, "boot": {"type": "integer", "default": 7}}}},
                                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                                "maybe": {"type": "string", "nullable": true},
                            },
                        },
                        "status": {"type": "object", "properties": {
                            "phase": {"type": "string"}, "replicas": {"type": "integer"}}},
                    },
                }},
            }],
        },
    })
}

async fn with_things() -> (ApiServer, User) {
    let (server, user) = (server().await, admin());
    let (code, crd) = ask(&server, &user, "POST", CRDS, Some(definition())).await;
    assert_eq!(code, 201, "{crd}");
    let conditions = crd["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|c| c["type"] == "Established" && c["status"] == "True"));
    (server, user)
}

fn thing(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": name}, "spec": spec})
}

#[tokio::test]
async fn a_definition_is_served_at_once_defaulted_pruned_and_checked() {
    let (server, user) = with_things().await;
    let spec = json!({"size": "small", "disks": [{"name": "a"}], "free": {"x": {"y": 1}}, "maybe": null, "what": 1});
    let (code, made) =
        ask(&server, &user, "POST", &format!("{THINGS}?fieldValidation=Ignore"), Some(thing("a", spec))).await;
    assert_eq!(code, 201, "{made}");
    assert_eq!(
        made["spec"],
        json!({"size": "small", "replicas": 1, "disks": [{"name": "a", "boot": 7}], "free": {"x": {"y": 1}}, "maybe": null})
    );
    assert_eq!(made["metadata"]["generation"], 1);
    let bad = json!({"size": "huge", "running": "yes", "replicas": -1, "memory": "4Q", "disks": [{"name": "a"}, {"name": "a"}]});
    let (code, status) = ask(&server, &user, "POST", THINGS, Some(thing("b", bad))).await;
    assert_eq!((code, &status["reason"]), (422, &json!("Invalid")));
    let causes: Vec<(&str, &str, &str)> = status["details"]["causes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["field"].as_str().unwrap(), c["reason"].as_str().unwrap(), c["message"].as_str().unwrap()))
        .collect();
    for want in [
        ("spec.size", "FieldValueNotSupported", "Unsupported value: \"huge\": supported values: \"small\", \"large\""),
        (
            "spec.running",
            "FieldValueTypeInvalid",
            "Invalid value: \"string\": spec.running in body must be of type boolean: \"string\"",
        ),
        (
            "spec.replicas",
            "FieldValueInvalid",
            "Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        ("spec.disks[1]", "FieldValueDuplicate", "Duplicate value: {\"name\":\"a\"}"),
    ] {
        assert!(causes.contains(&want), "{want:?} in {causes:#?}");
    }
    assert!(causes.iter().any(|c| c.0 == "spec.memory" && c.2.contains("should match")));
    let (code, status) = ask(
        &server,
        &user,
        "POST",
        THINGS,
        Some(json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "c"}})),
    )
    .await;
    assert_eq!((code, &status["message"]), (422, &json!("Thing.example.com \"c\" is invalid: spec: Required value")));
    let unknown = thing("d", json!({"size": "small", "foo": 1}));
    let (code, status) = ask(&server, &user, "POST", &format!("{THINGS}?fieldValidation=Strict"), Some(unknown)).await;
    assert_eq!(code, 400);
    assert_eq!(
        status["message"],
        "Thing in version \"v1\" cannot be handled as a Thing: strict decoding error: unknown field \"spec.foo\""
    );
}

#[tokio::test]
async fn status_spec_generation_and_scale_are_kept_apart() {
    let (server, user) = with_things().await;
    let mut body = thing("a", json!({"size": "small"}));
    body["status"] = json!({"phase": "Forged"});
    let (_, made) = ask(&server, &user, "POST", THINGS, Some(body)).await;
    assert!(made.get("status").is_none());
    let path = format!("{THINGS}/a");
    let patch = |p: String, body: Value| {
        let (server, user) = (server.clone(), user.clone());
        async move { ask_with(&server, &user, "PATCH", &p, "application/merge-patch+json", body.to_string()).await }
    };
    let (code, o) =
        patch(format!("{path}/status"), json!({"status": {"phase": "Up"}, "spec": {"size": "large"}})).await;
    assert_eq!((code, &o["spec"]["size"], &o["status"]["phase"]), (200, &json!("small"), &json!("Up")));
    assert_eq!(o["metadata"]["generation"], 1);
    let (_, o) = patch(path.clone(), json!({"status": {"phase": "Down"}, "spec": {"size": "large"}})).await;
    assert_eq!((&o["status"]["phase"], &o["metadata"]["generation"]), (&json!("Up"), &json!(2)));
    let (_, o) = patch(path.clone(), json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(o["metadata"]["generation"], 2);
    let (code, s) = patch(format!("{path}/scale"), json!({"spec": {"replicas": 3}})).await;
    assert_eq!((code, &s["spec"]["replicas"], &s["kind"]), (200, &json!(3), &json!("Scale")));
    assert_eq!(ask(&server, &user, "GET", &path, None).await.1["spec"]["replicas"], 3);
    let strategic =
        ask_with(&server, &user, "PATCH", &path, "application/strategic-merge-patch+json", "{}".into()).await;
    assert_eq!(strategic.0, 415);
    // A replace of a custom object must say which one it replaces.
    let (code, status) = ask(&server, &user, "PUT", &path, Some(thing("a", json!({"size": "small"})))).await;
    assert_eq!(code, 422);
    assert!(status["message"].as_str().unwrap().contains("metadata.resourceVersion: Invalid value: 0"), "{status}");
}

#[tokio::test]
async fn tables_discovery_and_openapi_follow_definitions() {
    let (server, user) = with_things().await;
    ask(&server, &user, "POST", THINGS, Some(thing("a", json!({"size": "small"})))).await;
    let request = http::Request::get(THINGS)
        .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
        .body(axum::body::Body::empty())
        .unwrap();
    let response = server.handle(request, Some(user.clone())).await;
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let table: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(table["kind"], "Table");
    let names: Vec<&str> =
        table["columnDefinitions"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["Name", "Size", "Phase", "Age"]);
    assert_eq!(table["rows"][0]["cells"][1], "small");
    let (_, list) = ask(&server, &user, "GET", "/apis/example.com/v1", None).await;
    let resources: Vec<&str> =
        list["resources"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(resources, ["things", "things/status", "things/scale"]);
    let (code, doc) = ask(&server, &user, "GET", "/openapi/v3/apis/example.com/v1", None).await;
    assert_eq!(code, 200);
    assert!(doc["components"]["schemas"].get("com.example.v1.Thing").is_some());
}

#[tokio::test]
async fn the_end_of_a_definition_takes_its_objects_along() {
    let (server, user) = with_things().await;
    let mut held = thing("held", json!({"size": "small"}));
    held["metadata"]["finalizers"] = json!(["example.com/x"]);
    ask(&server, &user, "POST", THINGS, Some(held)).await;
    ask(&server, &user, "POST", THINGS, Some(thing("free", json!({"size": "small"})))).await;
    let crd = format!("{CRDS}/things.example.com");
    assert_eq!(ask(&server, &user, "DELETE", &crd, None).await.0, 200);
    eventually("the free one is gone", || async {
        ask(&server, &user, "GET", &format!("{THINGS}/free"), None).await.0 == 404
    })
    .await;
    assert_eq!(ask(&server, &user, "GET", &crd, None).await.0, 200);
    let none = json!({"metadata": {"finalizers": null}}).to_string();
    let path = format!("{THINGS}/held");
    assert_eq!(ask_with(&server, &user, "PATCH", &path, "application/merge-patch+json", none).await.0, 200);
    eventually("the definition is gone", || async { ask(&server, &user, "GET", &crd, None).await.0 == 404 }).await;
    assert_eq!(ask(&server, &user, "GET", THINGS, None).await, (404, "404 page not found\n".into()));
    // And it can come again.
    assert_eq!(ask(&server, &user, "POST", CRDS, Some(definition())).await.0, 201);
    assert_eq!(ask(&server, &user, "GET", THINGS, None).await.1["items"], json!([]));
}

#[tokio::test]
async fn the_products_own_definitions_are_structural_and_served() {
    let (server, user) = (server().await, admin());
    for crd in api::crd::all() {
        let name = crd["metadata"]["name"].as_str().unwrap().to_owned();
        let (code, made) = ask(&server, &user, "POST", &format!("{CRDS}?fieldValidation=Strict"), Some(crd)).await;
        assert_eq!(code, 201, "{name}: {made}");
    }
    let path = "/apis/kubevirt.io/v1/namespaces/default/virtualmachines?fieldValidation=Strict";
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
        "spec": {"runStrategy": "Always", "template": {"spec": {
            "domain": {"devices": {"disks": [{"name": "d", "disk": {"bus": "virtio"}}]}, "memory": {"guest": "64Mi"}},
            "volumes": [{"name": "d", "containerDisk": {"image": "i"}}]}}},
    });
    let (code, made) = ask(&server, &user, "POST", path, Some(vm.clone())).await;
    assert_eq!(code, 201, "{made}");
    let mut wrong = vm;
    wrong["metadata"]["name"] = "vm2".into();
    wrong["spec"]["template"]["spec"]["domain"]["devices"]["diskz"] = json!([]);
    let (code, status) = ask(&server, &user, "POST", path, Some(wrong)).await;
    assert_eq!(code, 400);
    assert!(status["message"].as_str().unwrap().contains("unknown field \"spec.template.spec.domain.devices.diskz\""));
}
