//! Start, stop, restart, pause and the rest, through the API server.

use crate::support::{NODE, World, world, world_with};
use embedded::auth::User as Who;
use gateway::Authorization;
use http::Request;
use proto::agent::VerbReply;
use serde_json::{Value, json};
use tower::ServiceExt;

/// Who asks in these tests.
const USER: &str = "admin";

const PAUSED: &str = r#"[{"type": "Paused", "status": "True"}]"#;

fn message(status: &Value) -> &str {
    status["message"].as_str().unwrap_or_default()
}

/// The requests, all of which say who asked.
async fn requests(world: &World) -> Value {
    let mut all = world.vm().await["status"]["stateChangeRequests"].clone();
    for request in all.as_array_mut().into_iter().flatten() {
        let data = request["data"].as_object_mut().unwrap();
        assert_eq!(data.remove("virtfold.io/requested-by"), Some(json!(USER)));
        let trace = data.remove("virtfold.io/traceparent").and_then(|t| Some(t.as_str()?.to_owned()));
        assert!(trace.is_some_and(|t| telemetry::TraceContext::parse(&t).is_some()), "the request's trace");
        if data.is_empty() {
            request.as_object_mut().unwrap().remove("data");
        }
    }
    all
}

#[tokio::test]
async fn discovery_and_health() {
    let world = world().await;
    for version in ["v1", "v1alpha3"] {
        let (code, list) = world.ask("GET", &format!("/apis/subresources.kubevirt.io/{version}"), None).await;
        assert_eq!(
            (code, list["kind"].as_str(), list["groupVersion"].as_str()),
            (200, Some("APIResourceList"), Some(format!("subresources.kubevirt.io/{version}").as_str()))
        );
        assert!(list["resources"].as_array().unwrap().iter().any(|r| r["name"] == "virtualmachineinstances/console"));
    }
    let (code, version) = world.ask("GET", "/apis/subresources.kubevirt.io/v1/version", None).await;
    assert_eq!(code, 200);
    assert!(version["gitVersion"].as_str().unwrap().starts_with('v'));
    let (code, health) = world.ask("GET", "/apis/subresources.kubevirt.io/v1/healthz", None).await;
    assert_eq!((code, &health["apiserver"]["connectivity"]), (200, &json!("ok")));
    assert_eq!(world.ask("GET", "/apis/subresources.kubevirt.io/v1/nonsense", None).await.0, 404);
    for (method, what, code) in [
        ("PUT", "vm/migrate", 404),
        ("PUT", "vm/addvolume", 400),
        ("GET", "vmi/usbredir", 404),
        ("GET", "vmi/vsock", 404),
        ("GET", "vmi/sev/fetchcertchain", 400),
        ("GET", "vmi/sev/querylaunchmeasurement", 400),
        ("PUT", "vmi/sev/setupsession", 400),
        ("PUT", "vmi/sev/injectlaunchsecret", 400),
        ("PUT", "vmi/evacuate/cancel", 400),
        ("PUT", "vm/evacuate/cancel", 400),
        ("PUT", "vm/removevolume", 400),
        ("PUT", "vm/memorydump", 400),
        ("PUT", "vm/removememorydump", 400),
        ("PUT", "vm/addresourceclaim", 400),
        ("PUT", "vm/removeresourceclaim", 400),
        ("PUT", "vmi/addvolume", 400),
        ("PUT", "vmi/removevolume", 400),
        ("PUT", "vmi/addresourceclaim", 400),
        ("PUT", "vmi/removeresourceclaim", 400),
        ("PUT", "vmi/backup", 404),
        ("PUT", "vmi/redefine-checkpoint", 404),
        ("GET", "vm/objectgraph", 400),
        ("GET", "vmi/objectgraph", 400),
        ("GET", "vm/addvolume", 405),
        ("PUT", "vmi/objectgraph", 405),
        ("PUT", "vm/pause", 404),
        ("GET", "vm/start", 405),
        ("PUT", "vm/start", 404),
        ("PUT", "vmi/pause", 404),
        ("PUT", "vm/explain", 405),
        ("GET", "vm/explain", 404),
        ("GET", "vmi/explain", 404),
    ] {
        let (got, status) = world.verb(method, what, None).await;
        assert_eq!(got, code, "{method} {what}: {status}");
        assert_eq!(status["kind"], "Status");
    }
    let (_, status) = world.verb("PUT", "vmi/pause", None).await;
    assert_eq!(message(&status), "virtualmachineinstance.kubevirt.io \"a\" not found");
    assert_eq!(status["details"], json!({"name": "a", "group": "kubevirt.io", "kind": "virtualmachineinstance"}));
}

