//! Bodies in and out.

use axum::body::Body;
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};

use super::Response;
use crate::semantics::strict;
use crate::semantics::{Resource, Status};

/// The largest body that is read.
const BODY_BYTES_MAX: usize = 3 << 20;
/// So much more is taken and thrown away: a client that is cut off while it sends does not read why.
const BODY_BYTES_DRAINED: usize = 64 << 20;

/// In which form a client wants objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Full,
    Metadata,
    Table,
}

/// Reads `Accept`.
pub(super) fn form(headers: &HeaderMap) -> Result<Form, Status> {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if accept.trim().is_empty() {
        return Ok(Form::Full);
    }
    for part in accept.split(',') {
        let mut pieces = part.split(';').map(str::trim);
        let kind = pieces.next().unwrap_or_default();
        if !matches!(kind, "application/json" | "*/*" | "application/*" | "text/html" | "application/yaml") {
            continue;
        }
        let parameters: Vec<&str> = pieces.collect();
        let has = |p: &str| parameters.contains(&p);
        if !parameters.iter().any(|p| p.starts_with("as=")) {
            return Ok(Form::Full);
        }
        if !has("v=v1") && !has("v=v1beta1") {
            continue;
        }
        if has("as=Table") {
            return Ok(Form::Table);
        }
        if has("as=PartialObjectMetadata") || has("as=PartialObjectMetadataList") {
            return Ok(Form::Metadata);
        }
    }
    Err(Status {
        details: json!({}),
        ..Status::not_acceptable("406: Not Acceptable\n\nAvailable representations: application/json")
    })
}

/// What a table is to show of its objects.
pub(super) fn check_include(form: Form, include: &str) -> Result<(), Status> {
    if form != Form::Table || matches!(include, "" | "None" | "Metadata" | "Object") {
        return Ok(());
    }
    let why = "must be 'Metadata', 'Object', 'None', or empty";
    let error = crate::semantics::FieldError::invalid("includeObject", &include.into(), why);
    Err(Status::bad_request(format!("Unable to convert to Table as requested: {}", error.message())))
}

/// A list of whole objects. Those of built-in kinds do not say what they are; a list of others has no fields that are left out.
pub(super) fn list(resource: &Resource, mut metadata: Value, mut objects: Vec<Value>) -> Value {
    if resource.custom {
        if metadata.get("continue").is_none() {
            metadata["continue"] = "".into();
        }
    } else {
        for object in objects.iter_mut().filter_map(Value::as_object_mut) {
            object.remove("kind");
            object.remove("apiVersion");
        }
    }
    json!({"kind": resource.list_kind, "apiVersion": resource.api_version(), "metadata": metadata, "items": objects})
}

/// An object as `PartialObjectMetadata`.
pub(super) fn metadata_only(mut object: Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": object.get_mut("metadata").map(Value::take).unwrap_or(Value::Object(Map::new())),
    })
}

pub(super) fn json(code: u16, value: &Value) -> Response {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    let mut response = http::Response::new(Body::from(bytes));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(super) fn text(code: u16, text: impl Into<String>) -> Response {
    let mut response = http::Response::new(Body::from(text.into()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

pub(super) fn refuse(status: &Status) -> Response {
    let mut response = json(status.code, &status.to_value());
    if let Some(after) = status.details.get("retryAfterSeconds").and_then(Value::as_i64) {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(after));
    }
    response
}

/// What kube-apiserver says of a path that nobody serves.
pub(super) fn nowhere() -> Response {
    text(404, "404 page not found\n")
}

/// Adds warnings, as headers that kubectl shows.
pub(super) fn warn(response: &mut Response, warnings: &[String]) {
    for w in warnings {
        let clean: String = w.chars().filter(|c| !c.is_control()).collect();
        let quoted = clean.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
}

/// Reads a whole body.
pub(super) async fn body(body: Body) -> Result<bytes::Bytes, Status> {
    let broken = |e: axum::Error| Status::bad_request(format!("reading the body: {e}"));
    let mut bytes = bytes::BytesMut::new();
    let mut length = 0;
    let mut stream = body.into_data_stream();
    while let Some(part) = stream.next().await {
        let part = part.map_err(broken)?;
        length += part.len();
        if length <= BODY_BYTES_MAX {
            bytes.extend_from_slice(&part);
        } else if length > BODY_BYTES_DRAINED {
            break;
        }
    }
    if length > BODY_BYTES_MAX {
        let limit = format!("limit is {BODY_BYTES_MAX}");
        return Err(Status::new(413, "RequestEntityTooLarge", format!("Request entity too large: {limit}")));
    }
    Ok(bytes.freeze())
}

/// Decodes what is to be applied.
pub(super) fn apply_body(bytes: &[u8]) -> Result<Value, Status> {
    let wrong = |e: String| Status::bad_request(format!("error decoding YAML: {e}"));
    let text = std::str::from_utf8(bytes).map_err(|e| wrong(e.to_string()))?;
    let value: Value = serde_saphyr::from_str(text).map_err(|e| wrong(e.to_string()))?;
    if value.is_object() {
        return Ok(value);
    }
    Err(wrong("error unmarshaling JSON: while decoding JSON: json: cannot unmarshal array into Go value of type map[string]interface {}".into()))
}

/// Decodes an object in JSON or YAML; also the paths of duplicate fields.
pub(super) fn decode(headers: &HeaderMap, bytes: &[u8]) -> Result<(Value, Vec<String>), Status> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("application/json");
    match kind.split(';').next().unwrap_or_default().trim() {
        "application/json" | "" | "*/*" => strict::decode(bytes)
            .map_err(|e| Status::bad_request(format!("couldn't get version/kind; json parse error: {e}"))),
        "application/yaml" | "application/x-yaml" => {
            let text = std::str::from_utf8(bytes).map_err(|e| Status::bad_request(e.to_string()))?;
            let value = serde_saphyr::from_str(text)
                .map_err(|e| Status::bad_request(format!("error converting YAML to JSON: {e}")))?;
            Ok((value, Vec::new()))
        }
        "application/vnd.kubernetes.protobuf" => Ok((super::protobuf::decode(bytes)?, Vec::new())),
        _ => Err(Status::unsupported_media_type(
            "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml, application/vnd.kubernetes.protobuf",
        )),
    }
}
