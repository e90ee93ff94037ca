//! The journey from the VM's creation to the guest's agent is one trace across the processes.

use super::e2e;
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, Options},
    manifest::vm,
    process,
    vm::{START, Vm},
    wait,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    trace::v1::Span,
};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

/// All that our own crates say.
const LOUD: &str = "info,state=trace,reconcilers=trace,node_agent=trace,gateway=trace,launcher=trace,embedded=debug";

/// (service, span)
type Spans = Arc<Mutex<Vec<(String, Span)>>>;

struct Collector(Spans);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> std::result::Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = attributes.iter().find(|a| a.key == "service.name").map(|a| format!("{:?}", a.value));
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push((service.clone().unwrap_or_default(), span));
            }
        }
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

#[test]
fn a_start_is_one_trace_across_the_processes() -> Result<()> {
    e2e!();
    let _turn = super::TURN.read().unwrap_or_else(PoisonError::into_inner);
    let spans = Spans::default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = TraceServiceServer::new(Collector(spans.clone()));
    runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));

    let cluster = Cluster::start(Options {
        nodes: 1,
        arguments: vec!["--stop-guests".into(), "--otlp-endpoint".into(), endpoint],
        environment: vec![("VIRTFOLD_LOG".into(), LOUD.into())],
    })?;
    // What nobody but the guest may see.
    let secret = "hush-7c1e-user-data";
    let machine = Vm::running(&cluster, &vm("traced").user_data(&format!("#!/bin/sh\n: {secret}\n")))?;
    machine.wait_condition("AgentConnected", "True", START)?;
    let vmi = machine.vmi()?;
    let parent = vmi["metadata"]["annotations"]["virtfold.io/traceparent"].as_str().unwrap_or_default().to_owned();
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let of_trace = || -> Vec<(String, Span)> {
        let all = spans.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|(_, s)| parent.contains(&hex(&s.trace_id))).cloned().collect()
    };
    wait::until("the root span", START, || {
        let names: Vec<String> = of_trace().into_iter().map(|(_, s)| s.name).collect();
        let whole = names.iter().any(|n| n == "start") && names.iter().any(|n| n == "guest-agent");
        Ok(if whole { Ok(()) } else { Err(format!("{parent}: {names:?}")) })
    })?;
    for process in process::all() {
        let environment = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        let seen = process.arguments.join(" ") + &String::from_utf8_lossy(&environment);
        ensure!(!seen.contains(secret), "process {} ({}) shows user data", process.pid, process.name);
    }
    machine.delete()?;
    ensure!(cluster.terminate(std::time::Duration::from_secs(60))? == Some(0), "{}", cluster.log_tail());
    ensure!(!format!("{spans:?}").contains(secret), "a span shows user data");
    for log in [cluster.log(), cluster.data.join("nodes/node-1/agent.log")] {
        let said = std::fs::read(&log)?;
        ensure!(!String::from_utf8_lossy(&said).contains(secret), "{} shows user data", log.display());
    }
    let mut lines = 0;
    for segment in telemetry::journal::segments(&cluster.data.join("journal"))? {
        for piece in state::journal::pieces(&std::fs::read(&segment)?) {
            let state::journal::Piece::Block(block) = piece else { continue };
            for line in block.raw() {
                ensure!(!String::from_utf8_lossy(line).contains(secret), "{} shows user data", segment.display());
                lines += 1;
            }
        }
    }
    ensure!(lines > 40, "the journals have {lines} records");

    let all: Vec<(String, Span)> = of_trace();
    let story = all
        .iter()
        .map(|(service, s)| format!("{service} {} {} <- {}", s.name, hex(&s.span_id), hex(&s.parent_span_id)))
        .collect::<Vec<_>>()
        .join("\n");
    let named = |name: &str| -> Result<&Span> {
        let mut found = all.iter().filter(|(_, s)| s.name == name).map(|(_, s)| s);
        let one = found.next().ok_or_else(|| anyhow::anyhow!("no span '{name}':\n{story}"))?;
        ensure!(found.next().is_none(), "two spans '{name}':\n{story}");
        Ok(one)
    };
    let root = named("write")?;
    ensure!(root.parent_span_id.is_empty(), "the write is the root:\n{story}");
    ensure!(parent.contains(&hex(&root.span_id)), "the root is the annotation's span:\n{story}");
    let ids: BTreeSet<&[u8]> = all.iter().map(|(_, s)| s.span_id.as_slice()).collect();
    ensure!(ids.len() == all.len(), "two spans have one id:\n{story}");
    // The end of the machine is another operation that follows from the same write.
    for (operation, steps) in [
        ("start", &["create-vmi", "prepare-pod", "authorise", "boot", "guest-agent"][..]),
        ("stop", &["shutdown", "teardown"][..]),
    ] {
        let whole = named(operation)?;
        ensure!(whole.parent_span_id == root.span_id, "'{operation}' follows from the write:\n{story}");
        for step in steps {
            ensure!(named(step)?.parent_span_id == whole.span_id, "'{step}' is of the {operation}:\n{story}");
        }
    }
    for (_, s) in &all {
        ensure!(s.end_time_unix_nano >= s.start_time_unix_nano, "{} ends before it begins", s.name);
        let known = s.parent_span_id.is_empty() || ids.contains(s.parent_span_id.as_slice());
        ensure!(known, "nobody told of the parent of '{}':\n{story}", s.name);
    }
    let services: BTreeSet<&str> = all.iter().map(|(service, _)| service.as_str()).collect();
    ensure!(services.len() >= 2, "spans of one process only:\n{story}");
    Ok(())
}
