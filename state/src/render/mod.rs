//! What a recipe makes of its source: pure functions from one raw object to another.
//!
//! Projections cannot render an object, they have lost what nobody reads; so a creation names its source and the version,
//! and the raw object meets the recipe only where the write is made. Secrets that stand in the source (user data) pass
//! through here and are never kept.

pub mod member;
pub mod pod;
pub mod revision;
pub mod vmi;

use crate::{object::ObjectRef, vm::Recipe};
use serde_json::{Value, json};

/// Group and version of what virtfold makes and owns.
pub const API_VERSION: &str = "kubevirt.io/v1";

/// Why nothing could be rendered.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The source is not what the recipe is for.
    #[error("the source is not {expected}")]
    WrongSource {
        /// What was expected.
        expected: String,
    },
    /// A field of the source cannot be used.
    #[error("{field} cannot be used: {problem}")]
    Unusable {
        /// Path of the field.
        field: String,
        /// What is wrong, without the value.
        problem: String,
    },
}

/// Renders the body of a POST.
pub fn render(recipe: &Recipe, target: &ObjectRef, raw: &Value) -> Result<Value, Error> {
    match recipe {
        Recipe::Vmi { vm, revision, paused, at } => {
            check(raw, vm.as_str(), "VirtualMachine")?;
            vmi::render(raw, revision, *paused, *at)
        }
        Recipe::Pod { vmi, image } => {
            check(raw, vmi.as_str(), "VirtualMachineInstance")?;
            pod::render(raw, &target.name, image)
        }
        Recipe::Member { set } => {
            check(raw, set.as_str(), "VirtualMachineInstanceReplicaSet")?;
            member::render(raw, &target.name)
        }
        Recipe::Revision { vm, generation } => {
            check(raw, vm.as_str(), "VirtualMachine")?;
            Ok(revision::render(raw, &target.name, *generation))
        }
    }
}

fn check(raw: &Value, uid: &str, kind: &str) -> Result<(), Error> {
    if text(raw, "/metadata/uid") == Some(uid) {
        return Ok(());
    }
    Err(Error::WrongSource { expected: format!("the {kind} with UID {uid}") })
}

pub(crate) fn text<'a>(raw: &'a Value, pointer: &str) -> Option<&'a str> {
    raw.pointer(pointer).and_then(Value::as_str)
}

/// A controlling owner reference.
pub fn owner(api_version: &str, kind: &str, name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": api_version, "kind": kind, "name": name, "uid": uid,
        "controller": true, "blockOwnerDeletion": true,
    })
}
