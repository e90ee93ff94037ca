//! Start, stop and restart of a machine: a change of its strategy, or a request in its status.
//!
//! What is to be done is decided by pure functions on the VM and its VMI as they were read; it is written on the condition
//! that the VM did not change, and decided anew if it did.

use super::{Asked, dry_run};
use crate::admission::{at, get, items, text};
use crate::kubernetes::{self, Patched, VM, VMI};
use crate::limits;
use crate::status::Status;
use serde_json::{Value, json};

/// A change of a VM.
#[derive(Debug, Clone, PartialEq)]
enum Change {
    /// `spec.runStrategy` (or `running`).
    Strategy(&'static str),
    /// These requests, in place of all that are there.
    Requests(Vec<Value>),
    /// It waits to be done already.
    Nothing,
}

pub(super) async fn start(asked: &Asked<'_>, options: &Value) -> Result<(), Status> {
    let paused = options["paused"] == true;
    let dry = dry_run(options)?;
    change(asked, dry, |vm, vmi| decide_start(vm, vmi, paused).map(|c| (c, None))).await
}

pub(super) async fn stop(asked: &Asked<'_>, options: &Value) -> Result<(), Status> {
    let grace = seconds(options, "gracePeriod")?;
    let dry = dry_run(options)?;
    change(asked, dry, |vm, vmi| decide_stop(vm, vmi, grace)).await
}

pub(super) async fn restart(asked: &Asked<'_>, options: &Value) -> Result<(), Status> {
    let grace = seconds(options, "gracePeriodSeconds")?;
    match grace {
        Some(g) if g > 0 => {
            return Err(Status::bad_request("For force restart, only gracePeriod=0 is supported for now"));
        }
        Some(g) if g < 0 => return Err(Status::bad_request("gracePeriod has to be greater or equal to 0")),
        _ => {}
    }
    let dry = dry_run(options)?;
    change(asked, dry, |vm, vmi| decide_restart(vm, vmi, grace)).await
}

/// Why a machine is not migrated, as KubeVirt tells it of an instance that cannot be.
pub(super) async fn stays(asked: &Asked<'_>) -> Result<Status, Status> {
    let client = &asked.inner.config.client;
    kubernetes::need(client, VM, asked.namespace, asked.name).await?;
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await?;
    if phase(Some(&vmi)) != "Running" {
        return Ok(Status::conflict(VM.what, asked.name, "VM is not running"));
    }
    let conditions = items(&vmi, &["status", "conditions"]);
    let why = conditions.iter().find(|c| text(c, &["type"]) == "LiveMigratable" && text(c, &["status"]) == "False");
    let why = why.map_or_else(
        || "there is no live migration".to_owned(),
        |c| format!("cannot migrate VMI, reason: {}, message: {}", text(c, &["reason"]), text(c, &["message"])),
    );
    Ok(Status::bad_request(format!("migrate is not supported yet: {why}")))
}

/// A stored machine with what its instancetype and preference bring.
pub(super) async fn expand(asked: &Asked<'_>) -> Result<Value, Status> {
    let vm = kubernetes::need(&asked.inner.config.client, VM, asked.namespace, asked.name).await?;
    expanded(asked, &vm).await?.map_err(Status::internal)
}

/// The same for a machine in the request.
pub(super) async fn expand_body(asked: &Asked<'_>, body: axum::body::Body) -> Result<Value, Status> {
    let vm = super::options(body).await?;
    if vm == json!({}) {
        return Err(Status::bad_request("empty request body"));
    }
    let kind = text(&vm, &["kind"]);
    if !["", "VirtualMachine"].contains(&kind) || !get(&vm, &["spec", "template", "spec"]).is_object() {
        return Err(Status::bad_request("Object is not a valid VirtualMachine"));
    }
    let namespace = text(&vm, &["metadata", "namespace"]);
    if !["", asked.namespace].contains(&namespace) {
        return Err(Status::bad_request(format!("VM namespace must be empty or {}", asked.namespace)));
    }
    let mut vm = vm;
    *at(&mut vm, &["metadata", "namespace"]) = json!(asked.namespace);
    expanded(asked, &vm).await?.map_err(Status::bad_request)
}

async fn expanded(asked: &Asked<'_>, vm: &Value) -> Result<Result<Value, String>, Status> {
    let settings = asked.inner.cluster.settings();
    asked.inner.among_objects(|objects| crate::admission::expand(vm, asked.namespace, &settings, objects)).await
}

fn seconds(options: &Value, key: &str) -> Result<Option<i64>, Status> {
    match &options[key] {
        Value::Null => Ok(None),
        v => v.as_i64().map(Some).ok_or_else(|| Status::bad_request(format!("{key}: not an integer: {v}"))),
    }
}

/// What is decided: a change of the VM, and a grace period for the VMI before it.
type Decision = (Change, Option<i64>);

async fn change(
    asked: &Asked<'_>,
    dry: bool,
    decide: impl Fn(&Value, Option<&Value>) -> Result<Decision, Status>,
) -> Result<(), Status> {
    let client = &asked.inner.config.client;
    for _ in 0..limits::CONFLICTS {
        let vm = kubernetes::need(client, VM, asked.namespace, asked.name).await?;
        let vmi = kubernetes::get(client, VMI, asked.namespace, asked.name).await?;
        let (change, grace) = decide(&vm, vmi.as_ref())?;
        let undo = match (grace, &vmi) {
            (Some(g), Some(vmi)) => match set_grace(asked, vmi, Some(g), dry).await? {
                Some(undo) => undo,
                None => continue,
            },
            _ => None,
        };
        let done = apply(asked, &vm, &change, dry).await;
        if let Ok(Patched::Done(_)) = done {
            tracing::info!(
                namespace = asked.namespace,
                name = asked.name,
                ?change,
                traceparent = asked.traceparent,
                "virtual machine changed"
            );
            return Ok(());
        }
        // The grace period of a stop that did not come to pass would make a later one short.
        if let Some((vmi, before)) = undo {
            let _ = set_grace(asked, &vmi, before, dry).await;
        }
        done?;
    }
    Err(Status::conflict(
        VM.what,
        asked.name,
        "the object has been modified; please apply your changes to the latest version and try again",
    ))
}

/// Writes a change, in one patch or two.
async fn apply(asked: &Asked<'_>, vm: &Value, change: &Change, dry: bool) -> Result<Patched, Status> {
    let client = &asked.inner.config.client;
    let mut now = Patched::Done(vm.clone());
    for (subresource, operations) in operations(vm, change, &asked.user, &asked.traceparent) {
        match now {
            Patched::Done(vm) => now = kubernetes::patch(client, VM, &vm, subresource, operations, dry).await?,
            Patched::Changed => break,
        }
    }
    Ok(now)
}

/// The VMI as it is now and the grace period that it had.
type Undo = Option<(Value, Option<i64>)>;

/// Sets the grace period of an instance. `None`: the instance changed meanwhile.
async fn set_grace(asked: &Asked<'_>, vmi: &Value, grace: Option<i64>, dry: bool) -> Result<Option<Undo>, Status> {
    let path = "/spec/terminationGracePeriodSeconds";
    let before = get(vmi, &["spec", "terminationGracePeriodSeconds"]).as_i64();
    if before == grace {
        return Ok(Some(None));
    }
    let operation = match grace {
        Some(g) => json!({"op": "add", "path": path, "value": g}),
        None => json!({"op": "remove", "path": path}),
    };
    match kubernetes::patch(&asked.inner.config.client, VMI, vmi, "", vec![operation], dry).await? {
        Patched::Done(now) => Ok(Some(Some((now, before)))),
        Patched::Changed => Ok(None),
    }
}

/// The subresources and the JSON patches that make a change, in order, in the name of whoever asked for it and as a part of its trace.
fn operations(vm: &Value, change: &Change, user: &str, trace: &str) -> Vec<(&'static str, Vec<Value>)> {
    let marks = [(api::names::REQUESTED_BY, user), (api::names::ANN_TRACEPARENT, trace)];
    let named = |r: &Value| {
        let mut r = r.clone();
        // What waits already was asked for by somebody else.
        if !queue(vm).contains(&r) {
            for (name, value) in marks.iter().filter(|(_, value)| !value.is_empty()) {
                if get(&r, &["data", name]).is_null() {
                    *at(&mut r, &["data", name]) = json!(value);
                }
            }
        }
        r
    };
    let mut all = spelled(vm, change, &named);
    let marks = [(api::names::ANN_CHANGED_BY, user), (api::names::ANN_TRACEPARENT, trace)];
    if let (Change::Strategy(_), Some((_, last))) = (change, all.last_mut())
        && marks.iter().any(|(_, value)| !value.is_empty())
    {
        let mut annotations = get(vm, &["metadata", "annotations"]).clone();
        for (name, value) in marks.iter().filter(|(_, value)| !value.is_empty()) {
            *at(&mut annotations, &[name]) = json!(value);
        }
        last.push(json!({"op": "add", "path": "/metadata/annotations", "value": annotations}));
    }
    all
}

fn spelled(vm: &Value, change: &Change, named: &dyn Fn(&Value) -> Value) -> Vec<(&'static str, Vec<Value>)> {
    match change {
        Change::Nothing => vec![],
        Change::Strategy(strategy) => {
            let mut all = vec![];
            if *strategy == "Halted" && !queue(vm).is_empty() {
                // A start that waits in the queue would undo the stop.
                all.push(("status", vec![json!({"op": "remove", "path": "/status/stateChangeRequests"})]));
            }
            all.push(if get(vm, &["spec", "running"]).is_boolean() {
                ("", vec![json!({"op": "replace", "path": "/spec/running", "value": *strategy != "Halted"})])
            } else {
                ("", vec![json!({"op": "add", "path": "/spec/runStrategy", "value": strategy})])
            });
            all
        }
        Change::Requests(requests) if get(vm, &["status"]).is_object() => {
            let requests: Vec<Value> = requests.iter().map(named).collect();
            let mut all = vec![json!({"op": "add", "path": "/status/stateChangeRequests", "value": requests})];
            // Who asks by hand does not wait for the pause after failed starts.
            if get(vm, &["status", "startFailure"]).is_object() {
                all.push(json!({"op": "remove", "path": "/status/startFailure"}));
            }
            vec![("status", all)]
        }
        Change::Requests(requests) => {
            let requests: Vec<Value> = requests.iter().map(named).collect();
            let status = json!({"stateChangeRequests": requests});
            vec![("status", vec![json!({"op": "add", "path": "/status", "value": status})])]
        }
    }
}

fn name(vm: &Value) -> &str {
    text(vm, &["metadata", "name"])
}

fn conflict(vm: &Value, why: impl std::fmt::Display) -> Status {
    Status::conflict(VM.what, name(vm), why)
}

/// The strategy in effect.
fn strategy(vm: &Value) -> &str {
    match get(vm, &["spec", "running"]).as_bool() {
        Some(true) => "Always",
        Some(false) => "Halted",
        None => Some(text(vm, &["spec", "runStrategy"])).filter(|s| !s.is_empty()).unwrap_or("Halted"),
    }
}

fn phase(vmi: Option<&Value>) -> &str {
    vmi.map(|v| text(v, &["status", "phase"])).unwrap_or_default()
}

fn is_final(vmi: &Value) -> bool {
    matches!(phase(Some(vmi)), "Succeeded" | "Failed")
}

fn live(vmi: Option<&Value>) -> Option<&Value> {
    vmi.filter(|v| !is_final(v))
}

fn condition(object: &Value, kind: &str) -> bool {
    items(object, &["status", "conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == kind && text(c, &["status"]) == "True")
}

fn stop_request(vmi: &Value) -> Value {
    json!({"action": "Stop", "uid": text(vmi, &["metadata", "uid"])})
}

fn queue(vm: &Value) -> &[Value] {
    items(vm, &["status", "stateChangeRequests"])
}

/// Puts requests into the queue. What waits there already is not asked for twice; what is something else has to be done
/// first.
fn enqueue(vm: &Value, wished: Vec<Value>) -> Result<Change, Status> {
    let waiting = queue(vm);
    let essence = |r: &Value| {
        let paused = text(r, &["data", "paused"]) == "true";
        (text(r, &["action"]).to_owned(), text(r, &["uid"]).to_owned(), paused)
    };
    if waiting.is_empty() {
        Ok(Change::Requests(wished))
    } else if !waiting.iter().map(essence).eq(wished.iter().map(essence)) {
        Err(Status::internal("unable to complete request: stop/start already underway"))
    } else if get(vm, &["status", "startFailure"]).is_object() {
        Ok(Change::Requests(waiting.to_vec()))
    } else {
        Ok(Change::Nothing)
    }
}

fn decide_start(vm: &Value, vmi: Option<&Value>, paused: bool) -> Result<Change, Status> {
    if live(vmi).is_some() && !matches!(phase(vmi), "" | "Unknown") {
        return Err(conflict(vm, "VM is already running"));
    }
    if condition(vm, "ManualRecoveryRequired") {
        return Err(conflict(vm, "VM cannot be started: manual recovery is required"));
    }
    let mut start = json!({"action": "Start"});
    if paused {
        start["data"] = json!({"paused": "true"});
    }
    let ended = vmi.filter(|v| is_final(v));
    match strategy(vm) {
        "Halted" if paused => enqueue(vm, vec![start]),
        "Halted" => Ok(Change::Strategy("Always")),
        "RerunOnFailure" if phase(vmi) == "Failed" => {
            Err(conflict(vm, "RerunOnFailure does not support starting VM from failed state"))
        }
        "RerunOnFailure" | "Manual" => enqueue(vm, ended.map(stop_request).into_iter().chain([start]).collect()),
        other => Err(conflict(vm, format_args!("{other} does not support manual start requests"))),
    }
}

fn decide_stop(vm: &Value, vmi: Option<&Value>, grace: Option<i64>) -> Result<Decision, Status> {
    let running = live(vmi);
    let grace_now = running.map(|v| {
        get(v, &["spec", "terminationGracePeriodSeconds"]).as_i64().unwrap_or(api::names::DEFAULT_GRACE_SECONDS)
    });
    if grace.is_some_and(|g| g < 0) {
        return Err(Status::bad_request("gracePeriod has to be greater or equal to 0"));
    }
    let wished = grace.filter(|_| running.is_some());
    let strategy = strategy(vm);
    match (strategy, running) {
        ("Halted" | "Manual" | "RerunOnFailure", None) => Err(conflict(vm, "VM is not running")),
        ("Halted", Some(vmi)) => {
            if grace.is_none_or(|g| Some(g) >= grace_now) {
                return Err(conflict(vm, "Halted only supports manual stop requests with a shorter graceperiod"));
            }
            Ok((Change::Requests(vec![stop_request(vmi)]), wished))
        }
        ("Manual" | "RerunOnFailure" | "WaitAsReceiver", Some(vmi)) => {
            Ok((Change::Requests(vec![stop_request(vmi)]), wished))
        }
        ("Always" | "Once", _) => Ok((Change::Strategy("Halted"), wished)),
        (other, _) => Err(conflict(vm, format_args!("{other} does not support manual stop requests"))),
    }
}

fn decide_restart(vm: &Value, vmi: Option<&Value>, grace: Option<i64>) -> Result<Decision, Status> {
    if condition(vm, "VolumesChange") {
        return Err(conflict(vm, "VM recovery required: volumes are being changed"));
    }
    let strategy = strategy(vm);
    if matches!(strategy, "Halted" | "Once") {
        return Err(conflict(vm, format_args!("{strategy} does not support manual restart requests")));
    }
    let Some(vmi) = vmi else { return Err(conflict(vm, "VM is not running")) };
    Ok((enqueue(vm, vec![stop_request(vmi), json!({"action": "Start"})])?, grace.map(|_| 1)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn vm(strategy: &str) -> Value {
        json!({"metadata": {"name": "a"}, "spec": {"runStrategy": strategy}, "status": {}})
    }
    fn vmi(phase: &str) -> Value {
        json!({"metadata": {"name": "a", "uid": "u"}, "spec": {"terminationGracePeriodSeconds": 30}, "status": {"phase": phase}})
    }
    fn start_() -> Value {
        json!({"action": "Start"})
    }
    fn stop_() -> Value {
        json!({"action": "Stop", "uid": "u"})
    }

    /// Strategy, phase of the instance, whether paused, and what follows.
    type Row = (&'static str, Option<&'static str>, bool, Result<Change, &'static str>);

    #[test]
    fn starts() {
        let table: &[Row] = &[
            ("Halted", None, false, Ok(Change::Strategy("Always"))),
            ("Halted", None, true, Ok(Change::Requests(vec![json!({"action": "Start", "data": {"paused": "true"}})]))),
            ("Halted", Some("Succeeded"), false, Ok(Change::Strategy("Always"))),
            ("Halted", Some("Running"), false, Err("VM is already running")),
            ("Always", None, false, Err("Always does not support manual start requests")),
            ("Always", Some("Scheduling"), false, Err("VM is already running")),
            ("Once", Some("Failed"), false, Err("Once does not support manual start requests")),
            ("Manual", None, false, Ok(Change::Requests(vec![start_()]))),
            ("Manual", Some("Failed"), false, Ok(Change::Requests(vec![stop_(), start_()]))),
            (
                "RerunOnFailure",
                Some("Failed"),
                false,
                Err("RerunOnFailure does not support starting VM from failed state"),
            ),
            ("RerunOnFailure", Some("Succeeded"), false, Ok(Change::Requests(vec![stop_(), start_()]))),
        ];
        for (strategy, phase, paused, want) in table {
            let i = phase.map(vmi);
            let got = decide_start(&vm(strategy), i.as_ref(), *paused);
            match (got, want) {
                (Ok(c), Ok(w)) => assert_eq!(c, *w, "{strategy} {phase:?}"),
                (Err(s), Err(m)) => {
                    assert_eq!(s.code, 409);
                    assert_eq!(
                        s.message,
                        format!("Operation cannot be fulfilled on virtualmachine.kubevirt.io \"a\": {m}")
                    );
                }
                (got, want) => panic!("{strategy} {phase:?}: {got:?}, wanted {want:?}"),
            }
        }
    }

    #[test]
    fn stops() {
        let run =
            |s: &str, p: Option<&str>, g: Option<i64>| decide_stop(&vm(s), p.map(vmi).as_ref(), g).map_err(|e| e.code);
        let stop = Change::Requests(vec![stop_()]);
        assert_eq!(run("Always", Some("Running"), None), Ok((Change::Strategy("Halted"), None)));
        assert_eq!(run("Always", None, Some(0)), Ok((Change::Strategy("Halted"), None)));
        assert_eq!(run("Once", Some("Running"), Some(5)), Ok((Change::Strategy("Halted"), Some(5))));
        assert_eq!(run("Manual", Some("Running"), None), Ok((stop.clone(), None)));
        assert_eq!(run("Manual", None, None), Err(409));
        assert_eq!(run("RerunOnFailure", Some("Failed"), None), Err(409));
        assert_eq!(run("Halted", Some("Running"), None), Err(409));
        assert_eq!(run("Halted", Some("Running"), Some(30)), Err(409));
        assert_eq!(run("Halted", Some("Running"), Some(0)), Ok((stop, Some(0))));
    }

    #[test]
    fn restarts() {
        let both = Change::Requests(vec![stop_(), start_()]);
        let run =
            |v: Value, p: Option<&str>, g: Option<i64>| decide_restart(&v, p.map(vmi).as_ref(), g).map_err(|e| e.code);
        assert_eq!(run(vm("Always"), Some("Running"), None), Ok((both.clone(), None)));
        assert_eq!(run(vm("Always"), Some("Running"), Some(0)), Ok((both, Some(1))));
        assert_eq!(run(vm("Always"), None, None), Err(409));
        assert_eq!(run(vm("Halted"), Some("Running"), None), Err(409));
        let mut queued = vm("Manual");
        queued["status"]["stateChangeRequests"] = json!([start_()]);
        assert_eq!(run(queued, Some("Running"), None), Err(500));
        // The same restart once more, also a harder one, is the one that waits.
        let mut twice = vm("Manual");
        twice["status"]["stateChangeRequests"] = json!([stop_(), start_()]);
        assert_eq!(run(twice.clone(), Some("Running"), None), Ok((Change::Nothing, None)));
        assert_eq!(run(twice, Some("Running"), Some(0)), Ok((Change::Nothing, Some(1))));
        let mut changing = vm("Always");
        changing["status"]["conditions"] = json!([{"type": "VolumesChange", "status": "True"}]);
        assert_eq!(run(changing, Some("Running"), None), Err(409));
    }

    #[test]
    fn a_start_that_waits_is_not_asked_for_twice_and_a_pause_after_failures_ends() {
        let mut waiting = vm("RerunOnFailure");
        waiting["status"]["stateChangeRequests"] = json!([{"action": "Start", "data": {"virtfold.io/rerun-of": "u"}}]);
        assert_eq!(decide_start(&waiting, None, false).unwrap(), Change::Nothing);
        assert_eq!(decide_start(&waiting, None, true).unwrap_err().code, 500);
        waiting["status"]["startFailure"] = json!({"consecutiveFailCount": 3});
        let change = decide_start(&waiting, None, false).unwrap();
        let [(sub, ops)] = &operations(&waiting, &change, "ann", "")[..] else { panic!("{change:?}") };
        assert_eq!((*sub, ops.len()), ("status", 2));
        assert_eq!(ops[0]["value"], waiting["status"]["stateChangeRequests"]);
        assert_eq!(ops[1], json!({"op": "remove", "path": "/status/startFailure"}));
    }

    #[test]
    fn patches() {
        let halt = Change::Strategy("Halted");
        assert_eq!(
            operations(&json!({"spec": {"running": true}}), &halt, "ann", ""),
            [(
                "",
                vec![
                    json!({"op": "replace", "path": "/spec/running", "value": false}),
                    json!({"op": "add", "path": "/metadata/annotations", "value": {"virtfold.io/changed-by": "ann"}}),
                ]
            )]
        );
        let ops = operations(&json!({"spec": {}}), &Change::Requests(vec![start_()]), "ann", "");
        assert_eq!((ops.len(), ops[0].0, ops[0].1.len()), (1, "status", 1));
        assert_eq!(ops[0].1[0]["path"], "/status");
        let request = json!({"action": "Start", "data": {"virtfold.io/requested-by": "ann"}});
        assert_eq!(ops[0].1[0]["value"]["stateChangeRequests"], json!([request]));
        // A stop takes a restart that waits along, before it changes the strategy.
        let mut restarting = vm("Always");
        restarting["status"]["stateChangeRequests"] = json!([start_()]);
        let ops = operations(&restarting, &halt, "ann", "");
        assert_eq!(ops[0], ("status", vec![json!({"op": "remove", "path": "/status/stateChangeRequests"})]));
        assert_eq!(ops[1].1[0]["path"], "/spec/runStrategy");
        assert_eq!(operations(&restarting, &Change::Strategy("Always"), "ann", "").len(), 1);
        // Both kinds of change carry the trace of whoever asks.
        let [(_, ops)] = &operations(&json!({"spec": {}}), &Change::Requests(vec![start_()]), "", "t")[..] else {
            panic!()
        };
        assert_eq!(ops[0]["value"]["stateChangeRequests"][0]["data"], json!({api::names::ANN_TRACEPARENT: "t"}));
        let [(_, ops)] = &operations(&json!({"spec": {}}), &Change::Strategy("Always"), "", "t")[..] else { panic!() };
        assert_eq!(ops[1]["value"], json!({api::names::ANN_TRACEPARENT: "t"}));
    }
}
