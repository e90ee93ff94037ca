//! What a client sees in codes, bodies and headers.

use embedded::auth::User;
use embedded::server::https;
use serde_json::{Value, json};

use crate::support::{admin, ask, ask_with, listening, server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test]
async fn what_is_not_served_is_not_found_as_by_kube_apiserver() {
    let server = server().await;
    for path in ["/apis/nothing", "/apis/nothing/v1/things", "/nowhere"] {
        assert_eq!(ask(&server, &admin(), "GET", path, None).await, (404, "404 page not found\n".into()), "{path}");
    }
    for path in ["/apis/apps/v1/deployments", "/api/v1/foos", "/api/v2"] {
        let (code, status) = ask(&server, &admin(), "GET", path, None).await;
        let why = "the server could not find the requested resource";
        assert_eq!((code, &status["message"]), (404, &json!(why)), "{path}");
    }
    let (code, status) = ask(&server, &admin(), "GET", &format!("{MAPS}/none"), None).await;
    assert_eq!(code, 404);
    assert_eq!(status["message"], "configmaps \"none\" not found");
    assert_eq!(status["details"], json!({"name": "none", "kind": "configmaps"}));
}

#[tokio::test]
async fn unknown_fields_are_refused_warned_about_or_dropped() {
    let server = server().await;
    let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "u"}, "spec": {}, "dat": 1});
    let (code, status) =
        ask(&server, &admin(), "POST", &format!("{MAPS}?fieldValidation=Strict"), Some(body.clone())).await;
    assert_eq!(code, 400);
    assert_eq!(
        status["message"],
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: strict decoding error: unknown field \"dat\", unknown field \"spec\""
    );
    let twice = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"u"},"data":{"a":"1","a":"2"}}"#;
    let path = format!("{MAPS}?fieldValidation=Strict");
    let (code, status) = ask_with(&server, &admin(), "POST", &path, "application/json", twice.into()).await;
    assert_eq!(code, 400);
    assert!(status["message"].as_str().unwrap().ends_with("strict decoding error: duplicate field \"data.a\""));
    let (code, made) = ask(&server, &admin(), "POST", &format!("{MAPS}?fieldValidation=Ignore"), Some(body)).await;
    assert_eq!(code, 201);
    assert!(made.get("spec").is_none() && made.get("dat").is_none());
    // A wrong type is a matter of decoding.
    let wrong = json!({"metadata": {"name": "w"}, "spec": {"hostNetwork": "yes", "containers": []}});
    let (code, status) = ask(&server, &admin(), "POST", "/api/v1/namespaces/default/pods", Some(wrong)).await;
    assert_eq!(code, 400);
    assert_eq!(
        status["message"],
        "Pod in version \"v1\" cannot be handled as a Pod: json: cannot unmarshal string into Go struct field PodSpec.spec.hostNetwork of type bool"
    );
    let empty = json!({"metadata": {"name": "Bad_Name"}, "spec": {"containers": []}});
    let (code, status) = ask(&server, &admin(), "POST", "/api/v1/namespaces/default/pods", Some(empty)).await;
    assert_eq!((code, &status["reason"]), (422, &json!("Invalid")));
    let causes = status["details"]["causes"].as_array().unwrap();
    assert_eq!(causes[0]["field"], "metadata.name");
    assert_eq!(causes[0]["reason"], "FieldValueInvalid");
}

#[tokio::test]
async fn who_may_do_what() {
    let server = server().await;
    let reader = User::new("reader", &["readers"]);
    let (code, status) = ask(&server, &reader, "GET", MAPS, None).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "configmaps is forbidden: User \"reader\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\""
    );
    let binding = json!({
        "metadata": {"name": "r", "namespace": "default"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "Group", "name": "readers"}],
    });
    let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
    assert_eq!(ask(&server, &admin(), "POST", path, Some(binding)).await.0, 201);
    assert_eq!(ask(&server, &reader, "GET", MAPS, None).await.0, 200);
    assert_eq!(ask(&server, &reader, "GET", "/api/v1/configmaps", None).await.0, 403);
    assert_eq!(ask(&server, &reader, "GET", "/api/v1/namespaces/default/secrets", None).await.0, 403);
    let review = json!({"spec": {"resourceAttributes": {"verb": "list", "resource": "pods", "namespace": "default"}}});
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let (code, answer) = ask(&server, &reader, "POST", path, Some(review)).await;
    assert_eq!((code, &answer["status"]["allowed"]), (201, &json!(true)));
    // Nobody in particular may ask for health, and for nothing else.
    let nobody = User::anonymous();
    assert_eq!(ask(&server, &nobody, "GET", "/livez", None).await, (200, "ok".into()));
    assert_eq!(ask(&server, &nobody, "GET", "/api", None).await.0, 403);
}

