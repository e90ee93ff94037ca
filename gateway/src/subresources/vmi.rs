//! Verbs on a running instance: checked here, carried out by the agent of its node.

use super::{Asked, dry_run, json_response, options};
use crate::admission::{get, items, text};
use crate::kubernetes::{self, Patched, VM, VMI};
use crate::limits;
use crate::status::Status;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::{Value, json};

/// Pause, unpause, freeze, unfreeze, reset, softreboot.
pub(super) async fn verb(asked: &Asked<'_>, verb: &str, options: &Value) -> Result<Response, Status> {
    let client = &asked.inner.config.client;
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await?;
    if verb == "unpause" {
        let vm = kubernetes::get(client, VM, asked.namespace, asked.name).await?;
        if vm.is_some_and(|v| !text(&v, &["status", "snapshotInProgress"]).is_empty()) {
            return Err(Status::conflict(VMI.what, asked.name, "VM snapshot is in progress"));
        }
    }
    let dry = dry_run(options)?;
    allowed(verb, &vmi, asked.name, dry)?;
    if dry {
        return Ok(StatusCode::OK.into_response());
    }
    let body = serde_json::to_vec(options).map_err(Status::internal)?;
    let reply = asked.inner.agents.verb(client, &vmi, verb, body, asked.traceparent.clone()).await?;
    tracing::info!(
        namespace = asked.namespace,
        name = asked.name,
        verb,
        ok = reply.ok,
        reason = reply.reason,
        traceparent = asked.traceparent,
        "verb"
    );
    if reply.ok {
        return Ok(StatusCode::OK.into_response());
    }
    // The agent knows better than the VMI that was read a moment ago.
    Err(match reply.reason.as_str() {
        "already-paused" => Status::conflict(VMI.what, asked.name, "VMI is already paused"),
        "not-paused" => Status::conflict(VMI.what, asked.name, "VMI is not paused"),
        "not-running" | "not-found" => Status::conflict(VMI.what, asked.name, "VMI is not running"),
        "unsupported" => Status::bad_request(format!("{verb} is not supported: {}", reply.message)),
        _ => Status::internal(format_args!("{verb}: {}", reply.message)),
    })
}

/// What the VMI must be for a verb.
fn allowed(verb: &str, vmi: &Value, name: &str, dry: bool) -> Result<(), Status> {
    let phase = text(vmi, &["status", "phase"]);
    let running = phase == "Running";
    let conflict = |why: &str| Err(Status::conflict(VMI.what, name, why));
    let condition = |kind: &str| {
        items(vmi, &["status", "conditions"])
            .iter()
            .any(|c| text(c, &["type"]) == kind && text(c, &["status"]) == "True")
    };
    match verb {
        "pause" => {
            let probe = get(vmi, &["spec", "livenessProbe"]);
            if !running {
                return conflict("VM is not running");
            }
            if probe.is_object() && !get(probe, &["guestAgentPing"]).is_object() {
                return Err(Status::forbidden(
                    VMI.what,
                    name,
                    "Pausing VMIs with LivenessProbe is currently not supported",
                ));
            }
            // Whether it is paused its launcher knows; the condition says what a controller heard, which may be away.
            if dry && condition("Paused") { conflict("VMI is already paused") } else { Ok(()) }
        }
        "unpause" if !running => conflict("VMI is not running"),
        "unpause" if dry && !condition("Paused") => conflict("VMI is not paused"),
        "reset" if !running && phase != "Scheduled" => Err(Status::bad_request(format!("{phase}: VMI is not running"))),
        "freeze" | "unfreeze" | "softreboot" if !running => conflict("VM is not running"),
        "softreboot" if condition("Paused") => conflict("VMI is paused"),
        "softreboot"
            if !condition("AgentConnected")
                && get(vmi, &["spec", "domain", "features", "acpi", "enabled"]) == false =>
        {
            conflict("VMI neither have the agent connected nor the ACPI feature enabled")
        }
        _ => Ok(()),
    }
}

/// Why an instance has not what a stream or a backup needs: nothing that asks for it is admitted.
pub(super) async fn lacks(asked: &Asked<'_>, what: &str) -> Result<Status, Status> {
    let vmi = kubernetes::need(&asked.inner.config.client, VMI, asked.namespace, asked.name).await?;
    let conflict =
        |why: &str| Status::conflict(VMI.what, asked.name, format_args!("{what} is not supported yet: {why}"));
    Ok(match what {
        "vsock" => Status::bad_request("vsock is not supported yet: VSOCK is not attached"),
        "usbredir" => conflict("not configured with USB redirection"),
        _ if text(&vmi, &["status", "phase"]) != "Running" => conflict("VMI is not running"),
        _ => conflict("changed block tracking is not enabled"),
    })
}

