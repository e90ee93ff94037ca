//! Verbs on a running instance: checked here, carried out by the agent of its node.

use super::{Asked, dry_run, json_response};
use crate::admission::{get, items, text};
use crate::kubernetes::{self, VM, VMI};
use crate::status::Status;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::Value;

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
    allowed(verb, &vmi, asked.name)?;
    if dry_run(options)? {
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
fn allowed(verb: &str, vmi: &Value, name: &str) -> Result<(), Status> {
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
            if condition("Paused") { conflict("VMI is already paused") } else { Ok(()) }
        }
        "unpause" if !running => conflict("VMI is not running"),
        "unpause" if !condition("Paused") => conflict("VMI is not paused"),
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

/// guestosinfo, userlist, filesystemlist. Refusals are plain text with 500, which clients of KubeVirt know.
pub(super) async fn guest(asked: &Asked<'_>, verb: &str) -> Response {
    match ask(asked, verb).await {
        Ok(body) => json_response(&body),
        Err(message) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], message).into_response()
        }
    }
}

async fn ask(asked: &Asked<'_>, verb: &str) -> Result<Value, String> {
    let client = &asked.inner.config.client;
    let vmi = kubernetes::need(client, VMI, asked.namespace, asked.name).await.map_err(|s| s.message)?;
    if text(&vmi, &["status", "phase"]) != "Running" {
        return Err(format!(
            "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io {:?}: VMI is not running",
            asked.name
        ));
    }
    let connected = items(&vmi, &["status", "conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == "AgentConnected" && text(c, &["status"]) == "True");
    if !connected {
        return Err(format!(
            "Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io {:?}: VMI does not have guest agent connected",
            asked.name
        ));
    }
    let sent = asked.inner.agents.verb(client, &vmi, verb, Vec::new(), asked.traceparent.clone()).await;
    let reply = sent.map_err(|s| s.message)?;
    if !reply.ok {
        return Err(reply.message);
    }
    serde_json::from_slice(&reply.body).map_err(|e| format!("{verb}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            assert_eq!(allowed(verb, &vmi, "a").err().map_or(0, |s| s.code), code, "{verb} {vmi}");
        }
    }
}
