//! A real Prometheus scrapes a running system: all metrics of the catalogue are there, and a guest's are what the guest says.

use super::e2e;
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, Options, binaries, free_port, free_ports},
    console::Console,
    manifest::{longest, vm},
    prometheus::{self, Prometheus, Series},
    vm::{START, Vm},
    wait, web,
};
use chaos_tests::rules::root;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::PoisonError,
    time::Duration,
};
use telemetry::metrics::{Kind, catalogue};

/// For what a scrape every few seconds brings, on a busy machine.
const SEEN: Duration = Duration::from_secs(180);
/// Where the guest echoes.
const ECHO: u16 = 7_777;
/// What a guest must have done, and this one cannot do.
const NEVER: [(&str, &str); 3] = [
    ("kubevirt_vmi_guest_load_1m", "its agent is older than version 10"),
    ("kubevirt_vmi_guest_load_5m", "its agent is older than version 10"),
    ("kubevirt_vmi_guest_load_15m", "its agent is older than version 10"),
];

/// Runs of seeds that the dashboard of chaos runs shows: layer and seeds.
const CHAOS: [(&str, &str); 2] = [("1", "0..40"), ("2", "0..1")];
/// The files that they write.
const CHAOS_FILES: [&str; 2] = ["/layer1.txt", "/layer2.txt"];

/// Labels that may be empty of all instances.
const EMPTY: [&str; 2] = ["vnic_name", "guest_os_version_id"];

/// Asks an exporter: the code and the answer.
fn curl(port: u16, path: &str, arguments: &[&str]) -> Result<(u16, String)> {
    let out = Command::new("curl")
        .args(["-sSk", "-m", "60", "-w", "\n%{http_code}"])
        .args(arguments)
        .arg(format!("https://127.0.0.1:{port}{path}"))
        .output()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let (body, code) = text.rsplit_once('\n').with_context(|| format!("curl said {out:?}"))?;
    ensure!(code != "000", "no answer from port {port}: {}", String::from_utf8_lossy(&out.stderr));
    Ok((code.parse()?, body.to_owned()))
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}")
}

/// A token of a service account, which may see metrics or not.
fn token(cluster: &Cluster, account: &str, may: bool) -> Result<String> {
    cluster.ok(&["create", "serviceaccount", account])?;
    if may {
        let subject = format!("--serviceaccount=default:{account}");
        cluster.ok(&["create", "clusterrolebinding", account, "--clusterrole=virtfold:metrics", &subject])?;
    }
    Ok(cluster.ok(&["create", "token", account])?.trim().to_owned())
}

/// Nobody sees metrics who may not; health is for everybody.
fn is_authorised(cluster: &Cluster, port: u16, known: &str, stranger: &str) -> Result<()> {
    for path in ["/healthz", "/readyz"] {
        wait::until(&format!("{path} of port {port}"), SEEN, || {
            let (code, said) = curl(port, path, &[])?;
            Ok(if code == 200 { Ok(()) } else { Err(format!("{code} {said}")) })
        })?;
    }
    let pki = |name: &str| cluster.data.join("pki").join(name).display().to_string();
    let (cert, key) = (pki("client-admin.crt"), pki("client-admin.key"));
    let (node_cert, node_key) = (pki("node-node-1.crt"), pki("node-node-1.key"));
    let (known, stranger) = (bearer(known), bearer(stranger));
    for (what, arguments, code) in [
        ("nobody", &[][..], 401),
        ("a wrong token", &["-H", "Authorization: Bearer nonsense"], 401),
        ("no bearer", &["-H", "Authorization: Basic YTpi"], 401),
        ("a stranger", &["-H", &stranger], 403),
        ("a node", &["--cert", &node_cert, "--key", &node_key], 403),
        ("who may", &["-H", &known], 200),
        ("an administrator", &["--cert", &cert, "--key", &key], 200),
        ("who may, again", &["-H", &known], 200),
        ("somebody who writes", &["-H", &known, "-X", "POST"], 405),
    ] {
        let (got, said) = curl(port, "/metrics", arguments)?;
        ensure!(got == code, "{what} gets {got} from port {port}: {said}");
        ensure!((code == 200) == said.contains("virtfold_spans_total"), "{what}: {said}");
    }
    // What is logged can be changed by those who may.
    let admin = ["--cert", &cert, "--key", &key];
    for (filter, who, code) in [
        ("info,reconcilers=debug", &admin[..], 200),
        ("a=b=c,,=", &admin, 400),
        ("trace", &["-H", &known], 403),
        ("trace", &[], 401),
    ] {
        let (got, said) = curl(port, "/log", &[who, &["-X", "PUT", "-d", filter]].concat())?;
        ensure!(got == code, "{filter}: {got} {said}");
    }
    let (code, filter) = curl(port, "/log", &admin)?;
    ensure!((code, filter.trim()) == (200, "info,reconcilers=debug"), "{code} {filter}");
    let open = curl(port, "/metrics", &["-H", &known, "-H", "Accept: application/openmetrics-text; version=1.0.0"])?.1;
    ensure!(open.trim_end().ends_with("# EOF"), "no OpenMetrics from port {port}");
    Ok(())
}

struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Holds connections to a machine's screen and to one of its ports, where `cat` answers: a web server hangs up on who asks for nothing.
fn connected(cluster: &Cluster, name: &str, console: &mut Console) -> Result<Vec<(Helper, TcpStream)>> {
    console.start(&format!("nc -ll -p {ECHO} -e cat"))?;
    let local = || anyhow::Ok(free_port()?.to_string());
    let (screen, port) = (local()?, local()?);
    let ports = format!("{port}:{ECHO}");
    let all =
        [(&screen, vec!["vnc", name, "--proxy-only", "--port", &screen]), (&port, vec!["port-forward", name, &ports])];
    let mut held = vec![];
    for (port, arguments) in all {
        let mut command = Command::new(chaos_tests::e2e::cluster::virtfold()?);
        command.args(&arguments).env("KUBECONFIG", cluster.kubeconfig()).stdin(Stdio::null()).stdout(Stdio::null());
        let helper = Helper(command.spawn().context("start a helper")?);
        // A screen greets, and what echoes answers.
        let stream = wait::until("an answer", SEEN, || {
            let mut stream = TcpStream::connect(("127.0.0.1", port.parse::<u16>()?))?;
            stream.set_read_timeout(Some(SEEN))?;
            if arguments[0] == "port-forward" {
                stream.write_all(b"?")?;
            }
            stream.read_exact(&mut [0])?;
            Ok(Ok(stream))
        })?;
        held.push((helper, stream));
    }
    Ok(held)
}

/// Numbers that the guest says.
fn numbers(console: &mut Console, command: &str) -> Result<Vec<f64>> {
    let said = console.run(command)?;
    let all: Result<Vec<f64>, _> = said.split_whitespace().map(str::parse).collect();
    all.ok().filter(|all| !all.is_empty()).with_context(|| format!("'{command}' said {said:?}"))
}

fn number(console: &mut Console, command: &str) -> Result<f64> {
    Ok(numbers(console, command)?[0])
}

/// Waits until a metric is near what the guest says: both are looked at anew each time, because neither stands still.
fn near(prometheus: &Prometheus, query: &str, console: &mut Console, command: &str, tolerance: f64) -> Result<()> {
    wait::until(query, SEEN, || {
        let said = number(console, command)?;
        let seen = prometheus.value(query)?;
        let good = (seen - said).abs() <= tolerance;
        Ok(if good { Ok(()) } else { Err(format!("{seen}; the guest says {said}, and ± {tolerance} is allowed")) })
    })
}

