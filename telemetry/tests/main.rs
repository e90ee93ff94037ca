//! A step leaves the process by OTLP and arrives with its derived ids: by gRPC and by HTTP, in the clear and over TLS.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};
use telemetry::{
    Options, Step, TraceContext,
    steps::{self, Counts},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

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

/// What a collector was sent, each with the key that came with it.
type Sent = mpsc::UnboundedReceiver<(ExportTraceServiceRequest, String)>;

/// A collector that takes OTLP over gRPC.
fn collector(listener: TcpListener, tls: Option<ServerTlsConfig>, moods: watch::Receiver<Mood>) -> Sent {
    let (tx, rx) = mpsc::unbounded_channel();
    let mut server = tonic::transport::Server::builder();
    if let Some(tls) = tls {
        server = server.tls_config(tls).unwrap();
    }
    let server = server.add_service(TraceServiceServer::new(Receiver(tx, moods)));
    tokio::spawn(server.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)));
    rx
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
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
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

    let (mood, moods) = watch::channel(Mood::Refuses);
    let mut rx = collector(TcpListener::bind(address).await.unwrap(), None, moods);
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
    telemetry::emit(Step {
        error: error.clone(),
        links: vec![cause],
        kind: telemetry::Kind::Server,
        ..of_untold("failed")
    });
    until("what failed to be told", |c| c.exported == before.exported + 4).await;
    // Of a trace that nobody wants, whatever happens in it, a bounded part is held for the case that something fails.
    let endless = TraceContext { sampled: false, ..TraceContext::random() };
    (0..3_000).for_each(|_| telemetry::emit(Step { context: endless, ..step(Some("held")) }));
    telemetry::emit(Step { context: endless, error, ..step(Some("at last")) });
    guard.shutdown().await;
    let now = steps::counts();
    let told = now.exported - before.exported;
    assert_eq!((now.unsent, told, now.failed), (3_002, 4 + 1_024 + 1, before.failed), "{now:?}");

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

/// Set for the process that tells something to a collector, to how many traces that is.
const CHILD: &str = "TELEMETRY_TEST_CHILD";
/// Where its connections go.
const VIA: &str = "TELEMETRY_TEST_VIA";

/// What such a process does: it tells that many traces of one step each, and says what became of them.
async fn tell(traces: &str) {
    let via = std::env::var(VIA).ok().map(|via| via.parse().unwrap());
    let guard = telemetry::init(&Options { service: "child", otlp_via: via, ..Options::default() }).unwrap();
    let told: Vec<TraceContext> = (0..traces.parse().unwrap()).map(|_| telemetry::begin()).collect();
    let sampled = told.iter().filter(|c| c.sampled).count();
    for context in told {
        telemetry::emit(Step { begins: true, ..Step::of(context, "uid", "start", SystemTime::now()) });
    }
    guard.shutdown().await;
    let c = steps::counts();
    println!("sampled {sampled} exported {} failed {} unsent {}", c.exported, c.failed, c.unsent);
}

/// Runs this very test in a process of its own with these variables, where it is to [`tell`]: what it says.
async fn child(test: &str, traces: usize, variables: &[(&str, &str)]) -> String {
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, traces.to_string())
        .envs(variables.iter().copied())
        .kill_on_drop(true)
        .output();
    let out = tokio::time::timeout(Duration::from_secs(60), child).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    said
}

/// A certificate of its own authority for `localhost`, as PEM: certificate and key.
fn identity() -> (String, String) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    (made.cert.pem(), made.signing_key.serialize_pem())
}

