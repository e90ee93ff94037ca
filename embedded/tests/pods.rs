//! The pod runner with real containers in real network namespaces, against the API server in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use embedded::images::{ImageStore, Options};
use embedded::netns::Netns;
use embedded::pods::{Config, Network, NodeLogs, PodInfo, Pods, Runner};
use embedded::server::ApiServer;
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use kube::api::{DeleteParams, LogParams, Patch, PatchParams, PostParams, WatchParams};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::{admin, eventually, listening, server};

/// A script that ends with code 3 and a message at SIGTERM.
const WAIT: &str = "trap 'echo bye > /dev/termination-log; echo stopping; exit 3' TERM; echo up; \
    i=0; while [ $i -lt 1200 ]; do i=$((i+1)); sleep 0.05; done";

#[derive(Clone, Serialize, Deserialize)]
struct Places {
    id: String,
    dir: PathBuf,
}

impl Places {
    fn data(&self) -> PathBuf {
        self.dir.join("data/nodes/n1")
    }
    fn run(&self) -> PathBuf {
        self.dir.join("run/n1")
    }
    fn netns(&self, name: &str) -> Netns {
        Netns::named(&format!("vf-{}-{name}", self.id))
    }

    fn config(&self, client: Client) -> Config {
        let images = Options {
            root: self.dir.join("data/images"),
            local: vec![("registry.example/guest:1".into(), self.dir.join("layout"))],
            mirrors: vec![("broken.example".into(), "127.0.0.1:1".into())],
            ..Options::default()
        };
        Config {
            node_name: "n1".into(),
            cluster_id: self.id.clone(),
            client,
            data_dir: self.data(),
            run_dir: self.run(),
            volumes_root: self.dir.join("data/volumes"),
            images: Arc::new(ImageStore::new(images).unwrap()),
            network: Some(Network {
                node_netns: self.netns("n1").name().to_owned(),
                bridge: "br0".into(),
                node_address: [10, 244, 1, 1].into(),
                base: [10, 244, 1, 0].into(),
                prefix: 24,
                cluster_prefix: 16,
                gateway: [10, 244, 0, 1].into(),
            }),
            binary: "/usr/bin/dash".into(),
            private: vec![self.dir.clone()],
            kvm: false,
            runc: embedded::procs::find_program("runc").unwrap(),
            environment: Default::default(),
            labels: BTreeMap::from([("virtfold.io/test".into(), "yes".into())]),
        }
    }
}

/// A machine with one node.
struct Machine {
    places: Places,
    server: ApiServer,
    client: Client,
    _dir: tempfile::TempDir,
}

struct Running {
    pods: Pods,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// After a failure: what the test made must not stay.
impl Drop for Machine {
    fn drop(&mut self) {
        let runc = |arguments: &[&str]| {
            let root = self.places.run().join(".runc");
            std::process::Command::new("runc").arg("--root").arg(root).args(arguments).output().ok()
        };
        let list = runc(&["list", "-q"]).map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        for id in list.lines() {
            runc(&["delete", "--force", id]);
        }
        for netns in Netns::all(&format!("vf-{}-", self.places.id)) {
            let _ = std::process::Command::new("ip").args(["netns", "del", netns.name()]).output();
        }
    }
}

impl Machine {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let id: String = uuid::Uuid::new_v4().simple().to_string().chars().take(8).collect();
        let places = Places { id, dir: dir.path().to_owned() };
        let cluster = Netns::create(places.netns("cluster").name()).await.unwrap();
        cluster.bridge("br0", "10.244.0.1/16").await.unwrap();
        let node = Netns::create(places.netns("n1").name()).await.unwrap();
        node.bridge("br0", "10.244.1.1/16").await.unwrap();
        cluster.plug("br0", "port1", &node, "eth0").await.unwrap();
        node.enslave("eth0", "br0").await.unwrap();
        let server = server().await;
        server.set_logs(Arc::new(NodeLogs::new(&dir.path().join("data/nodes"))));
        let client = server.client(admin());
        Self { places, server, client, _dir: dir }
    }

