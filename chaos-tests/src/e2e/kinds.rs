//! Our kinds as `kubectl` sees them: the same on every API server.

use super::kubectl::Kubectl;
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

/// The namespace of the samples.
const NAMESPACE: &str = "kinds";

/// The smallest object of each kind that is `wanted`, in its stored version: the fields that must be there, and no others.
pub fn samples(wanted: impl Fn(&str) -> bool) -> Vec<Value> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let all = api::crd::all().into_iter().filter(|crd| wanted(&text(&crd["spec"]["names"]["kind"])));
    all.map(|crd| {
        let spec = &crd["spec"];
        let versions = spec["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
        let version = versions.iter().find(|v| v["storage"] == true).unwrap_or(&Value::Null);
        let mut object = smallest(&version["schema"]["openAPIV3Schema"]);
        object["apiVersion"] = format!("{}/{}", text(&spec["group"]), text(&version["name"])).into();
        object["kind"] = spec["names"]["kind"].clone();
        object["metadata"] = json!({"name": "sample"});
        if spec["scope"] == "Namespaced" {
            object["metadata"]["namespace"] = NAMESPACE.into();
        }
        // What only a rule asks for.
        if object["kind"] == "VirtualMachineBackup" {
            object["spec"]["pvcName"] = "sample".into();
        }
        if spec["group"] == "backup.kubevirt.io" {
            object["spec"]["source"] = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "sample"});
        }
        object
    })
    .collect()
}

/// A value that a schema takes.
fn smallest(schema: &Value) -> Value {
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("object") => {
            let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
            let fields = required.iter().filter_map(Value::as_str);
            fields.map(|f| (f.to_owned(), smallest(&schema["properties"][f]))).collect::<Map<_, _>>().into()
        }
        Some("array") => {
            let least = schema["minItems"].as_u64().unwrap_or(0);
            (0..least).map(|_| smallest(&schema["items"])).collect::<Vec<_>>().into()
        }
        Some("boolean") => false.into(),
        Some("integer" | "number") | None => 1.into(),
        Some(_) => "sample".into(),
    }
}

/// As `kubectl` takes them.
pub fn manifest(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}

/// `kubectl explain` knows each kind and its spec.
pub fn explained(k: &Kubectl) -> Result<()> {
    for crd in api::crd::all() {
        let kind = crd["spec"]["names"]["kind"].as_str().unwrap_or_default();
        let name = crd["metadata"]["name"].as_str().unwrap_or_default();
        let out = k.ok(&["explain", name])?;
        ensure!(out.contains(&format!("KIND:       {kind}")) && out.contains("spec"), "{name}: {out}");
    }
    Ok(())
}

/// Creates one of each kind that is `wanted`, and `kubectl get` shows them in the columns that the definition names. They go again.
pub fn shown(k: &Kubectl, wanted: impl Fn(&str) -> bool) -> Result<()> {
    k.ok(&["create", "namespace", NAMESPACE])?;
    let objects = samples(&wanted);
    let (code, out, error) = k.feed(&["create"], &manifest(&objects))?;
    ensure!(code == 0, "{out}{error}");
    let definitions: Vec<Value> =
        api::crd::all().into_iter().filter(|crd| crd["spec"]["names"]["kind"].as_str().is_some_and(&wanted)).collect();
    let names: Vec<&str> = definitions.iter().filter_map(|crd| crd["metadata"]["name"].as_str()).collect();
    let out = k.ok(&["get", &names.join(","), "-n", NAMESPACE])?;
    let mut tables = out.split("\n\n");
    for crd in &definitions {
        let singular = crd["spec"]["names"]["singular"].as_str().unwrap_or_default();
        let table = tables.next().with_context(|| format!("no table for {singular} in: {out}"))?;
        let stored = crd["spec"]["versions"].as_array().and_then(|all| all.iter().find(|v| v["storage"] == true));
        let columns = stored.and_then(|v| v["additionalPrinterColumns"].as_array()).cloned().unwrap_or_default();
        let shown = columns.iter().filter(|c| c["priority"].as_i64().unwrap_or(0) == 0);
        let mut want: Vec<String> = shown.filter_map(|c| c["name"].as_str()).map(str::to_uppercase).collect();
        if columns.is_empty() {
            want.push("AGE".into());
        }
        want.insert(0, "NAME".into());
        let head: Vec<&str> = table.lines().next().unwrap_or_default().split_whitespace().collect();
        ensure!(head == want && table.contains("sample"), "{singular}: {head:?} instead of {want:?}: {table}");
    }
    let (code, out, error) = k.feed(&["delete"], &manifest(&objects))?;
    ensure!(code == 0, "{out}{error}");
    k.ok(&["delete", "namespace", NAMESPACE]).map(drop)
}
