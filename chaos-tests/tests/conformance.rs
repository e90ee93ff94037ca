//! The model's API server and the embedded one answer the same calls in the same way.

use chaos_tests::world::{
    api::Verb,
    server::{Res, Server, Wanted},
    users::machine,
};
use embedded::{
    auth::User,
    semantics::{
        Moment, Status, patch,
        write::{DeleteOptions, Part, Propagation},
    },
    server::{ApiServer, Config},
    storage::Memory,
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};

const NS: &str = "default";

fn path(res: Res, name: &str) -> String {
    let r = res.resource();
    let root = if r.group.is_empty() { "/api/v1".into() } else { format!("/apis/{}/{}", r.group, r.version) };
    let place =
        if r.namespaced { format!("{root}/namespaces/{NS}/{}", r.plural) } else { format!("{root}/{}", r.plural) };
    if name.is_empty() { place } else { format!("{place}/{name}") }
}

/// The object, or code and message of the refusal.
type Answer = Result<Value, (u16, String)>;

async fn real(client: &kube::Client, verb: &Verb) -> Answer {
    let request = |method: &str, path: String, kind: &str, body: &Value| {
        let body = if body.is_null() { vec![] } else { serde_json::to_vec(body).unwrap() };
        http::Request::builder().method(method).uri(path).header("content-type", kind).body(body).unwrap()
    };
    let json_kind = "application/json";
    let request = match verb {
        Verb::Get(res, _, n) => request("GET", path(*res, n), json_kind, &Value::Null),
        Verb::List(res, _) => request("GET", path(*res, ""), json_kind, &Value::Null),
        Verb::Create(res, _, object) => request("POST", path(*res, ""), json_kind, object),
        Verb::Change(res, _, n, part, wanted) => {
            let sub = if *part == Part::Status { "/status" } else { "" };
            let path = format!("{}{sub}", path(*res, n));
            match wanted {
                Wanted::Whole(object) => request("PUT", path, json_kind, object),
                Wanted::Patch(patch::Kind::Merge, body) => request("PATCH", path, "application/merge-patch+json", body),
                Wanted::Patch(patch::Kind::Json, body) => request("PATCH", path, "application/json-patch+json", body),
                Wanted::Patch(patch::Kind::Apply, body) => request("PATCH", path, "application/apply-patch+yaml", body),
                Wanted::Patch(patch::Kind::Strategic, body) => {
                    request("PATCH", path, "application/strategic-merge-patch+json", body)
                }
            }
        }
        Verb::Delete(res, _, n, options) => {
            let mut body = json!({"kind": "DeleteOptions", "apiVersion": "v1"});
            if let Some(uid) = &options.uid {
                body["preconditions"] = json!({"uid": uid});
            }
            if let Some(grace) = options.grace {
                body["gracePeriodSeconds"] = json!(grace);
            }
            if options.propagation == Some(Propagation::Background) {
                body["propagationPolicy"] = json!("Background");
            }
            request("DELETE", path(*res, n), json_kind, &body)
        }
    };
    match client.request_text(request).await {
        Ok(text) => Ok(serde_json::from_str(&text).unwrap()),
        Err(kube::Error::Api(s)) => Err((s.code, s.message.clone())),
        Err(other) => panic!("{other}"),
    }
}

fn model(server: &mut Server, verb: &Verb, moment: &Moment) -> Answer {
    let refused = |s: Status| (s.code, s.message);
    let gone = json!({"status": "Success"});
    match verb.clone() {
        Verb::Get(res, ns, n) => {
            let r = res.resource();
            let found = server.get(res, &ns, &n).map(|o| o.value.clone());
            found.ok_or_else(|| refused(Status::not_found(&r.group, &r.plural, &n)))
        }
        Verb::List(res, ns) => {
            let all = server.list(res, 0).map(|(all, _)| all).map_err(refused)?;
            Ok(
                json!({"items": all.iter().filter(|o| o.namespace() == ns).map(|o| o.value.clone()).collect::<Vec<_>>()}),
            )
        }
        Verb::Create(res, ns, object) => {
            server.create(res, &ns, object, moment).map(|o| o.value.clone()).map_err(refused)
        }
        Verb::Change(res, ns, n, part, wanted) => {
            server.change(res, &ns, &n, part, &wanted).map(|o| o.value.clone()).map_err(refused)
        }
        Verb::Delete(res, ns, n, options) => {
            let done = server.delete(res, &ns, &n, &options, moment).map_err(refused);
            done.map(|(o, over)| if over && res != Res::Pod { gone } else { o.value.clone() })
        }
    }
}

