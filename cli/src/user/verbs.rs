//! `start`, `stop`, `restart`, `pause`, `unpause`, `reset`, `soft-reboot`: PUTs to subresources.

use serde_json::{Value, json};

use super::cluster::{Cluster, Kind, Machine, connect, machine, plain};
use crate::args;

async fn put(cluster: &Cluster, kind: Kind, name: &str, verb: &str, body: &Value) -> anyhow::Result<()> {
    let path =
        format!("/apis/subresources.kubevirt.io/v1/namespaces/{}/{}/{name}/{verb}", cluster.namespace, kind.plural());
    let request = http::Request::put(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(serde_json::to_vec(body)?)?;
    cluster.client.request_text(request).await.map(drop).map_err(plain)
}

fn vm(words: &[String]) -> anyhow::Result<Machine> {
    let machine = machine(words)?;
    if machine.kind == Kind::Vmi {
        anyhow::bail!(crate::Usage("this is for a vm, which makes and removes its vmi".into()));
    }
    Ok(machine)
}

/// `virtfold start`.
pub async fn start(options: args::Start) -> anyhow::Result<u8> {
    let machine = vm(&options.machine.machine)?;
    let cluster = connect(&options.target).await?;
    let body = if options.paused { json!({"paused": true}) } else { json!({}) };
    put(&cluster, Kind::Vm, &machine.name, "start", &body).await?;
    println!("VM {} was scheduled to start", machine.name);
    Ok(0)
}

fn grace(options: &args::Stop) -> anyhow::Result<Option<i64>> {
    match (options.force, options.grace_period) {
        (true, None | Some(0)) => Ok(Some(0)),
        (true, Some(_)) => anyhow::bail!(crate::Usage("--force goes with --grace-period 0".into())),
        (false, Some(seconds)) if seconds < 0 => anyhow::bail!(crate::Usage("--grace-period is not negative".into())),
        (false, seconds) => Ok(seconds),
    }
}

/// `virtfold stop`.
pub async fn stop(options: args::Stop) -> anyhow::Result<u8> {
    let (machine, grace) = (vm(&options.machine.machine)?, grace(&options)?);
    let cluster = connect(&options.target).await?;
    let body = grace.map_or_else(|| json!({}), |seconds| json!({"gracePeriod": seconds}));
    put(&cluster, Kind::Vm, &machine.name, "stop", &body).await?;
    println!("VM {} was scheduled to stop", machine.name);
    Ok(0)
}

/// `virtfold restart`.
pub async fn restart(options: args::Stop) -> anyhow::Result<u8> {
    let (machine, grace) = (vm(&options.machine.machine)?, grace(&options)?);
    let cluster = connect(&options.target).await?;
    let body = grace.map_or_else(|| json!({}), |seconds| json!({"gracePeriodSeconds": seconds}));
    put(&cluster, Kind::Vm, &machine.name, "restart", &body).await?;
    println!("VM {} was scheduled to restart", machine.name);
    Ok(0)
}

/// A verb on the running instance: its subresource, and what was done in words.
pub async fn instance(options: args::Verb, verb: &str, done: &str) -> anyhow::Result<u8> {
    let machine = machine(&options.machine.machine)?;
    let cluster = connect(&options.target).await?;
    put(&cluster, Kind::Vmi, &machine.name, verb, &json!({})).await?;
    println!("VMI {} was {done}", machine.name);
    Ok(0)
}