#[tokio::test]
async fn a_machine_is_started_and_stopped_by_its_strategy() {
    let world = world().await;
    let made = world.make_vm("Halted").await;
    let (code, why) = world.verb("GET", "vm/explain", None).await;
    assert_eq!((code, &why["name"]), (200, &json!("a")), "what the controller says of it");
    assert!(why["spans"].is_null(), "nobody asked for steps: {why}");
    let (code, why) = world.verb("GET", "vm/explain?spans=true", None).await;
    let spans: Vec<_> = why["spans"].as_array().unwrap().iter().map(|s| (&s["name"], &s["span"])).collect();
    let its = json!("default/a");
    assert_eq!((code, spans), (200, vec![(&its, &json!("a")), (&its, &json!("b"))]), "in order, each once: {why}");
    for (path, code) in [
        ("namespaces/default/virtualmachineinstancereplicasets/a/explain", 404),
        ("namespaces/default/virtualmachineinstancereplicasets/a/start", 404),
        ("nodes/nobody/explain", 404),
        ("nodes/node-1/start", 404),
        ("nodes/node-1/explain", 200),
    ] {
        let (got, said) = world.ask("GET", &format!("/apis/subresources.kubevirt.io/v1/{path}"), None).await;
        assert_eq!(got, code, "{path}: {said}");
        assert!(code != 200 || said["name"] == "node-1", "{said}");
    }
    let trace = made["metadata"]["annotations"]["virtfold.io/traceparent"].clone();
    let (code, body) = world.verb("PUT", "vm/start", Some(json!({"dryRun": ["All"]}))).await;
    assert_eq!((code, body), (202, json!("")));
    assert_eq!(world.vm().await["spec"]["runStrategy"], "Halted");
    assert_eq!(world.verb("PUT", "vm/start", None).await, (202, json!("")));
    let vm = world.vm().await;
    assert_eq!(vm["spec"]["runStrategy"], "Always");
    assert_ne!(vm["metadata"]["annotations"]["virtfold.io/traceparent"], trace, "a new operation is a new trace");
    assert_eq!(vm["metadata"]["annotations"]["virtfold.io/changed-by"], USER, "and not the gateway, which wrote it");
    let (code, status) = world.verb("PUT", "vm/start", None).await;
    assert_eq!(
        (code, message(&status)),
        (
            409,
            "Operation cannot be fulfilled on virtualmachine.kubevirt.io \"a\": Always does not support manual start requests"
        )
    );
    assert_eq!(world.verb("PUT", "vm/stop", None).await.0, 202);
    assert_eq!(world.vm().await["spec"]["runStrategy"], "Halted");
    let (code, status) = world.verb("PUT", "vm/stop", None).await;
    assert_eq!(
        (code, message(&status)),
        (409, "Operation cannot be fulfilled on virtualmachine.kubevirt.io \"a\": VM is not running")
    );
    // Paused: a request instead of a strategy, which would forget it.
    assert_eq!(world.verb("PUT", "vm/start", Some(json!({"paused": true}))).await.0, 202);
    assert_eq!(requests(&world).await, json!([{"action": "Start", "data": {"paused": "true"}}]));
    assert_eq!(world.vm().await["spec"]["runStrategy"], "Halted");
    let (code, status) = world.verb("PUT", "vm/start", Some(json!([1]))).await;
    assert_eq!((code, &status["reason"]), (400, &json!("BadRequest")));
}