/// What cannot be equal made comparable: UIDs by the order in which they appear, versions and times by their presence.
#[derive(Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    fn of(&mut self, uid: &str) -> String {
        let n = self.0.len();
        self.0.entry(uid.to_owned()).or_insert_with(|| format!("uid-{n}")).clone()
    }

    fn plain(&mut self, answer: Answer) -> Answer {
        match answer {
            Ok(mut object) => {
                if let Some(m) = object.get_mut("metadata").and_then(Value::as_object_mut) {
                    // Who owns what is not asked in the model.
                    m.remove("managedFields");
                    for key in ["resourceVersion", "creationTimestamp", "deletionTimestamp"] {
                        if let Some(v) = m.get_mut(key) {
                            *v = json!("there");
                        }
                    }
                    if let Some(Value::String(uid)) = m.get("uid").cloned() {
                        m.insert("uid".into(), json!(self.of(&uid)));
                    }
                }
                // Admission, which the model does not have, fills these in.
                if object["kind"] == "Pod"
                    && let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut)
                {
                    for key in ["preemptionPolicy", "priority", "serviceAccount", "serviceAccountName", "tolerations"] {
                        spec.remove(key);
                    }
                }
                if object["status"] == "Success" {
                    object = json!({"status": "Success"});
                }
                Ok(object)
            }
            Err((code, mut message)) => {
                for (uid, name) in &self.0 {
                    message = message.replace(uid, name);
                }
                Err((code, message))
            }
        }
    }
}

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 7,
        "containers": [{"name": "compute", "image": "x"}]}})
}

/// A call, made when the answers so far are known.
type Step = Box<dyn Fn(&[Answer]) -> Verb>;

fn uid_of(answers: &[Answer], n: usize) -> String {
    answers[n].as_ref().unwrap()["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn version_of(answers: &[Answer], n: usize) -> String {
    answers[n].as_ref().unwrap()["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

fn script() -> Vec<Step> {
    let merge = |res, n: &'static str, part, body: Value| -> Step {
        Box::new(move |_| Verb::merge(res, NS, n, part, body.clone()))
    };
    let get = |res, n: &'static str| -> Step { Box::new(move |_| Verb::Get(res, NS.into(), n.into())) };
    vec![
        Box::new(|_| Verb::Create(Res::Vm, NS.into(), machine("web", "Always", 5))),
        // Twice is a conflict.
        Box::new(|_| Verb::Create(Res::Vm, NS.into(), machine("web", "Always", 5))),
        get(Res::Vm, "web"),
        get(Res::Vm, "none"),
        // The spec raises the generation, the status does not, and each leaves the other alone.
        merge(Res::Vm, "web", Part::Main, json!({"spec": {"runStrategy": "Halted"}, "status": {"ready": true}})),
        merge(
            Res::Vm,
            "web",
            Part::Status,
            json!({"spec": {"runStrategy": "Once"}, "status": {"printableStatus": "Stopped"}}),
        ),
        // Nothing changes.
        merge(Res::Vm, "web", Part::Status, json!({"status": {"printableStatus": "Stopped"}})),
        // An old version, a foreign UID.
        Box::new(|a| {
            let body = json!({"metadata": {"resourceVersion": version_of(a, 0)}, "spec": {"runStrategy": "Manual"}});
            Verb::merge(Res::Vm, NS, "web", Part::Main, body)
        }),
        merge(Res::Vm, "web", Part::Main, json!({"metadata": {"uid": "other"}, "spec": {"runStrategy": "Manual"}})),
        Box::new(|a| {
            let ops = json!([{"op": "test", "path": "/metadata/uid", "value": uid_of(a, 0)},
                {"op": "add", "path": "/status/stateChangeRequests", "value": [{"action": "Start"}]}]);
            Verb::Change(Res::Vm, NS.into(), "web".into(), Part::Status, Wanted::Patch(patch::Kind::Json, ops))
        }),
        // PUT needs a version.
        Box::new(|_| {
            Verb::Change(Res::Vm, NS.into(), "web".into(), Part::Main, Wanted::Whole(machine("web", "Always", 5)))
        }),
        // Deletion: a wrong UID, then marked while a finalizer holds it, then gone with the last one.
        Box::new(|_| Verb::delete(Res::Vm, NS, "web", "other")),
        Box::new(|a| Verb::delete(Res::Vm, NS, "web", &uid_of(a, 0))),
        Box::new(|a| Verb::delete(Res::Vm, NS, "web", &uid_of(a, 0))),
        merge(
            Res::Vm,
            "web",
            Part::Main,
            json!({"metadata": {"finalizers": ["a/b", "kubevirt.io/virtualMachineControllerFinalize"]}}),
        ),
        merge(Res::Vm, "web", Part::Main, json!({"metadata": {"finalizers": null}})),
        get(Res::Vm, "web"),
        // The name is free again.
        Box::new(|_| Verb::Create(Res::Vm, NS.into(), machine("web", "Halted", 5))),
        // VMIs have no status subresource; pods have grace.
        Box::new(|_| {
            let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "bare"}, "spec": {"domain": {"devices": {}}}, "status": {"phase": "Pending"}});
            Verb::Create(Res::Vmi, NS.into(), object)
        }),
        merge(Res::Vmi, "bare", Part::Main, json!({"status": {"phase": "Scheduled", "activePods": {"p": "n"}}})),
        Box::new(|_| Verb::Create(Res::Pod, NS.into(), pod("p"))),
        merge(Res::Pod, "p", Part::Status, json!({"status": {"phase": "Running"}})),
        Box::new(|_| {
            let body = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
            Verb::Change(Res::Pod, NS.into(), "p".into(), Part::Status, Wanted::Patch(patch::Kind::Strategic, body))
        }),
        merge(Res::Pod, "p", Part::Main, json!({"spec": {"nodeName": "m"}})),
        Box::new(|a| Verb::delete(Res::Pod, NS, "p", &uid_of(a, 20))),
        Box::new(|a| {
            let options = DeleteOptions { grace: Some(0), uid: Some(uid_of(a, 20)), ..DeleteOptions::default() };
            Verb::Delete(Res::Pod, NS.into(), "p".into(), options)
        }),
        get(Res::Pod, "p"),
        Box::new(|_| {
            Verb::Create(Res::Pod, NS.into(), json!({"metadata": {"name": "Bad_Name"}, "spec": {"containers": []}}))
        }),
        // A Lease is taken by whoever read it last.
        Box::new(|_| {
            Verb::Create(Res::Lease, NS.into(), json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}}))
        }),
        Box::new(|a| {
            let mut lease = a[28].clone().unwrap();
            lease["spec"]["holderIdentity"] = json!("b");
            Verb::Change(Res::Lease, NS.into(), "l".into(), Part::Main, Wanted::Whole(lease))
        }),
        Box::new(|a| {
            let mut lease = a[28].clone().unwrap();
            lease["spec"]["holderIdentity"] = json!("c");
            Verb::Change(Res::Lease, NS.into(), "l".into(), Part::Main, Wanted::Whole(lease))
        }),
    ]
}

