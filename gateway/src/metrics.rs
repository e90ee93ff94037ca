//! What the gateway counts.

use crate::admission::{AdmissionInput, Operation};
use crate::status::Status;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use telemetry::TraceContext;
use telemetry::metrics::{Counter, Gauge, Held, Histogram, Registry, catalogue as c};

/// Its counters.
#[derive(Clone)]
pub(crate) struct Metrics {
    admissions: Counter,
    created: Counter,
    requests: Counter,
    durations: Histogram,
    consoles: Gauge,
    screens: Gauge,
    tunnels: Gauge,
    last: Gauge,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            admissions: registry.counter(&c::ADMISSIONS),
            created: registry.counter(&c::VM_CREATED_BY),
            requests: registry.counter(&c::SUBRESOURCES),
            durations: registry.histogram(&c::SUBRESOURCE_TIME),
            consoles: registry.gauge(&c::CONSOLES),
            screens: registry.gauge(&c::VNCS),
            tunnels: registry.gauge(&c::FORWARDS),
            last: registry.gauge(&c::LAST_CONNECTION),
        }
    }

    /// A write was judged.
    pub(crate) fn judged(&self, input: &AdmissionInput, admitted: bool) {
        let operation = match input.operation {
            Operation::Create => "create",
            Operation::Update => "update",
            Operation::Delete => "delete",
        };
        let outcome = if admitted { "admitted" } else { "refused" };
        self.admissions.add(&[&input.kind, operation, outcome]);
        let new = input.operation == Operation::Create && input.kind == "VirtualMachine";
        if admitted && new {
            self.created.add(&[&input.namespace]);
        }
    }

    /// A request about a machine was answered.
    pub(crate) fn answered(
        &self,
        resource: &str,
        subresource: &str,
        refused: Option<&Status>,
        took: Duration,
        trace: TraceContext,
    ) {
        // What does not exist is named by whoever asks.
        let subresource = if refused.is_some_and(|s| s.code == 404) { "other" } else { subresource };
        let code = refused.map_or("2xx".to_owned(), |s| s.code.to_string());
        self.requests.add(&[resource, subresource, &code]);
        self.durations.observe(&[resource, subresource], took, Some(trace));
    }

    /// Somebody is connected to an instance, until the guard is dropped.
    pub(crate) fn connected(&self, what: &str, namespace: &str, vmi: &str) -> Held {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last.set(&[namespace, vmi], now.as_secs());
        let gauge = match what {
            "console" => &self.consoles,
            "vnc" => &self.screens,
            _ => &self.tunnels,
        };
        gauge.hold(&[namespace, vmi])
    }
}
