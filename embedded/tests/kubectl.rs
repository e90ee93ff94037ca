//! The real kubectl over HTTPS.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::process::Command;

use crate::crd::definition;
use crate::support::{etcd_in, listening, over};

fn find() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("KUBECTL") {
        return Some(given.into());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|p| p.join("kubectl")).find(|p| p.is_file())
}

struct Kubectl {
    program: PathBuf,
    config: PathBuf,
    home: PathBuf,
}

impl Kubectl {
    fn command(&self, args: &[&str]) -> Command {
        let mut c = Command::new(&self.program);
        c.args(args).env("KUBECONFIG", &self.config).env("HOME", &self.home).kill_on_drop(true);
        c
    }

    async fn raw(&self, args: &[&str], input: &str) -> (bool, String, String) {
        use tokio::io::AsyncWriteExt;
        let mut child =
            self.command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
        let out = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output())
            .await
            .expect("kubectl ends")
            .unwrap();
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        (out.status.success(), text(&out.stdout), text(&out.stderr))
    }

    async fn ok(&self, args: &[&str]) -> String {
        self.ok_with(args, "").await
    }

    async fn ok_with(&self, args: &[&str], input: &str) -> String {
        let (good, out, err) = self.raw(args, input).await;
        assert!(good, "kubectl {args:?}\n{out}\n{err}");
        out
    }

    async fn fails(&self, args: &[&str], input: &str) -> String {
        let (good, out, err) = self.raw(args, input).await;
        assert!(!good, "kubectl {args:?} should fail\n{out}\n{err}");
        err
    }
}

fn script(folder: &Path, name: &str, body: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {app: a}}
spec:
  containers: [{name: c, image: example/image:1}]
";

