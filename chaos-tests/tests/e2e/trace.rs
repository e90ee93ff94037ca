//! What a user asks for is one trace, from the request to the guest's agent, across the processes and over their ends: read back from a
//! real Jaeger.

use super::e2e;
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, Options},
    jaeger::{self, Jaeger, Span, story, whole},
    manifest::longest,
    process,
    vm::{START, Vm},
    wait, web,
};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeSet,
    sync::PoisonError,
    time::{Duration, Instant},
};

/// All that our own crates say.
const LOUD: &str = "info,state=trace,reconcilers=trace,node_agent=trace,gateway=trace,launcher=trace,embedded=debug";
/// The steps of a start, one after the other; the last one is told after the start is over.
const START_STEPS: [&str; 7] =
    ["create-vmi", "place-pod", "prepare-pod", "authorise", "boot", "publish", "guest-agent"];
/// The steps of a stop.
const STOP_STEPS: [&str; 2] = ["shutdown", "teardown"];
/// Clocks are read in milliseconds, by processes of one machine.
const TICK: u64 = 2_000;

/// The id in a trace context.
fn id(object: &serde_json::Value) -> Result<String> {
    let context = object["metadata"]["annotations"]["virtfold.io/traceparent"].as_str().context("no trace context")?;
    Ok(context.split('-').nth(1).context("a trace context has four parts")?.to_owned())
}

/// The one span of that name below another one.
fn below<'a>(trace: &'a [Span], parent: &Span, name: &str) -> Result<&'a Span> {
    let found: Vec<&Span> = trace.iter().filter(|s| s.name == name && s.parent.as_ref() == Some(&parent.id)).collect();
    let [one] = found[..] else {
        anyhow::bail!("{} spans '{name}' below '{}':\n{}", found.len(), parent.name, story(trace))
    };
    Ok(one)
}

/// A start as its launcher saw it: within the steps of the controller, in its own name, and not longer than them.
fn launched(trace: &[Span], start: &Span) -> Result<()> {
    let story = story(trace);
    let boot = below(trace, start, "boot")?;
    let launch = below(trace, boot, "launch")?;
    let hypervisor = below(trace, launch, "start-hypervisor")?;
    let guest = below(trace, start, "guest-boot")?;
    let network = below(trace, boot, "prepare-network")?;
    for span in [launch, hypervisor, guest] {
        ensure!(span.service == "virtfold-launcher", "'{}' is told by {}:\n{story}", span.name, span.service);
        ensure!(span.tags.get("k8s.pod.name").is_some_and(|p| p.starts_with("virt-launcher-")), "{story}");
    }
    ensure!(network.service == "virtfold-node-agent", "{story}");
    ensure!(launch.tags.get("rpc.method").map(String::as_str) == Some("Execute"), "{:?}", launch.tags);
    let end = |s: &Span| s.start + s.duration;
    ensure!(hypervisor.duration > 0 && end(hypervisor) <= end(launch), "the hypervisor starts in the launch:\n{story}");
    ensure!(end(launch) <= end(boot) + TICK, "what is launched is seen to run afterwards:\n{story}");
    ensure!(guest.duration >= launch.duration, "a guest boots after its launch:\n{story}");
    for step in START_STEPS {
        let transition = below(trace, start, step)?.tags.get("virtfold.transition").cloned().unwrap_or_default();
        ensure!(transition.contains(" -> "), "'{step}' ended by {transition:?}:\n{story}");
    }
    Ok(())
}

/// The one span of an operation on one instance, and its steps: all are there, each begins where the one before ended, and all lie within it.
fn operation<'a>(trace: &'a [Span], root: &Span, name: &str, steps: &[&str], since: Instant) -> Result<&'a Span> {
    let story = story(trace);
    let whole = below(trace, root, name)?;
    ensure!(u128::from(whole.duration) <= since.elapsed().as_micros(), "'{name}' lasts too long:\n{story}");
    let mut at = whole.start;
    for step in steps {
        let span = below(trace, whole, step)?;
        ensure!(span.start.abs_diff(at) <= TICK, "'{step}' begins where the step before ended:\n{story}");
        ensure!(!span.tags.contains_key("error"), "'{step}' failed:\n{story}");
        at = span.start + span.duration;
        let within = at <= whole.start + whole.duration + TICK;
        ensure!(within || *step == "guest-agent", "'{step}' ends after the {name}:\n{story}");
    }
    for span in trace {
        for key in ["virtfold.cell", "virtfold.operation", "k8s.namespace.name", "kubevirt.vm.name"] {
            ensure!(span.tags.contains_key(key), "'{}' has no {key}:\n{story}", span.name);
        }
    }
    Ok(whole)
}