#[tokio::test]
async fn a_manual_machine_is_asked_by_requests() {
    let world = world().await;
    world.make_vm("Manual").await;
    assert_eq!(world.verb("PUT", "vm/start", None).await.0, 202);
    assert_eq!(requests(&world).await, json!([{"action": "Start"}]));
    // The same once more is the one that waits; another one has to wait for it.
    assert_eq!(world.verb("PUT", "vm/start", None).await.0, 202);
    assert_eq!(requests(&world).await, json!([{"action": "Start"}]));
    let (code, status) = world.verb("PUT", "vm/start", Some(json!({"paused": true}))).await;
    assert_eq!(
        (code, message(&status)),
        (500, "Internal error occurred: unable to complete request: stop/start already underway")
    );
    let vmi = world.make_vmi(json!({})).await;
    let stop = json!({"action": "Stop", "uid": vmi["metadata"]["uid"]});
    // A stop takes the place of whatever waits, and shortens the grace first.
    assert_eq!(world.verb("PUT", "vm/stop", Some(json!({"gracePeriod": 3}))).await.0, 202);
    assert_eq!(requests(&world).await, json!([stop]));
    let now = world.patch_vmi(json!({})).await;
    assert_eq!(now["spec"]["terminationGracePeriodSeconds"], 3);
    let (code, status) = world.verb("PUT", "vm/restart", None).await;
    assert_eq!(code, 500, "{status}");
    world.patch_vm_status(json!({"stateChangeRequests": []})).await;
    assert_eq!(world.verb("PUT", "vm/restart", Some(json!({"gracePeriodSeconds": 5}))).await.0, 400);
    assert_eq!(world.verb("PUT", "vm/restart", Some(json!({"gracePeriodSeconds": -1}))).await.0, 400);
    assert_eq!(world.verb("PUT", "vm/restart", Some(json!({"gracePeriodSeconds": 0}))).await.0, 202);
    assert_eq!(requests(&world).await, json!([stop, {"action": "Start"}]));
    let (code, status) = world.verb("PUT", "vm/start", None).await;
    assert_eq!(
        (code, message(&status)),
        (409, "Operation cannot be fulfilled on virtualmachine.kubevirt.io \"a\": VM is already running")
    );
}

