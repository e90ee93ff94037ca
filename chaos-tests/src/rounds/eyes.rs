//! What a person sees: the API by its own door, and what the leading controller says that it waits for.

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::Value;
use std::{path::Path, time::Duration};

/// Who does not answer within this is away.
const ANSWER: Duration = Duration::from_secs(2);
/// The controllers' Lease.
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/virtfold/leases/virtfold-controller";

/// A client that asks once and does not wait.
pub struct Eyes {
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
}

impl Eyes {
    /// With the rights that a kubeconfig gives.
    pub fn open(file: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = Kubeconfig::read_from(file).with_context(|| format!("read {}", file.display()))?;
        let client = runtime.block_on(async {
            let mut config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
            config.default_retry = false;
            Ok::<_, anyhow::Error>(kube::Client::try_from(config)?)
        })?;
        Ok(Self { runtime, client })
    }

    /// An object.
    pub fn get(&self, path: &str) -> Result<Value, String> {
        let request = http::Request::get(path).body(Vec::new()).map_err(|e| e.to_string())?;
        self.runtime.block_on(async {
            match tokio::time::timeout(ANSWER, self.client.request(request)).await {
                Ok(answer) => answer.map_err(|e| e.to_string()),
                Err(_) => Err("no answer".into()),
            }
        })
    }

    /// The API server and its store answer.
    pub fn served(&self) -> Result<(), String> {
        self.get(LEASE).map(drop)
    }

    /// The leading controller says that a node or a machine waits for nothing.
    pub fn content(&self, place: &str) -> Result<(), String> {
        let told = self.get(&format!("/apis/subresources.kubevirt.io/v1/{place}/explain"))?;
        let waits = told["waits"].as_array().cloned().unwrap_or_default();
        match waits.iter().find(|w| w["kind"] != "person") {
            Some(wait) => Err(format!("{place} waits for {}: {}", wait["waitsFor"], wait["message"])),
            None => Ok(()),
        }
    }
}