    fn start(&self) -> Running {
        let runner = Runner::new(self.places.config(self.client.clone())).unwrap();
        let (pods, stop) = (runner.handle(), CancellationToken::new());
        let inner = stop.clone();
        let task = tokio::spawn(async move { runner.run(inner).await.unwrap() });
        Running { pods, stop, task }
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create(&self, name: &str, script: &str, more: Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "default", "labels": {
                "kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "11111111-2222-3333-4444-555555555555"}},
            "spec": {
                "nodeName": "n1", "restartPolicy": "Never", "terminationGracePeriodSeconds": 20,
                "automountServiceAccountToken": false, "enableServiceLinks": false,
                "containers": [{"name": "compute", "image": "virtfold/launcher:test",
                    "command": ["/usr/bin/virtfold", "-c"], "args": [script]}],
            },
        });
        merge(&mut pod, more);
        self.api().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    async fn get(&self, name: &str) -> Option<Value> {
        self.api().get_opt(name).await.unwrap().map(|p| serde_json::to_value(p).unwrap())
    }

    /// Waits until the pod looks so.
    async fn until(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let found = std::sync::Mutex::new(Value::Null);
        let (found_in, holds) = (&found, &holds);
        eventually_or(
            what,
            || async move {
                let pod = self.get(name).await.unwrap_or(Value::Null);
                let good = holds(&pod);
                *found_in.lock().unwrap() = pod;
                good
            },
            || found.lock().unwrap()["status"].to_string(),
        )
        .await;
        found.into_inner().unwrap()
    }

    async fn running(&self, name: &str) -> Value {
        self.until(name, "the pod runs", |p| p["status"]["phase"] == "Running").await
    }

    async fn gone(&self, name: &str) {
        eventually("the pod is gone", || async { self.get(name).await.is_none() }).await;
    }

    /// Waits for a line of the log.
    async fn line(&self, name: &str, line: &str) -> String {
        let mut log = String::new();
        for _ in 0..500 {
            // Before the container runs there is no log, and the server says so.
            log = self.api().logs(name, &LogParams::default()).await.unwrap_or_else(|e| e.to_string());
            if log.lines().any(|l| l == line) {
                return log;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no line {line:?} in:\n{log}");
    }

    /// What may be left of pods on the machine.
    fn remains(&self) -> Vec<String> {
        let mut all = Vec::new();
        for netns in Netns::all(&format!("vf-{}-", self.places.id)) {
            if !netns.name().ends_with("-cluster") && !netns.name().ends_with("-n1") {
                all.push(netns.name().to_owned());
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        all.extend(mounts.lines().filter(|l| l.contains(&*self.places.dir.to_string_lossy())).map(str::to_owned));
        for controller in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            find(&controller.path(), &format!("vf-{}-", self.places.id), &mut all);
        }
        for folder in [self.places.data().join("pods"), self.places.run(), self.places.run().join(".runc")] {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.file_name() != ".runc" && entry.file_name() != "lock" {
                    all.push(entry.path().to_string_lossy().into_owned());
                }
            }
        }
        let ipam = std::fs::read_to_string(self.places.data().join("ipam.json")).unwrap_or_default();
        if !ipam.is_empty() && !ipam.contains("\"leases\":{}") {
            all.push(ipam);
        }
        let port = std::process::Command::new("ip")
            .args(["-n", self.places.netns("n1").name(), "-br", "link"])
            .output()
            .unwrap();
        let links = String::from_utf8_lossy(&port.stdout).into_owned();
        all.extend(links.lines().filter(|l| l.starts_with('v')).map(str::to_owned));
        all
    }

    /// Everything of pods is gone.
    async fn clean(self, running: Running) {
        eventually_or("nothing remains", || async { self.remains().is_empty() }, || self.remains().join("\n")).await;
        assert_eq!(running.pods.pods(), []);
        running.stop().await;
    }
}

fn find(folder: &Path, prefix: &str, all: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                all.push(entry.path().to_string_lossy().into_owned());
            } else {
                find(&entry.path(), prefix, all);
            }
        }
    }
}

