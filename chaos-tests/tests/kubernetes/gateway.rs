//! The gateway on a real kube-apiserver: aggregated API, webhooks, certificates that rotate, and what goes on without it.

use super::{LONG, phase};
use anyhow::{Context, Result, ensure};
use chaos_tests::{
    e2e::{
        cluster::{condition, free_port, virtfold},
        kubectl::finish,
        manifest, process, wait,
    },
    kubernetes::{self, CONTROLLER, FOR_ROLES, Kubernetes, Process},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::process::Command;

/// A cluster with simulated nodes whose gateway is a process of its own.
struct Apart {
    gateway: Process,
    controller: Process,
    _nodes: Process,
    listen: String,
    k: Kubernetes,
}

/// Waits until a gateway says of itself that it is ready, or is not, in these words.
fn is_ready(gateway: &Process, address: &str, ready: bool, words: &str) -> Result<()> {
    gateway.ready(words, LONG, || {
        let out = Command::new("curl")
            .args(["-sSk", "-w", " %{http_code}", &format!("https://{address}/readyz")])
            .output()?;
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        let code = if ready { " 200" } else { " 503" };
        Ok(if said.contains(words) && said.trim_end().ends_with(code) { Ok(()) } else { Err(said) })
    })
}

impl Apart {
    fn start(life: &str) -> Result<Self> {
        let k = Kubernetes::start_with(FOR_ROLES)?;
        let listen = format!("127.0.0.1:{}", free_port()?);
        k.install()?;
        let health = format!("127.0.0.1:{}", free_port()?);
        let told = ["--listen", &listen, "--certificate-life", life, "--metrics", &health];
        let gateway = k.gateway("gateway", &told)?;
        // Nobody trusts it before it is registered, and it says so.
        is_ready(&gateway, &health, false, "it has not been registered")?;
        let printed = ["crds", "--roles", "-o", "json", "--gateway", &listen];
        let (code, registration, error) = finish(Command::new(virtfold()?).args(printed))?;
        ensure!(code == 0, "{error}");
        let (code, out, error) = k.feed(&["apply", "--server-side", "--force-conflicts"], &registration)?;
        ensure!(code == 0, "{out}{error}");
        is_ready(&gateway, &health, true, "ok")?;
        let controller = k.controller_with("controller", &["--listen", &format!("127.0.0.1:{}", free_port()?)])?;
        let nodes = k.nodes(1, &["--kubelet", "--scheduler"])?;
        let apart = Self { gateway, controller, _nodes: nodes, listen, k };
        apart.available()?;
        Ok(apart)
    }

    /// Waits until the API server reaches the gateway.
    fn available(&self) -> Result<()> {
        self.gateway.ready("the aggregated API", LONG, || {
            let service = self.k.json(&["get", "apiservice", "v1.subresources.kubevirt.io"])?;
            Ok(if condition(&service, "Available").0 == "True" { Ok(()) } else { Err(service["status"].to_string()) })
        })
    }

    fn virtfold(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        finish(Command::new(virtfold()?).args(arguments).env("KUBECONFIG", &self.k.config))
    }

    fn said(&self) -> String {
        format!("{}\n{}", self.gateway.log_tail(), self.controller.log_tail())
    }

    /// A request to the gateway itself that claims to be an administrator's; code and body of the answer.
    fn directly(&self, who: Option<&str>) -> Result<(u16, Value)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut config = kube::Config::new(format!("https://{}", self.listen).parse()?);
        config.accept_invalid_certs = true;
        if let Some(user) = who {
            let identity = self.k.identity(user, None)?;
            let base64 = |text: &str| base64::Engine::encode(&base64::engine::general_purpose::STANDARD, text);
            config.auth_info.client_certificate_data = Some(base64(&identity.cert));
            config.auth_info.client_key_data = Some(base64(&identity.key).into());
        }
        runtime.block_on(async {
            let client = kube::Client::try_from(config)?;
            let path = "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines/any/start";
            let request = http::Request::put(path).header("x-remote-user", "admin");
            let request = request.header("x-remote-group", "system:masters");
            match client.request::<Value>(request.body(Vec::new())?).await {
                Ok(answer) => Ok((200, answer)),
                Err(kube::Error::Api(status)) => Ok((status.code, serde_json::to_value(status)?)),
                Err(error) => Err(error.into()),
            }
        })
    }

    /// A request in the administrator's name; code and body of the answer.
    fn call(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
        let config = kube::config::Kubeconfig::read_from(&self.k.config)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
            let client = kube::Client::try_from(config)?;
            let request = http::Request::builder().method(method).uri(path).header("content-type", "application/json");
            match client.request::<Value>(request.body(serde_json::to_vec(body)?)?).await {
                Ok(answer) => Ok((200, answer)),
                Err(kube::Error::Api(status)) => Ok((status.code, serde_json::to_value(status)?)),
                Err(error) => Err(error.into()),
            }
        })
    }
}

