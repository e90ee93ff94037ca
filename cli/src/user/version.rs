//! `virtfold version`.

use serde_json::{Value, json};

use super::cluster::connect;
use super::output::print;
use crate::args::{self, Output};

/// `virtfold version`.
pub async fn run(options: args::Version) -> anyhow::Result<u8> {
    let version = env!("CARGO_PKG_VERSION");
    let server = if options.client { None } else { server(&options).await };
    match options.output {
        Some(output @ (Output::Json | Output::Yaml)) => {
            let mut value = json!({"clientVersion": {"version": version, "protocol": proto::PROTOCOL.1}});
            if let Some(server) = server {
                value["serverVersion"] = server;
            }
            print(&[value], output)?;
        }
        _ => {
            println!("virtfold {version}");
            if let Some(server) = server {
                println!("API server {}", server["gitVersion"].as_str().unwrap_or_default());
            }
        }
    }
    Ok(0)
}

async fn server(options: &args::Version) -> Option<Value> {
    let cluster = connect(&options.target).await.ok()?;
    let request = http::Request::get("/version").body(Vec::new()).ok()?;
    let answer = cluster.client.request::<Value>(request);
    tokio::time::timeout(std::time::Duration::from_secs(5), answer).await.ok()?.ok()
}