async fn eventually_or<F, Fut>(what: &str, mut holds: F, tell: impl Fn() -> String)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let start = std::time::Instant::now();
    while !holds().await {
        assert!(start.elapsed() < Duration::from_secs(30), "not within 30 s: {what}\n{}", tell());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn merge(base: &mut Value, more: Value) {
    match (base, more) {
        (Value::Object(base), Value::Object(more)) => {
            for (key, value) in more {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(base), Value::Array(more)) if base.len() == 1 && more.len() == 1 && base[0].is_object() => {
            merge(&mut base[0], more.into_iter().next().unwrap());
        }
        (base, more) => *base = more,
    }
}

fn condition<'a>(pod: &'a Value, kind: &str) -> &'a str {
    let list = pod["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().find(|c| c["type"] == kind).and_then(|c| c["status"].as_str()).unwrap_or("none")
}

fn state(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["state"]
}

/// An OCI layout with one disk.
fn layout(at: &Path) {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o600);
    builder.append_data(&mut header, "disk/disk.img", &b"boot"[..]).unwrap();
    let layer = builder.into_inner().unwrap();
    let blobs = at.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        use sha2::Digest;
        let hex: String = sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        std::fs::write(blobs.join(&hex), bytes).unwrap();
        format!("sha256:{hex}")
    };
    let manifest = json!({"schemaVersion": 2, "layers": [{"digest": put(&layer), "size": layer.len()}]}).to_string();
    let index =
        json!({"schemaVersion": 2, "manifests": [{"digest": put(manifest.as_bytes()), "size": manifest.len()}]});
    std::fs::write(at.join("index.json"), index.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_is_confined_has_its_volumes_and_ends_with_its_message() {
    let machine = Machine::new().await;
    layout(&machine.places.dir.join("layout"));
    let secret = json!({"metadata": {"name": "s"}, "stringData": {"userdata": "hush-hush"}});
    let maps: Api<ConfigMap> = Api::namespaced(machine.client.clone(), "default");
    let secrets: Api<Secret> = Api::namespaced(machine.client.clone(), "default");
    secrets.create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
    let map = json!({"metadata": {"name": "m"}, "data": {"key": "mapped"}});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    let folder = machine.places.dir.join("data/volumes/default/disk");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("disk.img"), b"disk").unwrap();
    std::fs::set_permissions(folder.join("disk.img"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let pv = json!({"metadata": {"name": "pv1"}, "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
        "local": {"path": folder}, "claimRef": {"namespace": "default", "name": "disk"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}]}}}});
    let pvs: Api<PersistentVolume> = Api::all(machine.client.clone());
    pvs.create(&PostParams::default(), &serde_json::from_value(pv).unwrap()).await.unwrap();
    let pvc = json!({"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv1",
        "resources": {"requests": {"storage": "1Gi"}}}});
    let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(machine.client.clone(), "default");
    pvcs.create(&PostParams::default(), &serde_json::from_value(pvc).unwrap()).await.unwrap();

    let running = machine.start();
    let script = format!(
        r#"
        echo "uid $(id -u) gid $(id -g) groups $(id -G)"
        grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status
        for path in / /usr /etc /opt/virtfold/bin /sys/fs /proc/sys/kernel/hostname /run/kubevirt-private/secret/s \
            /run/kubevirt-image-volume/disk_1/disk; do
            (echo x > $path/x) 2>/dev/null && echo "wrote $path"
        done
        for path in {data} {run} /root /home /var/lib/dpkg /etc/shadow /run/netns /dev/kvm /dev/vda /dev/mem; do
            [ -e $path ] && echo "sees $path"
        done
        ls /dev | tr '\n' ' '; echo
        echo "processes $(ls /proc | grep -c '^[0-9]*$')"
        echo "hostname $(hostname) env $POD_UID $KEY args $0"
        unshare -U true 2>/dev/null && echo "made a user namespace"
        mount -t tmpfs x /tmp 2>/dev/null && echo "mounted"
        cat /var/run/kubevirt-private/secret/s/userdata; echo
        (echo y > /var/run/kubevirt-private/secret/s/userdata) 2>/dev/null && echo "wrote a secret"
        cat /var/run/kubevirt-image-volume/disk_1/disk/disk.img; echo
        cat /var/run/kubevirt-private/vmi-disks/d/disk.img; echo
        echo changed > /var/run/kubevirt-private/vmi-disks/d/disk.img
        echo scratch > /var/run/kubevirt-ephemeral-disks/x && echo "scratch"
        echo shared > /run/virtfold/from-launcher
        cat /etc/podinfo/labels
        stat -f -c %T /run/kubevirt-private/secret/s
        ip -br -4 addr show eth0 | tr -s ' '; ip route | head -1
        busybox nc -l -p 7000 -e echo hello &
        (while [ ! -e /run/virtfold/serve ]; do sleep 0.1; done; while :; do busybox nc -l -p 7001 -e true; done) &
        {WAIT}"#,
        data = machine.places.dir.join("data").display(),
        run = machine.places.run().display(),
    );
    let pod = machine
        .create(
            "guest",
            &script,
            json!({
                "metadata": {"finalizers": ["test.virtfold.io/hold"]},
                "spec": {
                    "hostname": "myguest",
                    "readinessGates": [{"conditionType": "kubevirt.io/virtual-machine-unpaused"}],
                    "containers": [{
                        "readinessProbe": {"tcpSocket": {"port": 7001}, "periodSeconds": 1},
                        "livenessProbe": {"exec": {"command": ["/bin/sh", "-c", "id -u > /run/virtfold/asked"]}, "periodSeconds": 1},
                        "resources": {"limits": {"memory": "256Mi"}},
                        "env": [{"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                            {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "key"}}}],
                        "volumeMounts": [
                            {"name": "secret", "mountPath": "/var/run/kubevirt-private/secret/s"},
                            {"name": "image", "mountPath": "/var/run/kubevirt-image-volume/disk_1"},
                            {"name": "disk", "mountPath": "/var/run/kubevirt-private/vmi-disks/d"},
                            {"name": "scratch", "mountPath": "/var/run/kubevirt-ephemeral-disks"},
                            {"name": "info", "mountPath": "/etc/podinfo"},
                        ],
                    }],
                    "volumes": [
                        {"name": "secret", "secret": {"secretName": "s"}},
                        {"name": "image", "image": {"reference": "registry.example/guest:1", "pullPolicy": "IfNotPresent"}},
                        {"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}},
                        {"name": "scratch", "emptyDir": {}},
                        {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
                    ],
                },
            }),
        )
        .await;
    let uid = pod.metadata.uid.clone().unwrap();
    let now = machine.running("guest").await;
    let log = machine.line("guest", "up").await;
    let has = |line: &str| assert!(log.lines().any(|l| l.trim_end() == line), "no {line:?} in:\n{log}");
    has("uid 107 gid 107 groups 107");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        has(&format!("{set}:\t0000000000000000"));
    }
    has("NoNewPrivs:\t1");
    has("Seccomp:\t2");
    assert!(
        !log.contains("wrote ") && !log.contains("sees ") && !log.contains("mounted") && !log.contains("made a"),
        "{log}"
    );
    has("full null ptmx pts random shm stderr stdin stdout termination-log tty urandom zero fd"
        .split(' ')
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect::<Vec<_>>()
        .join(" ")
        .as_str());
    has(&format!("hostname myguest env {uid} mapped args /opt/virtfold/bin/virtfold"));
    for line in [
        "hush-hush",
        "boot",
        "disk",
        "scratch",
        "tmpfs",
        "kubevirt.io=\"virt-launcher\"",
        "default via 10.244.0.1 dev eth0",
    ] {
        has(line);
    }
    assert_eq!(now["status"]["podIP"], "10.244.1.2");
    assert_eq!(now["status"]["hostIP"], "10.244.1.1");
    assert!(log.contains(" 10.244.1.2/16"), "{log}");
    // Its network, from the cluster's side.
    let (cluster, server) = (machine.places.netns("cluster"), "10.244.1.2:7000".parse().unwrap());
    let start = std::time::Instant::now();
    let mut stream = loop {
        // The script says "up" before its server listens.
        match cluster.dial(server).await {
            Ok(stream) => break stream,
            Err(e) => assert!(start.elapsed() < Duration::from_secs(20), "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await.unwrap();
    assert_eq!(text, "hello\n");
    // No secret on any disk of ours.
    assert!(
        !grep(&machine.places.data(), b"hush-hush")
            || grep(&machine.places.data().join("pods").join(&uid).join("compute.log"), b"hush-hush")
    );
    assert!(!grep(&machine.places.data().join("pods").join(&uid).join("bundle"), b"hush-hush"));
    assert!(!grep(&machine.places.run(), b"hush-hush"));
    // What the agent is told.
    let info: PodInfo = running.pods.pods().pop().unwrap();
    assert_eq!(
        (info.pod_uid.as_str(), info.vmi_uid.as_str(), info.running),
        (uid.as_str(), "11111111-2222-3333-4444-555555555555", true)
    );
    assert_eq!(std::fs::read_to_string(info.share_dir.join("from-launcher")).unwrap(), "shared\n");
    let meta = std::fs::metadata(&info.share_dir).unwrap();
    assert_eq!(
        (std::os::unix::fs::MetadataExt::uid(&meta), std::os::unix::fs::MetadataExt::mode(&meta) & 0o777),
        (107, 0o700)
    );
    assert_eq!(info.netns, machine.places.netns(&uid).path());
    let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", info.main_pid.unwrap())).unwrap();
    assert!(cgroup.contains(&format!("vf-{}-{uid}", machine.places.id)), "{cgroup}");
    for kind in ["pid", "net", "mnt", "uts", "ipc"] {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of("self"), of(&info.main_pid.unwrap().to_string()), "{kind}");
    }
    // The readiness probe decides, and the gates, which belong to others.
    assert_eq!((condition(&now, "ContainersReady"), condition(&now, "Ready")), ("False", "False"));
    assert_eq!(now["status"]["containerStatuses"][0]["ready"], false);
    std::fs::write(info.share_dir.join("serve"), b"").unwrap();
    let now = machine.until("guest", "probed", |p| condition(p, "ContainersReady") == "True").await;
    assert_eq!((condition(&now, "ContainersReady"), condition(&now, "Ready")), ("True", "False"));
    let gate = json!({"status": {"conditions": [{"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"}]}});
    machine.api().patch_status("guest", &PatchParams::default(), &Patch::Strategic(gate)).await.unwrap();
    machine.until("guest", "ready", |p| condition(p, "Ready") == "True").await;
    // The other probe is a command in the container, as the container's own user.
    let asked = info.share_dir.join("asked");
    eventually("a probe by command", || {
        let asked = asked.clone();
        async move { std::fs::read_to_string(&asked).is_ok_and(|uid| uid == "107\n") }
    })
    .await;

    machine.api().delete("guest", &DeleteParams::default()).await.unwrap();
    let ended = machine.until("guest", "ended", |p| !state(p)["terminated"].is_null()).await;
    assert_eq!(ended["status"]["phase"], "Failed");
    assert_eq!(state(&ended)["terminated"]["exitCode"], 3);
    assert_eq!(state(&ended)["terminated"]["message"], "bye\n");
    assert_eq!(condition(&ended, "Ready"), "False");
    machine.line("guest", "stopping").await;
    let free = json!({"metadata": {"finalizers": null}});
    machine.api().patch("guest", &PatchParams::default(), &Patch::Merge(free)).await.unwrap();
    machine.gone("guest").await;
    assert_eq!(std::fs::read(folder.join("disk.img")).unwrap(), b"changed\n", "a claim's folder stays");
    machine.clean(running).await;
}

fn grep(path: &Path, words: &[u8]) -> bool {
    if path.is_dir() && !path.is_symlink() {
        return std::fs::read_dir(path).into_iter().flatten().flatten().any(|e| grep(&e.path(), words));
    }
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(words.len()).any(|w| w == words))
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_end_by_themselves_by_force_and_when_they_do_not_listen() {
    let machine = Machine::new().await;
    let running = machine.start();
    let created = machine.create("good", "echo done; exit 0", json!({})).await;
    machine
        .create(
            "bad",
            "echo the reason; exit 4",
            json!({"spec": {"containers": [{"terminationMessagePolicy": "FallbackToLogsOnError"}]}}),
        )
        .await;
    machine
        .create("deaf", "trap '' TERM; echo up; sleep 60", json!({"spec": {"terminationGracePeriodSeconds": 1}}))
        .await;
    machine.create("forced", WAIT, json!({})).await;
    let limit = json!({"spec": {"containers": [{"resources": {"limits": {"memory": "16Mi"}}}]}});
    machine.create("greedy", "exec tail /dev/zero", limit).await;
    let good = machine.until("good", "over", |p| p["status"]["phase"] == "Succeeded").await;
    assert_eq!(state(&good)["terminated"]["reason"], "Completed");
    assert!(good["status"]["podIP"].is_string());
    let bad = machine.until("bad", "over", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(
        (state(&bad)["terminated"]["exitCode"].as_i64(), state(&bad)["terminated"]["message"].as_str()),
        (Some(4), Some("the reason"))
    );
    let greedy = machine.until("greedy", "over", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(
        (state(&greedy)["terminated"]["exitCode"].as_i64(), state(&greedy)["terminated"]["reason"].as_str()),
        (Some(137), Some("OOMKilled"))
    );
    machine.line("deaf", "up").await;
    machine.line("forced", "up").await;
    let old = machine.get("good").await.unwrap()["metadata"]["resourceVersion"].clone();
    machine.api().delete("deaf", &DeleteParams::default()).await.unwrap();
    machine.gone("deaf").await;
    machine
        .api()
        .delete("forced", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() })
        .await
        .unwrap();
    machine.gone("forced").await;
    eventually("the forced pod's container is gone", || async { running.pods.pods().len() == 3 }).await;
    assert_eq!(machine.get("good").await.unwrap()["metadata"]["resourceVersion"], old, "what is over is written once");
    let parameters = WatchParams::default().fields("metadata.name=good").timeout(1);
    let from = created.metadata.resource_version.unwrap();
    let writes = machine.api().watch(&parameters, &from).await.unwrap().collect::<Vec<_>>().await;
    assert!((1..=2).contains(&writes.len()), "running and over, no more: {writes:?}");
    // The log of what is over is kept, and followed to its end.
    let mut follow = std::pin::pin!(
        machine.api().log_stream("good", &LogParams { follow: true, ..LogParams::default() }).await.unwrap()
    );
    let mut text = String::new();
    futures::AsyncReadExt::read_to_string(&mut follow, &mut text).await.unwrap();
    assert_eq!(text, "done\n");
    for name in ["good", "bad", "greedy"] {
        machine.api().delete(name, &DeleteParams::default()).await.unwrap();
        machine.gone(name).await;
    }
    machine.clean(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_says_why_and_what_may_run_later_does() {
    let machine = Machine::new().await;
    let running = machine.start();
    machine.create("stranger", WAIT, json!({"metadata": {"labels": {"kubevirt.io": "other"}}})).await;
    let mount = |path: &str| json!([{"name": "v", "mountPath": path}]);
    let host = json!({"spec": {"containers": [{"volumeMounts": mount("/mnt")}], "volumes": [{"name": "v", "hostPath": {"path": "/etc"}}]}});
    machine.create("host", WAIT, host).await;
    let secret = json!({"spec": {"containers": [{"volumeMounts": mount("/run/s")}], "volumes": [{"name": "v", "secret": {"secretName": "late"}}]}});
    machine.create("waits", WAIT, secret).await;
    let image = json!({"spec": {"containers": [{"volumeMounts": mount("/run/i")}],
        "volumes": [{"name": "v", "image": {"reference": "broken.example/x:1"}}]}});
    machine.create("pulls", WAIT, image).await;
    machine.create("no-program", WAIT, json!({"spec": {"containers": [{"command": ["/nowhere"]}]}})).await;
    for (name, words) in [("stranger", "launcher pods"), ("host", "hostPath is refused")] {
        let pod = machine.until(name, "refused", |p| p["status"]["phase"] == "Failed").await;
        assert_eq!(pod["status"]["reason"], "UnsupportedPod");
        assert!(pod["status"]["message"].as_str().unwrap().contains(words), "{}", pod["status"]);
    }
    let waits = machine.until("waits", "says why", |p| state(p)["waiting"]["message"].is_string()).await;
    assert_eq!(state(&waits)["waiting"]["message"], "secret \"late\" not found");
    let pulls = machine.until("pulls", "cannot pull", |p| state(p)["waiting"]["reason"] == "ErrImagePull").await;
    let message = state(&pulls)["waiting"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("failed to pull image \"broken.example/x:1\""), "{pulls}");
    let waits_on = machine.until("pulls", "backs off", |p| state(p)["waiting"]["reason"] == "ImagePullBackOff").await;
    assert_eq!(
        state(&waits_on)["waiting"]["message"],
        format!("Back-off pulling image \"broken.example/x:1\": ErrImagePull: {message}")
    );
    let wrong =
        machine.until("no-program", "cannot run", |p| state(p)["waiting"]["reason"] == "CreateContainerError").await;
    assert!(state(&wrong)["waiting"]["message"].as_str().unwrap().contains("nowhere"), "{wrong}");
    let secrets: Api<Secret> = Api::namespaced(machine.client.clone(), "default");
    let late = json!({"metadata": {"name": "late"}, "stringData": {"a": "b"}});
    secrets.create(&PostParams::default(), &serde_json::from_value(late).unwrap()).await.unwrap();
    machine.running("waits").await;
    // The node says that it is there.
    let nodes: Api<Node> = Api::all(machine.client.clone());
    let node = serde_json::to_value(nodes.get("n1").await.unwrap()).unwrap();
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n1");
    assert_eq!(condition(&node, "Ready"), "True");
    let leases: Api<Lease> = Api::namespaced(machine.client.clone(), "kube-node-lease");
    assert_eq!(leases.get("n1").await.unwrap().spec.unwrap().holder_identity.as_deref(), Some("n1"));
    for name in ["stranger", "host", "waits", "pulls", "no-program"] {
        machine.api().delete(name, &DeleteParams::default()).await.unwrap();
    }
    for name in ["stranger", "host", "waits", "pulls", "no-program"] {
        machine.gone(name).await;
    }
    machine.clean(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_runs_under_the_profile() {
    let machine = Machine::new().await;
    let running = machine.start();
    let script = r#"cd /var/run/kubevirt-ephemeral-disks && truncate -s 16M disk.img && qemu-img create -q -f qcow2 -b disk.img -F raw o.qcow2 &&
        printf '{"execute":"qmp_capabilities"}\n{"execute":"query-status"}\n{"execute":"quit"}\n' | timeout 20 qemu-system-x86_64 \
        -M q35 -accel tcg -m 64 -display none -nodefaults -qmp stdio -sandbox on,spawn=deny -object iothread,id=io0 -vnc unix:/run/virtfold/vnc.sock \
        -drive if=none,id=d,file=o.qcow2,format=qcow2,cache=none,aio=threads,discard=unmap -device virtio-blk-pci,drive=d,iothread=io0"#;
    machine
        .create("qemu", script, json!({"spec": {"containers": [{"volumeMounts": [{"name": "e", "mountPath": "/var/run/kubevirt-ephemeral-disks"}]}],
            "volumes": [{"name": "e", "emptyDir": {}}]}}))
        .await;
    let over =
        machine.until("qemu", "over", |p| matches!(p["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))).await;
    let log = machine.api().logs("qemu", &LogParams::default()).await.unwrap();
    assert_eq!(over["status"]["phase"], "Succeeded", "{log}");
    assert!(log.contains("\"status\": \"running\""), "{log}");
    machine.api().delete("qemu", &DeleteParams::default()).await.unwrap();
    machine.gone("qemu").await;
    machine.clean(running).await;
}

/// Not a test: the runner as a process of its own, for the test below.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by another test as a process"]
async fn runner_process() {
    let Ok(text) = std::env::var("RUNNER_PLACES") else { return };
    let places: Places = serde_json::from_str(&text).unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(places.dir.join("kubeconfig")).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &kube::config::KubeConfigOptions::default()).await.unwrap();
    let runner = Runner::new(places.config(Client::try_from(config).unwrap())).unwrap();
    runner.run(CancellationToken::new()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn launchers_outlive_a_runner_that_is_killed_and_are_never_started_twice() {
    let machine = Machine::new().await;
    let _listening = listening(&machine.server, &machine.places.dir).await;
    let spawn = || {
        tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "pods::runner_process", "--ignored", "--nocapture"])
            .env("RUNNER_PLACES", serde_json::to_string(&machine.places).unwrap())
            .stdout(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    };
    // Orphans come to this process, so that the test can take the exit code before the runner, which then knows none.
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let mut process = spawn();
    let script = format!("echo started >> /run/virtfold/starts; {WAIT}");
    let mut uids = Vec::new();
    for name in ["lives", "dies", "removed", "between", "doubtful"] {
        let pod = machine.create(name, &script, json!({})).await;
        uids.push(pod.metadata.uid.unwrap());
        machine.running(name).await;
        machine.line(name, "up").await;
    }
    process.kill().await.unwrap();
    let record = |uid: &str| -> Value {
        serde_json::from_slice(
            &std::fs::read(machine.places.data().join("pods").join(uid).join("record.json")).unwrap(),
        )
        .unwrap()
    };
    let pid = |uid: &str| i32::try_from(record(uid)["process"]["pid"].as_i64().unwrap()).unwrap();
    let alive = pid(&uids[0]);
    assert!(Path::new(&format!("/proc/{alive}")).exists(), "the launcher outlives its runner");
    // One ends, one loses its object while nobody looks.
    let dies = nix::unistd::Pid::from_raw(pid(&uids[1]));
    nix::sys::signal::kill(dies, nix::sys::signal::Signal::SIGTERM).unwrap();
    tokio::task::spawn_blocking(move || nix::sys::wait::waitpid(dies, None).unwrap()).await.unwrap();
    machine
        .api()
        .delete("removed", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() })
        .await
        .unwrap();
    // The runner may have died around the start: one was started, of the other nobody knows.
    for uid in &uids[3..] {
        let mut record = record(uid);
        record["stage"] = "starting".into();
        let path = machine.places.data().join("pods").join(uid).join("record.json");
        std::fs::write(path, record.to_string()).unwrap();
    }
    let between = pid(&uids[3]);
    let id = format!("vf-{}-{}", machine.places.id, uids[4]);
    let root = machine.places.run().join(".runc");
    assert!(
        std::process::Command::new("runc")
            .arg("--root")
            .arg(root)
            .args(["delete", "--force", &id])
            .status()
            .unwrap()
            .success()
    );
    let running = machine.start();
    let lives = running.pods.pods().into_iter().find(|p| p.name == "lives").unwrap();
    assert_eq!((lives.running, lives.main_pid), (true, Some(alive)), "known before anything else happens");
    let dead = machine.until("dies", "ended", |p| p["status"]["phase"] == "Failed").await;
    let ended = &state(&dead)["terminated"];
    assert_eq!((ended["exitCode"].as_i64(), ended["reason"].as_str()), (Some(137), Some("ContainerStatusUnknown")));
    assert_eq!(ended["message"], "bye\n", "the message survives");
    eventually("the pod without object is gone", || async { running.pods.pods().len() == 4 }).await;
    let doubtful = machine.until("doubtful", "counts as ended", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(state(&doubtful)["terminated"]["reason"], "ContainerStatusUnknown");
    eventually("found again", || async { running.pods.pods().iter().any(|p| p.main_pid == Some(between)) }).await;
    let between = running.pods.pods().into_iter().find(|p| p.name == "between").unwrap();
    assert_eq!(std::fs::read_to_string(between.share_dir.join("starts")).unwrap(), "started\n");
    assert_eq!(std::fs::read_to_string(lives.share_dir.join("starts")).unwrap(), "started\n");
    assert_eq!(machine.get("lives").await.unwrap()["status"]["phase"], "Running");
    let second = Runner::new(machine.places.config(machine.client.clone()));
    assert!(second.is_err(), "a node has one runner");
    for name in ["lives", "dies", "between", "doubtful"] {
        machine.api().delete(name, &DeleteParams::default()).await.unwrap();
        machine.gone(name).await;
    }
    machine.clean(running).await;
}
