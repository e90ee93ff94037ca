//! `virtfold-chaos cluster`: trouble for a cluster that a person already has, by nothing but its API, in a namespace of its own, with
//! bounds, and with everything taken away at the end.

use crate::e2e::{kubectl::condition, manifest};
use crate::world::dice::Dice;
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use http::{Method, Request};
use kube::{
    Client,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

/// What everything of ours is marked with.
const LABEL: &str = "virtfold.io/chaos";
/// Namespaces that are never touched.
const SACRED: [&str; 6] = ["default", "kube-system", "kube-public", "kube-node-lease", "virtfold", "kubevirt"];
/// All is as it was asked for, for so long: it is at rest.
const STILL: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Machines are created, stopped, started, restarted, deleted and made again, at random
    Storm,
    /// Launcher pods are deleted at random
    Pods,
    /// The pod of the controller that leads is deleted, again and again, while machines are restarted
    Leader,
    /// Two operations on one machine in one moment
    Pairs,
    /// All machines are created at once and deleted at once
    Burst,
}

/// What can be said on the command line.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
    Nothing outside of the namespace is touched, except the leading controller's pod with --scenario leader. A namespace that holds \
    anything that this program did not make is refused. At the end, also after ctrl-C, machines are deleted and waited for, and a \
    namespace that was made is deleted.\n\n\
    Judged are: one launcher pod an instance (S4), phases that do not go back (S11), every machine as it was asked for within --settle \
    (L1), every deletion done (L3), nothing left behind (S22). Exit codes: 0 all held, 1 something did not, 2 wrong use.\n\n\
    A first look, which changes nothing:\n  \
    virtfold-chaos cluster --kubeconfig ~/.kube/config --scenario storm --dry-run")]
pub struct Storm {
    /// The kubeconfig file of the cluster
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: PathBuf,
    /// What is done
    #[arg(long)]
    scenario: Scenario,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Where; it is made if it is not there
    #[arg(long, default_value = "virtfold-chaos", value_name = "NAME")]
    namespace: String,
    /// Most machines at a time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=200))]
    max_vms: u32,
    /// Seconds of trouble
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    duration: u64,
    /// Milliseconds between two deeds
    #[arg(long, default_value_t = 2000, value_name = "MS", value_parser = clap::value_parser!(u64).range(50..=600_000))]
    every: u64,
    /// Seconds that the cluster gets to come to rest, and then to forget it all
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    settle: u64,
    /// Container disk of the guests
    #[arg(long, default_value = manifest::IMAGE, value_name = "REF")]
    image: String,
    /// Memory of each guest
    #[arg(long, default_value = "128Mi", value_name = "QUANTITY")]
    memory: String,
    /// What deeds are drawn by
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Something that is asked of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Deed {
    Create(String),
    Delete(String),
    Verb(String, &'static str),
    DeletePod(String),
    DeleteLeader,
    Both(Box<Deed>, Box<Deed>),
}

impl fmt::Display for Deed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(vm) => write!(f, "create {vm} where it is not there"),
            Self::Delete(vm) => write!(f, "delete {vm}"),
            Self::Verb(vm, verb) => write!(f, "{verb} {vm}"),
            Self::DeletePod(vm) => write!(f, "delete the launcher pod of {vm}"),
            Self::DeleteLeader => f.write_str("delete the pod of the controller that leads"),
            Self::Both(a, b) => write!(f, "{a} and {b}, at once"),
        }
    }
}

impl Storm {
    fn machines(&self) -> Vec<String> {
        (1..=self.max_vms).map(|n| format!("chaos-{n}")).collect()
    }

    /// What is done, and when: the same for the same seed.
    fn plan(&self) -> Vec<(Duration, Deed)> {
        let mut dice = Dice::new(self.seed);
        let machines = self.machines();
        let mut plan: Vec<_> = machines.iter().map(|vm| (Duration::ZERO, Deed::Create(vm.clone()))).collect();
        if self.scenario == Scenario::Burst {
            plan.extend(machines.iter().map(|vm| (Duration::from_secs(self.duration), Deed::Delete(vm.clone()))));
            return plan;
        }
        let mut at = self.every;
        while at < self.duration * 1000 {
            let Some(vm) = dice.pick(&machines).cloned() else { break };
            plan.push((Duration::from_millis(at), self.deed(&mut dice, vm)));
            at += self.every;
        }
        plan
    }

