//! On a real kube-apiserver: our definitions and roles are taken, a VM lives its life, and costs the calls that are written down
//! in `docs/budget.md`, no more.

use anyhow::{Context, Result, ensure};
use chaos_tests::{
    e2e::{
        jaeger::{self, Jaeger, Span},
        kinds, manifest, process, wait,
    },
    kubernetes::{
        self, CONTROLLER, Kubernetes, NODES,
        calls::{self, Counts},
    },
    rules::root,
};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};
use telemetry::TraceContext;

/// Nothing here takes longer; the machine may be busy.
const LONG: Duration = Duration::from_secs(90);

/// Begins a test: it ends here, as skipped, where there is no kube-apiserver.
macro_rules! kubernetes {
    () => {
        if let Err(why) = kubernetes::programs() {
            println!("SKIPPED: {why}");
            return Ok(());
        }
    };
}

mod gateway;
mod guests;

fn phase(k: &Kubernetes, name: &str, wanted: &str) -> Result<()> {
    wait::until(&format!("{wanted} of {name}"), LONG, || {
        let vm = k.json(&["get", "vm", name])?;
        let seen = vm["status"]["printableStatus"].as_str().unwrap_or_default().to_owned();
        Ok(if seen == wanted { Ok(()) } else { Err(format!("{}", vm["status"])) })
    })
}

/// Waits until the controller has not called for a while, but for its Lease and its watches; the number of its calls so far.
fn quiet(k: &Kubernetes, pause: Duration) -> Result<usize> {
    let begun = Instant::now();
    let mut last = (0, Instant::now());
    loop {
        let ours = k.calls()?.iter().filter(|c| c.user == CONTROLLER && !c.is_standing()).count();
        if ours != last.0 {
            last = (ours, Instant::now());
        } else if last.1.elapsed() >= pause {
            return Ok(ours);
        }
        anyhow::ensure!(begun.elapsed() < LONG, "the controller does not come to rest: {:#?}", k.calls()?.last());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The rows of a table in `docs/budget.md`, from its heading on.
fn promised(heading: &str) -> Result<Counts> {
    let page = std::fs::read_to_string(root().join("docs/budget.md")).context("read docs/budget.md")?;
    let part = page.split_once(heading).with_context(|| format!("docs/budget.md has no '{heading}'"))?.1;
    let rows =
        part.lines().skip_while(|line| !line.starts_with("|---")).skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let [verb, resource, count] = cells[..] else { anyhow::bail!("a row of three: {row}") };
        Ok(((verb.to_owned(), resource.to_owned()), count.parse().with_context(|| row.to_owned())?))
    })
    .collect()
}

/// For each verb and resource the smallest count of all the VMs: a level that lasted over a second on a busy machine is written by
/// right, and is not what every VM costs.
fn least(of_each: &[Counts]) -> Counts {
    let mut least = Counts::new();
    for (key, first) in of_each.iter().flatten() {
        let count = of_each.iter().map(|c| c.get(key).copied().unwrap_or(0)).min().unwrap_or(*first);
        if count > 0 {
            least.insert(key.clone(), count);
        }
    }
    least
}

/// Fails for each count that is above what is promised.
fn compare(what: &str, counted: &Counts) -> Result<()> {
    let promised = promised(what)?;
    println!("{what}\n\n{}", calls::table(counted, 1));
    let grown: Vec<_> =
        counted.iter().filter(|(key, count)| promised.get(key).copied().unwrap_or(0) < **count).collect();
    anyhow::ensure!(grown.is_empty(), "more than docs/budget.md says under '{what}': {grown:?}");
    Ok(())
}

/// None can be a part of a UID or of a hash: each has letters that are no hexadecimal digits.
const NAMES: [&str; 3] = ["web", "sql", "cache"];

