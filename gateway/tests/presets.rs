//! Presets: parts of a domain for instances with some labels.

use crate::admission::{ask, ask_with, input, spec_with, update, vmi};
use crate::support::world;
use gateway::admission::{Objects, Wanted};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const KIND: &str = "VirtualMachineInstancePreset";

fn preset(name: &str, labels: Value, domain: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": KIND, "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"matchLabels": labels}, "domain": domain}})
}

fn among(presets: Value) -> Objects {
    let mut known = Objects::default();
    known.insert(Wanted { kind: KIND, namespace: String::new(), name: String::new() }, Some(json!({"items": presets})));
    known
}

fn labelled(labels: Value, spec: &Value) -> Value {
    let mut o = vmi(spec_with(spec));
    o["metadata"]["labels"] = labels;
    o
}

#[test]
fn an_instance_gets_what_it_does_not_say() {
    let small = preset(
        "small",
        json!({"size": "small"}),
        json!({
        "memory": {"guest": "64Mi"}, "cpu": {"cores": 2}, "resources": {"requests": {"cpu": "1", "memory": "64Mi"}},
        "devices": {"watchdog": {"name": "dog", "i6300esb": {"action": "poweroff"}}}}),
    );
    let same = preset("again", json!({"size": "small"}), json!({"cpu": {"cores": 2}}));
    let mut elsewhere = preset("elsewhere", json!({"size": "small"}), json!({"cpu": {"cores": 3}}));
    elsewhere["metadata"]["namespace"] = json!("other");
    let all = json!([small, same, elsewhere, preset("large", json!({"size": "large"}), json!({"cpu": {"cores": 4}}))]);
    let applied = |o: &Value| {
        let names = o["metadata"]["annotations"].as_object().unwrap().keys();
        names.filter_map(|k| k.strip_prefix("virtualmachinepreset.kubevirt.io/")).map(str::to_owned).collect::<Vec<_>>()
    };
    let mine = json!({"domain": {"resources": {"requests": {"memory": "128Mi"}}}});
    let out = ask_with(input("VirtualMachineInstance", labelled(json!({"size": "small"}), &mine)), &among(all.clone()))
        .unwrap();
    let domain = &out.object["spec"]["domain"];
    assert_eq!(domain["memory"]["guest"], "128Mi", "as it says itself");
    assert_eq!(
        (&domain["cpu"]["cores"], &domain["cpu"]["sockets"]),
        (&json!(2), &json!(1)),
        "defaults come afterwards"
    );
    assert_eq!(domain["resources"]["requests"], json!({"cpu": "1", "memory": "128Mi"}));
    assert_eq!(domain["devices"]["watchdog"]["i6300esb"]["action"], "poweroff");
    assert_eq!(applied(&out.object), ["again", "small"]);
    assert_eq!(out.warnings.iter().filter(|w| w.contains("deprecated")).count(), 2, "{:?}", out.warnings);
    // Asked again, by the validating call, nothing changes.
    let again = ask_with(input("VirtualMachineInstance", out.object.clone()), &among(all.clone())).unwrap().object;
    assert_eq!((&again["spec"], &again["metadata"]), (&out.object["spec"], &out.object["metadata"]));
    for (labels, excluded) in [(json!({"size": "none"}), false), (json!({"size": "small"}), true)] {
        let mut o = labelled(labels, &json!({}));
        if excluded {
            o["metadata"]["annotations"] =
                json!({"virtualmachineinstancepresets.admission.kubevirt.io/exclude": "true"});
        }
        let out = ask_with(input("VirtualMachineInstance", o), &among(all.clone())).unwrap();
        assert_eq!(applied(&out.object), [] as [&str; 0]);
        assert_eq!(out.object["spec"]["domain"]["cpu"]["cores"], 1);
    }
}

#[test]
fn presets_that_want_different_things_are_refused() {
    let cores = |name: &str, n: u8| preset(name, json!({"a": "b"}), json!({"cpu": {"cores": n}}));
    let all = json!([cores("one", 1), cores("two", 2)]);
    let refused =
        ask_with(input("VirtualMachineInstance", labelled(json!({"a": "b"}), &json!({}))), &among(all)).unwrap_err();
    assert_eq!((refused.code, refused.causes()[0].1.as_str()), (422, "spec.domain.cpu"));
    assert!(refused.message.contains("\"one\" and \"two\" conflict"), "{refused}");
}

#[test]
fn a_preset_is_held_against_the_rules() {
    let out = ask(input(
        KIND,
        preset("a", json!({"a": "b"}), json!({"devices": {}, "resources": {}, "memory": {"guest": "128Mi"}})),
    ))
    .unwrap();
    assert!(out.warnings.len() == 1 && out.warnings[0].contains("deprecated"), "{:?}", out.warnings);
    let none = json!({"metadata": {"name": "a"}, "spec": {"selector": {}}});
    let mut unusable = preset("a", json!({}), json!({}));
    unusable["spec"]["selector"] = json!({"matchExpressions": [{"key": "a", "operator": "Is"}]});
    for (object, cause) in [
        (none, "FieldValueRequired spec.domain"),
        (unusable, "FieldValueInvalid spec.selector"),
        (preset("a", json!({}), json!({"machine": {"type": "q35"}})), "FieldValueNotSupported spec.domain.machine"),
        (preset("a", json!({}), json!({"devices": {"rng": {}}})), "FieldValueNotSupported spec.domain.devices.rng"),
        (
            preset("a", json!({}), json!({"resources": {"limits": {"cpu": "1"}}})),
            "FieldValueNotSupported spec.domain.resources.limits",
        ),
        (
            preset("a", json!({}), json!({"cpu": {"dedicatedCpuPlacement": true}})),
            "FieldValueNotSupported spec.domain.cpu.dedicatedCpuPlacement",
        ),
    ] {
        for asked in [input(KIND, object.clone()), update(KIND, preset("a", json!({}), json!({})), object.clone())] {
            let causes = ask(asked).unwrap_err().causes();
            let got: Vec<String> = causes.iter().map(|c| format!("{} {}", c.0, c.1)).collect();
            assert_eq!(got, [cause]);
        }
    }
}

#[tokio::test]
async fn presets_are_followed() {
    let world = world().await;
    let path = "/apis/kubevirt.io/v1/namespaces/default";
    let made = preset("small", json!({"size": "small"}), json!({"cpu": {"cores": 2}, "devices": {}}));
    let (code, said) = world.ask("POST", &format!("{path}/virtualmachineinstancepresets"), Some(made)).await;
    assert_eq!(code, 201, "{said}");
    let cores = |name: String| {
        let world = &world;
        async move {
            let mut o = labelled(json!({"size": "small"}), &json!({}));
            o["metadata"]["name"] = json!(name);
            let (code, made) = world.ask("POST", &format!("{path}/virtualmachineinstances"), Some(o)).await;
            assert_eq!(code, 201, "{made}");
            made["spec"]["domain"]["cpu"]["cores"].as_i64()
        }
    };
    assert_eq!(cores("before".into()).await, Some(2), "read where nobody follows");
    let gateway = world.gateway.clone();
    let follower = tokio::spawn(async move { gateway.follow().await });
    let gone = format!("{path}/virtualmachineinstancepresets/small");
    assert_eq!(world.ask("DELETE", &gone, None).await.0, 200);
    let begun = Instant::now();
    let mut n = 0;
    while cores(format!("after-{n}")).await != Some(1) {
        n += 1;
        assert!(begun.elapsed() < Duration::from_secs(60), "the preset is still applied");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    follower.abort();
}