    fn deed(&self, dice: &mut Dice, vm: String) -> Deed {
        let one = |dice: &mut Dice| match dice.below(6) {
            0 => Deed::Create(vm.clone()),
            1 => Deed::Delete(vm.clone()),
            2 => Deed::Verb(vm.clone(), "start"),
            3 => Deed::Verb(vm.clone(), "stop"),
            _ => Deed::Verb(vm.clone(), "restart"),
        };
        match self.scenario {
            Scenario::Pods => Deed::DeletePod(vm),
            Scenario::Leader if dice.chance(300) => Deed::DeleteLeader,
            Scenario::Leader => Deed::Verb(vm, "restart"),
            Scenario::Pairs => {
                let first = one(dice);
                Deed::Both(Box::new(first), Box::new(one(dice)))
            }
            Scenario::Storm | Scenario::Burst => one(dice),
        }
    }

    /// Does it, or says what it would do. A cluster that cannot be reached, or must not be touched, is wrong use.
    pub fn execute(self) -> ExitCode {
        let permitted = || {
            let sacred = SACRED.contains(&self.namespace.as_str());
            ensure!(!sacred, "--namespace {}: that one is not for this", self.namespace);
            Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
        };
        permitted().and_then(|runtime| runtime.block_on(self.run())).unwrap_or_else(|error| {
            eprintln!("virtfold-chaos: {error:#}");
            ExitCode::from(2)
        })
    }

