//! The controller against a real API server in this process, over real sessions, with modelled nodes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod secrets;
mod support;

use proto::agent;
use serde_json::json;
use state::object::Kind;
use std::{sync::atomic::Ordering, time::Duration};
use support::{World, eventually, set, vm};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_runs_within_the_budget_is_stopped_and_deleted() {
    let w = World::new().await;
    let (stop, running) = w.controller();
    eventually("a session", || async { w.agent.sessions.load(Ordering::SeqCst) > 0 }).await;
    let began = std::time::Instant::now();
    w.create(Kind::VirtualMachine, vm("web", "Always")).await;
    w.status("web", "Running").await;
    let took = began.elapsed();
    eventually("the event", || async { w.events().await.contains(&"Started".to_owned()) }).await;
    let mut writes = w.writes.lock().unwrap().clone();
    println!("created -> Running in {took:?}, writes of the controller: {writes:#?}");
    writes.retain(|x| !x.contains("events"));
    writes.sort();
    let six = [
        "PATCH virtualmachineinstances 200",
        "PATCH virtualmachineinstances 200",
        "PATCH virtualmachines/status 200",
        "POST controllerrevisions 201",
        "POST pods 201",
        "POST virtualmachineinstances 201",
    ];
    let patches = writes.iter().filter(|x| x.starts_with("PATCH virtualmachines/status")).count();
    if patches == 1 {
        assert_eq!(writes, six);
    }
    assert!(patches <= 2 && writes.len() <= 7, "{writes:?}");
    assert!(writes.iter().all(|x| !x.ends_with("409") && !x.ends_with("422")), "{writes:?}");

    let vmi = w.get(Kind::VirtualMachineInstance, "web").await.unwrap();
    assert_eq!(vmi["status"]["interfaces"][0]["ipAddress"], "10.244.1.7");
    assert_eq!(w.pods().await.len(), 1);
    let events = w.events().await;
    assert_eq!(events.len(), 2, "{events:?}");

    // Nothing changes: nothing is written.
    let before = w.writes.lock().unwrap().len();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(w.writes.lock().unwrap()[before..], [] as [String; 0]);

    // Stop.
    w.patch(Kind::VirtualMachine, "web", json!({"spec": {"runStrategy": "Halted"}})).await;
    w.status("web", "Stopped").await;
    eventually("everything is gone", || async {
        w.get(Kind::VirtualMachineInstance, "web").await.is_none() && w.pods().await.is_empty()
    })
    .await;
    eventually("the outcome is acknowledged", || async { w.agent.launchers.lock().unwrap().all.is_empty() }).await;

    // Start again, same generation apart from the strategy; delete while it runs.
    w.patch(Kind::VirtualMachine, "web", json!({"spec": {"runStrategy": "Always"}})).await;
    w.status("web", "Running").await;
    w.delete(Kind::VirtualMachine, "web").await;
    eventually("the VM is gone", || async {
        w.get(Kind::VirtualMachine, "web").await.is_none()
            && w.get(Kind::VirtualMachineInstance, "web").await.is_none()
            && w.pods().await.is_empty()
    })
    .await;
    eventually("its revisions are collected", || async {
        w.api(Kind::ControllerRevision).list(&Default::default()).await.unwrap().items.is_empty()
    })
    .await;

    stop.cancel();
    running.await.unwrap().unwrap();
    // What happened can be read back, and the machines of today do the same.
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_machines_start_is_replaced_and_nothing_starts_twice() {
    let w = World::new().await;
    let (_, running) = w.controller();
    for i in 0..10 {
        w.create(Kind::VirtualMachine, vm(&format!("m{i}"), "Always")).await;
    }
    // Somewhere in the middle.
    eventually("some pods", || async { w.pods().await.len() >= 3 }).await;
    running.abort();
    let _ = running.await;
    let (stop, running) = w.controller();
    for i in 0..10 {
        w.status(&format!("m{i}"), "Running").await;
    }
    assert_eq!(w.pods().await.len(), 10);
    assert_eq!(w.agent.running().len(), 10);
    assert!(w.agent.launchers.lock().unwrap().all.values().all(|l| l.starts == 1));
    // Guests keep running while nobody leads, and are taken over.
    stop.cancel();
    running.await.unwrap().unwrap();
    let before = w.writes.lock().unwrap().len();
    let sessions = w.agent.sessions.load(Ordering::SeqCst);
    let (stop, running) = w.controller();
    eventually("a session", || async { w.agent.sessions.load(Ordering::SeqCst) > sessions }).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(w.writes.lock().unwrap()[before..], [] as [String; 0], "taking over changes nothing");
    stop.cancel();
    running.await.unwrap().unwrap();
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guests_that_end_by_themselves_and_starts_that_are_refused() {
    let w = World::new().await;
    let (stop, running) = w.controller();
    w.create(Kind::VirtualMachine, vm("once", "Once")).await;
    w.status("once", "Running").await;
    let pod = w.agent.running().pop().unwrap();
    w.agent.end(&pod, agent::Cause::GuestShutdown);
    w.status("once", "Stopped").await;
    let vmi = w.get(Kind::VirtualMachineInstance, "once").await.unwrap();
    assert_eq!(vmi["status"]["phase"], "Succeeded");

    w.create(Kind::VirtualMachine, vm("again", "Always")).await;
    w.status("again", "Running").await;
    let first = w.get(Kind::VirtualMachineInstance, "again").await.unwrap()["metadata"]["uid"].clone();
    let pod = w.agent.running().pop().unwrap();
    w.agent.end(&pod, agent::Cause::Crashed);
    eventually("another VMI runs", || async {
        let vmi = w.get(Kind::VirtualMachineInstance, "again").await.unwrap_or_default();
        vmi["metadata"]["uid"] != first && vmi["status"]["phase"] == "Running"
    })
    .await;

    // Paused by somebody: shown, and gone again.
    let pod = w.agent.running().pop().unwrap();
    w.agent.report(&pod, agent::DomainState::Paused);
    w.status("again", "Paused").await;
    w.agent.report(&pod, agent::DomainState::Running);
    w.status("again", "Running").await;

    w.agent.launchers.lock().unwrap().refuse = Some("no tap device".into());
    w.create(Kind::VirtualMachine, vm("refused", "Always")).await;
    w.status("refused", "CrashLoopBackOff").await;
    let vm = w.get(Kind::VirtualMachine, "refused").await.unwrap();
    assert_eq!(vm["status"]["startFailure"]["consecutiveFailCount"], 1);
    stop.cancel();
    running.await.unwrap().unwrap();
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_claim_is_named_until_it_is_there() {
    let w = World::new().await;
    let why = |name: &'static str| {
        let explainer = w.explainer.clone();
        async move { explainer.explain(&reconcilers::Subject::Machine(state::Key::new("default", name))).await }
    };
    assert!(matches!(why("disk").await, Err(reconcilers::ExplainError::NotLeading(_))), "nobody leads yet");
    let (stop, running) = w.controller();
    let mut m = vm("disk", "Always");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    w.create(Kind::VirtualMachine, m).await;
    w.status("disk", "ErrorPvcNotFound").await;
    let e = why("disk").await.unwrap();
    assert_eq!((e.waits[0].reason.as_str(), e.live), ("FailedPvcNotFound", true), "{e:#?}");
    assert!(e.waits[0].since.is_some() && e.gaps.is_empty(), "{e:#?}");
    assert!(matches!(why("other").await, Err(reconcilers::ExplainError::Unknown(_))));
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c1", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    });
    w.create(Kind::PersistentVolumeClaim, claim).await;
    w.status("disk", "Running").await;
    let e = why("disk").await.unwrap();
    let told: Vec<_> = e.history.iter().map(|h| h.message.as_str()).collect();
    let at = |text: &str| told.iter().position(|t| t.contains(text)).unwrap_or_else(|| panic!("{text}: {told:#?}"));
    let story = [
        "created the virtual machine",
        "waits for PersistentVolumeClaim c1",
        "has PersistentVolumeClaim c1 now",
        "runs the guest",
    ];
    assert!(story.map(at).is_sorted(), "{told:#?}");
    stop.cancel();
    running.await.unwrap().unwrap();
    assert!(matches!(why("disk").await, Err(reconcilers::ExplainError::NotLeading(_))), "nobody leads any more");
    // The journal alone tells the same.
    let key = state::Key::new("default", "disk");
    let (story, gaps) = reconcilers::read_journal(&w.folder.path().join("journal"), &key).unwrap();
    let now = story.latest();
    let past = state::explain::Explanation::new(&key, story, None, now);
    assert_eq!((past.history, gaps), (e.history, vec![]));
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_machines_at_once_keep_to_the_budget() {
    const N: usize = 100;
    let w = World::new().await;
    let (stop, running) = w.controller();
    eventually("a session", || async { w.agent.sessions.load(Ordering::SeqCst) > 0 }).await;
    let began = std::time::Instant::now();
    for i in 0..N {
        w.create(Kind::VirtualMachine, vm(&format!("m{i}"), "Always")).await;
    }
    for i in 0..N {
        w.status(&format!("m{i}"), "Running").await;
    }
    let took = began.elapsed();
    let writes = w.writes.lock().unwrap().clone();
    let refused = writes.iter().filter(|x| !x.ends_with("200") && !x.ends_with("201")).count();
    let events = writes.iter().filter(|x| x.contains("events")).count();
    #[allow(clippy::cast_precision_loss)]
    let each = (writes.len() - events) as f64 / N as f64;
    println!("{N} VMs in {took:?}: {each} writes each, {events} events, {refused} refused");
    assert_eq!(refused, 0, "{writes:?}");
    // How many lazy levels show depends on how long a start takes here; how many can show does not.
    let creates = writes.iter().filter(|x| x.starts_with("POST") && !x.contains("events")).count();
    assert_eq!(creates, 3 * N, "VMI, pod and revision, each once");
    assert!(writes.len() - events <= 11 * N, "six and the revision, and each lazy level at most once");
    assert!(w.agent.launchers.lock().unwrap().all.values().all(|l| l.starts == 1));
    stop.cancel();
    running.await.unwrap().unwrap();
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_makes_scales_replaces_adopts_and_goes_with_its_instances() {
    const SET: Kind = Kind::VirtualMachineInstanceReplicaSet;
    const VMI: Kind = Kind::VirtualMachineInstance;
    let w = World::new().await;
    let (stop, running) = w.controller();
    w.create(SET, set("web", 3)).await;
    let shows = |replicas: u64, ready: u64| {
        let w = &w;
        async move {
            let s = w.get(SET, "web").await.unwrap_or_default();
            s["status"]["replicas"] == replicas && s["status"]["readyReplicas"] == ready
        }
    };
    eventually("three run", || shows(3, 3)).await;
    assert_eq!(w.agent.running().len(), 3);
    let writes = w.writes.lock().unwrap().clone();
    let refused = writes.iter().filter(|x| !x.ends_with("200") && !x.ends_with("201")).count();
    assert_eq!(refused, 0, "{writes:?}");
    assert_eq!(writes.iter().filter(|x| x.starts_with("POST virtualmachineinstances ")).count(), 3);
    let events = w.events().await;
    assert_eq!(events.iter().filter(|e| *e == "SuccessfulCreate").count(), 3, "{events:?}");

    // Another controller takes over: nothing is made or written.
    stop.cancel();
    running.await.unwrap().unwrap();
    let before = w.writes.lock().unwrap().len();
    let sessions = w.agent.sessions.load(Ordering::SeqCst);
    let (stop, running) = w.controller();
    eventually("a session", || async { w.agent.sessions.load(Ordering::SeqCst) > sessions }).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(w.writes.lock().unwrap()[before..], [] as [String; 0]);

    // One guest ends: it is replaced.
    let pod = w.agent.running().pop().unwrap();
    let over = w.agent.launchers.lock().unwrap().all[&pod].vmi.clone();
    w.agent.end(&pod, agent::Cause::Crashed);
    eventually("the instance that ended is gone and another one runs", || async {
        let all = w.api(VMI).list(&Default::default()).await.unwrap().items;
        all.len() == 3 && all.iter().all(|v| v.metadata.uid.as_ref() != Some(&over)) && shows(3, 3).await
    })
    .await;

    // Scale by the subresource; a stranger that matches is taken on instead of making one.
    let scale = kube::api::Patch::Merge(json!({"spec": {"replicas": 1}}));
    w.api(SET).patch_scale("web", &Default::default(), &scale).await.unwrap();
    eventually("one runs", || async { shows(1, 1).await && w.agent.running().len() == 1 }).await;
    let seen = w.api(SET).get_scale("web").await.unwrap();
    assert_eq!(seen.status.unwrap().selector.as_deref(), Some("app=web"));
    let mut orphan = set("web", 1)["spec"]["template"].clone();
    orphan["apiVersion"] = json!("kubevirt.io/v1");
    orphan["kind"] = json!("VirtualMachineInstance");
    orphan["metadata"]["name"] = json!("orphan");
    orphan["metadata"]["namespace"] = json!("default");
    w.patch(SET, "web", json!({"spec": {"paused": true, "replicas": 2}})).await;
    eventually("paused", || async {
        w.get(SET, "web").await.unwrap()["status"]["conditions"][0]["type"] == "ReplicaPaused"
    })
    .await;
    w.create(VMI, orphan).await;
    eventually("adopted", || shows(2, 2)).await;
    let orphan = w.get(VMI, "orphan").await.unwrap();
    assert_eq!(orphan["metadata"]["ownerReferences"][0]["name"], "web");
    w.patch(SET, "web", json!({"spec": {"paused": false}})).await;

    w.delete(SET, "web").await;
    eventually("everything is gone", || async {
        w.get(SET, "web").await.is_none()
            && w.api(VMI).list(&Default::default()).await.unwrap().items.is_empty()
            && w.pods().await.is_empty()
    })
    .await;

    stop.cancel();
    running.await.unwrap().unwrap();
    // Both lives can be read back, and the machines of today do the same.
    w.assert_replays();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_controllers_one_leads_and_the_other_takes_over() {
    let w = World::new().await;
    let (_a_gate, a_open) = tokio::sync::watch::channel(true);
    let (b_gate, b_open) = tokio::sync::watch::channel(true);
    let (_c_gate, c_open) = tokio::sync::watch::channel(true);
    let sessions = || w.agent.sessions.load(Ordering::SeqCst);
    let (_, a) = w.rival(a_open);
    eventually("the first one leads", || async { sessions() == 1 }).await;
    let (_, b) = w.rival(b_open);
    w.create(Kind::VirtualMachine, vm("web", "Always")).await;
    w.status("web", "Running").await;
    assert_eq!(sessions(), 1, "who stands by keeps quiet");

    // Killed: nothing is given up.
    a.abort();
    let _ = a.await;
    let killed = std::time::Instant::now();
    eventually("the second one leads", || async { sessions() == 2 }).await;
    println!("killed: another one leads after {:?}, of which 3 s are the lease", killed.elapsed());
    w.create(Kind::VirtualMachine, vm("second", "Always")).await;
    w.status("second", "Running").await;

    // Cut off from the API server: it stops by itself, and what it had sent arrives too late.
    let (stop, c) = w.rival(c_open);
    b_gate.send_replace(false);
    let cut = std::time::Instant::now();
    let ended =
        tokio::time::timeout(Duration::from_secs(30), b).await.expect("a leader that hears nothing ends").unwrap();
    assert!(matches!(ended, Err(reconcilers::Error::Lease(_))), "{ended:?}");
    println!("cut off: it ended after {:?}", cut.elapsed());
    eventually("the third one leads", || async { sessions() == 3 }).await;
    println!("cut off: another one leads after {:?}", cut.elapsed());
    b_gate.send_replace(true);
    w.create(Kind::VirtualMachine, vm("third", "Always")).await;
    w.status("third", "Running").await;
    assert!(w.agent.launchers.lock().unwrap().all.values().all(|l| l.starts == 1));
    assert_eq!(w.agent.running().len(), 3);
    stop.cancel();
    c.await.unwrap().unwrap();
}