/// A count that only grows, and that guest and metric begin at once, is between what the guest says before and after it is seen.
fn between(prometheus: &Prometheus, query: &str, console: &mut Console, command: &str) -> Result<()> {
    let before = number(console, command)?;
    let seen = prometheus.wait(query, SEEN, |all| matches!(all, [one] if one.value >= before))?[0].value;
    let after = number(console, command)?;
    ensure!(seen <= after, "{query} is {seen}; the guest said {before} and then {after}");
    Ok(())
}

/// Counts of which the guest knows nothing of before its drivers came.
struct Counts<'a> {
    /// Each with what may be off by what happens by itself.
    queries: &'a [(String, f64)],
    /// What the guest says of them, in the same order.
    command: &'a str,
}

impl Counts<'_> {
    fn look(&self, prometheus: &Prometheus, console: &mut Console) -> Result<Vec<(f64, f64)>> {
        let said = numbers(console, self.command)?;
        ensure!(said.len() == self.queries.len(), "'{}' said {said:?}", self.command);
        let seen: Result<Vec<f64>> = self.queries.iter().map(|(query, _)| prometheus.value(query)).collect();
        Ok(said.into_iter().zip(seen?).collect())
    }

    /// What guest and metrics say at a time when nothing happens: as long as three scrapes show the same.
    fn rest(&self, prometheus: &Prometheus, console: &mut Console) -> Result<Vec<(f64, f64)>> {
        let mut scrapes: Vec<f64> = vec![];
        let mut known: Vec<(f64, f64)> = vec![];
        let scraped = format!("timestamp({})", self.queries[0].0);
        wait::until("a guest that rests", SEEN, || {
            let at = prometheus.value(&scraped)?;
            let now = self.look(prometheus, console)?;
            if now != known {
                scrapes.clear();
                known = now;
            }
            if scrapes.last() != Some(&at) {
                scrapes.push(at);
            }
            Ok(if scrapes.len() >= 3 { Ok(known.clone()) } else { Err(format!("{known:?} at {scrapes:?}")) })
        })
    }

    /// Some work makes both grow by at least so much, and alike, but for a share of it.
    fn grow_alike(
        &self,
        prometheus: &Prometheus,
        console: &mut Console,
        work: &str,
        least: &[f64],
        share: f64,
    ) -> Result<()> {
        let begun = self.rest(prometheus, console)?;
        console.run_within(work, START)?;
        wait::until(work, SEEN, || {
            let now = self.look(prometheus, console)?;
            let grown = now.iter().zip(&begun).map(|((said, seen), (s, m))| (said - s, seen - m));
            let off: Vec<String> = grown
                .zip(self.queries)
                .zip(least)
                .filter(|(((said, seen), (_, slack)), least)| {
                    *said < **least || (said - seen).abs() > said * share + *slack
                })
                .map(|(((said, seen), (query, _)), least)| {
                    format!("{query} grew by {seen}, in the guest by {said}, and at least by {least}")
                })
                .collect();
            Ok(if off.is_empty() { Ok(()) } else { Err(off.join("\n")) })
        })
    }
}