/// Takes back that an instance has to leave its node.
pub(super) async fn cancel_evacuation(asked: &Asked<'_>, body: Body) -> Result<Response, Status> {
    let client = &asked.inner.config.client;
    let options = options(body).await?;
    if options.as_object().is_some_and(serde_json::Map::is_empty) {
        return Err(Status::bad_request("Request with no body: name the node in evacuationNodeName"));
    }
    let dry = dry_run(&options)?;
    let given = text(&options, &["evacuationNodeName"]);
    for _ in 0..limits::CONFLICTS {
        let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await?;
        let marked = text(&vmi, &["status", "evacuationNodeName"]);
        if marked.is_empty() {
            return Ok(StatusCode::OK.into_response());
        }
        if !given.is_empty() && given != marked {
            let why = format_args!("it is evacuated from node {marked:?}, not from {given:?}");
            return Err(Status::conflict(VMI.what, asked.name, why));
        }
        let node = kubernetes::node(client, marked).await?.unwrap_or_default();
        if items(&node, &["spec", "taints"]).iter().any(|t| text(t, &["key"]) == api::names::TAINT_DRAIN) {
            return Err(Status::bad_request(format!(
                "node {marked:?} is being drained: it has the taint {}",
                api::names::TAINT_DRAIN
            )));
        }
        let operations = vec![json!({"op": "remove", "path": "/status/evacuationNodeName"})];
        if let Patched::Done(_) = kubernetes::patch(client, VMI, &vmi, "", operations, dry).await? {
            return Ok(StatusCode::OK.into_response());
        }
    }
    Err(Status::conflict(VMI.what, asked.name, "the object has been modified; please try again"))
}

/// guestosinfo, userlist, filesystemlist. Refusals are plain text with 500, which clients of KubeVirt know.
pub(super) async fn guest(asked: &Asked<'_>, verb: &str) -> Response {
    match ask(asked, verb).await {
        Ok(body) => json_response(&body),
        Err(message) => plain(message),
    }
}

/// What the screen shows, as PNG.
pub(super) async fn screenshot(asked: &Asked<'_>) -> Response {
    let shot = async {
        let vmi = running(asked).await?;
        if get(&vmi, &["spec", "domain", "devices", "autoattachGraphicsDevice"]) == false {
            return Err("No graphics devices are present.".to_owned());
        }
        carried_out(asked, &vmi, "screenshot").await
    };
    match shot.await {
        Ok(image) => ([(header::CONTENT_TYPE, "image/png")], image).into_response(),
        Err(message) => plain(message),
    }
}

fn plain(message: String) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], message).into_response()
}

async fn running(asked: &Asked<'_>) -> Result<Value, String> {
    let client = &asked.inner.config.client;
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await.map_err(|s| s.message)?;
    if text(&vmi, &["status", "phase"]) != "Running" {
        return Err(format!(
            "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io {:?}: VMI is not running",
            asked.name
        ));
    }
    Ok(vmi)
}

async fn carried_out(asked: &Asked<'_>, vmi: &Value, verb: &str) -> Result<Bytes, String> {
    let client = &asked.inner.config.client;
    let sent = asked.inner.agents.verb(client, vmi, verb, Vec::new(), asked.traceparent.clone()).await;
    let reply = sent.map_err(|s| s.message)?;
    if reply.ok { Ok(reply.body) } else { Err(reply.message) }
}

async fn ask(asked: &Asked<'_>, verb: &str) -> Result<Value, String> {
    let vmi = running(asked).await?;
    let connected = items(&vmi, &["status", "conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == "AgentConnected" && text(c, &["status"]) == "True");
    if !connected {
        return Err(format!(
            "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io {:?}: VMI does not have guest agent connected",
            asked.name
        ));
    }
    let body = carried_out(asked, &vmi, verb).await?;
    serde_json::from_slice(&body).map_err(|e| format!("{verb}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preconditions() {
        let v = |phase: &str, conditions: &[&str]| json!({"status": {"phase": phase, "conditions": conditions.iter().map(|c| json!({"type": c, "status": "True"})).collect::<Vec<_>>()}});
        let mut probed = v("Running", &[]);
        probed["spec"] = json!({"livenessProbe": {"tcpSocket": {"port": 1}}});
        let mut no_acpi = v("Running", &[]);
        no_acpi["spec"] = json!({"domain": {"features": {"acpi": {"enabled": false}}}});
        for (verb, vmi, code) in [
            ("pause", v("Running", &[]), 0),
            ("pause", v("Scheduled", &[]), 409),
            ("pause", v("Running", &["Paused"]), 409),
            ("pause", probed, 403),
            ("unpause", v("Running", &[]), 409),
            ("unpause", v("Running", &["Paused"]), 0),
            ("unpause", v("Failed", &["Paused"]), 409),
            ("reset", v("Pending", &[]), 400),
            ("reset", v("Scheduled", &[]), 0),
            ("softreboot", v("Running", &["Paused"]), 409),
            ("softreboot", no_acpi, 409),
            ("softreboot", v("Running", &[]), 0),
            ("freeze", v("Succeeded", &[]), 409),
        ] {
            assert_eq!(allowed(verb, &vmi, "a", true).err().map_or(0, |s| s.code), code, "{verb} {vmi}");
        }
        // Whether it is paused is its launcher's to say.
        assert!(allowed("pause", &v("Running", &["Paused"]), "a", false).is_ok());
        assert!(allowed("unpause", &v("Running", &[]), "a", false).is_ok());
    }
}
