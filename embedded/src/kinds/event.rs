//! Events: one store, two groups. Stored in the form of the core group.

use serde_json::Value;

use crate::semantics::FieldError;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{self, object, text};

/// Field of the core group's form, field of the other's.
const FIELDS: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// Turns an event from one form into the other.
pub fn convert(event: &mut Value, to_core: bool) {
    let map = object(event);
    for (core, grouped) in FIELDS {
        let (from, to) = if to_core { (grouped, core) } else { (core, grouped) };
        if let Some(v) = map.remove(from) {
            map.insert(to.into(), v);
        }
    }
    map.insert("apiVersion".into(), if to_core { "v1" } else { "events.k8s.io/v1" }.into());
}

const CORE_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
];

fn check_namespace(event: &Value, about: &str, errors: &mut Vec<FieldError>) {
    let there = text(event, &format!("/{about}/namespace"));
    let here = value::namespace(event);
    let fits = there == here || (there.is_empty() && here == "default") || (there.is_empty() && here == "kube-system");
    if !fits {
        let why = "does not match event.namespace";
        errors.push(FieldError::invalid(format!("{about}.namespace"), &there.into(), why));
    }
}

/// Events of the core group.
#[derive(Debug)]
pub struct Core;

impl Behaviour for Core {
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_namespace(o, "involvedObject", errors);
    }
    fn selectable(&self) -> &'static [&'static str] {
        CORE_FIELDS
    }
    fn field(&self, o: &Value, path: &str) -> Option<String> {
        (path == "source").then(|| {
            let component = text(o, "/source/component");
            if component.is_empty() { text(o, "/reportingComponent") } else { component }.to_owned()
        })
    }
}

/// Events of `events.k8s.io`.
#[derive(Debug)]
pub struct Grouped;

impl Behaviour for Grouped {
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_namespace(o, "regarding", errors);
        for field in ["reportingController", "reportingInstance", "action", "reason"] {
            if text(o, &format!("/{field}")).is_empty() {
                errors.push(FieldError::required(field, ""));
            }
        }
        if text(o, "/eventTime").is_empty() {
            errors.push(FieldError::required("eventTime", ""));
        }
    }
    fn selectable(&self) -> &'static [&'static str] {
        &[
            "regarding.kind",
            "regarding.namespace",
            "regarding.name",
            "regarding.uid",
            "regarding.apiVersion",
            "regarding.resourceVersion",
            "regarding.fieldPath",
            "reason",
            "reportingController",
            "type",
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
        ]
    }
    fn field(&self, o: &Value, path: &str) -> Option<String> {
        path.strip_prefix("involvedObject.").map(|f| text(o, &format!("/regarding/{f}")).to_owned())
    }
}
