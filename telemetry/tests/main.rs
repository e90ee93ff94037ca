//! A step leaves the process by OTLP/gRPC and arrives with its derived ids.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use std::time::{Duration, SystemTime};
use telemetry::{Options, Step, TraceContext};
use tokio::sync::mpsc;

struct Receiver(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.0.send(request.into_inner()).map_err(|_| tonic::Status::unavailable("closed"))?;
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_arrives_at_the_collector() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (tx, mut rx) = mpsc::unbounded_channel();
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Receiver(tx)))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
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
    telemetry::emit(step(Some("schedule")));
    telemetry::emit(step(None));
    telemetry::emit(Step { context: TraceContext { sampled: false, ..context }, ..step(Some("unsampled")) });
    guard.shutdown().await;
    assert_eq!(telemetry::steps_dropped(), 1);

    let mut spans = vec![];
    while spans.len() < 2 {
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