#[tokio::test]
async fn tokens_of_service_accounts_are_issued_and_believed() {
    let server = server().await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let (code, request) = ask(&server, &admin(), "POST", path, Some(json!({"spec": {}}))).await;
    assert_eq!(code, 201);
    let token = request["status"]["token"].as_str().unwrap().to_owned();
    let review = json!({"spec": {"token": token}});
    let (_, answer) = ask(&server, &admin(), "POST", "/apis/authentication.k8s.io/v1/tokenreviews", Some(review)).await;
    assert_eq!(answer["status"]["user"]["username"], "system:serviceaccount:default:default");
    let ask_as = |token: String| {
        let server = server.clone();
        async move {
            let request = ::http::Request::get(MAPS)
                .header("authorization", format!("Bearer {token}"))
                .body(axum::body::Body::empty())
                .unwrap();
            server.handle(request, None).await.status().as_u16()
        }
    };
    assert_eq!(ask_as(token).await, 403);
    assert_eq!(ask_as("nonsense".into()).await, 401);
    assert_eq!(ask_as("reader-token".into()).await, 403);
}

#[tokio::test]
async fn what_is_too_old_or_too_new_is_said() {
    let server = server().await;
    let (_, list) = ask(&server, &admin(), "GET", MAPS, None).await;
    let now: i64 = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    let (code, status) = ask(&server, &admin(), "GET", &format!("{MAPS}?resourceVersion={}", now + 100), None).await;
    assert_eq!((code, &status["reason"]), (504, &json!("Timeout")));
    let exact = format!("{MAPS}?resourceVersion={now}&resourceVersionMatch=Exact");
    assert_eq!(ask(&server, &admin(), "GET", &exact, None).await.0, 200);
    let (code, _) = ask(&server, &admin(), "GET", &format!("{MAPS}?continue=nonsense"), None).await;
    assert_eq!(code, 400);
    let (code, _) =
        ask(&server, &admin(), "GET", &format!("{MAPS}?watch=1&timeoutSeconds=1&resourceVersion={now}"), None).await;
    assert_eq!(code, 200);
    let (code, status) = ask(&server, &admin(), "GET", &format!("{MAPS}?fieldSelector=data.x%3D1"), None).await;
    assert_eq!(
        (code, &status["message"]),
        (400, &json!("\"data.x\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""))
    );
    let apply =
        ask_with(&server, &admin(), "PATCH", &format!("{MAPS}/x"), "application/apply-patch+yaml", "{}".into()).await;
    // Who applies says who he is.
    assert_eq!((apply.0, &apply.1["details"]["causes"][0]["field"]), (422, &json!("fieldManager")));
}

#[tokio::test]
async fn events_are_the_same_in_both_groups() {
    let server = server().await;
    let event = json!({
        "metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"},
        "reason": "Started", "message": "it did", "type": "Normal", "source": {"component": "c"},
    });
    assert_eq!(ask(&server, &admin(), "POST", "/api/v1/namespaces/default/events", Some(event)).await.0, 201);
    let (code, e) = ask(&server, &admin(), "GET", "/apis/events.k8s.io/v1/namespaces/default/events/e", None).await;
    assert_eq!(code, 200);
    assert_eq!((&e["note"], &e["regarding"]["name"]), (&json!("it did"), &json!("p")));
    assert_eq!(e["apiVersion"], "events.k8s.io/v1");
    let path = "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Dp";
    assert_eq!(ask(&server, &admin(), "GET", path, None).await.1["items"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn a_dry_run_leaves_nothing() {
    let server = server().await;
    let body = json!({"metadata": {"name": "d"}});
    assert_eq!(ask(&server, &admin(), "POST", &format!("{MAPS}?dryRun=All"), Some(body)).await.0, 201);
    assert_eq!(ask(&server, &admin(), "GET", &format!("{MAPS}/d"), None).await.0, 404);
}

#[tokio::test]
async fn a_taken_port_is_named_and_certificates_say_who_somebody_is() {
    let dir = tempfile::tempdir().unwrap();
    let server = server().await;
    let up = listening(&server, dir.path()).await;
    let error = https::listen(up.address).await.unwrap_err();
    assert!(error.to_string().contains(&up.address.port().to_string()), "{error}");
    let config = kube::config::Kubeconfig::read_from(&up.kubeconfig).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(config, &kube::config::KubeConfigOptions::default()).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    let review = ::http::Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
        .header("content-type", "application/json")
        .body(b"{}".to_vec())
        .unwrap();
    let answer: Value = client.request(review).await.unwrap();
    assert_eq!(answer["status"]["userInfo"]["username"], "admin");
    assert_eq!(answer["status"]["userInfo"]["groups"], json!(["system:masters", "system:authenticated"]));
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_and_the_client_reads_why() {
    let dir = tempfile::tempdir().unwrap();
    let up = listening(&server().await, dir.path()).await;
    let config = kube::config::Kubeconfig::read_from(&up.kubeconfig).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &kube::config::KubeConfigOptions::default()).await;
    let client = kube::Client::try_from(config.unwrap()).unwrap();
    let body = json!({"metadata": {"name": "big"}, "data": {"a": "x".repeat(8 << 20)}}).to_string();
    let request =
        ::http::Request::post(MAPS).header("content-type", "application/json").body(body.into_bytes()).unwrap();
    let refused = client.request::<Value>(request).await.unwrap_err();
    let kube::Error::Api(status) = refused else { panic!("{refused}") };
    assert_eq!((status.code, status.message.as_str()), (413, "Request entity too large: limit is 3145728"));
}

#[tokio::test]
async fn nothing_is_stored_that_would_be_too_deep_to_be_listed() {
    let server = server().await;
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "wells.e.io"},
        "spec": {"group": "e.io", "scope": "Namespaced", "names": {"plural": "wells", "kind": "Well"}, "versions": [{
            "name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]},
    });
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(ask(&server, &admin(), "POST", definitions, Some(definition)).await.0, 201);
    let nested = |levels: usize| (0..levels).fold(json!(1), |below, _| json!({"x": below}));
    let wells = "/apis/e.io/v1/namespaces/default/wells";
    let well = |name: &str, levels: usize| json!({"apiVersion": "e.io/v1", "kind": "Well", "metadata": {"name": name}, "spec": nested(levels)});
    assert_eq!(ask(&server, &admin(), "POST", wells, Some(well("w", 99))).await.0, 201);
    for path in [wells.to_owned(), format!("{wells}?dryRun=All")] {
        let (code, status) = ask(&server, &admin(), "POST", &path, Some(well("deep", 100))).await;
        assert_eq!((code, &status["details"]["causes"][0]["field"]), (422, &json!("spec")), "{status}");
        assert!(status["message"].as_str().unwrap().contains("at most 100 levels"), "{status}");
    }
    let one = format!("{wells}/w");
    let add = json!([{"op": "add", "path": format!("/spec{}", "/x".repeat(98)), "value": nested(2)}]).to_string();
    let merge = json!({"spec": nested(110)}).to_string();
    for (kind, body) in [("json-patch", add), ("merge-patch", merge)] {
        let kind = format!("application/{kind}+json");
        let (code, status) = ask_with(&server, &admin(), "PATCH", &one, &kind, body).await;
        assert_eq!((code, &status["details"]["causes"][0]["field"]), (422, &json!("spec")), "{status}");
    }
    // What is written beside the checks of an update.
    let finalizers = json!({"metadata": {"name": "default"}, "spec": {"finalizers": [nested(110)]}});
    let path = "/api/v1/namespaces/default/finalize";
    assert_eq!(ask(&server, &admin(), "PUT", path, Some(finalizers)).await.0, 422);
    // Owners of fields that are as deep as an object may be.
    let owned = format!("{one}?fieldManager=me");
    let body = json!({"metadata": {"labels": {"a": "b"}}}).to_string();
    let kind = "application/merge-patch+json";
    assert_eq!(ask_with(&server, &admin(), "PATCH", &owned, kind, body).await.0, 200);
    let (code, all) = ask(&server, &admin(), "GET", wells, None).await;
    assert_eq!((code, all["items"].as_array().map(Vec::len)), (200, Some(1)), "and the list can be read");
    assert_eq!(ask(&server, &admin(), "DELETE", &one, None).await.0, 200);
}

#[tokio::test]
async fn who_acts_as_a_group_without_a_user_is_refused() {
    let server = server().await;
    for header in ["impersonate-group", "impersonate-uid", "impersonate-extra-scopes"] {
        let request = ::http::Request::get(MAPS).header(header, "readers").body(axum::body::Body::empty()).unwrap();
        assert_eq!(server.handle(request, Some(admin())).await.status(), 500, "{header}");
    }
}
