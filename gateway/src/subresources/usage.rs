//! What machines use now: each node's agent is asked, when somebody wants to know.
//!
//! `GET .../namespaces/NAMESPACE/usage` tells of the machines of a namespace, `GET .../usage` of all and of the nodes, too. A node
//! that does not answer in time is named among the gaps, and costs its own figures alone.

use std::collections::BTreeSet;

use futures::{StreamExt, stream};
use proto::agent::{MachineUsage, NodeUsage, UsageReply};
use serde_json::{Value, json};

use super::Asked;
use crate::admission::text;
use crate::status::Status;
use crate::{kubernetes, limits};

/// The usage of the machines of a namespace, or of all machines and nodes.
pub(super) async fn list(asked: &Asked<'_>) -> Result<Value, Status> {
    let (client, everywhere) = (&asked.inner.config.client, asked.namespace.is_empty());
    let wanted: Option<BTreeSet<String>> = match everywhere {
        true => None,
        false => {
            let instances = kubernetes::list(client, kubernetes::VMI, asked.namespace).await?;
            Some(items(&instances).iter().map(|vmi| text(vmi, &["status", "nodeName"]).to_owned()).collect())
        }
    };
    let mut nodes = agents(asked).await?;
    nodes.retain(|(name, _)| wanted.as_ref().is_none_or(|w| w.contains(name)));
    let answers = stream::iter(nodes).map(|(name, address)| async move {
        let answer = asked.inner.agents.usage(&name, &address, asked.namespace).await;
        (name, answer, jiff::Timestamp::now().as_millisecond())
    });
    let mut answers: Vec<_> = answers.buffer_unordered(limits::USAGE_AT_ONCE).collect().await;
    answers.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let (mut nodes, mut machines, mut gaps) = (vec![], vec![], vec![]);
    for (name, answer, at) in answers {
        match answer {
            Ok(UsageReply { node, machines: all }) => {
                nodes.extend(node.filter(|_| everywhere).map(|usage| of_node(&name, &usage, at)));
                machines.extend(all.iter().map(|usage| of_machine(&name, usage, at)));
            }
            Err(why) => gaps.push(format!("node {name}: {why}")),
        }
    }
    Ok(json!({
        "kind": "Usage", "apiVersion": "subresources.kubevirt.io/v1", "nodes": nodes, "machines": machines, "gaps": gaps,
    }))
}

/// All nodes with an agent, and where that is.
async fn agents(asked: &Asked<'_>) -> Result<Vec<(String, String)>, Status> {
    let nodes = kubernetes::list(&asked.inner.config.client, kubernetes::NODE, "").await?;
    let address_of = |node: &Value| {
        let (name, address) = (
            text(node, &["metadata", "name"]),
            text(node, &["metadata", "annotations", api::names::ANN_AGENT_ADDRESS]),
        );
        (!address.is_empty()).then(|| (name.to_owned(), address.to_owned()))
    };
    Ok(items(&nodes).iter().filter_map(address_of).collect())
}

/// The newest finished steps about a machine, as `spans` of its explanation: those that this process keeps, and those of the agents. Why one
/// does not say is a gap.
pub(super) async fn steps(asked: &Asked<'_>, explanation: &mut Value) {
    let mut spans = telemetry::kept::of(asked.namespace, asked.name);
    let mut gaps = vec![];
    match agents(asked).await {
        Ok(nodes) => {
            let answers = stream::iter(nodes).map(|(node, address)| async move {
                (asked.inner.agents.steps(&node, &address, asked.namespace, asked.name).await, node)
            });
            let answers: Vec<_> = answers.buffer_unordered(limits::USAGE_AT_ONCE).collect().await;
            for (answer, node) in answers {
                match answer {
                    Ok(more) => spans.extend(more),
                    Err(why) => gaps.push(format!("steps on node {node}: {why}")),
                }
            }
        }
        Err(status) => gaps.push(format!("steps on nodes: {}", status.message)),
    }
    // A step that is told again after a crash is the same span.
    spans.sort_by(|a, b| (a.start, &a.span).cmp(&(b.start, &b.span)));
    let mut known = BTreeSet::new();
    spans.retain(|s| known.insert(s.span.clone()));
    explanation["spans"] = json!(spans);
    gaps.sort();
    match explanation["gaps"].as_array_mut() {
        Some(all) => all.extend(gaps.into_iter().map(Value::from)),
        None => explanation["gaps"] = json!(gaps),
    }
}

fn items(list: &Value) -> &[Value] {
    list["items"].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn of_node(name: &str, usage: &NodeUsage, at: i64) -> Value {
    json!({
        "name": name, "atMilliseconds": at, "cpuSeconds": usage.cpu_seconds, "cpus": usage.cpus,
        "memoryBytes": usage.memory_bytes, "availableBytes": usage.available_bytes, "load": usage.load,
    })
}

fn of_machine(node: &str, usage: &MachineUsage, at: i64) -> Value {
    json!({
        "namespace": usage.namespace, "name": usage.name, "uid": usage.vmi_uid, "node": node, "atMilliseconds": at,
        "cpuSeconds": usage.cpu_seconds, "cpus": usage.cpus, "memoryBytes": usage.memory_bytes,
        "residentBytes": usage.resident_bytes, "guestUsedBytes": usage.guest_used_bytes, "readBytes": usage.read_bytes,
        "writeBytes": usage.write_bytes, "receiveBytes": usage.receive_bytes, "transmitBytes": usage.transmit_bytes,
    })
}