const THING: &str = "
apiVersion: example.com/v1
kind: Thing
metadata: {name: t}
spec: {size: small}
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_works_unchanged() {
    let Some(program) = find() else {
        println!("SKIPPED: no kubectl in KUBECTL or PATH");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (process, store) = etcd_in(dir.path()).await;
    let server = over(Arc::new(store)).await;
    let up = listening(&server, dir.path()).await;
    let k = Kubectl { program, config: up.kubeconfig.clone(), home: dir.path().to_owned() };

    // What there is.
    let out = k.ok(&["api-resources"]).await;
    for want in ["pods", "customresourcedefinitions", "events.k8s.io/v1", "leases"] {
        assert!(out.contains(want), "{want} in\n{out}");
    }
    assert!(k.ok(&["version"]).await.contains("Server Version: v1."));
    assert!(k.ok(&["get", "ns"]).await.contains("kube-system"));

    // Apply, validation, get in all its forms.
    assert!(k.ok_with(&["apply", "-f", "-"], &definition().to_string()).await.contains("created"));
    k.ok(&["wait", "--for=condition=Established", "crd/things.example.com", "--timeout=10s"]).await;
    assert!(k.ok_with(&["apply", "-f", "-"], THING).await.contains("thing.example.com/t created"));
    assert!(k.ok_with(&["apply", "-f", "-"], THING).await.contains("unchanged"));
    let large = THING.replace("small", "large");
    assert!(k.ok_with(&["apply", "-f", "-"], &large).await.contains("configured"));
    let err = k.fails(&["apply", "-f", "-"], &THING.replace("size: small", "size: small, foo: 1")).await;
    assert!(err.contains("strict decoding error: unknown field \"spec.foo\""), "{err}");
    let err = k.fails(&["apply", "-f", "-"], &THING.replace("small", "huge")).await;
    assert!(err.contains("spec.size: Unsupported value: \"huge\""), "{err}");
    assert!(k.ok_with(&["apply", "-f", "-"], POD).await.contains("pod/p created"));
    assert!(k.ok_with(&["apply", "-f", "-"], &POD.replace("app: a", "app: b")).await.contains("configured"));
    let err = k.fails(&["apply", "-f", "-"], &POD.replace("image:1", "image:1, oops: true")).await;
    assert!(err.contains("unknown field \"spec.containers[0].oops\""), "{err}");
    let out = k.ok(&["get", "pod", "p", "-o", "wide"]).await;
    assert!(out.contains("READINESS GATES") && out.contains("0/1") && out.contains("Pending"), "{out}");
    assert_eq!(k.ok(&["get", "pod", "p", "-o", "jsonpath={.metadata.labels.app}"]).await, "b");
    assert!(k.ok(&["get", "pod", "p", "-o", "yaml"]).await.contains("restartPolicy: Always"));
    assert!(k.ok(&["get", "pods", "-A", "-o", "json"]).await.contains("\"kind\": \"List\""));
    assert!(k.ok(&["get", "th"]).await.contains("large"));
    assert!(k.ok(&["get", "all"]).await.contains("thing.example.com/t"));
    assert_eq!(k.ok(&["get", "pods", "-l", "app=b", "-o", "name"]).await.trim(), "pod/p");
    assert_eq!(k.ok(&["get", "pods", "--field-selector", "metadata.name=x", "-o", "name"]).await.trim(), "");
    assert!(
        k.fails(&["get", "pod", "none"], "").await.contains("Error from server (NotFound): pods \"none\" not found")
    );

    // Changing.
    k.ok(&["label", "pod", "p", "x=y"]).await;
    k.ok(&["annotate", "thing", "t", "x=y"]).await;
    k.ok(&["patch", "thing", "t", "--type=merge", "-p", "{\"spec\":{\"running\":true}}"]).await;
    let json = "[{\"op\":\"replace\",\"path\":\"/spec/size\",\"value\":\"small\"}]";
    k.ok(&["patch", "thing", "t", "--type=json", "-p", json]).await;
    k.ok(&["patch", "pod", "p", "-p", "{\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"example/image:2\"}]}}"])
        .await;
    assert_eq!(k.ok(&["get", "pod", "p", "-o", "jsonpath={.spec.containers[0].image}"]).await, "example/image:2");
    k.ok(&["patch", "thing", "t", "--subresource=status", "--type=merge", "-p", "{\"status\":{\"phase\":\"Up\"}}"])
        .await;
    k.ok(&["wait", "--for=jsonpath={.status.phase}=Up", "thing/t", "--timeout=10s"]).await;
    k.ok(&["scale", "thing/t", "--replicas=4"]).await;
    assert_eq!(k.ok(&["get", "thing", "t", "-o", "jsonpath={.spec.replicas}"]).await, "4");
    let editor = script(dir.path(), "editor", "sed -i s/size:.small/size:\\ large/ \"$1\"");
    let mut edit = k.command(&["edit", "thing", "t"]);
    let edited = edit.env("KUBE_EDITOR", &editor).output().await.unwrap();
    assert!(edited.status.success(), "{edited:?}");
    assert_eq!(k.ok(&["get", "thing", "t", "-o", "jsonpath={.spec.size}"]).await, "large");
    k.ok_with(&["create", "-f", "-"], "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n").await;
    k.ok(&["create", "secret", "generic", "s", "--from-literal=a=b"]).await;
    assert!(k.ok(&["get", "secret", "s"]).await.contains("Opaque"));
    assert!(!k.ok(&["create", "token", "default"]).await.trim().is_empty());

    // Applied by the server: owners, conflicts, force, and the difference to what is there.
    let owned = |a: &str| format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: owned}}\ndata: {{a: '{a}'}}\n");
    let one = ["apply", "--server-side", "--field-manager=one", "-f", "-"];
    assert!(k.ok_with(&one, &owned("1")).await.contains("configmap/owned serverside-applied"));
    let err = k.fails(&["apply", "--server-side", "--field-manager=two", "-f", "-"], &owned("2")).await;
    assert!(err.contains("conflict with \"one\": .data.a"), "{err}");
    k.ok_with(&["apply", "--server-side", "--field-manager=two", "--force-conflicts", "-f", "-"], &owned("2")).await;
    assert!(k.ok(&["get", "cm", "owned", "--show-managed-fields", "-o", "yaml"]).await.contains("manager: two"));
    assert!(!k.ok(&["get", "cm", "owned", "-o", "yaml"]).await.contains("managedFields"));
    let (same, out, err) = k.raw(&["diff", "--server-side", "--field-manager=two", "-f", "-"], &owned("3")).await;
    assert!(!same && out.contains("+  a: \"3\""), "{out}{err}");
    k.ok_with(&["diff", "-f", "-"], &owned("2")).await;
    // What kubectl applied from the client it takes over.
    k.ok_with(&["apply", "-f", "-"], &owned("1").replace("owned", "taken")).await;
    k.ok_with(&["apply", "--server-side", "-f", "-"], &owned("2").replace("owned", "taken")).await;

    // Of a kind that nobody serves it is said that there is none.
    let err = k
        .fails(&["apply", "-f", "-"], "apiVersion: none.example.com/v1\nkind: Nothing\nmetadata: {name: nothing}\n")
        .await;
    assert!(err.contains("no matches for kind \"Nothing\" in version \"none.example.com/v1\""), "{err}");

    // Describing and explaining.
    assert!(k.ok(&["describe", "pod", "p"]).await.contains("example/image:2"));
    assert!(k.ok(&["describe", "thing", "t"]).await.contains("Phase:"));
    assert!(k.ok(&["describe", "ns", "default"]).await.contains("Active"));
    assert!(k.ok(&["explain", "pod.spec.containers.image"]).await.contains("Container image name"));
    let out = k.ok(&["explain", "thing.spec"]).await;
    assert!(out.contains("What is wanted.") && out.contains("size"), "{out}");
    assert!(k.ok(&["explain", "thing.spec.size"]).await.contains("How large it is."));

    // Who may.
    assert_eq!(k.ok(&["auth", "can-i", "create", "pods"]).await.trim(), "yes");
    assert!(k.ok(&["auth", "whoami"]).await.contains("admin"));
    assert!(k.ok(&["auth", "can-i", "--list"]).await.contains("*.*"));
    let joe = up.pki.client("joe", None).unwrap();
    let other = dir.path().join("joe");
    std::fs::write(&other, embedded::pki::kubeconfig(&format!("https://{}", up.address), up.pki.ca(), &joe)).unwrap();
    let j = Kubectl { program: k.program.clone(), config: other, home: k.home.clone() };
    assert!(j.fails(&["get", "pods"], "").await.contains("pods is forbidden: User \"joe\" cannot list resource"));
    k.ok(&["create", "rolebinding", "joe", "--clusterrole=view", "--user=joe"]).await;
    j.ok(&["get", "pods"]).await;
    assert!(j.fails(&["delete", "pod", "p"], "").await.contains("forbidden"));
    assert_eq!(j.raw(&["auth", "can-i", "delete", "pods"], "").await.1.trim(), "no");
    assert_eq!(k.raw(&["auth", "can-i", "delete", "pods", "--as=ann"], "").await.1.trim(), "no");

    // Events and watching.
    let event = "apiVersion: v1\nkind: Event\nmetadata: {name: e}\ninvolvedObject: {apiVersion: v1, kind: Pod, name: p, namespace: default}\nreason: Tested\nmessage: hello\ntype: Normal\ncount: 1\nfirstTimestamp: '2026-01-01T00:00:00Z'\nlastTimestamp: '2026-01-01T00:00:00Z'\n";
    k.ok_with(&["create", "-f", "-"], event).await;
    assert!(k.ok(&["events"]).await.contains("hello"));
    assert!(k.ok(&["get", "events"]).await.contains("Tested"));
    let log = dir.path().join("watch.log");
    let mut watch = k.command(&["get", "things", "-w"]).stdout(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    crate::support::eventually("the watch shows the thing", || async {
        std::fs::read_to_string(&log).unwrap().contains("large")
    })
    .await;
    k.ok(&[
        "patch",
        "thing",
        "t",
        "--subresource=status",
        "--type=merge",
        "-p",
        "{\"status\":{\"phase\":\"Watched\"}}",
    ])
    .await;
    crate::support::eventually("the watch shows the change", || async {
        std::fs::read_to_string(&log).unwrap().contains("Watched")
    })
    .await;
    watch.kill().await.unwrap();

    // Deleting.
    assert!(k.ok(&["delete", "thing", "t", "--cascade=orphan", "--wait=false"]).await.contains("deleted"));
    assert_eq!(
        k.ok(&["get", "thing", "t", "-o", "jsonpath={.metadata.finalizers}"]).await,
        "[\"orphan\"]",
        "the collector of garbage takes the finalizer off, not the API server"
    );
    k.ok(&["patch", "thing", "t", "--type=merge", "-p", "{\"metadata\":{\"finalizers\":null}}"]).await;
    k.ok(&["delete", "pod", "p", "--grace-period=1"]).await;
    k.ok(&["delete", "cm,secret", "c", "s", "owned", "taken", "--ignore-not-found"]).await;
    k.ok(&["delete", "crd", "things.example.com", "--timeout=20s"]).await;
    // kubectl still has the discovery of before in its cache, as with any API server.
    assert!(k.fails(&["get", "things"], "").await.contains("the server could not find the requested resource"));
    process.stop().await;
}
