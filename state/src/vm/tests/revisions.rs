//! Generations, ControllerRevisions and RestartRequired: sections 1.5 (generations), 1.6 and 1.13.

use super::*;

fn revisions(w: &World) -> Vec<String> {
    w.objects.keys().filter(|(k, _)| *k == Kind::ControllerRevision).map(|(_, n)| n.clone()).collect()
}

fn generations(w: &World) -> (Value, Value) {
    let s = &vmobj(w)["status"];
    (s["observedGeneration"].clone(), s["desiredGeneration"].clone())
}

/// The template's spec changes.
fn change(w: &mut World, spec: Value) {
    w.edit_spec(json!({"template": {"spec": spec}}));
    w.settle(5_000);
}

#[test]
fn rule_1_6_a_revision_records_the_spec_of_each_start_and_older_ones_go() {
    let mut w = running("Always");
    let r = w.get(Kind::ControllerRevision).unwrap().clone();
    assert_eq!(r["metadata"]["name"], "revision-start-vm-vm-1-1");
    assert_eq!(r["revision"], 1);
    assert_eq!(r["data"]["spec"], vmobj(&w)["spec"]);
    let owner = &r["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"], &owner["controller"]),
        (&json!("VirtualMachine"), &json!("vm-1"), &json!(true))
    );
    assert_eq!(vmi(&w)["status"]["virtualMachineRevisionName"], "revision-start-vm-vm-1-1");
    // A restart of the same generation writes none.
    let request = w.restart_request();
    let n = w.writes.len();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
    w.settle(20_000);
    assert!(w.writes[n..].iter().all(|x| !x.contains("ControllerRevision")), "{:?}", &w.writes[n..]);
    // Another generation: its own, and the old one goes once the new instance is there.
    change(&mut w, json!({"hostname": "other"}));
    assert_eq!(revisions(&w), ["revision-start-vm-vm-1-1"], "the running one needs it");
    let request = w.restart_request();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
    w.settle(20_000);
    assert_eq!(revisions(&w), ["revision-start-vm-vm-1-2"]);
    assert_eq!(vmi(&w)["status"]["virtualMachineRevisionName"], "revision-start-vm-vm-1-2");
    assert_eq!(w.refused, 0);
}

#[test]
fn rule_1_6_a_machine_that_takes_the_name_of_another_has_revisions_of_its_own() {
    let mut w = running("Always");
    // While the cell is still busy with what the first one has left.
    w.edit(
        Kind::VirtualMachine,
        json!({"metadata": {"finalizers": null, "deletionTimestamp": "1970-01-01T00:00:20Z"}}),
    );
    w.settle(500);
    let mut second = vm("Always");
    second["metadata"]["uid"] = json!("vm-2");
    w.put(Kind::VirtualMachine, second);
    w.settle(60_000);
    assert_eq!(vmi(&w)["status"]["virtualMachineRevisionName"], "revision-start-vm-vm-2-1");
    assert!(revisions(&w).contains(&"revision-start-vm-vm-2-1".to_owned()), "{:?}", revisions(&w));
}

#[test]
fn rule_1_5_generations_are_shown_while_there_is_an_instance() {
    let mut w = running("Always");
    assert_eq!(generations(&w), (json!(1), json!(1)));
    change(&mut w, json!({"hostname": "other"}));
    assert_eq!(generations(&w), (json!(1), json!(2)));
    // Without the annotation the number is that of the revision's name.
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"annotations": {"kubevirt.io/vm-generation": null}}}));
    w.settle(5_000);
    assert_eq!(generations(&w), (json!(1), json!(2)));
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(30_000);
    assert_eq!(generations(&w), (Value::Null, Value::Null));
}

#[test]
fn rule_1_6_the_generation_follows_in_one_write_where_the_template_is_the_same() {
    let mut w = running("Always");
    let n = w.writes.len();
    w.edit_spec(json!({"runStrategy": "Manual"}));
    w.settle(10_000);
    assert_eq!(vmi(&w)["metadata"]["annotations"]["kubevirt.io/vm-generation"], "2");
    assert_eq!(generations(&w), (json!(2), json!(2)));
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
    let vmi_writes = w.writes[n..].iter().filter(|x| x.contains("VirtualMachineInstance")).count();
    assert_eq!(vmi_writes, 1, "{:?}", &w.writes[n..]);
    assert_eq!(
        vmi(&w)["status"]["virtualMachineRevisionName"],
        "revision-start-vm-vm-1-1",
        "that is what it was made from"
    );
    assert_eq!(revisions(&w), ["revision-start-vm-vm-1-1"]);
    // And again, from a controller that knows nothing of before.
    w.restart();
    w.edit_spec(json!({"runStrategy": "Always"}));
    w.settle(10_000);
    assert_eq!(generations(&w), (json!(3), json!(3)));
    // Labels and annotations of the template are for the next instance: no restart is called for, and none is claimed.
    w.edit_spec(json!({"template": {"metadata": {"labels": {"a": "b"}}}}));
    w.settle(10_000);
    assert_eq!(generations(&w), (json!(3), json!(4)));
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
}