#[tokio::test]
async fn requests_survive_a_machine_that_changes_meanwhile() {
    let world = std::sync::Arc::new(world().await);
    world.make_vm("Halted").await;
    let (writer, stop) = (world.clone(), std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let stopped = stop.clone();
    let writes = tokio::spawn(async move {
        let mut n = 0;
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            n += 1;
            writer.patch_vm_status(json!({"observedGeneration": n})).await;
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    });
    for _ in 0..10 {
        let (code, status) = world.verb("PUT", "vm/start", None).await;
        assert_eq!(code, 202, "{status}");
        let (code, status) = world.verb("PUT", "vm/stop", None).await;
        assert_eq!(code, 202, "{status}");
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writes.await.unwrap();
}

#[tokio::test]
async fn pause_and_unpause_reach_the_agent() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    assert_eq!(world.verb("PUT", "vmi/pause", None).await, (200, json!("")));
    let says = |verb: &str, reason: &str| {
        let reply = VerbReply { ok: reason.is_empty(), reason: reason.into(), ..VerbReply::default() };
        world.seen.replies.lock().unwrap().insert(verb.into(), reply);
    };
    // A dry run judges by the condition, the real one asks the launcher.
    let dry = || Some(json!({"dryRun": ["All"]}));
    says("unpause", "not-paused");
    for body in [dry(), None] {
        let (code, status) = world.verb("PUT", "vmi/unpause", body).await;
        assert_eq!(
            (code, message(&status)),
            (409, "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io \"a\": VMI is not paused")
        );
    }
    world.patch_vmi(json!({"status": {"conditions": serde_json::from_str::<Value>(PAUSED).unwrap()}})).await;
    says("pause", "already-paused");
    says("unpause", "");
    for body in [dry(), None] {
        let (code, status) = world.verb("PUT", "vmi/pause", body).await;
        assert_eq!(
            (code, message(&status)),
            (409, "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io \"a\": VMI is already paused")
        );
    }
    assert_eq!(world.verb("PUT", "vmi/unpause", dry()).await.0, 200);
    assert_eq!(world.verb("PUT", "vmi/unpause", None).await.0, 200);
    assert_eq!(world.verb("PUT", "vmi/freeze", Some(json!({"unfreezeTimeout": "10s"}))).await.0, 200);
    let verbs = world.seen.verbs.lock().unwrap().clone();
    assert_eq!(
        verbs,
        [
            ("pause".into(), json!({})),
            ("unpause".into(), json!({})),
            ("pause".into(), json!({})),
            ("unpause".into(), json!({})),
            ("freeze".into(), json!({"unfreezeTimeout": "10s"}))
        ]
    );
}

#[tokio::test]
async fn what_the_agent_answers_is_told() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    for (reason, code) in [("already-paused", 409), ("not-running", 409), ("failed", 500), ("unsupported", 400)] {
        world.seen.replies.lock().unwrap().insert(
            "pause".into(),
            VerbReply { ok: false, reason: reason.into(), message: "because".into(), ..VerbReply::default() },
        );
        assert_eq!(world.verb("PUT", "vmi/pause", None).await.0, code, "{reason}");
    }
    // Guest information: plain text where there is none, the agent's JSON otherwise.
    let (code, text) = world.verb("GET", "vmi/guestosinfo", None).await;
    assert_eq!(code, 500);
    assert!(text.as_str().unwrap().contains("does not have guest agent connected"), "{text}");
    world.patch_vmi(json!({"status": {"conditions": [{"type": "AgentConnected", "status": "True"}]}})).await;
    let info = json!({"kind": "VirtualMachineInstanceGuestAgentInfo", "hostname": "h"});
    world.seen.replies.lock().unwrap().insert(
        "guestosinfo".into(),
        VerbReply { ok: true, body: info.to_string().into_bytes().into(), ..VerbReply::default() },
    );
    assert_eq!(world.verb("GET", "vmi/guestosinfo", None).await, (200, info));
    // A node without an agent, an agent that is not there, and one that is somebody else.
    let node = format!("/api/v1/nodes/{NODE}");
    let set = |address: Value| json!({"metadata": {"annotations": {"virtfold.io/agent-address": address}}});
    world.ask("PATCH", &node, Some(set(Value::Null))).await;
    assert_eq!(world.verb("PUT", "vmi/reset", None).await.0, 400);
    world.ask("PATCH", &node, Some(set(json!("127.0.0.1:1")))).await;
    let (code, status) = world.verb("PUT", "vmi/reset", None).await;
    assert_eq!((code, &status["reason"]), (503, &json!("ServiceUnavailable")));
    assert!(message(&status).contains("the node agent of \"node-1\" is not ready"), "{status}");
    assert!(message(&status).contains("127.0.0.1:1"), "{status}");
    world.patch_vmi(json!({"status": {"phase": "Pending"}})).await;
    let (code, status) = world.verb("PUT", "vmi/reset", None).await;
    assert_eq!((code, message(&status)), (400, "Pending: VMI is not running"));
}

