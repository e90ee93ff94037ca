//! `virtfold status`.

use anyhow::bail;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::json;

use super::cluster::{Kind, connect, machine};
use super::output::{colour, print, table};
use crate::args::{self, Output};
use crate::machines::{Machine, age, get, list, machines, text, waits_for};

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
    let all = machines(&vms, &vmis);
    if let Some(output @ (Output::Json | Output::Yaml)) = options.output {
        print(&[serde_json::to_value(&all)?], output)?;
        return Ok(0);
    }
    let now = Timestamp::now().as_second();
    let row = |m: &Machine| {
        let mut row = Vec::new();
        if options.all_namespaces {
            row.push(m.namespace.clone());
        }
        let ready = if m.ready { "True" } else { "False" };
        let since = m.created.map(|t| age(now - t)).unwrap_or_default();
        row.extend([m.name.clone(), colour(&m.status), ready.to_owned(), since]);
        if options.output == Some(Output::Wide) {
            row.extend([&m.node, &m.address, &m.system].map(String::clone));
        }
        row.push(m.waits_for.clone());
        row
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
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