/// What is measured of a guest is what the guest measures itself.
fn guest_says_the_same(prometheus: &Prometheus, console: &mut Console) -> Result<()> {
    const MIB: f64 = 1_048_576.0;
    let of = |metric: &str| format!("kubevirt_vmi_{metric}{{name=\"measured\"}}");
    let kib = |keys: &str| format!("awk '/^({keys}):/ {{n += $2 * 1024}} END {{print n}}' /proc/meminfo");
    near(prometheus, &of("memory_available_bytes"), console, &kib("MemTotal"), 0.0)?;
    for given in ["memory_domain_bytes", "memory_actual_balloon_bytes"] {
        prometheus.wait(&of(given), SEEN, |all| matches!(all, [one] if one.value == 128.0 * MIB))?;
    }
    // The driver tells every ten seconds, and an idle guest does not change much.
    for (metric, keys) in [
        ("memory_usable_bytes", "MemAvailable"),
        ("memory_unused_bytes", "MemFree"),
        ("memory_cached_bytes", "Buffers|Cached|SwapCached"),
    ] {
        near(prometheus, &of(metric), console, &kib(keys), 8.0 * MIB)?;
    }
    for (metric, key) in [
        ("memory_pgmajfault_total", "pgmajfault"),
        ("memory_pgminfault_total", "pgfault"),
        ("memory_swap_in_traffic_bytes", "pswpin"),
        ("memory_swap_out_traffic_bytes", "pswpout"),
    ] {
        between(prometheus, &of(metric), console, &format!("awk '/^{key} / {{print $2}}' /proc/vmstat"))?;
    }

    // Disks: what the guest's kernel counts, QEMU counts, too.
    let drive = |metric: &str, slack| (of(metric).replace('}', ",drive=\"system\"}"), slack);
    let disk = Counts {
        queries: &[
            drive("storage_iops_read_total", 30.0),
            drive("storage_read_traffic_bytes_total", MIB),
            drive("storage_iops_write_total", 30.0),
            drive("storage_write_traffic_bytes_total", MIB),
            drive("storage_flush_requests_total", 5.0),
        ],
        command: "awk '{print $1, $3 * 512, $5, $7 * 512, $16}' /sys/block/vda/stat",
    };
    let work = "echo 3 >/proc/sys/vm/drop_caches; head -c 20000000 /dev/vda >/dev/null; \
                dd if=/dev/vda of=/dev/vda bs=1000000 count=9 conv=notrunc,fsync 2>/dev/null";
    disk.grow_alike(prometheus, console, work, &[20.0, 19e6, 5.0, 9e6, 1.0], 0.05)?;

    // The network: in both directions, from the guest's side.
    let (bytes, packets) = (4096.0, 30.0);
    let network = Counts {
        queries: &[
            (of("network_receive_bytes_total"), bytes),
            (of("network_transmit_bytes_total"), bytes),
            (of("network_receive_packets_total"), packets),
            (of("network_transmit_packets_total"), packets),
        ],
        command: "cd /sys/class/net/$(ls /sys/class/net | grep -v lo | head -n1)/statistics; \
                  cat rx_bytes tx_bytes rx_packets tx_packets; cd /",
    };
    let work = "ping -q -c 100 -s 1400 -i 0.05 $(ip route | awk '/^default/ {print $3}')";
    network.grow_alike(prometheus, console, work, &[140e3, 140e3, 100.0, 100.0], 0.02)?;

    // File systems, by the guest's agent.
    let all = prometheus.wait(&of("filesystem_capacity_bytes"), SEEN, |all| !all.is_empty())?;
    for series in &all {
        let mount = series.labels.get("mount_point").context("a mount point")?;
        let [size, used] = numbers(console, &format!("df -k {mount} | awk 'END {{print $2 * 1024, $3 * 1024}}'"))?[..]
        else {
            anyhow::bail!("df of {mount}")
        };
        ensure!((series.value - size).abs() <= size * 0.1, "{mount} has {} bytes; the guest says {size}", series.value);
        let metric = of("filesystem_used_bytes").replace('}', &format!(",mount_point=\"{mount}\"}}"));
        prometheus.wait(&metric, SEEN, |all| matches!(all, [one] if (one.value - used).abs() <= size * 0.1))?;
    }

    // CPU time: a loop in the guest is work of its processor, or waiting for one of the node's: the guest cannot tell them apart.
    let cpu = of("cpu_usage_seconds_total");
    let processors = format!("sum({}) + sum({})", of("vcpu_seconds_total"), of("vcpu_delay_seconds_total"));
    let (before, processors_before) = (prometheus.value(&cpu)?, prometheus.value(&processors)?);
    let command = "awk '/^cpu / {print ($2 + $3 + $4) / 100}' /proc/stat";
    let begun = number(console, command)?;
    console.run_within("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done", START)?;
    let used = number(console, command)? - begun;
    ensure!(used > 0.5, "the guest used {used} s");
    let enough = |all: &[Series]| matches!(all, [one] if one.value - processors_before >= used * 0.8);
    prometheus
        .wait(&processors, SEEN, enough)
        .with_context(|| format!("{processors_before} before {used} s of use"))?;
    let spent = prometheus.value(&cpu)? - before;
    ensure!(spent > 0.0 && spent <= used * 2.0 + 10.0, "{spent} s of the hypervisor for {used} s of the guest");
    let vcpus = prometheus.value(&format!("sum({})", of("vcpu_seconds_total")))?;
    ensure!(vcpus > 0.0 && vcpus <= prometheus.value(&cpu)? + 1.0, "virtual processors used {vcpus} s");
    let parts = format!("sum({}) + sum({})", of("cpu_user_usage_seconds_total"), of("cpu_system_usage_seconds_total"));
    let parts = prometheus.value(&format!("abs({parts} - sum({cpu}))"))?;
    ensure!(parts <= 0.1, "user and system are off the whole by {parts} s");
    Ok(())
}