const VMS: &str = "/apis/kubevirt.io/v1/namespaces/default/virtualmachines";

#[test]
fn what_users_ask_passes_the_gateway_and_what_is_wrong_is_refused_there() -> Result<()> {
    kubernetes!();
    let a = Apart::start("90d")?;
    let k = &a.k;
    // Its API is one of the cluster's.
    for version in ["v1", "v1alpha3"] {
        let list: Value =
            serde_json::from_str(&k.ok(&["get", "--raw", &format!("/apis/subresources.kubevirt.io/{version}")])?)?;
        ensure!(list["resources"].as_array().is_some_and(|r| r.iter().any(|r| r["name"] == "virtualmachines/start")));
    }
    // Who is not the aggregation layer speaks for nobody there, whatever certificate of the same authority he has.
    for who in [None, Some("viewer")] {
        let (code, status) = a.directly(who)?;
        ensure!(code == 401, "{who:?}: {code} {status}");
    }

    // Wrong fields: KubeVirt's paths, words and code, in the object as it was sent.
    let mut wrong = manifest::vm("wrong").object;
    wrong["spec"]["running"] = true.into();
    wrong["spec"]["template"]["spec"]["volumes"][0]["name"] = "other".into();
    let (code, status) = a.call("POST", VMS, &wrong)?;
    let causes = status["details"]["causes"].as_array().cloned().unwrap_or_default();
    let fields: Vec<_> = causes.iter().filter_map(|c| c["field"].as_str()).collect();
    ensure!(code == 422 && status["reason"] == "Invalid", "{code} {status}");
    ensure!(
        fields.contains(&"spec.running")
            && fields.iter().any(|f| f.contains("spec.template.spec.domain.devices.disks[0]")),
        "{status}"
    );

    // A right one has the defaults that must not change, and says who made it.
    k.apply(&manifest::vm("right").text())?;
    let vm = k.json(&["get", "vm", "right"])?;
    let template = &vm["spec"]["template"]["spec"];
    ensure!(template["domain"]["machine"]["type"] == "q35" && template["architecture"] == "amd64", "{vm}");
    ensure!(vm["metadata"]["annotations"]["virtfold.io/changed-by"] == "admin", "{}", vm["metadata"]);
    phase(k, "right", "Running").with_context(|| a.said())?;
    let vmi = k.json(&["get", "vmi", "right"])?;
    ensure!(vmi["spec"]["domain"]["cpu"]["model"].is_string(), "no defaults: {}", vmi["spec"]);

    // Verbs, and who may use them.
    let done = a.virtfold(&["stop", "right"])?;
    ensure!(done.0 == 0, "{done:?}");
    phase(k, "right", "Stopped").with_context(|| a.said())?;
    let viewer = k.kubeconfig_of("viewer", None)?;
    k.ok(&["create", "rolebinding", "viewer", "--clusterrole=view", "--user=viewer"])?;
    let as_viewer = |arguments: &[&str]| finish(Command::new(virtfold()?).args(arguments).env("KUBECONFIG", &viewer));
    let refused = wait::until("the right to look", LONG, || {
        let looked = as_viewer(&["status", "right"])?;
        Ok(if looked.0 == 0 { as_viewer(&["start", "right"]).map(Ok)? } else { Err(looked.2) })
    })?;
    ensure!(refused.0 == 1 && !refused.2.is_empty(), "{refused:?}");
    let done = a.virtfold(&["start", "right"])?;
    ensure!(done.0 == 0, "{done:?}");
    phase(k, "right", "Running").with_context(|| a.said())?;

    // Why: from the controller that leads, which is another process.
    let explained = as_viewer(&["explain", "vm/right", "-o", "json"])?;
    ensure!(explained.0 == 0, "{explained:?} {}", a.said());
    let explanation: Value = serde_json::from_str(&explained.1)?;
    let history = explanation["history"].to_string();
    ensure!(explanation["live"] == true && history.contains("from Halted to Always"), "{history}");
    process::signal(a.controller.pid(), Signal::SIGTERM)?;
    wait::until("the end of the controller", LONG, || {
        Ok(a.controller.check().err().map(|_| ()).ok_or_else(|| "it runs".to_owned()))
    })?;
    let (code, _, said) = a.virtfold(&["explain", "vm/right"])?;
    ensure!(code == 1 && said.contains("the controller that leads cannot be asked"), "{code} {said}");
    Ok(())
}

