//! A probe of the pod that is about the inside of the guest: a process beside the launcher, which asks it over its socket.
//!
//! The runtime of the pod runs it in the launcher's container and reads its exit code, as KubeVirt's `virt-probe`.

use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::launcher::ProbeRequest;
use proto::launcher::launcher_client::LauncherClient;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

/// The launcher keeps to the limit; this is for the way to it.
const SLACK: Duration = Duration::from_millis(500);

/// Runs `command` inside of the guest, or, where that is empty, asks whether the guest's agent answers. What comes back is the
/// exit code and what the command wrote; the error says why there is none.
pub async fn ask(share: &Path, command: Vec<String>, limit: Duration) -> Result<(i32, String), String> {
    let path = share.join("launcher.sock");
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let asked = async {
        let channel = Endpoint::from_static("http://launcher")
            .connect_with_connector(connector)
            .await
            .map_err(|e| format!("the launcher cannot be reached: {e}"))?;
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let answer = LauncherClient::new(channel).probe(ProbeRequest { command, limit_ms }).await;
        answer.map(|reply| reply.into_inner()).map_err(|status| status.message().to_owned())
    };
    match tokio::time::timeout(limit + SLACK, asked).await {
        Ok(answer) => answer.map(|reply| (reply.exit, reply.message)),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}
