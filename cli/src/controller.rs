//! `virtfold controller`: the controller as a process of its own, for a cluster whose API server is somewhere else.

use anyhow::Context;
use proto::transport::direct;
use telemetry::metrics::catalogue as c;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::args::Controller;
use crate::component::{self, THREADS, client, identity, until_asked};
use crate::observed::{self, Observed};

/// Runs until it is asked to end (0), or does not lead any more (an error: whoever started it starts it again).
pub fn run(options: &Controller) -> anyhow::Result<u8> {
    component::run(THREADS, serve(options))
}

async fn serve(options: &Controller) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-controller",
        otlp_endpoint: options.otlp_endpoint.clone(),
        log_filter: options.log.clone(),
        ..telemetry::Options::default()
    })?;
    let stop = CancellationToken::new();
    until_asked(&stop)?;
    let (explainer, tls) = (reconcilers::Explainer::default(), identity(&options.tls)?);
    if let Some(address) = options.listen {
        anyhow::ensure!(
            !address.ip().is_unspecified(),
            "--listen {address}: name the address by which gateways reach it"
        );
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let (tls, explainer, stop) = (tls.clone(), explainer.clone(), stop.clone());
        tokio::spawn(async move {
            if let Err(error) = reconcilers::server::serve(listener, &tls, explainer, stop).await {
                tracing::error!(error = format!("{:#}", anyhow::Error::from(error)), "gateways get no answers");
            }
        });
    }
    let lease = reconcilers::LeaseConfig {
        namespace: options.namespace.clone(),
        address: options.listen.map(|a| a.to_string()),
        ..reconcilers::LeaseConfig::lasting(options.lease_duration)
    };
    let registry = telemetry::metrics::Registry::default();
    let client = client(&options.kubeconfig, "virtfold-controller", &registry).await?;
    let readiness = telemetry::Readiness::default();
    if let Some(address) = options.metrics {
        let ready = vec![(&c::CONTROLLER_READY, observed::ready(&readiness))];
        let what = Observed { registry: registry.clone(), client: client.clone(), before: None, ready };
        observed::spawn(what, address, observed::tls(&tls), stop.clone()).await?;
    }
    let result = reconcilers::run(reconcilers::Config {
        metrics: registry,
        readiness,
        client,
        dial: direct(),
        tls,
        lease,
        journal: options.journal.clone().map(|dir| options.bounds.config(dir, "controller")),
        explainer,
        cluster: state::vm::ClusterConfig::default(),
        stop,
    })
    .await;
    telemetry.shutdown().await;
    Ok(result?)
}
