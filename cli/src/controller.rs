//! `virtfold controller`: the controller as a process of its own, for a cluster whose API server is somewhere else.

use std::time::Duration;

use proto::transport::direct;
use tokio_util::sync::CancellationToken;

use crate::args::Controller;
use crate::component::{client, identity, until_asked};

/// Runs until it is asked to end (0), or does not lead any more (an error: whoever started it starts it again).
pub fn run(options: &Controller) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(serve(options));
    runtime.shutdown_timeout(Duration::from_secs(2));
    result.map(|()| 0)
}

async fn serve(options: &Controller) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-controller",
        otlp_endpoint: options.otlp_endpoint.clone(),
        log_file: None,
        log_filter: options.log.clone(),
        json: false,
    })?;
    let stop = CancellationToken::new();
    until_asked(&stop)?;
    let result = reconcilers::run(reconcilers::Config {
        client: client(&options.kubeconfig, "virtfold-controller").await?,
        dial: direct(),
        tls: identity(&options.tls)?,
        lease: reconcilers::LeaseConfig { namespace: options.namespace.clone(), ..Default::default() },
        journal: options.journal.clone().map(|dir| options.bounds.config(dir, "controller")),
        explainer: reconcilers::Explainer::default(),
        cluster: state::vm::ClusterConfig::default(),
        stop,
    })
    .await;
    telemetry.shutdown().await;
    Ok(result?)
}
