//! Between what is stored and what a client of one version sees.

use bytes::Bytes;
use serde_json::Value;

use super::hub::decode;
use crate::kinds::event;
use crate::semantics::value::{meta, object};
use crate::semantics::{Resource, Status, write};
use crate::storage::Revision;

/// The stored bytes of an object.
pub(super) fn encode(resource: &Resource, mut value: Value) -> Result<Bytes, Status> {
    // Also of what is changed beside the checks of an update: bindings, finalizers.
    write::within_levels(resource, &value)?;
    if resource.kind == "Event" && resource.group == "events.k8s.io" {
        event::convert(&mut value, true);
    } else if resource.api_version() != resource.stored_version {
        object(&mut value).insert("apiVersion".into(), resource.stored_version.clone().into());
    }
    meta(&mut value).remove("resourceVersion");
    serde_json::to_vec(&value).map(Bytes::from).map_err(Status::internal)
}

/// Turns a decoded stored object into the version that is asked for.
pub(super) fn present(resource: &Resource, mut value: Value) -> Value {
    if resource.kind == "Event" && resource.group == "events.k8s.io" {
        event::convert(&mut value, false);
    } else if resource.custom {
        object(&mut value).insert("apiVersion".into(), resource.api_version().into());
    }
    value
}

/// Whether the stored form is what a client sees.
pub(super) fn is_stored_form(resource: &Resource) -> bool {
    resource.api_version() == resource.stored_version
}

/// Reads a stored object as a client of this version sees it.
pub(super) fn read(resource: &Resource, bytes: &[u8], revision: Revision) -> Result<Value, Status> {
    let value = decode(bytes, revision).ok_or_else(|| Status::internal("a stored object is no JSON"))?;
    Ok(present(resource, value))
}
