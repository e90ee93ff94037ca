//! What a recipe makes of its source: pure functions from one raw object to another.
//!
//! Projections cannot render an object, they have lost what nobody reads; so a creation names its source and the version,
//! and the raw object meets the recipe only where the write is made. Secrets that stand in the source (user data) pass
//! through here and are never kept.

pub mod member;
mod pattern;
pub mod pod;
pub mod revision;
pub mod vmi;

use crate::{
    instancetype::{Role, spec_of_record},
    object::{Kind, ObjectRef},
    vm::Recipe,
};
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
    /// The machine sets what its instancetype sets.
    #[error("VMI conflicts with instancetype spec in fields: [{0}]")]
    Conflict(String),
}

/// Renders the body of a POST. `inputs` are what the recipe asks for beside its source ([`Recipe::inputs`]).
pub fn render(
    recipe: &Recipe,
    source: &ObjectRef,
    target: &ObjectRef,
    raw: &Value,
    inputs: &[Value],
) -> Result<Value, Error> {
    match recipe {
        Recipe::Vmi { cause, began, vm, revision, paused, at, .. } => {
            check(raw, vm.as_str(), "VirtualMachine")?;
            let wanted = recipe.inputs();
            if wanted.len() != inputs.len() {
                return Err(Error::WrongSource {
                    expected: format!("accompanied by {} ControllerRevisions", wanted.len()),
                });
            }
            let mut patterns = vmi::Patterns::default();
            for ((role, name), record) in wanted.into_iter().zip(inputs) {
                let spec = spec_of_record(role, record).cloned().ok_or_else(|| Error::WrongSource {
                    expected: format!("a ControllerRevision {name} that records an object for {}", role.field()),
                })?;
                match role {
                    Role::Instancetype => patterns.instancetype = spec,
                    Role::Preference => patterns.preference = spec,
                }
            }
            let mut body = vmi::render(raw, revision, *paused, *at, &patterns)?;
            if let Some(began) = began {
                body["metadata"]["annotations"][api::names::ANN_BEGAN] = began.0.to_string().into();
            }
            if let Some(cause) = cause {
                body["metadata"]["annotations"][api::names::ANN_TRACEPARENT] = cause.as_ref().into();
            }
            Ok(body)
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
        Recipe::Pattern { vm, name } => {
            let Kind::Pattern(p) = source.kind else {
                return Err(Error::WrongSource { expected: "an instancetype or a preference".into() });
            };
            check(raw, source.uid.as_str(), p.name())?;
            Ok(pattern::render(raw, name, vm.as_str(), &target.namespace, &target.name, p))
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
