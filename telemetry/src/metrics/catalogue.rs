//! Every metric, once: name, type, labels, unit, meaning, who tells it. `docs/metrics.md` is made of it.
//!
//! Names, types, labels and units of those that begin with `kubevirt_` are KubeVirt's, byte for byte: dashboards and alerts of others go by them.
//! What KubeVirt has and is not here is in [`ABSENT`], with the reason.

use super::Kind;

/// One metric.
#[derive(Debug)]
pub struct Def {
    /// As Prometheus stores it (of a histogram without `_bucket`, `_sum`, `_count`).
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// It has further labels: those of the machine, one each (`kubernetes_vmi_label_NAME`), at most [`MORE`].
    pub more: bool,
    /// What is measured, and in which unit. No full stop at the end.
    pub help: &'static str,
    /// Which part tells it.
    pub part: Part,
    /// Bounds of a histogram's buckets.
    pub buckets: &'static [f64],
}

/// Labels of a machine that become labels of its metrics.
pub const MORE: usize = 16;

/// Who tells a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Every process.
    All,
    /// The controller that leads.
    Controller,
    /// The gateway.
    Gateway,
    /// A node's agent.
    NodeAgent,
}

impl Part {
    /// In words.
    pub fn word(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Controller => "controller",
            Self::Gateway => "gateway",
            Self::NodeAgent => "node agent",
        }
    }
}

/// Seconds of what machines do.
const SLOW: &[f64] = &[0.5, 1., 2., 5., 10., 20., 30., 40., 50., 60., 90., 120., 180., 300., 600., 1200., 1800., 3600.];
/// Seconds of requests.
const REQUEST: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1., 2.5, 5., 10., 30.];
/// Seconds of steps of a machine of states.
const QUICK: &[f64] = &[0.000_001, 0.000_01, 0.000_1, 0.001, 0.01, 0.1, 1.];
/// Seconds of waiting for a turn.
const QUEUE: &[f64] = &[0.000_01, 0.000_1, 0.001, 0.01, 0.1, 1., 10.];

const VMI: &[&str] = &["node", "namespace", "name"];
const DRIVE: &[&str] = &["node", "namespace", "name", "drive"];
const NIC: &[&str] = &["node", "namespace", "name", "interface"];
const FILE_SYSTEM: &[&str] = &["node", "namespace", "name", "disk_name", "mount_point", "file_system_type"];
const NAMED: &[&str] = &["name", "namespace"];
const CONNECTION: &[&str] = &["namespace", "vmi"];

