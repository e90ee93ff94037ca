//! Admission behind an API server that is somewhere else: `AdmissionReview` in, `AdmissionReview` out.
//!
//! The same functions as in the embedded API server, asked twice: the mutating call answers with what they make of the object,
//! the validating one, which comes after everybody has had a say, with their verdict. So a refusal is never about an object
//! that somebody else still changes.

use base64::Engine;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{AdmissionInput, AdmissionOutput, Gateway, Operation, Status, User};

/// Path of the mutating call.
pub const MUTATE: &str = "/admission/mutate";
/// Path of the validating call.
pub const VALIDATE: &str = "/admission/validate";

#[derive(Deserialize)]
struct Review {
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: Kind,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    operation: String,
    #[serde(default)]
    user_info: UserInfo,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
    #[serde(default)]
    dry_run: Option<bool>,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}

#[derive(Deserialize, Default)]
struct UserInfo {
    #[serde(default)]
    username: String,
    #[serde(default)]
    groups: Vec<String>,
}

/// The answer to a review; `mutating` says to which call.
///
/// # Errors
/// 400 for a body that is no review.
pub async fn answer(gateway: &Gateway, body: &[u8], mutating: bool) -> Result<Value, Status> {
    let review: Review = serde_json::from_slice(body)
        .map_err(|e| Status::bad_request(format!("the body is no AdmissionReview of admission.k8s.io/v1: {e}")))?;
    let request = review.request;
    let mut response = json!({"uid": request.uid, "allowed": true});
    let operation = match request.operation.as_str() {
        "CREATE" => Operation::Create,
        "UPDATE" => Operation::Update,
        _ => Operation::Delete,
    };
    if request.kind.kind == "Eviction" && !mutating {
        let dry_run = request.dry_run.unwrap_or_default();
        let judged = gateway.admit_eviction(&request.namespace, &request.name, None, &request.object, dry_run).await;
        if let Err(refusal) = judged {
            response["allowed"] = false.into();
            response["status"] = refusal.to_json();
        }
    } else if api::crd::is_own(&request.kind.group) {
        let before = request.object.clone();
        let verdict = gateway.admit(AdmissionInput {
            operation,
            kind: request.kind.kind,
            subresource: request.sub_resource,
            namespace: request.namespace,
            name: request.name,
            user: User { name: request.user_info.username, groups: request.user_info.groups },
            object: request.object,
            old_object: (!request.old_object.is_null()).then_some(request.old_object),
            traceparent: None,
        });
        match (verdict.await, mutating) {
            (Ok(AdmissionOutput { object, .. }), true) => {
                let patch = serde_json::to_vec(&json_patch::diff(&before, &object)).map_err(Status::internal)?;
                if patch != b"[]" {
                    response["patchType"] = "JSONPatch".into();
                    response["patch"] = base64::engine::general_purpose::STANDARD.encode(patch).into();
                }
            }
            (Ok(AdmissionOutput { warnings, .. }), false) => response["warnings"] = warnings.into(),
            // The validating call says it, of the object as it is then.
            (Err(_), true) => {}
            (Err(refusal), false) => {
                response["allowed"] = false.into();
                response["status"] = refusal.to_json();
            }
        }
    }
    Ok(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
}
