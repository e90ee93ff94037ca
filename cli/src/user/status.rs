//! `virtfold status`.

use anyhow::bail;
use kube::Client;
use serde_json::{Value, json};

use super::cluster::{Kind, connect, machine, plain};
use super::output::{colour, print, table};
use crate::args::{self, Output};

async fn get(client: &Client, path: &str) -> anyhow::Result<Option<Value>> {
    let request = http::Request::get(path).body(Vec::new())?;
    match client.request::<Value>(request).await {
        Ok(value) => Ok(Some(value)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(plain(error)),
    }
}

async fn list(client: &Client, namespace: Option<&str>, plural: &str) -> anyhow::Result<Vec<Value>> {
    let place = namespace.map_or_else(String::new, |n| format!("namespaces/{n}/"));
    let found = get(client, &format!("/apis/kubevirt.io/v1/{place}{plural}")).await?;
    let Some(found) = found else { bail!("the cluster does not serve {plural}.kubevirt.io") };
    Ok(found["items"].as_array().cloned().unwrap_or_default())
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn condition<'a>(value: &'a Value, kind: &str) -> Option<&'a Value> {
    value["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)
}

/// What a machine waits for, in a line; empty when it is where it should be. The most telling condition first.
fn waits_for(vm: Option<&Value>, vmi: Option<&Value>) -> String {
    const TELLING: [(&str, &str); 8] = [
        ("Failure", "True"),
        ("Synchronized", "False"),
        ("PodScheduled", "False"),
        ("DataVolumesReady", "False"),
        ("Provisioning", "True"),
        ("Paused", "True"),
        ("Ready", "False"),
        ("RestartRequired", "True"),
    ];
    // A machine that is to be stopped waits for nothing.
    let stopped = vmi.is_none() && vm.is_some_and(|v| text(v, "/status/printableStatus") == "Stopped");
    let objects = [vmi, vm];
    let mut found = TELLING.iter().filter(|_| !stopped).flat_map(|(kind, bad)| {
        objects.iter().flatten().filter_map(move |o| condition(o, kind).filter(|c| text(c, "/status") == *bad))
    });
    let line = |c: &Value| {
        // This one has no reason.
        let kind = if text(c, "/type") == "RestartRequired" { "RestartRequired" } else { text(c, "/reason") };
        [kind, text(c, "/message")].iter().filter(|s| !s.is_empty()).copied().collect::<Vec<_>>().join(": ")
    };
    found.find_map(|c| Some(line(c)).filter(|l| !l.is_empty())).unwrap_or_default()
}

fn age(value: &Value) -> String {
    let Ok(since) = text(value, "/metadata/creationTimestamp").parse::<k8s_openapi::jiff::Timestamp>() else {
        return String::new();
    };
    let seconds = k8s_openapi::jiff::Timestamp::now().as_second() - since.as_second();
    match seconds {
        ..120 => format!("{}s", seconds.max(0)),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// `virtfold status`.
pub async fn run(options: args::Status) -> anyhow::Result<u8> {
    let cluster = connect(&options.target).await?;
    if !options.machine.is_empty() {
        let machine = machine(&options.machine)?;
        return one(&cluster.client, &cluster.namespace, &machine.name, machine.kind, options.output).await;
    }
    let namespace = (!options.all_namespaces).then_some(cluster.namespace.as_str());
    let vms = list(&cluster.client, namespace, Kind::Vm.plural()).await?;
    let vmis = list(&cluster.client, namespace, Kind::Vmi.plural()).await?;
    let key = |o: &Value| (text(o, "/metadata/namespace").to_owned(), text(o, "/metadata/name").to_owned());
    let mut keys: Vec<_> = vms.iter().chain(&vmis).map(key).collect();
    keys.sort();
    keys.dedup();
    let mut rows = Vec::new();
    let mut values = Vec::new();
    for (namespace, name) in keys {
        let find = |all: &[Value]| all.iter().find(|o| key(o) == (namespace.clone(), name.clone())).cloned();
        let (vm, vmi) = (find(&vms), find(&vmis));
        let object = vm.as_ref().or(vmi.as_ref()).cloned().unwrap_or_default();
        let status = vm.as_ref().map(|v| text(v, "/status/printableStatus")).filter(|s| !s.is_empty());
        let status = status.or_else(|| vmi.as_ref().map(|v| text(v, "/status/phase"))).unwrap_or_default().to_owned();
        let ready = condition(&object, "Ready").map_or("False", |c| text(c, "/status")).to_owned();
        let instance = vmi.clone().unwrap_or_default();
        let node = text(&instance, "/status/nodeName").to_owned();
        let address = text(&instance, "/status/interfaces/0/ipAddress").to_owned();
        let waits = waits_for(vm.as_ref(), vmi.as_ref());
        values.push(json!({
            "namespace": namespace, "name": name, "status": status, "ready": ready == "True", "node": node,
            "address": address, "waitsFor": waits, "phase": text(&instance, "/status/phase"),
        }));
        let mut row = Vec::new();
        if options.all_namespaces {
            row.push(namespace.clone());
        }
        row.extend([name.clone(), colour(&status), ready, age(&object)]);
        if options.output == Some(Output::Wide) {
            row.extend([node, address, text(&instance, "/status/guestOSInfo/prettyName").to_owned()]);
        }
        row.push(waits);
        rows.push(row);
    }
    if let Some(output @ (Output::Json | Output::Yaml)) = options.output {
        print(&[values.into()], output)?;
        return Ok(0);
    }
    if rows.is_empty() {
        eprintln!("No virtual machines{}.", namespace.map_or_else(String::new, |n| format!(" in namespace {n}")));
        return Ok(0);
    }
    let mut head = vec!["NAME", "STATUS", "READY", "AGE"];
    if options.all_namespaces {
        head.insert(0, "NAMESPACE");
    }
    if options.output == Some(Output::Wide) {
        head.extend(["NODE", "ADDRESS", "SYSTEM"]);
    }
    head.push("WAITS FOR");
    table(&head, &rows)?;
    Ok(0)
}

async fn one(client: &Client, namespace: &str, name: &str, kind: Kind, output: Option<Output>) -> anyhow::Result<u8> {
    let path = |kind: Kind| format!("/apis/kubevirt.io/v1/namespaces/{namespace}/{}/{name}", kind.plural());
    let vm = if kind == Kind::Vm { get(client, &path(Kind::Vm)).await? } else { None };
    let vmi = get(client, &path(Kind::Vmi)).await?;
    if vm.is_none() && vmi.is_none() {
        bail!("there is no virtual machine {name} in namespace {namespace}");
    }
    if let Some(output @ (Output::Json | Output::Yaml)) = output {
        print(&[json!({"virtualMachine": vm, "virtualMachineInstance": vmi})], output)?;
        return Ok(0);
    }
    let instance = vmi.clone().unwrap_or_default();
    let machine = vm.clone().unwrap_or_default();
    let mut lines = vec![
        ("Name", name.to_owned()),
        ("Namespace", namespace.to_owned()),
        ("Status", colour(text(&machine, "/status/printableStatus"))),
        ("Phase", text(&instance, "/status/phase").to_owned()),
        ("Node", text(&instance, "/status/nodeName").to_owned()),
        ("System", text(&instance, "/status/guestOSInfo/prettyName").to_owned()),
        ("Waits for", waits_for(vm.as_ref(), vmi.as_ref())),
    ];
    for interface in instance["status"]["interfaces"].as_array().into_iter().flatten() {
        lines.push((
            "Interface",
            format!("{} {} {}", text(interface, "/name"), text(interface, "/mac"), text(interface, "/ipAddress")),
        ));
    }
    for (label, value) in lines.iter().filter(|(_, value)| !value.trim().is_empty()) {
        println!("{:<12} {value}", format!("{label}:"));
    }
    let mut rows = Vec::new();
    for (what, object) in [("VM", &machine), ("VMI", &instance)] {
        for c in object["status"]["conditions"].as_array().into_iter().flatten() {
            rows.push(vec![
                what.to_owned(),
                text(c, "/type").to_owned(),
                text(c, "/status").to_owned(),
                text(c, "/reason").to_owned(),
                text(c, "/message").to_owned(),
            ]);
        }
    }
    if !rows.is_empty() {
        println!();
        table(&["OF", "CONDITION", "STATUS", "REASON", "MESSAGE"], &rows)?;
    }
    Ok(0)
}