#[tokio::test]
async fn an_agent_must_be_who_it_should_be() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    // The same agent under the name of another node: its certificate does not name it.
    let (_, node) = world.ask("GET", &format!("/api/v1/nodes/{NODE}"), None).await;
    let address = node["metadata"]["annotations"]["virtfold.io/agent-address"].clone();
    let other = json!({"metadata": {"name": "node-2", "annotations": {"virtfold.io/agent-address": address}}});
    assert_eq!(world.ask("POST", "/api/v1/nodes", Some(other)).await.0, 201);
    world.patch_vmi(json!({"status": {"nodeName": "node-2", "activePods": {(crate::support::POD): "node-2"}}})).await;
    let (code, status) = world.verb("PUT", "vmi/pause", None).await;
    assert_eq!(code, 503, "{status}");
    assert!(world.seen.verbs.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_verb_waits_for_an_agent_that_has_just_been_started_and_keeps_its_id() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    *world.seen.unready.lock().unwrap() = 3;
    assert_eq!(world.verb("PUT", "vmi/reset", None).await, (200, json!("")));
    let ids = world.seen.ids.lock().unwrap().clone();
    assert_eq!(ids.len(), 4);
    assert!(ids.iter().all(|id| *id == ids[0]), "one request, one id: {ids:?}");
    assert_eq!(world.seen.verbs.lock().unwrap().len(), 1);
    // Not for ever, and then by name.
    *world.seen.unready.lock().unwrap() = u32::MAX;
    let (code, status) = world.verb("PUT", "vmi/softreboot", None).await;
    assert_eq!((code, &status["reason"]), (503, &json!("ServiceUnavailable")));
    assert_eq!(
        message(&status),
        "softreboot of VMI \"a\": the node agent of \"node-1\" is not ready: the launcher does not answer"
    );
}

#[tokio::test]
async fn the_api_server_authorises_and_so_can_the_gateway() {
    let world = world_with(Authorization::Review).await;
    world.make_vm("Halted").await;
    // Through the embedded API server: RBAC there.
    let nobody = Who::new("nobody", &[]);
    let path = "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines/a/start";
    assert_eq!(world.ask_as(&nobody, "PUT", path, None).await.0, 403);
    // By itself: SubjectAccessReview for the user of the front proxy.
    let ask = |user: &'static str, group: &'static str| {
        let router = world.gateway.router();
        async move {
            let request = Request::builder()
                .method("PUT")
                .uri(path)
                .header("x-remote-user", user)
                .header("x-remote-group", group);
            router.oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap().status().as_u16()
        }
    };
    assert_eq!(ask("nobody", "system:authenticated").await, 401);
    assert_eq!(ask("", "system:masters").await, 401);
    assert_eq!(ask("boss", "system:masters").await, 202);
    assert_eq!(world.vm().await["spec"]["runStrategy"], "Always");
}

#[tokio::test]
async fn admission_sits_in_the_api_server() {
    let world = world().await;
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "bad"},
        "spec": {"running": true, "runStrategy": "Always", "template": {"spec": {"domain": {"devices": {"tpm": {}}}}}}});
    let path = "/apis/kubevirt.io/v1/namespaces/default/virtualmachines";
    let (code, status) = world.ask("POST", path, Some(vm)).await;
    assert_eq!((code, &status["reason"]), (422, &json!("Invalid")));
    let fields: Vec<&str> =
        status["details"]["causes"].as_array().unwrap().iter().map(|c| c["field"].as_str().unwrap()).collect();
    assert_eq!(fields, ["spec.running", "spec.template.spec.domain.devices.tpm"]);
    // The schema comes first.
    let wrong = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "bad"}, "spec": {"runStrategy": 1}});
    let (code, status) = world.ask("POST", path, Some(wrong)).await;
    assert_eq!((code, &status["reason"]), (422, &json!("Invalid")));
    // What is stored has what admission added.
    let made = world.make_vm("Halted").await;
    assert_eq!(made["metadata"]["finalizers"], json!(["kubevirt.io/virtualMachineControllerFinalize"]));
    assert_eq!(made["spec"]["template"]["spec"]["domain"]["machine"]["type"], "q35");
}

