//! What gateways that are processes of their own ask the controller.

use std::time::Duration;

use proto::controller::controller_server::{Controller, ControllerServer};
use proto::controller::{ExplainReply, ExplainRequest};
use proto::transport::{Tls, caller, server};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{ExplainError, Explainer, Subject};

/// Common name of the certificate that gateways come with.
const GATEWAY: &str = "virtfold-gateway";
/// How often a silent connection is asked whether somebody is there, and how long the answer may take.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Questions of one connection that are answered at the same time.
const QUESTIONS: usize = 8;

struct Answers(Explainer);

#[tonic::async_trait]
impl Controller for Answers {
    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainReply>, Status> {
        caller(&request, GATEWAY)?;
        let asked = request.into_inner();
        let found = self.0.explain(&Subject::of(&asked.resource, &asked.namespace, &asked.name)).await;
        let explanation = match found {
            Ok(explanation) => serde_json::to_vec(&explanation).map_err(|e| Status::internal(e.to_string()))?,
            Err(e @ (ExplainError::NotLeading(_) | ExplainError::Unknown(_))) => {
                return Err(Status::failed_precondition(e.to_string()));
            }
            Err(ExplainError::Journal(e)) => {
                return Err(Status::internal(format!("cannot read the controller's journal: {e}")));
            }
        };
        Ok(Response::new(ExplainReply { explanation: explanation.into() }))
    }
}

/// Answers until `stop`.
///
/// # Errors
/// When the certificates are not usable or the socket breaks.
pub async fn serve(
    listener: TcpListener,
    tls: &Tls,
    explainer: Explainer,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    server(tls)?
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .concurrency_limit_per_connection(QUESTIONS)
        .add_service(ControllerServer::new(Answers(explainer)))
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.cancelled_owned())
        .await
}
