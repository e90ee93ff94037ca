//! The gateway as a server of its own, for a cluster whose API server is somewhere else: `virtfold gateway`, and a part of `virtfold up
//! --kubeconfig`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use embedded::cluster::bootstrap::{CONTROLLER, GATEWAY, NAMESPACE};
use embedded::pki::Rotation;
use gateway::{Authorization, Explain, Gateway, Leader, Serving, registration};
use kube::Client;
use proto::transport::{Datagrams, Dial, Tls, direct, direct_datagrams};
use telemetry::metrics::catalogue as c;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args;
use crate::component::{self, THREADS, client, identity, until_asked};
use crate::observed::{self, Observed};

/// A registration that cannot be written is tried again after this.
const AGAIN: Duration = Duration::from_secs(2);
/// Users of Kubernetes' own collectors, which take away owners and finalizers.
const COLLECTORS: [&str; 3] = [
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:generic-garbage-collector",
    "system:serviceaccount:kube-system:namespace-controller",
];

/// A part of the control plane, as it is called by a certificate and as a service account.
fn names(part: &str) -> [String; 2] {
    [part.to_owned(), format!("system:serviceaccount:{NAMESPACE}:{part}")]
}

/// The users of the control plane.
pub fn trusted() -> Vec<String> {
    [CONTROLLER, GATEWAY].iter().flat_map(|part| names(part)).collect()
}

/// What a gateway lacks whose certificate the API server does not trust.
const TRUST: &str = "trust of the API server";

/// What a Kubernetes needs for a gateway that it reaches at that place.
pub fn registered((host, port): &(String, u16)) -> Vec<serde_json::Value> {
    let unasked: Vec<String> = names(CONTROLLER).into_iter().chain(COLLECTORS.map(str::to_owned)).collect();
    registration::objects(NAMESPACE, host, *port, &unasked)
}

/// A gateway that is about to serve.
pub struct Apart {
    /// The API server, with the rights of the gateway.
    pub client: Client,
    /// The way to node agents.
    pub dial: Dial,
    /// The way to ports of guests that speak UDP.
    pub datagrams: Datagrams,
    /// Who it is to node agents and controllers.
    pub tls: Tls,
    /// Who explains.
    pub explain: Arc<dyn Explain>,
    /// Where the API server finds it.
    pub listener: TcpListener,
    /// What is kept of its certificates.
    pub certificates: PathBuf,
    /// How long each of them lives.
    pub life: Duration,
    /// Where it counts.
    pub metrics: telemetry::metrics::Registry,
    /// Says what it lacks: settings, or the trust of the API server.
    pub readiness: telemetry::Readiness,
    /// Ends it.
    pub stop: CancellationToken,
}

impl Apart {
    /// Serves, and keeps certificates and registration fresh.
    pub async fn serve(self) -> anyhow::Result<()> {
        let names = vec![registration::server_name(NAMESPACE)];
        let mut rotation = Rotation::open(&self.certificates, names, self.life, jiff::Timestamp::now())?;
        let (show, serving) = watch::channel(shown(&rotation));
        self.readiness.lacks(TRUST, "it is not asked for yet");
        let readiness = self.readiness.clone();
        let gateway = Gateway::new(gateway::Config {
            client: self.client.clone(),
            dial: self.dial,
            datagrams: self.datagrams,
            tls: self.tls,
            settings: gateway::Settings { trusted: trusted(), ..gateway::Settings::default() },
            authorization: Authorization::Review,
            explain: Some(self.explain),
            patience: gateway::PATIENCE,
            metrics: self.metrics,
            readiness: self.readiness,
        });
        let follower = gateway.clone();
        tokio::select! {
            () = follower.follow() => Ok(()),
            served = gateway.serve(self.listener, serving, self.stop) => Ok(served?),
            failed = keep(&self.client, &mut rotation, &show, &readiness) => failed,
        }
    }
}

fn shown(rotation: &Rotation) -> Serving {
    let identity = rotation.identity();
    Serving { cert: identity.cert, key: identity.key }
}

/// Tells the API server whom to trust before it is shown, for ever; ends with an error of the disk.
async fn keep(
    client: &Client,
    rotation: &mut Rotation,
    show: &watch::Sender<Serving>,
    readiness: &telemetry::Readiness,
) -> anyhow::Result<()> {
    let mut told = None;
    loop {
        let now = jiff::Timestamp::now();
        rotation.advance(now)?;
        let result = registration::trust(client, &rotation.authorities(), now).await;
        let complaint = match &result {
            Ok(true) => None,
            Ok(false) => Some("it has not been registered: see `virtfold crds --gateway`".to_owned()),
            Err(status) => Some(status.message.clone()),
        };
        if complaint.is_some() && complaint != told {
            tracing::warn!(why = complaint, "the API server does not trust the gateway yet");
        }
        match &complaint {
            Some(why) => readiness.lacks(TRUST, why),
            None => readiness.has(TRUST),
        }
        let mut pause = AGAIN;
        if complaint.is_none() {
            rotation.published()?;
            pause = gateway::REGISTERED.min(rotation.next(jiff::Timestamp::now())).max(Duration::from_millis(100));
        }
        told = complaint;
        let now = shown(rotation);
        show.send_if_modified(|shown| {
            let other = *shown != now;
            if other {
                *shown = now;
                tracing::info!("the gateway shows another certificate");
            }
            other
        });
        tokio::time::sleep(pause).await;
    }
}

/// Runs until it is asked to end.
pub fn run(options: &args::Gateway) -> anyhow::Result<u8> {
    component::run(THREADS, serve(options))
}

async fn serve(options: &args::Gateway) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-gateway",
        otlp_endpoint: options.otlp_endpoint.clone(),
        log_filter: options.log.clone(),
        ..telemetry::Options::default()
    })?;
    let stop = CancellationToken::new();
    until_asked(&stop)?;
    std::fs::create_dir_all(&options.certificates)
        .with_context(|| format!("cannot make {}", options.certificates.display()))?;
    let metrics = telemetry::metrics::Registry::default();
    let client = client(&options.kubeconfig, GATEWAY, &metrics).await?;
    let tls = identity(&options.tls)?;
    let readiness = telemetry::Readiness::default();
    if let Some(address) = options.metrics {
        let ready = vec![(&c::API_READY, observed::ready(&readiness))];
        let what = Observed { registry: metrics.clone(), client: client.clone(), before: None, ready };
        observed::spawn(what, address, observed::tls(&tls), stop.clone()).await?;
    }
    let lease = (options.namespace.clone(), reconcilers::LeaseConfig::default().name);
    let listener =
        TcpListener::bind(options.listen).await.with_context(|| format!("cannot listen on {}", options.listen))?;
    tracing::info!(address = %options.listen, "the gateway listens");
    let served = Apart {
        explain: Arc::new(Leader::new(client.clone(), direct(), tls.clone(), lease)),
        client,
        dial: direct(),
        datagrams: direct_datagrams(),
        tls,
        listener,
        certificates: options.certificates.join("gateway.json"),
        life: Duration::from_secs(options.certificate_life),
        metrics,
        readiness,
        stop,
    }
    .serve()
    .await;
    telemetry.shutdown().await;
    served
}