#[tokio::test]
async fn what_a_caller_traces_stays_in_its_trace() {
    let world = world().await;
    let (admin, trace) = (Who::system("admin"), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let caller = telemetry::TraceContext::parse(trace).unwrap();
    let annotation = |o: &Value| {
        telemetry::TraceContext::parse(o["metadata"]["annotations"]["virtfold.io/traceparent"].as_str().unwrap())
            .unwrap()
    };
    assert!(annotation(&world.make_vm("Halted").await).is_root(), "nobody's trace is a new one");
    for (version, verb) in [("v1", "start"), ("v1alpha3", "stop")] {
        let path = format!("/apis/subresources.kubevirt.io/{version}/namespaces/default/virtualmachines/a/{verb}");
        assert_eq!(world.ask_in(&admin, trace, "PUT", &path, None).await.0, 202, "{verb}");
        let context = annotation(&world.vm().await);
        assert_eq!(context.trace_id, caller.trace_id, "{verb}");
        assert_ne!(context.span_id, caller.span_id, "{verb} is a span of its own");
    }
    world.make_vmi(json!({})).await;
    let pause = "/apis/subresources.kubevirt.io/v1alpha3/namespaces/default/virtualmachineinstances/a/pause";
    assert_eq!(world.ask_in(&admin, trace, "PUT", pause, None).await.0, 200);
    let context = world.seen.trace.lock().unwrap().unwrap();
    assert_eq!(context.trace_id, caller.trace_id);
    assert_ne!(context.span_id, caller.span_id);
    // A trace that makes no sense is none.
    assert_eq!(world.ask_in(&admin, "00-nonsense", "PUT", pause, None).await.0, 200);
    assert!(world.seen.trace.lock().unwrap().unwrap().is_root());
}

#[tokio::test]
async fn an_eviction_marks_the_machine_or_is_refused() {
    let world = world().await;
    let vmi = world.make_vmi(json!({})).await;
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": vmi["metadata"]["uid"], "controller": true});
    let pod = json!({"metadata": {"name": "virt-launcher-a", "labels": {"kubevirt.io": "virt-launcher"}, "ownerReferences": [owner]},
        "spec": {"nodeName": NODE, "containers": [{"name": "compute", "image": "i"}]}});
    let pods = "/api/v1/namespaces/default/pods";
    assert_eq!(world.ask("POST", pods, Some(pod.clone())).await.0, 201);
    let evict = |dry: bool| {
        let world = &world;
        let mut eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "virt-launcher-a",
            "annotations": {"requested-by": "sigs.k8s.io/descheduler"}}});
        if dry {
            eviction["deleteOptions"] = json!({"dryRun": ["All"]});
        }
        async move {
            let (code, said) = world.ask("POST", &format!("{pods}/virt-launcher-a/eviction"), Some(eviction)).await;
            (code, message(&said).to_owned(), said["reason"].as_str().unwrap_or_default().to_owned())
        }
    };
    let strategy = |s: &'static str| {
        let world = &world;
        async move { world.patch_vmi(json!({"spec": {"evictionStrategy": s}})).await }
    };
    strategy("LiveMigrate").await;
    let (code, why, reason) = evict(false).await;
    assert_eq!((code, reason.as_str()), (429, "TooManyRequests"));
    assert!(why.contains("not live-migratable"), "{why}");
    assert!(strategy("External").await["status"]["evacuationNodeName"].is_null(), "nothing is marked");

    let triggered = "Eviction triggered evacuation of VMI \"default/a\"";
    assert_eq!(evict(true).await.1, triggered);
    let vmi_now = || world.ask("GET", "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances/a", None);
    assert!(vmi_now().await.1["status"]["evacuationNodeName"].is_null(), "a dry run leaves no mark");
    assert_eq!(evict(false).await, (429, triggered.into(), "TooManyRequests".into()));
    let marked = vmi_now().await.1;
    assert_eq!(marked["status"]["evacuationNodeName"], NODE);
    assert_eq!(marked["metadata"]["annotations"]["kubevirt.io/eviction-source"], "descheduler");
    assert_eq!(evict(false).await.1, format!("Evacuation in progress: {triggered}"));

    // The mark is taken off again, unless the node is still being drained.
    let cancel = |body: Value| {
        let world = &world;
        async move { world.verb("PUT", "vmi/evacuate/cancel", Some(body)).await.0 }
    };
    let node = format!("/api/v1/nodes/{NODE}");
    let taint = json!({"spec": {"taints": [{"key": "kubevirt.io/drain", "effect": "NoSchedule"}]}});
    assert_eq!(world.ask("PATCH", &node, Some(taint)).await.0, 200);
    assert_eq!(cancel(json!({"evacuationNodeName": NODE})).await, 400);
    assert_eq!(world.ask("PATCH", &node, Some(json!({"spec": {"taints": null}}))).await.0, 200);
    assert_eq!(cancel(json!({"evacuationNodeName": "another"})).await, 409);
    assert_eq!(cancel(json!({"evacuationNodeName": NODE, "dryRun": ["All"]})).await, 200);
    assert_eq!(vmi_now().await.1["status"]["evacuationNodeName"], NODE);
    assert_eq!(world.verb("PUT", "vm/evacuate/cancel", Some(json!({"evacuationNodeName": NODE}))).await.0, 200);
    assert!(vmi_now().await.1["status"]["evacuationNodeName"].is_null());
    assert_eq!(cancel(json!({"evacuationNodeName": NODE})).await, 200, "nothing is marked");

    // Without a strategy the pod goes, and so does one of a machine that is gone.
    strategy("None").await;
    assert_eq!(evict(false).await.0, 201);
}