#[test]
fn a_vm_costs_what_is_written_down_and_nothing_where_nothing_changes() -> Result<()> {
    kubernetes!();
    let k = Kubernetes::start()?;
    k.install()?;
    kinds::explained(&k)?;
    kinds::shown(&k, |_| true)?;
    let nodes = k.nodes(2, &["--kubelet", "--scheduler"])?;
    let controller = k.controller("controller")?;
    let said = || format!("{}\n{}", controller.log_tail(), nodes.log_tail());
    let counted = |from: usize, of: &str, prefix: &str| -> Result<Counts> {
        let all = k.calls()?;
        let of_vm = all.iter().skip(from).filter(|c| c.user == of && !c.is_standing() && c.namespace == "default");
        let of_vm: Vec<_> = of_vm.filter(|c| c.name.starts_with(prefix)).collect();
        let refused: Vec<_> = of_vm.iter().filter(|c| c.is_refused() && c.is_write()).collect();
        anyhow::ensure!(refused.is_empty(), "refused: {refused:#?}");
        Ok(calls::counts(of_vm))
    };

    let (mut starts, mut agents, mut ends) = (vec![], vec![], vec![]);
    for name in NAMES {
        let from = k.calls()?.len();
        k.apply(&manifest::vm(name).text())?;
        phase(&k, name, "Running").with_context(said)?;
        quiet(&k, Duration::from_secs(3))?;
        starts.push(counted(from, CONTROLLER, "")?);
        agents.push(counted(from, NODES, "virt-launcher")?);
    }
    // At rest for longer than any of its own deadlines for what runs.
    let from = k.calls()?.len();
    std::thread::sleep(Duration::from_secs(8));
    let idle: Vec<_> = k.calls()?.into_iter().skip(from).filter(|c| !c.is_standing()).collect();
    assert!(idle.is_empty(), "nothing changes, and there are calls: {idle:#?}");
    for name in NAMES {
        let from = k.calls()?.len();
        k.ok(&["delete", "vm", name])?;
        wait::until("the end of everything", LONG, || {
            let left = k.ok(&["get", "vmi,pods,controllerrevisions", "-o", "name"])?;
            let left: Vec<_> = left.lines().filter(|line| line.contains(name)).map(str::to_owned).collect();
            Ok(if left.is_empty() { Ok(()) } else { Err(left.join(" ")) })
        })
        .with_context(said)?;
        quiet(&k, Duration::from_secs(2))?;
        ends.push(counted(from, CONTROLLER, "")?);
    }
    compare("## From created to Running", &least(&starts))?;
    compare("## The node agent's part", &least(&agents))?;
    compare("## From deleted to gone", &least(&ends))
}

/// Waits until somebody other than `before` holds the controllers' Lease; who it is.
fn leader(k: &Kubernetes, before: &str) -> Result<String> {
    wait::until("a controller that leads", LONG, || {
        let lease = k.json(&["get", "lease", "-n", "virtfold", "virtfold-controller"])?;
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned();
        Ok(if holder.is_empty() || holder == before { Err(format!("'{holder}'")) } else { Ok(holder) })
    })
}

/// The UIDs of the VMIs and of their pods.
fn uids(k: &Kubernetes) -> Result<Vec<String>> {
    let list =
        k.ok(&["get", "vmi,pods", "-o", "jsonpath={range .items[*]}{.kind} {.metadata.name} {.metadata.uid}\n{end}"])?;
    Ok(list.lines().map(str::to_owned).collect())
}

/// The VM has come to one instance and one launcher pod, and there never was another.
fn started_once(k: &Kubernetes, name: &str) -> Result<()> {
    let calls = k.calls()?;
    let made = |resource: &str, prefix: &str| {
        let of_controller = calls.iter().filter(|c| c.user == CONTROLLER && c.verb == "create" && !c.is_refused());
        let of_kind = of_controller.filter(|c| c.resource == resource);
        of_kind.filter(|c| c.body["metadata"]["name"].as_str().is_some_and(|n| n.starts_with(prefix))).count()
    };
    let seen = (made("virtualmachineinstances", name), made("pods", &format!("virt-launcher-{name}")));
    ensure!(seen == (1, 1), "{name}: {seen:?} VMIs and pods were created");
    Ok(())
}

/// A VM whose write belongs to a trace, as a gateway would have it.
fn traced(name: &str) -> Result<(String, TraceContext)> {
    let context = TraceContext::random();
    let mut vm = manifest::vm(name);
    vm.object["metadata"]["annotations"] = serde_json::json!({"virtfold.io/traceparent": context.to_string()});
    Ok((vm.text(), context))
}