/// Runs of seeds, and a server of the files that they write: its port, and the files.
fn chaos_runs() -> Result<(Helper, tempfile::TempDir, u16)> {
    let folder = tempfile::tempdir()?;
    for (layer, seeds) in CHAOS {
        let mut command = Command::new(binaries()?.join("virtfold-chaos"));
        command
            .args(["run", "--layer", layer, "--seeds", seeds, "--metrics"])
            .arg(folder.path().join(format!("layer{layer}.txt")));
        let out = command.output()?;
        ensure!(
            out.status.success(),
            "{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
    let port = free_port()?;
    let mut server = Command::new("python3");
    server.args(["-m", "http.server", "--bind", "127.0.0.1", &port.to_string(), "--directory"]).arg(folder.path());
    let server = Helper(server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    wait::until("the files", SEEN, || {
        Ok(TcpStream::connect(("127.0.0.1", port)).map(drop).map_err(|e| e.to_string()))
    })?;
    Ok((server, folder, port))
}

/// Where the links of the dashboards lead to: variables are of the dashboard, paths are of the page.
fn dashboards_link(cluster: &Cluster) -> Result<()> {
    let home = web::home(cluster)?;
    let links = web::dashboard_links(&[
        ("page", &home),
        ("jaeger", "jaeger:"),
        ("namespace", "default"),
        ("name", "measured"),
    ])?;
    ensure!(links.len() >= 8, "{links:?}");
    for url in links {
        if let Some(path) = url.strip_prefix(&home) {
            // The page waits some seconds for what it watches, and shows what it has then.
            wait::until(&url, SEEN, || {
                let (code, body) = web::page(cluster, path)?;
                let there = code == 200 && (url.ends_with("/nodes") || body.contains("measured"));
                Ok(if there { Ok(()) } else { Err(format!("{code} {body}")) })
            })?;
        } else if url.strip_prefix("jaeger:").is_none() {
            // Those to Jaeger are followed where there is one.
            let uid = url.split("/d/").nth(1).and_then(|r| r.split('?').next()).with_context(|| url.clone())?;
            let file = format!("monitoring/dashboards/{}.json", uid.trim_start_matches("virtfold-"));
            ensure!(root().join(file).exists(), "{url}");
        }
    }
    Ok(())
}

/// Every query of every panel has an answer.
fn dashboards_show_data(prometheus: &Prometheus) -> Result<()> {
    let mut queries = vec![];
    for file in fs::read_dir(root().join("monitoring/dashboards"))? {
        let file = file?.path();
        let dashboard: Value = serde_json::from_slice(&fs::read(&file)?).with_context(|| file.display().to_string())?;
        for panel in dashboard["panels"].as_array().context("panels")? {
            for target in panel["targets"].as_array().context("targets")? {
                let mut query = target["expr"].as_str().context("a query")?.to_owned();
                for (variable, value) in [
                    ("$__rate_interval", "15m"),
                    ("$__range", "15m"),
                    ("$namespace", "default"),
                    ("$name", "measured"),
                    ("$node", "node-1"),
                    ("$layer", ".*"),
                ] {
                    query = query.replace(variable, value);
                }
                ensure!(!query.contains('$'), "{}: {query}", file.display());
                queries.push(format!("{}: {query}", panel["title"].as_str().unwrap_or_default()));
            }
        }
    }
    ensure!(queries.len() > 85, "{} queries", queries.len());
    wait::until("data in every panel", SEEN, || {
        let mut empty = vec![];
        for named in &queries {
            let query = named.split_once(": ").map_or("", |(_, query)| query);
            if prometheus.query(query)?.iter().all(|s| s.value.is_nan()) {
                empty.push(named.clone());
            }
        }
        Ok(if empty.is_empty() { Ok(()) } else { Err(empty.join("\n")) })
    })
}

#[test]
fn alerts_fire_and_do_not_fire_and_each_has_a_page() -> Result<()> {
    if let Err(why) = prometheus::program() {
        println!("SKIPPED: {why}");
        return Ok(());
    }
    let folder = root().join("monitoring");
    let out = Command::new("promtool").args(["test", "rules", "rules.test.yaml"]).current_dir(&folder).output()?;
    ensure!(out.status.success(), "{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let (rules, tests) =
        (fs::read_to_string(folder.join("rules.yaml"))?, fs::read_to_string(folder.join("rules.test.yaml"))?);
    let pages = fs::read_to_string(root().join("docs/runbooks.md"))?;
    let alerts: BTreeSet<&str> = rules.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect();
    ensure!(alerts.len() > 15, "{alerts:?}");
    for alert in &alerts {
        for what in [format!("# {alert} fires"), format!("# {alert} does not fire")] {
            ensure!(tests.contains(&what), "there is no test '{what}'");
        }
        let rule = rules.split(&format!("- alert: {alert}\n")).nth(1).context("the rule")?;
        let place = rule.split("runbook_url: docs/runbooks.md#").nth(1).and_then(|r| r.lines().next());
        let place = place.with_context(|| format!("{alert} names no page"))?;
        let there = pages.lines().any(|l| l.strip_prefix("## ").is_some_and(|t| t.to_lowercase() == place));
        ensure!(there, "docs/runbooks.md has no {place}");
    }
    Ok(())
}

#[test]
fn a_real_prometheus_sees_the_whole_catalogue_and_what_the_guest_sees() -> Result<()> {
    e2e!();
    if let Err(why) = prometheus::program() {
        println!("SKIPPED: {why}");
        return Ok(());
    }
    let _turn = super::TURN.read().unwrap_or_else(PoisonError::into_inner);
    let port = free_ports(2)?;
    let cluster = Cluster::start(Options {
        nodes: 1,
        arguments: vec!["--stop-guests".into(), "--metrics".into(), format!("127.0.0.1:{port}")],
        ..Options::default()
    })?;
    let (scraper, stranger) = (token(&cluster, "scraper", true)?, token(&cluster, "stranger", false)?);
    let mut manifest = vm("measured");
    manifest.object["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] = "measured".into();
    let machine = Vm::running(&cluster, &manifest)?;
    for port in [port, port + 1] {
        is_authorised(&cluster, port, &scraper, &stranger)?;
    }
    let (_server, _files, chaos) = chaos_runs()?;
    let prometheus = Prometheus::start(&cluster, port, &scraper, &CHAOS_FILES.map(|file| (chaos, file)))?;
    wait::until("all targets", SEEN, || {
        let failing = prometheus.failing()?;
        Ok(if failing.is_empty() { Ok(()) } else { Err(failing.join("\n")) })
    })?;

    // A start that comes to nothing, for what counts such: no node takes it, however long it is until it is deleted.
    let mut nowhere = vm("interrupted");
    nowhere.spec()["nodeSelector"] = serde_json::json!({"disk": "fast"});
    let interrupted = Vm::apply(&cluster, &nowhere)?;
    wait::until("its instance", START, || Ok(interrupted.vmi().map(|_| ()).map_err(|e| e.to_string())))?;
    interrupted.delete()?;

    machine.wait_condition("AgentConnected", "True", START)?;
    let mut console = machine.shell()?;
    // What is counted has to grow while somebody looks.
    for (n, verb) in ["pause", "unpause"].repeat(2).into_iter().enumerate() {
        let (code, out, error) = cluster.virtfold(&[verb, "measured"])?;
        ensure!(code == 0, "{verb}: {out}{error}");
        let of_verb = format!("virtfold_subresource_requests_total{{subresource=\"{verb}\"}}");
        let times = (n / 2) as f64;
        prometheus.wait(&of_verb, SEEN, |all| all.iter().any(|s| s.value > times))?;
    }
    prometheus.wait("virtfold_operation_step_duration_seconds_count", SEEN, |all| !all.is_empty())?;
    // A name of 253 characters stands whole in whatever tells of its machine.
    let another = Vm::running(&cluster, &longest())?;
    for metric in ["kubevirt_vm_info", "kubevirt_vmi_info", "kubevirt_vmi_cpu_usage_seconds_total"] {
        prometheus.wait(&format!("{metric}{{name=\"{}\"}}", another.name), SEEN, |all| all.len() == 1)?;
    }
    for arguments in [&["explain", &another.name][..], &["top"]] {
        let (code, out, error) = cluster.virtfold(arguments)?;
        ensure!(code == 0 && out.contains(&another.name), "{arguments:?}: {out}{error}");
    }
    another.delete()?;
    let held = connected(&cluster, "measured", &mut console)?;
    wait::until("all metrics", SEEN, || {
        let mut missing = vec![];
        for def in catalogue::ALL.iter().filter(|def| NEVER.iter().all(|(name, _)| *name != def.name)) {
            let query = match def.kind {
                Kind::Histogram => format!("{}_count", def.name),
                Kind::Counter | Kind::Gauge | Kind::Untyped => def.name.to_owned(),
            };
            let found = prometheus.query(&query)?;
            // Prometheus keeps no empty labels.
            let lacks =
                def.labels.iter().filter(|l| !EMPTY.contains(l) && !found.iter().any(|s| s.labels.contains_key(**l)));
            let lacks: Vec<_> = lacks.collect();
            if found.is_empty() || !lacks.is_empty() {
                missing.push(format!("{} {lacks:?}", def.name));
            }
        }
        Ok(if missing.is_empty() { Ok(()) } else { Err(missing.join("\n")) })
    })?;
    for part in ["api", "controller", "handler"] {
        prometheus.wait(&format!("kubevirt_virt_{part}_ready_status == 1"), SEEN, |all| !all.is_empty())?;
    }
    let label = "kubernetes_vmi_label_app_kubernetes_io_name";
    let labelled = prometheus.query(&format!("kubevirt_vmi_cpu_usage_seconds_total{{{label}=\"measured\"}}"))?;
    ensure!(labelled.len() == 1, "{labelled:?}");
    let info = prometheus.query("kubevirt_vm_info{name=\"measured\"}")?;
    ensure!(
        info.len() == 1 && info[0].labels["status"] == "running" && info[0].labels["status_group"] == "running",
        "{info:?}"
    );
    wait::until("a step that names its trace", SEEN, || {
        let exemplars = prometheus.exemplars("virtfold_operation_step_duration_seconds_bucket")?;
        Ok(if exemplars.is_empty() { Err(String::new()) } else { Ok(()) })
    })?;

    let broken = prometheus.broken_rules()?;
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    dashboards_show_data(&prometheus)?;
    dashboards_link(&cluster)?;
    guest_says_the_same(&prometheus, &mut console)?;
    drop(held);
    prometheus.wait("kubevirt_vnc_active_connections{vmi=\"measured\"}", SEEN, <[Series]>::is_empty)?;
    drop(console);
    machine.delete()?;
    prometheus.wait("kubevirt_vmi_cpu_usage_seconds_total", SEEN, <[Series]>::is_empty)?;
    Ok(())
}