/// As KubeVirt refuses what a machine cannot do, and by its name.
#[tokio::test]
async fn what_is_not_built_is_refused_by_name() {
    let world = world().await;
    let gate = |what: &str| format!("{what} is not supported yet: the HotplugVolumes feature gate is not enabled");
    for (what, body) in [
        (
            "vm/addvolume",
            json!({"name": "v", "disk": {}, "volumeSource": {"persistentVolumeClaim": {"claimName": "c"}}}),
        ),
        ("vmi/removevolume", json!({"name": "v"})),
        ("vm/memorydump", json!({"claimName": "c"})),
        ("vm/removememorydump", Value::Null),
    ] {
        let (code, said) = world.verb("PUT", what, Some(body).filter(|b| !b.is_null())).await;
        assert_eq!((code, message(&said)), (400, gate(what.split_once('/').unwrap().1).as_str()), "closed for all");
    }
    world.make_vm("Manual").await;
    assert_eq!(world.verb("PUT", "vm/migrate", None).await.0, 404, "there is no instance");
    world.make_vmi(json!({"phase": "Scheduled"})).await;
    for (what, code, why) in [
        ("vm/migrate", 409, "VM is not running"),
        ("vmi/backup", 409, "VMI is not running"),
        ("vmi/usbredir", 409, "not configured with USB redirection"),
        ("vmi/vsock", 400, "VSOCK is not attached"),
    ] {
        let method = if matches!(what, "vmi/usbredir" | "vmi/vsock") { "GET" } else { "PUT" };
        let (got, said) = world.verb(method, what, None).await;
        assert!(got == code && message(&said).ends_with(why), "{what}: {got} {said}");
    }
    let no = json!([{"type": "LiveMigratable", "status": "False", "reason": "NotMigratable", "message": "as it is"}]);
    world.patch_vmi(json!({"status": {"phase": "Running", "conditions": no}})).await;
    let (code, said) = world.verb("PUT", "vm/migrate", Some(json!({}))).await;
    let why = "migrate is not supported yet: cannot migrate VMI, reason: NotMigratable, message: as it is";
    assert_eq!((code, message(&said)), (400, why));
    let (code, said) = world.verb("PUT", "vmi/backup", None).await;
    assert!(code == 409 && message(&said).ends_with("changed block tracking is not enabled"), "{said}");
}