#[test]
fn rule_1_13_a_changed_template_requires_a_restart_and_the_message_names_the_fields() {
    let mut w = running("Always");
    change(&mut w, json!({"domain": {"memory": {"guest": "128Mi"}}, "nodeSelector": {"a": "b"}}));
    assert_eq!(condition(&vmobj(&w), "RestartRequired").unwrap().0, "True");
    assert_eq!(
        message(&vmobj(&w), "RestartRequired"),
        "a non-live-updatable field was changed in the template spec: spec.template.spec.domain.memory, spec.template.spec.nodeSelector"
    );
    // A controller that starts anew says the same, and writes nothing.
    let n = w.writes.len();
    w.restart();
    w.settle(60_000);
    assert_eq!(w.writes[n..], [] as [&str; 0]);
    // More changes: the message follows.
    change(&mut w, json!({"nodeSelector": null}));
    assert!(message(&vmobj(&w), "RestartRequired").ends_with(": spec.template.spec.domain.memory"));
    // Back to what it was, in other words: nothing to restart for, and the generation follows.
    change(&mut w, json!({"domain": {"memory": {"guest": "65536Ki"}}}));
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
    assert_eq!(generations(&w), (json!(4), json!(4)));
}

#[test]
fn rule_1_13_start_and_stop_clear_it() {
    for stop in [true, false] {
        let mut w = running("Always");
        change(&mut w, json!({"hostname": "other"}));
        assert_eq!(condition(&vmobj(&w), "RestartRequired").unwrap().0, "True");
        if stop {
            w.edit_spec(json!({"runStrategy": "Halted"}));
        } else {
            let request = w.restart_request();
            w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
        }
        w.settle(30_000);
        assert_eq!(condition(&vmobj(&w), "RestartRequired"), None, "stop: {stop}");
        assert_eq!(w.phase(), if stop { "" } else { "Running" });
    }
}

#[test]
fn rule_1_13_the_firmware_uuid_and_what_says_nothing_are_ignored() {
    let mut w = running("Always");
    change(
        &mut w,
        json!({"domain": {"firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"}}, "tolerations": []}),
    );
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
}

#[test]
fn a_restart_is_not_asked_for_where_nobody_can_know() {
    // The record is gone: what was recorded stands.
    let mut w = running("Always");
    w.objects.remove(&(Kind::ControllerRevision, "revision-start-vm-vm-1-1".into()));
    w.restart();
    change(&mut w, json!({"hostname": "other"}));
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
    assert_eq!(generations(&w), (json!(1), json!(2)), "that it is not the newest can be seen all the same");
    let asked = w.confirms;
    w.settle(600_000);
    assert_eq!(w.confirms, asked, "and it is not asked for again and again");
    // A machine that ended takes the new template with its next start.
    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.end(&pod, Cause::GuestShutdown);
    w.settle(5_000);
    change(&mut w, json!({"hostname": "other"}));
    assert_eq!(w.phase(), "Succeeded");
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
}

#[test]
fn an_adopted_instance_is_held_against_the_record_that_it_names() {
    let mut w = running("Always");
    let orphan = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z", "finalizers": [api::names::FINALIZER_VM, "orphan"]}});
    w.edit(Kind::VirtualMachine, orphan);
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"ownerReferences": null}}));
    w.edit(Kind::ControllerRevision, json!({"metadata": {"ownerReferences": null}}));
    w.settle(2_000);
    w.edit(Kind::VirtualMachine, json!({"metadata": {"finalizers": null}}));
    w.settle(10_000);
    // Another VM of the name, of the same generation and with another template.
    let mut again = vm("Always");
    again["metadata"]["uid"] = json!("vm-2");
    again["spec"]["template"]["spec"]["hostname"] = json!("other");
    w.put(Kind::VirtualMachine, again);
    w.settle(10_000);
    assert_eq!(vmi(&w)["metadata"]["ownerReferences"][0]["uid"], "vm-2");
    assert!(
        message(&vmobj(&w), "RestartRequired").ends_with("spec.template.spec.hostname"),
        "{:?}",
        vmobj(&w)["status"]
    );
}