macro_rules! catalogue {
    ($($id:ident $name:literal $kind:ident $part:ident [$($labels:tt)*] $(more $more:literal)? $(buckets $buckets:ident)? $help:literal;)*) => {
        $(
            #[doc = $help]
            pub static $id: Def = Def {
                name: $name,
                kind: Kind::$kind,
                labels: catalogue!(@labels $($labels)*),
                more: false $(|| $more)?,
                help: $help,
                part: Part::$part,
                buckets: { let none: &'static [f64] = &[]; let _ = none; $(let none = $buckets;)? none },
            };
        )*
        /// All of them.
        pub static ALL: &[&Def] = &[$(&$id),*];
        /// All of them, by the names that they have in the code.
        pub static IDS: &[&str] = &[$(stringify!($id)),*];
    };
    (@labels $list:ident) => { $list };
    (@labels $($label:literal)*) => { &[$($label),*] };
}

catalogue! {
    // --- one instance: its node's agent ---
    CPU "kubevirt_vmi_cpu_usage_seconds_total" Counter NodeAgent [VMI] more true "CPU time of the hypervisor process, the guest's included, in seconds";
    CPU_USER "kubevirt_vmi_cpu_user_usage_seconds_total" Counter NodeAgent [VMI] more true "CPU time of the hypervisor process in user mode, the guest's included, in seconds";
    CPU_SYSTEM "kubevirt_vmi_cpu_system_usage_seconds_total" Counter NodeAgent [VMI] more true "CPU time of the hypervisor process in the kernel, in seconds";
    VCPU "kubevirt_vmi_vcpu_seconds_total" Counter NodeAgent ["node" "namespace" "name" "id" "state"] more true "CPU time of a virtual processor, in seconds, by its number and its present state (running, or offline where the machine is paused; none is ever told to be blocked, because QEMU says by QMP which thread a processor is, and not whether it is halted)";
    VCPU_DELAY "kubevirt_vmi_vcpu_delay_seconds_total" Counter NodeAgent ["node" "namespace" "name" "id"] more true "Time that a virtual processor was ready to run and had to wait for a processor of the node, in seconds";
    MEMORY_DOMAIN "kubevirt_vmi_memory_domain_bytes" Gauge NodeAgent [VMI] more true "Memory that the guest was given, in bytes";
    MEMORY_BALLOON "kubevirt_vmi_memory_actual_balloon_bytes" Gauge NodeAgent [VMI] more true "Memory that the balloon leaves the guest, in bytes";
    MEMORY_RESIDENT "kubevirt_vmi_memory_resident_bytes" Gauge NodeAgent [VMI] more true "Memory of the node that the hypervisor process takes, in bytes";
    MEMORY_AVAILABLE "kubevirt_vmi_memory_available_bytes" Gauge NodeAgent [VMI] more true "All memory that the guest sees, in bytes, as its balloon driver says";
    MEMORY_UNUSED "kubevirt_vmi_memory_unused_bytes" Gauge NodeAgent [VMI] more true "Memory that the guest uses for nothing, in bytes, as its balloon driver says";
    MEMORY_USABLE "kubevirt_vmi_memory_usable_bytes" Gauge NodeAgent [VMI] more true "Memory that the guest can free without swapping, in bytes, as its balloon driver says";
    MEMORY_CACHED "kubevirt_vmi_memory_cached_bytes" Gauge NodeAgent [VMI] more true "Memory of the guest that caches files, in bytes, as its balloon driver says";
    FAULTS_MAJOR "kubevirt_vmi_memory_pgmajfault_total" Counter NodeAgent [VMI] more true "Page faults of the guest that needed its disk";
    FAULTS_MINOR "kubevirt_vmi_memory_pgminfault_total" Counter NodeAgent [VMI] more true "Page faults of the guest that needed no disk";
    SWAP_IN "kubevirt_vmi_memory_swap_in_traffic_bytes" Gauge NodeAgent [VMI] more true "Bytes that the guest read back from its swap so far";
    SWAP_OUT "kubevirt_vmi_memory_swap_out_traffic_bytes" Gauge NodeAgent [VMI] more true "Bytes that the guest wrote to its swap so far";
    DISK_READS "kubevirt_vmi_storage_iops_read_total" Counter NodeAgent [DRIVE] more true "Reads of a disk by the guest";
    DISK_WRITES "kubevirt_vmi_storage_iops_write_total" Counter NodeAgent [DRIVE] more true "Writes of a disk by the guest";
    DISK_READ_BYTES "kubevirt_vmi_storage_read_traffic_bytes_total" Counter NodeAgent [DRIVE] more true "Bytes that the guest read from a disk";
    DISK_WRITE_BYTES "kubevirt_vmi_storage_write_traffic_bytes_total" Counter NodeAgent [DRIVE] more true "Bytes that the guest wrote to a disk";
    DISK_READ_TIME "kubevirt_vmi_storage_read_times_seconds_total" Counter NodeAgent [DRIVE] more true "Time that reads of a disk took, in seconds";
    DISK_WRITE_TIME "kubevirt_vmi_storage_write_times_seconds_total" Counter NodeAgent [DRIVE] more true "Time that writes of a disk took, in seconds";
    DISK_FLUSHES "kubevirt_vmi_storage_flush_requests_total" Counter NodeAgent [DRIVE] more true "Flushes of a disk's cache by the guest";
    DISK_FLUSH_TIME "kubevirt_vmi_storage_flush_times_seconds_total" Counter NodeAgent [DRIVE] more true "Time that flushes of a disk's cache took, in seconds";
    NET_RX_BYTES "kubevirt_vmi_network_receive_bytes_total" Counter NodeAgent [NIC] more true "Bytes that the guest received";
    NET_TX_BYTES "kubevirt_vmi_network_transmit_bytes_total" Counter NodeAgent [NIC] more true "Bytes that the guest sent";
    NET_RX_PACKETS "kubevirt_vmi_network_receive_packets_total" Counter NodeAgent [NIC] more true "Packets that the guest received";
    NET_TX_PACKETS "kubevirt_vmi_network_transmit_packets_total" Counter NodeAgent [NIC] more true "Packets that the guest sent";
    NET_RX_ERRORS "kubevirt_vmi_network_receive_errors_total" Counter NodeAgent [NIC] more true "Packets for the guest that were damaged";
    NET_TX_ERRORS "kubevirt_vmi_network_transmit_errors_total" Counter NodeAgent [NIC] more true "Packets of the guest that were damaged";
    NET_RX_DROPPED "kubevirt_vmi_network_receive_packets_dropped_total" Counter NodeAgent [NIC] more true "Packets for the guest that were dropped on their way";
    NET_TX_DROPPED "kubevirt_vmi_network_transmit_packets_dropped_total" Counter NodeAgent [NIC] more true "Packets of the guest that were dropped on their way";
    NET_TRAFFIC "kubevirt_vmi_network_traffic_bytes_total" Counter NodeAgent ["node" "namespace" "name" "interface" "type"] more true "Bytes that the guest received (rx) or sent (tx). Deprecated: use the two metrics that tell one each";
    FS_CAPACITY "kubevirt_vmi_filesystem_capacity_bytes" Gauge NodeAgent [FILE_SYSTEM] more true "Size of a file system in the guest, in bytes, as its agent says";
    FS_USED "kubevirt_vmi_filesystem_used_bytes" Gauge NodeAgent [FILE_SYSTEM] more true "Used part of a file system in the guest, in bytes, as its agent says";
    LOAD_1 "kubevirt_vmi_guest_load_1m" Gauge NodeAgent [VMI] more true "Load average of the guest over a minute, as its agent says";
    LOAD_5 "kubevirt_vmi_guest_load_5m" Gauge NodeAgent [VMI] more true "Load average of the guest over five minutes, as its agent says";
    LOAD_15 "kubevirt_vmi_guest_load_15m" Gauge NodeAgent [VMI] more true "Load average of the guest over fifteen minutes, as its agent says";
    HANDLER_READY "kubevirt_virt_handler_ready_status" Gauge NodeAgent [] "Whether this node's agent serves: 1 or 0";
    AGENT_DOMAINS "virtfold_agent_domains" Gauge NodeAgent ["node" "state"] "Machines whose launchers this node's agent knows, by the state of the domain";
    NODE_CPU "virtfold_node_cpu_seconds_total" Counter NodeAgent ["node"] "Seconds that the processors of the agent's machine were in use, all together, since its boot";
    NODE_CPUS "virtfold_node_cpus" Gauge NodeAgent ["node"] "Processors of the agent's machine";
    NODE_MEMORY "virtfold_node_memory_bytes" Gauge NodeAgent ["node"] "Memory of the agent's machine";
    NODE_AVAILABLE "virtfold_node_memory_available_bytes" Gauge NodeAgent ["node"] "Memory of the agent's machine that could be given to processes without swapping";
    NODE_LOAD "virtfold_node_load_1m" Gauge NodeAgent ["node"] "Load average of the agent's machine over one minute";
    AGENT_SILENT "virtfold_agent_silent_launchers_total" Counter NodeAgent [] "Launchers that did not answer for a scrape in time";

    // --- machines: the controller ---
    VM_INFO "kubevirt_vm_info" Gauge Controller ["name" "namespace" "os" "workload" "flavor" "machine_type" "instance_type" "preference" "status" "status_group"] "One for each VirtualMachine; the labels tell about it";
    VM_STARTING_SINCE "kubevirt_vm_starting_status_last_transition_timestamp_seconds" Untyped Controller [NAMED] "Since when a VirtualMachine is starting, in seconds since 1970; 0 where it is not";
    VM_RUNNING_SINCE "kubevirt_vm_running_status_last_transition_timestamp_seconds" Untyped Controller [NAMED] "Since when a VirtualMachine is running, in seconds since 1970; 0 where it is not";
    VM_MIGRATING_SINCE "kubevirt_vm_migrating_status_last_transition_timestamp_seconds" Untyped Controller [NAMED] "Since when a VirtualMachine is migrating, in seconds since 1970; 0 where it is not";
    VM_NOT_RUNNING_SINCE "kubevirt_vm_non_running_status_last_transition_timestamp_seconds" Untyped Controller [NAMED] "Since when a VirtualMachine is stopped, stopping or paused, in seconds since 1970; 0 where it is not";
    VM_ERROR_SINCE "kubevirt_vm_error_status_last_transition_timestamp_seconds" Untyped Controller [NAMED] "Since when a VirtualMachine is in a state of error, in seconds since 1970; 0 where it is not";
    VM_CREATED "kubevirt_vm_create_date_timestamp_seconds" Gauge Controller [NAMED] "When a VirtualMachine was created, in seconds since 1970";
    VMI_INFO "kubevirt_vmi_info" Gauge Controller ["node" "namespace" "name" "phase" "os" "workload" "flavor" "instance_type" "preference" "guest_os_kernel_release" "guest_os_machine" "guest_os_arch" "guest_os_name" "guest_os_version_id" "evictable" "outdated" "vmi_pod"] "One for each VirtualMachineInstance; the labels tell about it";
    VMI_NOT_EVICTABLE "kubevirt_vmi_non_evictable" Gauge Controller [VMI] "Whether an instance wants to be migrated when its node is drained, and cannot be: 1 or 0";
    VMI_OUTDATED "kubevirt_vmi_number_of_outdated" Gauge Controller [] "Instances whose launchers are of another image than new ones get";
    VMI_ADDRESSES "kubevirt_vmi_status_addresses" Gauge Controller ["node" "namespace" "name" "vnic_name" "interface_name" "address" "type"] "One for each address of a VirtualMachineInstance";
    VMI_PHASE_TIME "kubevirt_vmi_phase_transition_time_seconds" Histogram Controller ["phase" "last_phase"] buckets SLOW "Time between two phases of an instance, in seconds";
    VMI_FROM_CREATION "kubevirt_vmi_phase_transition_time_from_creation_seconds" Histogram Controller ["phase"] buckets SLOW "Time from the creation of an instance to a phase, in seconds";
    VMI_FROM_DELETION "kubevirt_vmi_phase_transition_time_from_deletion_seconds" Histogram Controller ["phase"] buckets SLOW "Time from the deletion of an instance to its last phase, in seconds";
    CONTROLLER_LEADS "kubevirt_virt_controller_leading_status" Gauge Controller [] "Whether this controller leads: 1 or 0";
    CONTROLLER_READY "kubevirt_virt_controller_ready_status" Gauge Controller [] "Whether this controller could lead, or does: 1 or 0";
    QUEUE_ADDS "kubevirt_workqueue_adds_total" Counter Controller ["name"] "What came into the queue of the cells";
    QUEUE_DEPTH "kubevirt_workqueue_depth" Gauge Controller ["name"] "What waits in the queue of the cells";
    QUEUE_WAIT "kubevirt_workqueue_queue_duration_seconds" Histogram Controller ["name"] buckets QUEUE "How long what came waited in the queue, in seconds";
    QUEUE_WORK "kubevirt_workqueue_work_duration_seconds" Histogram Controller ["name"] buckets QUICK "How long it took to fold what came into the cells, in seconds";
    STEP "virtfold_step_duration_seconds" Histogram Controller ["cell"] buckets QUICK "Duration of one step of a cell, recording included, in seconds, by the kind of cell";
    CELLS "virtfold_cells" Gauge Controller ["cell"] "Cells of this controller, by kind";
    COMMANDS "virtfold_commands_total" Counter Controller ["command" "outcome"] "Commands of cells, by what was to be done and how it settled";
    OPERATION_STEP "virtfold_operation_step_duration_seconds" Histogram Controller ["operation" "step"] buckets SLOW "Duration of a step of a start or a stop, in seconds; exemplars name traces";
    OPERATION_FAILURES "virtfold_operation_failures_total" Counter Controller ["operation" "step"] "Starts that came to nothing, by the step that they were in";
    VIOLATIONS "virtfold_invariant_violations_total" Counter Controller ["invariant"] "How often something was seen that must not be: two domains of one instance (one-domain), two pods of one instance (one-pod)";
    SESSIONS "virtfold_sessions" Gauge Controller [] "Open sessions with node agents";
    SESSIONS_OPENED "virtfold_sessions_opened_total" Counter Controller [] "Sessions with node agents that were opened";
    SESSIONS_LOST "virtfold_sessions_lost_total" Counter Controller [] "Sessions with node agents that ended while they were wanted";
    EPOCH "virtfold_epoch" Gauge Controller [] "The epoch of this leader: it grows with each change of the leader";
    JOURNAL_BYTES "virtfold_journal_bytes_total" Counter Controller [] "Bytes that were written to the journal";
    JOURNAL_DROPPED "virtfold_journal_records_dropped_total" Counter Controller [] "Records that could not be written to the journal";

    // --- requests: the gateway ---
    VM_CREATED_BY "kubevirt_vm_created_by_pod_total" Counter Gateway ["namespace"] "VirtualMachines whose creation was admitted. Deprecated by KubeVirt";
    API_READY "kubevirt_virt_api_ready_status" Gauge Gateway [] "Whether this gateway serves: 1 or 0";
    CONSOLES "kubevirt_console_active_connections" Gauge Gateway [CONNECTION] "Open connections to the serial console of an instance";
    VNCS "kubevirt_vnc_active_connections" Gauge Gateway [CONNECTION] "Open connections to the screen of an instance";
    FORWARDS "kubevirt_portforward_active_tunnels" Gauge Gateway [CONNECTION] "Open tunnels to ports of an instance";
    LAST_CONNECTION "kubevirt_vmi_last_api_connection_timestamp_seconds" Gauge Gateway [CONNECTION] "When somebody connected to an instance last (screen, console, port), in seconds since 1970";
    ADMISSIONS "virtfold_admissions_total" Counter Gateway ["resource" "operation" "outcome"] "Writes that were judged, by kind of object and what came of it (admitted, refused)";
    SUBRESOURCES "virtfold_subresource_requests_total" Counter Gateway ["resource" "subresource" "code"] "Requests about machines (start, console, ...), by the code of the answer";
    SUBRESOURCE_TIME "virtfold_subresource_request_duration_seconds" Histogram Gateway ["resource" "subresource"] buckets REQUEST "Time to the answer of such requests, in seconds; exemplars name traces";

    // --- every process ---
    INFO "kubevirt_info" Gauge All ["goversion" "kubeversion"] "Which build runs; goversion names the compiler, which is none of Go";
    REST_REQUESTS "kubevirt_rest_client_requests_total" Counter All ["code" "method" "host" "resource" "verb"] "Requests to the API server, by the code of the answer (`<error>` where there was none), kind of object and verb";
    REST_LATENCY "kubevirt_rest_client_request_latency_seconds" Histogram All ["verb" "url"] buckets REQUEST "Time to the answer of the API server, in seconds; the URL without names";
    SPANS "virtfold_spans_total" Counter All ["outcome"] "Finished spans: exported, failed or overflown (lost on the way to the collector), unsent (no collector, or not sampled)";
    SPANS_WAITING "virtfold_spans_waiting" Gauge All [] "Spans that wait for the collector";
    LOG_LINES_SUPPRESSED "virtfold_log_lines_suppressed_total" Counter All [] "Lines of the log that were left out because their message had come too often";
    METRIC_SERIES_DROPPED "virtfold_metric_series_dropped_total" Counter All [] "Series that were not told because a metric had too many";
    CERTIFICATE_ENDS "virtfold_certificate_expiry_timestamp_seconds" Gauge All [] "When the certificate ends by which this process shows its metrics, in seconds since 1970; a node's agent has no other";
    SCRAPES "virtfold_scrapes_total" Counter All ["code"] "Requests for metrics, by the code of the answer";
}

/// What KubeVirt has and this has not, and why.
pub static ABSENT: &[(&str, &str)] = &[
    (
        "kubevirt_vmi_vcpu_wait_seconds_total",
        "libvirt reads it from what the kernel keeps for debugging (wait_sum), which most kernels do not; waiting for disks is the threads' of \
         QEMU, not the processors'",
    ),
    ("kubevirt_vmi_node_cpu_affinity", "processors are not pinned yet"),
    ("kubevirt_vmi_dirty_rate_bytes_per_second", "measuring it slows the guest; it comes with migrations"),
    ("kubevirt_vmi_gpu_info", "there are no host devices yet"),
    ("kubevirt_vmi_guest_os_panic_total", "there is no panic device yet"),
    ("kubevirt_vmi_migration_*", "there are no migrations yet"),
    ("kubevirt_vmi_migrations_*", "there are no migrations yet"),
    ("kubevirt_vm_resource_requests", "the caches keep no resources of machines"),
    ("kubevirt_vm_resource_limits", "the caches keep no resources of machines"),
    ("kubevirt_vm_disk_allocated_size_bytes", "the caches keep no sizes of claims"),
    ("kubevirt_vm_vnic_info", "the caches keep no interfaces of a spec"),
    ("kubevirt_vmi_vnic_info", "the caches keep no interfaces of a spec"),
    ("kubevirt_vm_labels", "which labels are told is configured in KubeVirt's own ConfigMap, which is not read yet"),
    ("kubevirt_vmi_launcher_memory_overhead_bytes", "it is in the requests of the pod, and not kept"),
    ("kubevirt_vmi_sync_total", "nothing is synchronised: cells step, and virtfold_step_duration_seconds counts that"),
    ("kubevirt_vmsnapshot_succeeded_timestamp_seconds", "there are no snapshots yet"),
    (
        "kubevirt_configuration_emulation_enabled",
        "there is no operator; whether guests are emulated is each node's own, and in its labels",
    ),
    ("kubevirt_virt_operator_*", "there is no operator yet"),
    (
        "kubevirt_node_deprecated_machine_types",
        "QEMU's machine types are told as labels of the node, without what it deprecates",
    ),
    ("kubevirt_usbredir_active_connections", "USB is not redirected yet"),
    ("kubevirt_rest_client_rate_limiter_duration_seconds", "the clients have no rate limiter"),
    ("kubevirt_workqueue_retries_total", "pauses after failures are deadlines of the cells, not retries of a queue"),
    ("kubevirt_workqueue_unfinished_work_seconds", "a step takes microseconds and is never left half done"),
    ("kubevirt_workqueue_longest_running_processor_seconds", "a step takes microseconds"),
];

/// The catalogue as a page.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         Made from the catalogue in `telemetry/src/metrics/catalogue.rs` (`UPDATE=1 cargo test -p telemetry catalogue`).\n\n\
         Each process tells its own at `/metrics`, by HTTPS, to those who may `get` the path `/metrics` (a bearer token or a client \
         certificate; reviewed by the API server). `/healthz` and `/readyz` are for everybody; who may `get` or `put` the path `/log` reads or \
         changes there what the process logs (`curl -X PUT -d info,reconcilers=debug`), until it ends. Exemplars name traces where the scraper \
         asks for OpenMetrics, as Prometheus does.\n\n\
         Names, types, labels and units that begin with `kubevirt_` are KubeVirt's. `untyped` are those that KubeVirt calls counters \
         though their names do not end in `_total`. Metrics of one instance have its labels besides, up to 16, as \
         `kubernetes_vmi_label_NAME`.\n\n\
         **How many series there are:** a counted metric has at most 1,000, a told one 50,000, a label's value 253 bytes; of one guest at \
         most 64 file systems, disks and interfaces each are told. What is over that is dropped and counted \
         (`virtfold_metric_series_dropped_total`).\n",
    );
    for part in [Part::NodeAgent, Part::Controller, Part::Gateway, Part::All] {
        let title = match part {
            Part::All => "Every process",
            Part::Controller => "Controller",
            Part::Gateway => "Gateway",
            Part::NodeAgent => "Node agent",
        };
        page += &format!("\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n");
        for def in ALL.iter().filter(|def| def.part == part) {
            let labels = def.labels.join(", ") + if def.more { ", those of the instance" } else { "" };
            page += &format!("| `{}` | {} | {labels} | {} |\n", def.name, def.kind.word(), def.help);
        }
    }
    page += "\n## Of KubeVirt's, not here\n\n| metric | why |\n|---|---|\n";
    for (name, why) in ABSENT {
        page += &format!("| `{name}` | {why} |\n");
    }
    page
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::{collections::BTreeSet, fs, path::Path};

    #[test]
    fn the_page_is_made_of_the_catalogue() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&file, markdown()).unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), markdown(), "run the test with UPDATE=1");
    }

    #[test]
    fn names_are_as_prometheus_wants_them() {
        let mut seen = BTreeSet::new();
        for def in ALL {
            assert!(seen.insert(def.name), "{} twice", def.name);
            assert_eq!(def.kind == Kind::Counter, def.name.ends_with("_total"), "{}", def.name);
            assert_eq!(def.kind == Kind::Histogram, !def.buckets.is_empty(), "{}", def.name);
            assert!(!def.help.ends_with('.') && !def.help.contains(['\n', '\\', '"']), "{}", def.name);
            assert!(def.name.starts_with("kubevirt_") || def.name.starts_with("virtfold_"), "{}", def.name);
        }
        let absent = ABSENT.iter().filter(|(name, _)| seen.contains(name));
        assert_eq!(absent.count(), 0, "absent and there");
    }

    /// All code of the other crates.
    fn code() -> String {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut folders: Vec<_> = ["reconcilers", "gateway", "node-agent", "cli", "telemetry"]
            .iter()
            .map(|c| top.join(c).join("src"))
            .collect();
        let mut all = String::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
                if entry.is_dir() {
                    folders.push(entry);
                } else if !entry.ends_with("catalogue.rs") {
                    all += &fs::read_to_string(entry).unwrap();
                }
            }
        }
        all
    }

    #[test]
    fn everything_in_the_catalogue_is_told_by_somebody() {
        let code = code();
        for id in IDS {
            let used = code.match_indices(&format!("::{id}")).any(|(at, text)| {
                !code[at + text.len()..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            });
            assert!(used, "nobody tells {id}");
        }
    }

    /// The names in the tables of a description of KubeVirt's metrics, as sections 2 to 5 there have them.
    fn of_kubevirt(page: &str) -> BTreeSet<String> {
        let tables = page.split("## 2.").nth(1).unwrap().split("## 6.").next().unwrap();
        let mut names = BTreeSet::new();
        for row in tables.lines().filter(|l| l.starts_with("| kubevirt_")) {
            let cell = row.split('|').nth(1).unwrap().trim();
            for part in cell.split(", ").flat_map(|p| p.split(" / ")).map(|p| p.trim().trim_end_matches('…')) {
                let alternatives = match (part.find('{'), part.find('}')) {
                    (Some(a), Some(b)) => {
                        part[a + 1..b].split(',').map(|x| format!("{}{x}{}", &part[..a], &part[b + 1..])).collect()
                    }
                    _ => vec![part.to_owned()],
                };
                names.extend(alternatives.into_iter().filter(|n| n.starts_with("kubevirt_")));
            }
        }
        names
    }

    #[test]
    fn what_kubevirt_has_is_here_or_is_named_as_absent() {
        let Some(shared) = std::env::var_os("SHARED") else {
            println!("SKIPPED: SHARED names no description of KubeVirt's metrics");
            return;
        };
        let Ok(page) = fs::read_to_string(Path::new(&shared).join("reference/observability.md")) else {
            println!("SKIPPED: there is no description of KubeVirt's metrics");
            return;
        };
        let here: BTreeSet<&str> = ALL.iter().map(|d| d.name).collect();
        let absent = |name: &str| {
            ABSENT.iter().any(|(a, _)| *a == name || a.strip_suffix('*').is_some_and(|a| name.starts_with(a)))
        };
        let theirs = of_kubevirt(&page);
        assert!(theirs.len() > 60, "{theirs:?}");
        let unknown: Vec<_> = theirs.iter().filter(|n| !here.contains(n.as_str()) && !absent(n)).collect();
        assert!(unknown.is_empty(), "neither here nor absent for a reason: {unknown:?}");
    }
}
