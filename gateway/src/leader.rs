//! Asks the controller that leads, wherever it is: the Lease says who leads and where it answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use proto::controller::ExplainRequest;
use proto::controller::controller_client::ControllerClient;
use tonic::Code;
use tonic::transport::Channel;

use crate::{Dial, Explain, Status, Tls, limits};

/// Name in the certificate of every controller.
const CONTROLLER: &str = "virtfold-controller";

/// The way to the leader.
pub struct Leader {
    client: Client,
    dial: Dial,
    tls: Tls,
    /// Namespace and name of the Lease.
    lease: (String, String),
    channel: Mutex<Option<(SocketAddr, Channel)>>,
}

impl std::fmt::Debug for Leader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leader").field("lease", &self.lease).finish_non_exhaustive()
    }
}

fn unavailable(why: impl std::fmt::Display) -> Status {
    Status::new(503, "ServiceUnavailable", format!("the controller that leads cannot be asked: {why}"))
}

impl Leader {
    /// By the Lease of that namespace and name, over `dial`, as who `tls` says.
    pub fn new(client: Client, dial: Dial, tls: Tls, lease: (String, String)) -> Arc<Self> {
        Arc::new(Self { client, dial, tls, lease, channel: Mutex::default() })
    }

    async fn place(&self) -> Result<SocketAddr, Status> {
        let (namespace, name) = &self.lease;
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let lease = tokio::time::timeout(limits::API, leases.get_opt(name))
            .await
            .map_err(|_| unavailable("the API server did not answer"))?
            .map_err(unavailable)?;
        let lease = lease.ok_or_else(|| unavailable(format!("there is no Lease {namespace}/{name}")))?;
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.as_deref()).unwrap_or_default();
        if holder.is_empty() {
            return Err(unavailable("nobody leads at the moment"));
        }
        let annotations = lease.metadata.annotations.unwrap_or_default();
        let address = annotations.get(api::names::ANN_CONTROLLER_ADDRESS).and_then(|a| a.parse().ok());
        address.ok_or_else(|| unavailable(format!("{holder} was not told where to listen (--listen)")))
    }

    async fn channel(&self, address: SocketAddr) -> Result<Channel, Status> {
        let kept = |c: &Option<(SocketAddr, Channel)>| c.as_ref().filter(|(a, _)| *a == address).map(|c| c.1.clone());
        if let Some(channel) = kept(&self.channel.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(channel);
        }
        let made = proto::transport::channel(self.dial.clone(), &self.tls, CONTROLLER, address).await;
        let channel = made.map_err(|e| unavailable(format!("{address}: {}", crate::agent::chain(&e))))?;
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = Some((address, channel.clone()));
        Ok(channel)
    }

    async fn ask(&self, request: ExplainRequest) -> Result<serde_json::Value, Status> {
        let mut client = ControllerClient::new(self.channel(self.place().await?).await?)
            .max_decoding_message_size(limits::EXPLANATION);
        let asked = client.explain(request);
        match tokio::time::timeout(limits::EXPLAIN, asked).await {
            Ok(Ok(reply)) => serde_json::from_slice(&reply.into_inner().explanation).map_err(Status::internal),
            Ok(Err(status)) if status.code() == Code::Internal => {
                Err(Status::new(500, "InternalError", status.message()))
            }
            // In the controller's own words where it has some: that it does not lead any more, or has not seen the machine.
            Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                Err(Status::new(503, "ServiceUnavailable", status.message()))
            }
            Ok(Err(status)) => Err(unavailable(status.message())),
            Err(_) => Err(unavailable("it did not answer in time")),
        }
    }
}

/// A [`Leader`] that is shared.
impl Explain for Arc<Leader> {
    fn explain(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<serde_json::Value, Status>> {
        let request =
            ExplainRequest { resource: resource.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        let leader = self.clone();
        Box::pin(async move { leader.ask(request).await })
    }
}