/// The links of dashboards and page lead to a machine's traces, and the page shows all that is in this one.
fn is_linked(cluster: &Cluster, jaeger: &Jaeger, name: &str, id: &str) -> Result<()> {
    let values = [("page", "page:"), ("jaeger", ""), ("namespace", "default"), ("name", name)];
    let searches: Vec<String> =
        web::dashboard_links(&values)?.into_iter().filter(|link| link.starts_with("/search?")).collect();
    ensure!(!searches.is_empty(), "no dashboard leads to traces");
    for search in searches {
        let found = jaeger.found(&search)?;
        ensure!(found.iter().any(|t| t == id), "{search} finds {found:?}, and not {id}");
        let other = jaeger.found(&search.replace(name, "nobody"))?;
        ensure!(other.is_empty(), "a search for another machine finds {other:?}");
    }
    let trace = jaeger.trace(id)?;
    let way = format!("{}/trace/", jaeger.url);
    wait::until("the page to show the trace", START, || {
        let (code, body) = web::page(cluster, &format!("/machines/default/{name}"))?;
        let linked: Vec<&str> = body.split(&way).skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let missing: Vec<&str> =
            trace.iter().map(|s| s.name.as_str()).filter(|name| !body.contains(&format!(">{name}<"))).collect();
        Ok(match linked.contains(&id) && missing.is_empty() {
            true => Ok(()),
            false => Err(format!("{code}, linked: {linked:?}, without {missing:?}: {body}")),
        })
    })?;
    Ok(())
}

