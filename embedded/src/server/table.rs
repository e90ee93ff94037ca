//! Server-side tables: kube-apiserver's columns for built-in kinds, `additionalPrinterColumns` for custom ones.

mod cells;
mod columns;
mod jsonpath;

use serde_json::{Value, json};

use super::now;
use super::respond::metadata_only;
use crate::semantics::Resource;
use crate::semantics::value::{name, text};

pub(crate) use cells::age;

/// One column: heading, type, format, priority, explanation.
pub(crate) struct Heading {
    pub name: String,
    pub kind: String,
    pub format: String,
    pub priority: i64,
    pub description: String,
}

impl Heading {
    fn to_value(&self) -> Value {
        json!({
            "name": self.name, "type": self.kind, "format": self.format, "description": self.description,
            "priority": self.priority,
        })
    }
}

/// Objects as a table. `include`: `None`, `Object` or the default, metadata alone.
pub(super) fn table(resource: &Resource, objects: Vec<Value>, include: &str, metadata: Value) -> Value {
    let headings: Vec<Value> = headings(resource).iter().map(Heading::to_value).collect();
    let at = now();
    let rows: Vec<Value> = objects
        .into_iter()
        .map(|o| {
            let cells = row(resource, &o, at);
            let mut row = json!({"cells": cells});
            if let Some(conditions) = conditions(resource, &o) {
                row["conditions"] = conditions;
            }
            row["object"] = match include {
                "None" => Value::Null,
                "Object" => o,
                _ => metadata_only(o),
            };
            row
        })
        .collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "columnDefinitions": headings,
        "rows": rows,
    })
}

fn conditions(resource: &Resource, object: &Value) -> Option<Value> {
    if resource.kind != "Pod" || resource.custom {
        return None;
    }
    match text(object, "/status/phase") {
        "Succeeded" => Some(json!([{"type": "Completed", "status": "True", "reason": "Succeeded",
            "message": "The pod has completed successfully."}])),
        "Failed" => Some(json!([{"type": "Completed", "status": "True", "reason": "Failed",
            "message": "The pod failed."}])),
        _ => None,
    }
}

fn heading(name: &str, kind: &str, format: &str, priority: i64) -> Heading {
    Heading { name: name.into(), kind: kind.into(), format: format.into(), priority, description: String::new() }
}

fn headings(resource: &Resource) -> Vec<Heading> {
    let mut out = vec![heading("Name", "string", "name", 0)];
    if resource.custom {
        for c in &resource.columns {
            out.push(Heading {
                name: c.name.clone(),
                kind: c.kind.clone(),
                format: c.format.clone(),
                priority: c.priority,
                description: match c.description.as_str() {
                    "" => format!("Custom resource definition column (in JSONPath format): {}", c.path),
                    own => own.to_owned(),
                },
            });
        }
        if resource.columns.is_empty() {
            out.push(heading("Age", "date", "", 0));
        }
        return out;
    }
    match columns::of(resource) {
        Some(list) => {
            let skip_name = list.first().is_some_and(|c| c.name == "Last Seen");
            if skip_name {
                out.clear();
            }
            out.extend(
                list.iter().map(|c| heading(c.name, c.kind, if c.name == "Name" { "name" } else { "" }, c.priority)),
            );
        }
        None => out.push(heading("Created At", "date", "", 0)),
    }
    out
}

fn row(resource: &Resource, object: &Value, at: i64) -> Vec<Value> {
    let mut out = vec![Value::from(name(object))];
    if resource.custom {
        for c in &resource.columns {
            out.push(jsonpath::cell(object, &c.path, &c.kind, at));
        }
        if resource.columns.is_empty() {
            out.push(text(object, "/metadata/creationTimestamp").into());
        }
        return out;
    }
    match columns::of(resource) {
        Some(list) => {
            if list.first().is_some_and(|c| c.name == "Last Seen") {
                out.clear();
            }
            out.extend(list.iter().map(|c| (c.cell)(object, at)));
        }
        None => out.push(text(object, "/metadata/creationTimestamp").into()),
    }
    out
}