    async fn run(self) -> Result<ExitCode> {
        let file = &self.kubeconfig;
        let config = Kubeconfig::read_from(file).with_context(|| format!("--kubeconfig {}", file.display()))?;
        let mut config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        config.default_retry = false;
        let url = config.cluster_url.to_string();
        let site = Site { client: Client::try_from(config)?, namespace: self.namespace.clone() };
        let there = site.foreign().await?;
        if self.scenario == Scenario::Leader {
            let pod = site.leader().await?;
            println!("the controller that leads is pod {}/{}", pod.0, pod.1);
        }
        if self.dry_run {
            println!("cluster    {url}");
            let made =
                if there { "which is there and holds nothing foreign" } else { "which is made and deleted again" };
            println!("namespace  {}, {made}", self.namespace);
            println!("machines   at most {} of {} from {}", self.max_vms, self.memory, self.image);
            for (at, deed) in self.plan() {
                println!("{:>8.1} s {deed}", at.as_secs_f64());
            }
            println!(
                "then it is waited for up to {} s until all is as it was asked for; then all of it is deleted",
                self.settle
            );
            return Ok(ExitCode::SUCCESS);
        }
        if !there {
            site.make().await?;
        }
        let mut judge = Judge::default();
        let trouble = tokio::select! {
            done = self.trouble(&site, &mut judge) => done,
            _ = tokio::signal::ctrl_c() => {
                println!("stopped by hand; cleaning up");
                Ok(())
            }
        };
        let cleaned = self.clean(&site, !there).await;
        for wrong in &judge.wrong {
            println!("VIOLATED {wrong}");
        }
        trouble?;
        cleaned?;
        println!(
            "{} deeds taken, {} refused, {} looks, {} violations",
            judge.taken,
            judge.refused,
            judge.looks,
            judge.wrong.len()
        );
        Ok(if judge.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    async fn trouble(&self, site: &Site, judge: &mut Judge) -> Result<()> {
        let began = Instant::now();
        for (at, deed) in self.plan() {
            while began.elapsed() < at {
                tokio::time::sleep(LOOK.min(at.saturating_sub(began.elapsed()))).await;
                judge.look(site).await?;
            }
            let done = site.carry_out(&deed, self).await;
            println!(
                "{:>8.1} s {deed}{}",
                began.elapsed().as_secs_f64(),
                done.as_ref().err().map(|e| format!(": {e}")).unwrap_or_default()
            );
            match done {
                Ok(()) => judge.taken += 1,
                Err(_) => judge.refused += 1,
            }
        }
        let healed = Instant::now();
        let end = healed + Duration::from_secs(self.settle);
        let mut moved = healed;
        while moved.elapsed() < STILL {
            judge.look(site).await?;
            if let Some(why) = site.restless().await? {
                moved = Instant::now();
                if moved > end {
                    judge.wrong.insert(format!("L1: not as it was asked for within {} s: {why}", self.settle));
                    break;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
        println!("at rest {:.1} s after the last deed", moved.duration_since(healed).as_secs_f64());
        Ok(())
    }

    async fn clean(&self, site: &Site, namespace: bool) -> Result<()> {
        for vm in self.machines() {
            site.delete("kubevirt.io/v1", "virtualmachines", &vm).await.ok();
        }
        let end = Instant::now() + Duration::from_secs(self.settle);
        loop {
            let left = site.left().await?;
            if left.is_empty() {
                break;
            }
            ensure!(Instant::now() < end, "L3 S22: left behind after {} s: {}", self.settle, left.join(", "));
            tokio::time::sleep(LOOK).await;
        }
        if namespace {
            site.call(Method::DELETE, &format!("/api/v1/namespaces/{}", self.namespace), None).await?;
        }
        println!("all of it is gone");
        Ok(())
    }
}

struct Site {
    client: Client,
    namespace: String,
}

fn place(group: &str, namespace: &str, plural: &str) -> String {
    let root = if group == "v1" { "/api/v1".to_owned() } else { format!("/apis/{group}") };
    format!("{root}/namespaces/{namespace}/{plural}")
}

fn items(list: &Value) -> &[Value] {
    list["items"].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

impl Site {
    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> kube::Result<Value> {
        let body = body.map(|b| b.to_string().into_bytes()).unwrap_or_default();
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json").body(body);
        let text = self.client.request_text(request.map_err(kube::Error::HttpError)?).await?;
        // A verb's answer is empty.
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }

    async fn list(&self, group: &str, plural: &str) -> Result<Value> {
        let path = place(group, &self.namespace, plural);
        self.call(Method::GET, &path, None).await.with_context(|| format!("list {plural}"))
    }

    async fn delete(&self, group: &str, plural: &str, name: &str) -> kube::Result<()> {
        self.call(Method::DELETE, &format!("{}/{name}", place(group, &self.namespace, plural)), None).await.map(drop)
    }

    /// Whether the namespace is there; refuses one that holds what is not ours.
    async fn foreign(&self) -> Result<bool> {
        match self.call(Method::GET, &format!("/api/v1/namespaces/{}", self.namespace), None).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(false),
            Err(error) => return Err(error).context("the cluster does not answer"),
        }
        let kinds = [
            ("kubevirt.io/v1", "virtualmachines"),
            ("kubevirt.io/v1", "virtualmachineinstances"),
            ("v1", "pods"),
            ("v1", "persistentvolumeclaims"),
            ("v1", "services"),
            ("v1", "secrets"),
            ("apps/v1", "deployments"),
        ];
        for (group, plural) in kinds {
            let list = match self.list(group, plural).await {
                Ok(list) => list,
                // A small API server need not have them all.
                Err(error)
                    if error
                        .downcast_ref::<kube::Error>()
                        .is_some_and(|e| matches!(e, kube::Error::Api(s) if s.code == 404)) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let own = |o: &Value| o["metadata"]["labels"][LABEL].is_string();
            if let Some(foreign) = items(&list).iter().find(|o| !own(o)) {
                let name = text(foreign, "/metadata/name");
                bail!(
                    "namespace {} holds {plural}/{name}, which is not of this program: choose another --namespace",
                    self.namespace
                );
            }
        }
        Ok(true)
    }

    async fn make(&self) -> Result<()> {
        let object = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": self.namespace, "labels": {LABEL: "true"}}});
        self.call(Method::POST, "/api/v1/namespaces", Some(object)).await.context("make the namespace")?;
        Ok(())
    }

    /// Namespace and name of the pod that leads: the Lease says at which address it answers.
    async fn leader(&self) -> Result<(String, String)> {
        let lease = "/apis/coordination.k8s.io/v1/namespaces/virtfold/leases/virtfold-controller";
        let lease = self.call(Method::GET, lease, None).await.context("who leads")?;
        let address = lease["metadata"]["annotations"][api::names::ANN_CONTROLLER_ADDRESS].as_str().unwrap_or_default();
        let host = address.rsplit_once(':').map_or("", |(host, _)| host);
        let pods =
            self.call(Method::GET, "/api/v1/namespaces/virtfold/pods", None).await.context("list the controllers")?;
        let pod = items(&pods).iter().find(|p| !host.is_empty() && text(p, "/status/podIP") == host);
        let pod = pod.with_context(|| format!("the controller that leads ({address:?}) is no pod of namespace virtfold: --scenario leader deletes pods"))?;
        Ok((text(pod, "/metadata/namespace").to_owned(), text(pod, "/metadata/name").to_owned()))
    }

    async fn carry_out(&self, deed: &Deed, storm: &Storm) -> Result<(), String> {
        let said = |e: kube::Error| match e {
            kube::Error::Api(status) => status.message,
            other => other.to_string(),
        };
        match deed {
            Deed::Create(vm) => {
                let mut manifest = manifest::vm(vm).image(&storm.image).memory(&storm.memory).grace(10);
                manifest.object["metadata"]["namespace"] = self.namespace.clone().into();
                for pointer in ["/metadata", "/spec/template/metadata"] {
                    if let Some(meta) = manifest.object.pointer_mut(pointer) {
                        meta["labels"][LABEL] = "true".into();
                    }
                }
                let path = place("kubevirt.io/v1", &self.namespace, "virtualmachines");
                self.call(Method::POST, &path, Some(manifest.object)).await.map(drop).map_err(said)
            }
            Deed::Delete(vm) => self.delete("kubevirt.io/v1", "virtualmachines", vm).await.map_err(said),
            Deed::Verb(vm, verb) => {
                let path =
                    format!("{}/{vm}/{verb}", place("subresources.kubevirt.io/v1", &self.namespace, "virtualmachines"));
                self.call(Method::PUT, &path, Some(json!({}))).await.map(drop).map_err(said)
            }
            Deed::DeletePod(vm) => {
                let pods = self.list("v1", "pods").await.map_err(|e| format!("{e:#}"))?;
                let of = |p: &&Value| items_of(p).any(|(kind, name)| kind == "VirtualMachineInstance" && name == *vm);
                let pod = items(&pods).iter().find(of).ok_or("it has none")?;
                self.delete("v1", "pods", text(pod, "/metadata/name")).await.map_err(said)
            }
            Deed::DeleteLeader => {
                let (namespace, name) = self.leader().await.map_err(|e| format!("{e:#}"))?;
                let path = format!("{}/{name}", place("v1", &namespace, "pods"));
                self.call(Method::DELETE, &path, None).await.map(drop).map_err(said)
            }
            Deed::Both(a, b) => {
                let (a, b) = tokio::join!(Box::pin(self.carry_out(a, storm)), Box::pin(self.carry_out(b, storm)));
                a.and(b)
            }
        }
    }

    /// What is not yet as it was asked for.
    async fn restless(&self) -> Result<Option<String>> {
        let vms = self.list("kubevirt.io/v1", "virtualmachines").await?;
        for vm in items(&vms) {
            let (name, status) = (text(vm, "/metadata/name"), text(vm, "/status/printableStatus"));
            let wanted = match text(vm, "/spec/runStrategy") {
                "Halted" => "Stopped",
                _ => "Running",
            };
            if vm["metadata"]["deletionTimestamp"].is_string() {
                return Ok(Some(format!("{name} is being deleted")));
            }
            if status != wanted || vm["status"]["stateChangeRequests"].is_array() {
                return Ok(Some(format!("{name} is {status}, and should be {wanted}: {}", condition(vm, "Ready").1)));
            }
        }
        let vms: BTreeSet<&str> = items(&vms).iter().map(|v| text(v, "/metadata/name")).collect();
        let vmis = self.list("kubevirt.io/v1", "virtualmachineinstances").await?;
        let orphan = items(&vmis).iter().map(|v| text(v, "/metadata/name")).find(|v| !vms.contains(v));
        Ok(orphan.map(|name| format!("instance {name} has no machine")))
    }

    /// What is still there of ours.
    async fn left(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for (group, plural) in
            [("kubevirt.io/v1", "virtualmachines"), ("kubevirt.io/v1", "virtualmachineinstances"), ("v1", "pods")]
        {
            let list = self.list(group, plural).await?;
            left.extend(items(&list).iter().map(|o| format!("{plural}/{}", text(o, "/metadata/name"))));
        }
        Ok(left)
    }
}

/// Kind and name of the owners of an object.
fn items_of(object: &Value) -> impl Iterator<Item = (&str, &str)> {
    let owners = object["metadata"]["ownerReferences"].as_array().map(Vec::as_slice).unwrap_or_default();
    owners.iter().map(|o| (o["kind"].as_str().unwrap_or_default(), o["name"].as_str().unwrap_or_default()))
}

/// What must not be seen.
#[derive(Default)]
struct Judge {
    wrong: BTreeSet<String>,
    /// How far each instance was, by UID.
    phases: BTreeMap<String, usize>,
    looks: u64,
    taken: u64,
    refused: u64,
}

/// How far an instance in this phase is.
fn rank(phase: &str) -> usize {
    match phase {
        "Pending" => 1,
        "Scheduling" => 2,
        "Scheduled" => 3,
        "Running" => 4,
        "Succeeded" | "Failed" => 5,
        _ => 0,
    }
}

impl Judge {
    async fn look(&mut self, site: &Site) -> Result<()> {
        self.looks += 1;
        let pods = site.list("v1", "pods").await?;
        self.pods(items(&pods));
        let vmis = site.list("kubevirt.io/v1", "virtualmachineinstances").await?;
        for vmi in items(&vmis) {
            self.phase(text(vmi, "/metadata/uid"), text(vmi, "/metadata/name"), text(vmi, "/status/phase"));
        }
        Ok(())
    }

    fn pods(&mut self, pods: &[Value]) {
        let mut of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for pod in pods.iter().filter(|p| !matches!(text(p, "/status/phase"), "Succeeded" | "Failed")) {
            if let Some(uid) = pod["metadata"]["labels"][api::names::LABEL_CREATED_BY].as_str() {
                of.entry(uid).or_default().push(text(pod, "/metadata/name"));
            }
        }
        for (uid, names) in of.iter().filter(|(_, names)| names.len() > 1) {
            self.wrong.insert(format!("S4: instance {uid} has pods {}", names.join(", ")));
        }
    }

    fn phase(&mut self, uid: &str, name: &str, phase: &str) {
        let (rank, before) = (rank(phase), self.phases.get(uid).copied().unwrap_or(0));
        if rank < before {
            self.wrong.insert(format!("S11: instance {name} ({uid}) went back to {phase:?}"));
        }
        self.phases.insert(uid.to_owned(), rank.max(before));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        storm: Storm,
    }

    fn storm(more: &str) -> Storm {
        let line = format!("x --kubeconfig none {more}");
        Line::try_parse_from(line.split_whitespace()).unwrap().storm
    }

    #[test]
    fn a_plan_is_the_same_for_the_same_seed_and_keeps_its_bounds() {
        for scenario in ["storm", "pods", "pairs", "leader", "burst"] {
            let one = storm(&format!("--scenario {scenario} --max-vms 4 --duration 10 --every 500"));
            let plan = one.plan();
            assert_eq!(plan, one.plan());
            assert!(plan.iter().all(|(at, _)| *at <= Duration::from_secs(10)), "{scenario}");
            assert_eq!(plan.iter().filter(|(at, d)| at.is_zero() && matches!(d, Deed::Create(_))).count(), 4);
            let names: BTreeSet<String> = one.machines().into_iter().collect();
            let of = |d: &Deed| match d {
                Deed::Create(vm) | Deed::Delete(vm) | Deed::Verb(vm, _) | Deed::DeletePod(vm) => Some(vm.clone()),
                Deed::DeleteLeader | Deed::Both(..) => None,
            };
            assert!(plan.iter().filter_map(|(_, d)| of(d)).all(|vm| names.contains(&vm)));
        }
        assert_ne!(storm("--scenario storm --seed 2").plan(), storm("--scenario storm --seed 3").plan());
    }

    #[test]
    fn what_is_not_for_this_is_refused() {
        for namespace in SACRED {
            let code = storm(&format!("--scenario storm --namespace {namespace}")).execute();
            assert_eq!(code, ExitCode::from(2), "{namespace}");
        }
        assert!(Line::try_parse_from("x --kubeconfig none --scenario storm --max-vms 0".split(' ')).is_err());
    }

    #[test]
    fn two_pods_and_a_phase_that_goes_back_are_seen() {
        let pod = |name: &str, phase: &str| json!({"metadata": {"name": name, "labels": {api::names::LABEL_CREATED_BY: "u"}}, "status": {"phase": phase}});
        let mut judge = Judge::default();
        judge.pods(&[pod("a", "Running"), pod("b", "Succeeded")]);
        judge.phase("u", "vm", "Running");
        judge.phase("u", "vm", "Succeeded");
        judge.phase("v", "vm", "Pending");
        assert!(judge.wrong.is_empty(), "{:?}", judge.wrong);
        judge.pods(&[pod("a", "Running"), pod("b", "Pending")]);
        judge.phase("u", "vm", "Running");
        assert_eq!(judge.wrong.len(), 2, "{:?}", judge.wrong);
    }
}