/// The start in a trace whose root, the write, nobody has told here: once and whole, and nothing in it is told twice.
fn started_in(jaeger: &Jaeger, context: TraceContext, steps: &[&str]) -> Result<Vec<Span>> {
    wait::until("the trace of a start", LONG, || {
        let mut trace = jaeger.trace(&context.trace())?;
        let text = context.to_string();
        let root = text.split('-').nth(2).unwrap_or_default().to_owned();
        let first = trace.iter().map(|s| s.start).min().unwrap_or_default();
        trace.push(Span { id: root.clone(), name: "write".into(), start: first, ..Span::default() });
        let lacks: Vec<_> = steps.iter().filter(|name| !trace.iter().any(|s| s.name == **name)).collect();
        if !lacks.is_empty() {
            return Ok(Err(format!("without {lacks:?}:\n{}", jaeger::story(&trace))));
        }
        Ok(jaeger::whole(&trace).map(|_| trace.clone()).map_err(|e| format!("{e:#}")))
    })
}

#[test]
fn another_controller_takes_over_and_a_vm_starts_once() -> Result<()> {
    kubernetes!();
    let k = Kubernetes::start()?;
    k.install()?;
    let jaeger = match jaeger::program() {
        Ok(_) => Some(Jaeger::start()?),
        Err(why) => {
            println!("without traces: {why}");
            None
        }
    };
    let told: Vec<&str> = jaeger.iter().flat_map(|j| ["--otlp-endpoint", &j.otlp]).collect();
    let nodes = k.nodes(2, &[&["--kubelet", "--scheduler"], &told[..]].concat())?;
    let first = k.controller_with("first", &told)?;
    let one = leader(&k, "")?;
    let second = k.controller_with("second", &told)?;
    let said = || format!("{}\n{}\n{}", first.log_tail(), second.log_tail(), nodes.log_tail());
    k.apply(&manifest::vm("early").text())?;
    phase(&k, "early", "Running").with_context(said)?;
    ensure!(leader(&k, "")? == one, "the second took the Lease of one who lives");

    // Stopped amid its work: what it has begun is finished by the other, and what comes meanwhile is begun by it.
    let (amid, amid_trace) = traced("amid")?;
    let (meanwhile, meanwhile_trace) = traced("meanwhile")?;
    k.apply(&amid)?;
    process::signal(first.pid(), Signal::SIGSTOP)?;
    k.apply(&meanwhile)?;
    let two = leader(&k, &one).with_context(said)?;
    for name in ["amid", "meanwhile"] {
        phase(&k, name, "Running").with_context(said)?;
    }
    let before = uids(&k)?;
    process::signal(first.pid(), Signal::SIGCONT)?;
    wait::until("the end of the one who woke", LONG, || {
        Ok(first.check().err().map(|ended| format!("{ended:#}")).ok_or_else(|| first.log_tail()))
    })
    .and_then(|ended| {
        ensure!(ended.contains("lease"), "it says nothing of the Lease: {ended}");
        Ok(())
    })?;
    ensure!(uids(&k)? == before, "{before:?} became {:?}", uids(&k)?);
    if let Some(jaeger) = &jaeger {
        // What nobody began waited for a leader, and is told whole; what one began and the other ended is one start all the same.
        let steps = ["start", "create-vmi", "place-pod", "prepare-pod", "authorise", "boot", "publish", "launch"];
        let trace = started_in(jaeger, meanwhile_trace, &steps)?;
        let create = trace.iter().find(|s| s.name == "create-vmi").context("create-vmi")?;
        let waited = trace.iter().find(|s| s.name == "wait-for-leader").context("it did not wait for a leader")?;
        ensure!(waited.parent.as_ref() == Some(&create.id), "{}", jaeger::story(&trace));
        ensure!(waited.duration > 1_000_000, "{}", jaeger::story(&trace));
        started_in(jaeger, amid_trace, &["start", "publish"])?;
    }

    // Killed, and not missed for long.
    let third = k.controller("third")?;
    process::signal(second.pid(), Signal::SIGKILL)?;
    k.apply(&manifest::vm("late").text())?;
    leader(&k, &two).with_context(|| third.log_tail())?;
    phase(&k, "late", "Running").with_context(|| third.log_tail())?;
    for name in ["early", "amid", "meanwhile", "late"] {
        started_once(&k, name)?;
        phase(&k, name, "Running")?;
    }
    third.check()?;
    ensure!(before.iter().all(|uid| uids(&k).is_ok_and(|now| now.contains(uid))), "{before:?} became {:?}", uids(&k)?);
    Ok(())
}
