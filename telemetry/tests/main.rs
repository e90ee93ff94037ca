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

struct Receiver(mpsc::UnboundedSender<(ExportTraceServiceRequest, String)>, watch::Receiver<Mood>);

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
        let key = request.metadata().get("x-key").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        self.0.send((request.into_inner(), key)).map_err(|_| tonic::Status::unavailable("closed"))?;
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
    let guard = telemetry::init(&Options {
        service: "test",
        otlp_endpoint: Some(endpoint),
        speaks_for: Some("other"),
        ..Options::default()
    })
    .unwrap();
    let context = TraceContext::random();
    let now = SystemTime::now();
    let step = |step| Step {
        step,
        begins: true,
        end: now + Duration::from_millis(5),
        ..Step::of(context, "uid", "start", now)
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
    let untold = TraceContext { sampled: false, ..TraceContext::random() };
    let of_untold = |name| Step { context: untold, service: Some("other"), ..step(Some(name)) };
    let cause = telemetry::Cause { context, relation: "after-failure-of" };
    // Another trace that nobody wants, of which nothing fails.
    let other = TraceContext { sampled: false, ..TraceContext::random() };
    telemetry::emit(Step { context: other, ..step(Some("unwanted")) });
    telemetry::emit(of_untold("untold"));
    let error = Some(telemetry::Failure { reason: "ErrImagePull".into(), message: "no such image".into() });
    telemetry::emit(Step { error, links: vec![cause], kind: telemetry::Kind::Server, ..of_untold("failed") });
    guard.shutdown().await;
    let now = steps::counts();
    assert_eq!((now.unsent, now.exported - before.exported, now.failed), (2, 4, before.failed), "{now:?}");

    let mut spans = vec![];
    let mut services = std::collections::BTreeMap::new();
    while !["start", "schedule", "failed"].iter().all(|n| spans.iter().any(|s: &Span| s.name == *n)) {
        let (request, _) = tokio::time::timeout(Duration::from_secs(5), rx.recv()).await.unwrap().unwrap();
        for resource in request.resource_spans {
            let attributes = resource.resource.unwrap().attributes;
            let service = attributes.iter().find(|a| a.key == "service.name").unwrap().value.clone().unwrap().value;
            let all: Vec<Span> = resource.scope_spans.into_iter().flat_map(|s| s.spans).collect();
            services.extend(all.iter().map(|s| (s.name.clone(), format!("{service:?}"))));
            spans.extend(all);
        }
    }
    let by_name = |name: &str| spans.iter().find(|s| s.name == name).unwrap();
    let (root, child) = (by_name("start"), by_name("schedule"));
    assert_eq!((root.trace_id.as_slice(), root.span_id.as_slice()), (&context.trace_id[..], &context.span_id[..]));
    assert_eq!(child.parent_span_id, root.span_id);
    assert!(root.parent_span_id.is_empty());
    // What failed brings its trace along, in the name of the part that it is of.
    let failed = by_name("failed");
    assert!(spans.iter().any(|s| s.name == "untold") && spans.iter().all(|s| s.name != "unwanted"));
    assert!(services["failed"].contains("other") && services["start"].contains("test"), "{services:?}");
    let status = failed.status.clone().unwrap();
    assert_eq!((status.message.as_str(), status.code, failed.kind), ("ErrImagePull: no such image", 2, 2));
    assert!(failed.attributes.iter().any(|a| a.key == "error.type"));
    assert_eq!(
        (failed.links[0].trace_id.as_slice(), failed.links[0].span_id.as_slice()),
        (&context.trace_id[..], &context.span_id[..])
    );
    assert_eq!(child.end_time_unix_nano - child.start_time_unix_nano, 5_000_000);
}

/// Set for the process that tells something to a collector by its environment alone.
const CHILD: &str = "TELEMETRY_TEST_CHILD";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_alone_names_collector_headers_and_sampler() {
    if std::env::var_os(CHILD).is_some() {
        let guard = telemetry::init(&Options { service: "child", ..Options::default() }).unwrap();
        let told: Vec<TraceContext> = (0..200).map(|_| telemetry::begin()).collect();
        let sampled = told.iter().filter(|c| c.sampled).count();
        assert!((40..160).contains(&sampled), "{sampled} of 200");
        for context in told {
            telemetry::emit(Step { begins: true, ..Step::of(context, "uid", "start", SystemTime::now()) });
        }
        guard.shutdown().await;
        let counts = steps::counts();
        assert_eq!((counts.exported, counts.unsent), (sampled as u64, 200 - sampled as u64), "{counts:?}");
        return;
    }
    let (tx, mut rx) = mpsc::unbounded_channel();
    let (_mood, moods) = watch::channel(Mood::Takes);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Receiver(tx, moods)))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_environment_alone_names_collector_headers_and_sampler"])
        .env(CHILD, "1")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
        .env("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        .env("OTEL_TRACES_SAMPLER_ARG", "0.5")
        .output();
    let out = tokio::time::timeout(Duration::from_secs(60), child).await.unwrap().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    let (request, key) = rx.recv().await.unwrap();
    assert_eq!(key, "secret");
    assert!(!request.resource_spans.is_empty());
}