/// Fails where anything that people or collectors can read shows what only the guest may see.
fn assert_hushed(cluster: &Cluster, jaeger: &Jaeger, secret: &str) -> Result<()> {
    ensure!(!jaeger.everything()?.contains(secret), "a span shows user data");
    for log in [cluster.log(), cluster.data.join("virtfold.log"), cluster.data.join("nodes/node-1/agent.log")] {
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
    Ok(())
}

#[test]
fn each_operation_is_one_trace_across_processes_and_over_their_ends() -> Result<()> {
    e2e!();
    if let Err(why) = jaeger::program() {
        println!("SKIPPED: {why}");
        return Ok(());
    }
    let _turn = super::TURN.read().unwrap_or_else(PoisonError::into_inner);
    let jaeger = Jaeger::start()?;
    let arguments = ["--stop-guests", "--otlp-endpoint", &jaeger.otlp, "--jaeger", &jaeger.url];
    let manifest = longest();
    let name = manifest.object["metadata"]["name"].as_str().context("a name")?;
    let cluster = Cluster::start(Options {
        nodes: 1,
        arguments: arguments.map(str::to_owned).to_vec(),
        environment: vec![("VIRTFOLD_LOG".into(), LOUD.into())],
    })?;
    let ask = |verb: &str| -> Result<Instant> {
        let began = Instant::now();
        let (code, out, error) = cluster.virtfold(&[verb, name])?;
        ensure!(code == 0, "{verb}: {code} {out}{error}");
        Ok(began)
    };
    let started = |machine: &Vm, before: &str| -> Result<String> {
        machine.wait_vmi("another instance", START, |vmi| (vmi["metadata"]["uid"] != before).then_some(()))?;
        machine.wait_condition("AgentConnected", "True", START)?;
        Ok(machine.vmi()?["metadata"]["uid"].as_str().unwrap_or_default().to_owned())
    };
    let gone = |machine: &Vm| {
        wait::until("the end of the instance", START, || Ok(machine.vmi().err().map(|_| ()).ok_or_else(String::new)))
    };
    let names = |lists: &[&[&'static str]]| lists.concat();

    // What nobody but the guest may see.
    let secret = "hush-7c1e-user-data";
    let began = Instant::now();
    let machine = Vm::running(&cluster, &manifest.clone().user_data(&format!("#!/bin/sh\n: {secret}\n")))?;
    let first = started(&machine, "")?;
    for process in process::all() {
        let environment = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        let seen = process.arguments.join(" ") + &String::from_utf8_lossy(&environment);
        ensure!(!seen.contains(secret), "process {} ({}) shows user data", process.pid, process.name);
    }
    let created = id(&machine.vmi()?)?;
    let launcher = ["launch", "start-hypervisor", "guest-boot"];
    let trace = jaeger.finished(&created, &names(&[&["write", "start"], &START_STEPS, &launcher]), START)?;
    let root = whole(&trace)?;
    ensure!(root.name == "write", "the write is the root:\n{}", story(&trace));
    let before = operation(&trace, root, "start", &START_STEPS, began)?.id.clone();
    launched(&trace, below(&trace, root, "start")?)?;
    is_linked(&cluster, &jaeger, name, &created)?;
    let services: BTreeSet<&str> = trace.iter().map(|s| s.service.as_str()).collect();
    let all = ["virtfold-controller", "virtfold-launcher", "virtfold-node-agent"];
    ensure!(services == BTreeSet::from(all), "spans of {services:?}:\n{}", story(&trace));

    // A request that starts nothing is a trace of its own, through all processes.
    ask("pause")?;
    let trace = jaeger.begun_by("virtfold-controller", "pause", &["pause", "agent-verb"], START)?;
    let asked = whole(&trace)?;
    ensure!(asked.tags.get("http.request.method").map(String::as_str) == Some("PUT"), "{:?}", asked.tags);
    let verb = below(&trace, asked, "agent-verb")?;
    ensure!(verb.service == "virtfold-node-agent" && verb.tags["rpc.system"] == "grpc", "{}", story(&trace));
    ensure!(below(&trace, verb, "pause")?.service == "virtfold-launcher", "{}", story(&trace));
    ask("unpause")?;

    // A restart is a request that leads to a stop and a start.
    let began = ask("restart")?;
    started(&machine, &first)?;
    let restarted = id(&machine.vmi()?)?;
    ensure!(restarted != created, "the restart belongs to the creation");
    let all = names(&[&["restart", "stop", "start"], &START_STEPS, &STOP_STEPS]);
    let trace = jaeger.finished(&restarted, &all, START)?;
    let root = whole(&trace)?;
    ensure!(root.name == "restart", "the request is the root:\n{}", story(&trace));
    let stop = operation(&trace, root, "stop", &STOP_STEPS, began)?;
    let start = operation(&trace, root, "start", &START_STEPS, began)?;
    ensure!(stop.start <= start.start, "the stop comes first:\n{}", story(&trace));
    ensure!(start.links == [(created.clone(), before)], "{:?} is linked to the start before", start.links);
    launched(&trace, start)?;

    let began = ask("stop")?;
    gone(&machine)?;
    let trace = jaeger.finished(&id(&machine.vm()?)?, &names(&[&["stop"], &STOP_STEPS]), START)?;
    operation(&trace, whole(&trace)?, "stop", &STOP_STEPS, began)?;

    // A node agent dies in the middle of a start.
    let began = ask("start")?;
    machine.wait_vmi("a pod", START, |vmi| {
        let pods = vmi["status"]["activePods"].as_object();
        pods.is_some_and(|pods| !pods.is_empty()).then_some(())
    })?;
    process::destroy(cluster.agent_pid("node-1")?)?;
    started(&machine, "")?;
    let trace = jaeger.finished(&id(&machine.vm()?)?, &names(&[&["start"], &START_STEPS]), START)?;
    operation(&trace, whole(&trace)?, "start", &START_STEPS, began)?;

    // The controller dies in the middle of a start, which cannot go on while the agent sleeps.
    ask("stop")?;
    gone(&machine)?;
    let agent = cluster.agent_pid("node-1")?;
    process::signal(agent, Signal::SIGSTOP)?;
    let began = ask("start")?;
    let trace_id = id(&machine.vm()?)?;
    wait::until("the first spans", START, || {
        let trace = jaeger.trace(&trace_id)?;
        let there = ["start", "create-vmi", "place-pod"].iter().all(|name| trace.iter().any(|s| s.name == *name));
        Ok(if there { Ok(()) } else { Err(story(&trace)) })
    })?;
    cluster.kill_up()?;
    cluster.up()?;
    wait::until("the successor", START, || {
        let (code, out, error) = cluster.virtfold(&["explain", name])?;
        Ok(if code == 0 { Ok(()) } else { Err(format!("{out}{error}")) })
    })?;
    process::signal(agent, Signal::SIGCONT)?;
    started(&machine, "")?;
    let trace = jaeger.finished(&trace_id, &names(&[&["start"], &START_STEPS]), START)?;
    let root = whole(&trace)?;
    let start = trace.iter().find(|s| s.name == "start" && s.parent.as_ref() == Some(&root.id)).context("no start")?;
    ensure!(u128::from(start.duration) <= began.elapsed().as_micros() + 1_000_000, "too long:\n{}", story(&trace));
    let interrupted: Vec<&str> =
        trace.iter().filter(|s| s.tags.contains_key("virtfold.interrupted")).map(|s| s.name.as_str()).collect();
    ensure!(interrupted == ["prepare-pod"], "{interrupted:?} were interrupted:\n{}", story(&trace));
    let interrupted = below(&trace, start, "prepare-pod")?;
    let waits: Vec<&Span> = trace.iter().filter(|s| s.name == "wait-for-leader").collect();
    ensure!(waits.iter().all(|w| w.parent.as_ref() == Some(&interrupted.id)), "{}", story(&trace));
    launched(&trace, start)?;

    // A deletion follows from the last write, and its trace stays whole.
    machine.delete()?;
    let trace = jaeger.finished(&trace_id, &names(&[&["start", "stop"], &STOP_STEPS]), START)?;
    operation(&trace, whole(&trace)?, "stop", &STOP_STEPS, began)?;
    ensure!(cluster.terminate(Duration::from_secs(60))? == Some(0), "{}", cluster.log_tail());
    assert_hushed(&cluster, &jaeger, secret)
}