#[tokio::test]
async fn a_picture_of_the_screen() {
    let world = world().await;
    assert_eq!(world.verb("GET", "vmi/vnc/screenshot", None).await.0, 500);
    world.make_vmi(json!({})).await;
    let image = VerbReply { ok: true, body: b"\x89PNG".to_vec().into(), ..VerbReply::default() };
    world.seen.replies.lock().unwrap().insert("screenshot".into(), image);
    let request = Request::get(
        "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/a/vnc/screenshot?moveCursor=true",
    );
    let response =
        world.server.handle(request.body(axum::body::Body::empty()).unwrap(), Some(Who::system("admin"))).await;
    assert_eq!((response.status().as_u16(), &response.headers()["content-type"]), (200, &"image/png".parse().unwrap()));
    assert_eq!(axum::body::to_bytes(response.into_body(), 100).await.unwrap(), b"\x89PNG".as_slice());
    let failed = VerbReply { ok: false, message: "no screen".into(), ..VerbReply::default() };
    world.seen.replies.lock().unwrap().insert("screenshot".into(), failed);
    assert_eq!(world.verb("GET", "vmi/vnc/screenshot", None).await, (500, json!("no screen")));
    world.patch_vmi(json!({"spec": {"domain": {"devices": {"autoattachGraphicsDevice": false}}}})).await;
    assert_eq!(world.verb("GET", "vmi/vnc/screenshot", None).await, (500, json!("No graphics devices are present.")));
}

#[tokio::test]
async fn what_machines_use_is_asked_of_the_nodes() {
    let world = world().await;
    let usage =
        async |place: &str| world.ask("GET", &format!("/apis/subresources.kubevirt.io/v1/{place}usage"), None).await;
    let names = |answer: &Value| -> Vec<String> {
        answer["machines"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap().to_owned()).collect()
    };
    let (code, all) = usage("").await;
    assert_eq!((code, names(&all)), (200, vec!["a".to_owned(), "b".to_owned()]), "{all}");
    assert_eq!((&all["nodes"][0]["name"], &all["nodes"][0]["load"][1]), (&json!("node-1"), &json!(1.0)));
    assert_eq!((&all["machines"][0]["guestUsedBytes"], &all["machines"][0]["node"]), (&json!(7), &json!("node-1")));
    // A node is asked for a namespace where one of its machines is there, and tells nothing of itself then.
    let (code, none) = usage("namespaces/default/").await;
    assert_eq!((code, names(&none).len()), (200, 0), "{none}");
    world.make_vm("Always").await;
    world.make_vmi(json!({})).await;
    let (code, own) = usage("namespaces/default/").await;
    assert_eq!((code, names(&own), &own["nodes"]), (200, vec!["a".to_owned()], &json!([])), "{own}");
    // One that does not answer is named.
    let away = json!({"metadata": {"name": "node-2", "annotations": {"virtfold.io/agent-address": "127.0.0.1:1"}}});
    assert_eq!(world.ask("POST", "/api/v1/nodes", Some(away)).await.0, 201);
    let (_, all) = usage("").await;
    assert!(all["gaps"][0].as_str().unwrap().starts_with("node node-2: "), "{all}");
    assert_eq!(names(&all).len(), 2);
    assert_eq!(world.ask("PUT", "/apis/subresources.kubevirt.io/v1/usage", None).await.0, 405);
    let (code, refused) =
        world.ask_as(&Who::new("nobody", &[]), "GET", "/apis/subresources.kubevirt.io/v1/usage", None).await;
    assert_eq!(code, 403, "{refused}");
}
