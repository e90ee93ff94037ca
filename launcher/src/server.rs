//! The gRPC face of the launcher: it passes on what is asked, and streams the level.

use std::pin::Pin;

use futures::Stream;
use proto::agent::{Ack, VerbReply, VerbRequest};
use proto::launcher::launcher_server::Launcher;
use proto::launcher::{
    InfoReply, InfoRequest, Order, ProbeReply, ProbeRequest, StatsReply, StatsRequest, Step, ToldReply, ToldRequest,
    Update, WatchRequest, update,
};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use crate::core::{Ask, Level};

pub(crate) struct Service {
    pub asks: mpsc::Sender<Ask>,
    pub level: watch::Receiver<Level>,
    /// Set once a watcher has taken the outcome.
    pub delivered: watch::Sender<bool>,
}

impl Service {
    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<Response<T>, Status> {
        let (reply, answer) = oneshot::channel();
        let gone = || Status::unavailable("the launcher is ending");
        self.asks.send(ask(reply)).await.map_err(|_| gone())?;
        answer.await.map(Response::new).map_err(|_| gone())
    }
}

/// Which part of the level a watcher has seen.
struct Watcher {
    level: watch::Receiver<Level>,
    delivered: watch::Sender<bool>,
    domain_seq: u64,
    outcome_sent: bool,
    /// It wants steps, and has had those up to this one.
    steps: Option<u64>,
}

impl Watcher {
    async fn next(&mut self) -> Option<Update> {
        loop {
            if self.outcome_sent {
                // Asked for more: the transport has taken what came before.
                self.delivered.send_replace(true);
                return None;
            }
            {
                let level = self.level.borrow_and_update();
                let steps: Vec<Step> = match &mut self.steps {
                    Some(had) => {
                        let new = level.steps.iter().filter(|s| s.seq > *had).cloned().collect();
                        *had = level.steps.back().map_or(*had, |s| s.seq.max(*had));
                        new
                    }
                    None => Vec::new(),
                };
                if level.domain.seq > self.domain_seq {
                    self.domain_seq = level.domain.seq;
                    return Some(Update { kind: Some(update::Kind::Domain(level.domain.clone())), steps });
                }
                if let Some(outcome) = &level.outcome {
                    self.outcome_sent = true;
                    return Some(Update { kind: Some(update::Kind::Outcome(outcome.clone())), steps });
                }
                if !steps.is_empty() {
                    return Some(Update { kind: None, steps });
                }
            }
            self.level.changed().await.ok()?;
        }
    }
}

/// Fails unless the node agent asks.
fn agent<T>(request: &Request<T>) -> Result<(), Status> {
    let who = request.extensions().get::<UdsConnectInfo>().and_then(|c| c.peer_cred);
    if who.is_some_and(|w| crate::is_agent(w.uid())) {
        return Ok(());
    }
    Err(Status::permission_denied("the node agent alone may ask for this"))
}

#[tonic::async_trait]
impl Launcher for Service {
    async fn info(&self, request: Request<InfoRequest>) -> Result<Response<InfoReply>, Status> {
        agent(&request)?;
        self.ask(Ask::Info).await
    }

    async fn execute(&self, request: Request<Order>) -> Result<Response<Ack>, Status> {
        agent(&request)?;
        let order = Box::new(request.into_inner());
        self.ask(|reply| Ask::Execute(order, reply)).await
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeReply>, Status> {
        let answer = self.ask(|reply| Ask::Probe(request.into_inner(), reply)).await?;
        answer.into_inner().map(Response::new).map_err(|e| Status::unavailable(e.to_string()))
    }

    async fn stats(&self, request: Request<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        agent(&request)?;
        self.ask(Ask::Stats).await
    }

    async fn verb(&self, request: Request<VerbRequest>) -> Result<Response<VerbReply>, Status> {
        agent(&request)?;
        let request = request.into_inner();
        self.ask(|reply| Ask::Verb(request, reply)).await
    }

    async fn told(&self, request: Request<ToldRequest>) -> Result<Response<ToldReply>, Status> {
        agent(&request)?;
        let told = Ask::Told(request.into_inner().seq);
        self.asks.send(told).await.map_err(|_| Status::unavailable("the launcher is ending"))?;
        Ok(Response::new(ToldReply {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Update, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        agent(&request)?;
        let watcher = Watcher {
            level: self.level.clone(),
            delivered: self.delivered.clone(),
            domain_seq: 0,
            outcome_sent: false,
            steps: request.get_ref().steps.then_some(0),
        };
        let stream = futures::stream::unfold(watcher, |mut w| async move { w.next().await.map(|u| (Ok(u), w)) });
        Ok(Response::new(Box::pin(stream)))
    }
}
