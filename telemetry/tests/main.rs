//! A step leaves the process by OTLP/gRPC and arrives with its derived ids.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::time::{Duration, SystemTime};
use telemetry::{
    Options, Step, TraceContext,
    steps::{self, Counts},
};
use tokio::sync::{mpsc, watch};

/// What a collector does with what it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Takes,
    Refuses,
    Sleeps,
}

struct Receiver(mpsc::UnboundedSender<ExportTraceServiceRequest>, watch::Receiver<Mood>);

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let mood = *self.1.borrow();
        match mood {
            Mood::Takes => {}
            Mood::Refuses => return Err(tonic::Status::permission_denied("not you")),
            Mood::Sleeps => std::future::pending().await,
        }
        self.0.send(request.into_inner()).map_err(|_| tonic::Status::unavailable("closed"))?;
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn until(what: &str, done: impl Fn(Counts) -> bool) -> Counts {
    let began = tokio::time::Instant::now();
    loop {
        let now = steps::counts();
        if done(now) {
            return now;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "waited too long for {what}: {now:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One test: a process has one exporter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_arrive_at_the_collector_and_one_that_is_away_or_slow_or_refuses_costs_a_bounded_queue() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let endpoint = format!("http://{address}");
    let guard =
        telemetry::init(&Options { service: "test", otlp_endpoint: Some(endpoint), ..Options::default() }).unwrap();
    let context = TraceContext::random();
    let now = SystemTime::now();
    let step = |step| Step {
        context,
        cell: "uid",
        operation: "start",
        step,
        parent: None,
        begins: true,
        start: now,
        end: now + Duration::from_millis(5),
        attributes: vec![],
        error: None,
    };
    let crowd = |count: u64| (0..count).for_each(|_| telemetry::emit(step(Some("crowd"))));

    // Nobody is there.
    crowd(10);
    until("the loss of what nobody takes", |c| c.failed == 10).await;

    let (tx, mut rx) = mpsc::unbounded_channel();
    let (mood, moods) = watch::channel(Mood::Refuses);
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Receiver(tx, moods)))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    crowd(10);
    until("the loss of what is refused", |c| c.failed == 20).await;

    // It takes its time: what waits is bounded, what is over that is counted.
    mood.send(Mood::Sleeps).unwrap();
    crowd(10_000);
    let now = steps::counts();
    assert!(now.waiting <= 2048, "{now:?}");
    assert_eq!(now.waiting + now.failed + now.overflown, 10_020, "{now:?}");
    assert!(now.overflown >= 10_000 - 2 * 2048, "{now:?}");
    until("patience to end", |c| c.failed > 20).await;

    mood.send(Mood::Takes).unwrap();
    until("the queue to be empty", |c| c.waiting == 0).await;
    let before = steps::counts();
    telemetry::emit(step(Some("schedule")));
    telemetry::emit(step(None));
    telemetry::emit(Step { context: TraceContext { sampled: false, ..context }, ..step(Some("unsampled")) });
    guard.shutdown().await;
    let now = steps::counts();
    assert_eq!((now.unsent, now.exported - before.exported, now.failed), (1, 2, before.failed), "{now:?}");

    let mut spans = vec![];
    while !["start", "schedule"].iter().all(|n| spans.iter().any(|s: &Span| s.name == *n)) {
        let request = tokio::time::timeout(Duration::from_secs(5), rx.recv()).await.unwrap().unwrap();
        spans.extend(request.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans));
    }
    let by_name = |name: &str| spans.iter().find(|s| s.name == name).unwrap();
    let (root, child) = (by_name("start"), by_name("schedule"));
    assert_eq!((root.trace_id.as_slice(), root.span_id.as_slice()), (&context.trace_id[..], &context.span_id[..]));
    assert_eq!(child.parent_span_id, root.span_id);
    assert!(root.parent_span_id.is_empty());
    assert_eq!(child.end_time_unix_nano - child.start_time_unix_nano, 5_000_000);
}