/// Kinds of events and names, in order, as a watch from the beginning tells them.
async fn watched(client: &kube::Client, res: Res, from: &str) -> Vec<(String, String)> {
    let uri = format!("{}?watch=1&resourceVersion={from}&timeoutSeconds=1", path(res, ""));
    let text = client.request_text(http::Request::get(uri).body(vec![]).unwrap()).await.unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines
        .filter(|e| e["type"] != "BOOKMARK")
        .map(|e| {
            let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
            (text(&e["type"]), text(&e["object"]["metadata"]["name"]))
        })
        .collect()
}

#[tokio::test]
async fn the_model_answers_as_the_embedded_server_does() {
    let embedded = ApiServer::new(Arc::new(Memory::new()), Config::default()).await.unwrap();
    let client = embedded.client(User::new("admin", &["system:masters"]));
    for crd in api::crd::all() {
        let request = http::Request::post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions");
        let body = serde_json::to_vec(&crd).unwrap();
        client.request_text(request.header("content-type", "application/json").body(body).unwrap()).await.unwrap();
    }
    let list = client.request_text(http::Request::get(path(Res::Vm, "")).body(vec![]).unwrap()).await.unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let from = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();

    let mut server = Server::default();
    let (mut theirs, mut ours): (Vec<Answer>, Vec<Answer>) = (vec![], vec![]);
    let (mut their_names, mut our_names) = (Names::default(), Names::default());
    for (n, step) in script().iter().enumerate() {
        let verb = step(&theirs);
        let moment = Moment { seconds: 1_767_225_600, uid: format!("model-{n}"), suffix: "abcde".into() };
        theirs.push(real(&client, &verb).await);
        ours.push(model(&mut server, &step(&ours), &moment));
        let (a, b) = (their_names.plain(theirs[n].clone()), our_names.plain(ours[n].clone()));
        assert_eq!(a, b, "call {n}: {}", verb.name());
    }
    assert!(theirs.iter().filter(|a| a.is_err()).count() >= 9, "the script has refusals");

    for res in [Res::Vm, Res::Vmi, Res::Pod, Res::Lease] {
        let (commits, _) = server.changes(res, 0, u64::MAX).unwrap();
        let ours: Vec<(String, String)> = commits
            .iter()
            .map(|c| {
                let kind = if c.gone {
                    "DELETED"
                } else if c.before.is_some() {
                    "MODIFIED"
                } else {
                    "ADDED"
                };
                (kind.to_owned(), c.now.name().to_owned())
            })
            .collect();
        assert_eq!(watched(&client, res, &from).await, ours, "{res:?}");
        assert!(!ours.is_empty());
    }
}