/// Files for variables that name some.
fn files(all: &[&str]) -> (tempfile::TempDir, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let write = |(n, text): (usize, &&str)| {
        let path = folder.path().join(n.to_string());
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let paths = all.iter().enumerate().map(write).collect();
    (folder, paths)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_alone_names_collector_headers_and_sampler() {
    if let Ok(traces) = std::env::var(CHILD) {
        return tell(&traces).await;
    }
    let (_mood, moods) = watch::channel(Mood::Takes);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let mut sent = collector(listener, None, moods);
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret"),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
    ];
    let said = child("the_environment_alone_names_collector_headers_and_sampler", 200, &variables).await;
    let sampled = (40..160).find(|n| said.contains(&format!("sampled {n} exported {n} failed 0 unsent {}\n", 200 - n)));
    assert!(sampled.is_some(), "{said}");
    let (request, key) = sent.recv().await.unwrap();
    assert_eq!(key, "secret");
    assert!(!request.resource_spans.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_go_by_grpc_over_tls_to_a_host_that_is_reached_by_another_way() {
    if let Ok(traces) = std::env::var(CHILD) {
        return tell(&traces).await;
    }
    let ((certificate, key), (ours, our_key)) = (identity(), identity());
    let (_mood, moods) = watch::channel(Mood::Takes);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let via = listener.local_addr().unwrap().to_string();
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(&certificate, &key))
        .client_ca_root(Certificate::from_pem(&ours));
    let mut sent = collector(listener, Some(tls), moods);
    let (_folder, files) = files(&[&certificate, &ours, &our_key]);
    let [certificate, ours, our_key] = &files[..] else { panic!("{files:?}") };
    let whole = [
        // No such port there: the way is another.
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://localhost:1"),
        (VIA, &via),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", certificate),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", ours),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", our_key),
    ];
    let told = async |variables: &[(&str, &str)]| {
        child("spans_go_by_grpc_over_tls_to_a_host_that_is_reached_by_another_way", 1, variables).await
    };
    assert!(told(&whole).await.contains("exported 1 failed 0"));
    let (request, _) = sent.recv().await.unwrap();
    assert_eq!(request.resource_spans[0].scope_spans[0].spans[0].name, "start");
    // Neither a collector that another authority vouches for, nor one that wants to know who we are.
    let mut stranger = whole;
    stranger[2].1 = ours;
    for refused in [&stranger[..], &whole[..3]] {
        let said = told(refused).await;
        assert!(said.contains("exported 0 failed 1"), "{said}");
    }
}

/// Takes one request, head and body, from a connection.
async fn request(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> (String, Vec<u8>) {
    let mut bytes = vec![];
    loop {
        let mut some = [0; 4096];
        let n = stream.read(&mut some).await.unwrap();
        bytes.extend_from_slice(&some[..n]);
        let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap().parse::<usize>().unwrap();
        if bytes.len() >= end + 4 + length {
            return (head, bytes[end + 4..].to_vec());
        }
    }
}

/// A collector that takes OTLP over HTTPS: what comes, as head and body.
fn https(listener: TcpListener, certificate: &str, key: &str) -> mpsc::UnboundedReceiver<(String, Vec<u8>)> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    let (tx, rx) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
        loop {
            let Ok(mut stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            tx.send(request(&mut stream).await).unwrap();
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.shutdown().await.ok();
        }
    });
    rx
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_go_by_http_over_tls_with_headers() {
    if let Ok(traces) = std::env::var(CHILD) {
        return tell(&traces).await;
    }
    let (certificate, key) = identity();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let via: SocketAddr = listener.local_addr().unwrap();
    let mut sent = https(listener, &certificate, &key);
    let (_folder, files) = files(&[&certificate, &identity().0]);
    let (endpoint, via) = (format!("https://localhost:{}", via.port()), via.to_string());
    let told = async |authority: &str| {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
            (VIA, &via),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", authority),
        ];
        child("spans_go_by_http_over_tls_with_headers", 1, &variables).await
    };
    assert!(told(&files[0]).await.contains("exported 1 failed 0"));
    let (head, body) = sent.recv().await.unwrap();
    assert!(head.starts_with("post /v1/traces http/1.1") && head.contains("application/x-protobuf"), "{head}");
    assert!(head.contains("x-key: secret"), "{head}");
    let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
    assert_eq!(request.resource_spans[0].scope_spans[0].spans[0].name, "start");
    let said = told(&files[1]).await;
    assert!(said.contains("exported 0 failed 1"), "{said}");
}