#[test]
fn a_dead_gateway_blocks_no_status_and_no_finalizer_and_its_certificates_rotate() -> Result<()> {
    kubernetes!();
    let mut a = Apart::start("20s")?;
    let bundle = |a: &Apart| -> Result<String> {
        let hooks = a.k.json(&["get", "mutatingwebhookconfiguration", "virtfold-gateway"])?;
        Ok(hooks["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap_or_default().to_owned())
    };
    let first = bundle(&a)?;
    ensure!(!first.is_empty(), "no authority is known");
    for (name, strategy) in [("stays", "Always"), ("ends", "Manual")] {
        a.k.apply(&manifest::vm(name).run(strategy).text())?;
    }
    ensure!(a.virtfold(&["start", "ends"])?.0 == 0);
    for name in ["stays", "ends"] {
        phase(&a.k, name, "Running").with_context(|| a.said())?;
    }

    // Another authority is known, and then the first is forgotten; every request gets through meanwhile.
    let trial = manifest::vm("trial").text();
    let mut seen = vec![first.clone()];
    wait::until("certificates of another authority alone", LONG, || {
        let (code, out, error) = a.k.feed(&["create", "--dry-run=server"], &trial)?;
        ensure!(code == 0, "amid the change: {out}{error} {}", a.said());
        a.k.ok(&["get", "--raw", "/apis/subresources.kubevirt.io/v1"])?;
        let now = bundle(&a)?;
        if !seen.contains(&now) {
            seen.push(now);
        }
        // One alone, both, the other with its successor.
        Ok(if seen.len() >= 3 { Ok(()) } else { Err(format!("{} lists of authorities", seen.len())) })
    })?;

    process::signal(a.gateway.pid(), Signal::SIGKILL)?;
    wait::until("the end of the gateway", LONG, || {
        Ok(a.gateway.check().err().map(|_| ()).ok_or_else(|| "it runs".to_owned()))
    })?;
    // Nothing that nobody has looked at.
    let said = a.k.apply_refused(&manifest::vm("new").text())?;
    ensure!(said.contains("virtfold.io") && said.contains("failed calling webhook"), "{said}");
    let patch = |kind: &str, name: &str, patch: Value| {
        a.k.kubectl(&["patch", kind, name, "--type=merge", "-p", &patch.to_string()])
    };
    let changed = patch("vm", "stays", json!({"spec": {"runStrategy": "Halted"}}))?;
    ensure!(changed.0 != 0 && changed.2.contains("failed calling webhook"), "{changed:?}");
    // And what is the control plane's stays its own.
    for (what, words) in [
        (json!({"status": {"phase": "Failed"}}), "status of a VMI"),
        (json!({"status": {"activePods": {"x": "y"}}}), "status of a VMI"),
        (json!({"spec": {"nodeSelector": {"a": "b"}}}), "update of VMI object is restricted"),
        (json!({"metadata": {"labels": {"kubevirt.io/nodeName": "elsewhere"}}}), "reserved kubevirt.io/ labels"),
        (json!({"metadata": {"annotations": {"virtfold.io/boot-id": "another"}}}), "control plane's word"),
    ] {
        let refused = patch("vmi", "stays", what.clone())?;
        ensure!(refused.0 != 0 && refused.2.contains(words), "{what}: {refused:?}");
    }
    // Everybody's labels and finalizers, and what the controller has to say, go on.
    for kind in ["vm", "vmi"] {
        let labelled = patch(kind, "stays", json!({"metadata": {"labels": {"colour": "green"}, "finalizers": null}}))?;
        ensure!(labelled.0 == 0, "{kind}: {labelled:?}");
    }
    a.k.ok(&["delete", "vmi", "ends", "--wait=false"])?;
    phase(&a.k, "ends", "Stopped").with_context(|| a.said())?;
    a.k.ok(&["delete", "vm", "ends", "--timeout=60s"])?;
    let left = a.k.ok(&["get", "vmi,pods", "-o", "name"])?;
    ensure!(!left.contains("ends"), "{left}");
    let refused: Vec<_> =
        a.k.calls()?.into_iter().filter(|c| c.user == CONTROLLER && c.is_write() && c.code >= 500).collect();
    ensure!(refused.is_empty(), "the controller was held up: {refused:#?}");

    // The next one goes on where it was, with what it finds of its certificates.
    let listen = a.listen.clone();
    a.gateway = a.k.gateway("gateway-2", &["--listen", &listen, "--certificate-life", "20s"])?;
    a.available()?;
    wait::until("an answer of the next gateway", LONG, || {
        let (code, out, error) = a.k.feed(&["apply"], &manifest::vm("new").text())?;
        Ok(if code == 0 { Ok(()) } else { Err(format!("{out}{error}")) })
    })?;
    phase(&a.k, "new", "Running").with_context(|| a.said())
}
