//! CustomResourceDefinitions of `kubevirt.io`, complete: every field that a user may set is known, so nothing is pruned.
//! Whether a field *does* something is admission's business.
//!
//! The source is the `*.schema` files beside this module, in a notation of our own ([`schema`]); named types are shared,
//! so that the spec of an instance is written once for VirtualMachine, VirtualMachineInstance and the sets.

mod schema;

use serde_json::{Value, json};

/// What the definition of a kind holds beside its schema.
struct Kind {
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    /// (name, type, JSON path, description, priority)
    columns: &'static [(&'static str, &'static str, &'static str, &'static str, u8)],
    subresources: Option<fn() -> Value>,
    /// Version in etcd; the other one is served only.
    storage: &'static str,
    /// Whether `v1` itself carries a deprecation.
    deprecated: bool,
}

const AGE: (&str, &str, &str, &str, u8) = ("Age", "date", ".metadata.creationTimestamp", "", 0);
const READY: (&str, &str, &str, &str, u8) = ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", "", 0);

fn status() -> Value {
    json!({"status": {}})
}

fn status_and_scale() -> Value {
    json!({"status": {}, "scale": {
        "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.labelSelector"}})
}

const KINDS: &[Kind] = &[
    Kind {
        kind: "VirtualMachine",
        plural: "virtualmachines",
        short: &["vm", "vms"],
        columns: &[AGE, ("Status", "string", ".status.printableStatus", "Human Readable Status", 0), READY],
        subresources: Some(status),
        storage: "v1",
        deprecated: false,
    },
    Kind {
        kind: "VirtualMachineInstance",
        plural: "virtualmachineinstances",
        short: &["vmi", "vmis"],
        columns: &[
            AGE,
            ("Phase", "string", ".status.phase", "", 0),
            ("IP", "string", ".status.interfaces[0].ipAddress", "", 0),
            ("NodeName", "string", ".status.nodeName", "", 0),
            READY,
            ("Live-Migratable", "string", ".status.conditions[?(@.type=='LiveMigratable')].status", "", 1),
            ("Paused", "string", ".status.conditions[?(@.type=='Paused')].status", "", 1),
        ],
        subresources: None,
        storage: "v1",
        deprecated: false,
    },
    Kind {
        kind: "VirtualMachineInstanceReplicaSet",
        plural: "virtualmachineinstancereplicasets",
        short: &["vmirs", "vmirss"],
        columns: &[
            ("Desired", "integer", ".spec.replicas", "Number of desired VirtualMachineInstances", 0),
            (
                "Current",
                "integer",
                ".status.replicas",
                "Number of managed and not final or deleted VirtualMachineInstances",
                0,
            ),
            (
                "Ready",
                "integer",
                ".status.readyReplicas",
                "Number of managed VirtualMachineInstances which are ready to receive traffic",
                0,
            ),
            AGE,
        ],
        subresources: Some(status_and_scale),
        storage: "v1",
        deprecated: false,
    },
    Kind {
        kind: "VirtualMachineInstancePreset",
        plural: "virtualmachineinstancepresets",
        short: &["vmipreset", "vmipresets"],
        columns: &[],
        subresources: None,
        storage: "v1alpha3",
        deprecated: true,
    },
    Kind {
        kind: "VirtualMachineInstanceMigration",
        plural: "virtualmachineinstancemigrations",
        short: &["vmim", "vmims"],
        columns: &[
            ("Phase", "string", ".status.phase", "The current phase of VM instance migration", 0),
            ("VMI", "string", ".spec.vmiName", "The name of the VMI to perform the migration on", 0),
        ],
        subresources: Some(status),
        storage: "v1",
        deprecated: false,
    },
    Kind {
        kind: "KubeVirt",
        plural: "kubevirts",
        short: &["kv", "kvs"],
        columns: &[AGE, ("Phase", "string", ".status.phase", "", 0)],
        subresources: Some(status),
        storage: "v1",
        deprecated: false,
    },
];

const FILES: &[(&str, &str)] = &[
    ("kubernetes.schema", include_str!("kubernetes.schema")),
    ("domain.schema", include_str!("domain.schema")),
    ("vmi.schema", include_str!("vmi.schema")),
    ("vm.schema", include_str!("vm.schema")),
    ("sets.schema", include_str!("sets.schema")),
    ("kubevirt.schema", include_str!("kubevirt.schema")),
];

/// Every CustomResourceDefinition (`apiextensions.k8s.io/v1`), VirtualMachine first.
pub fn all() -> Vec<Value> {
    let library = schema::Library::parse(FILES);
    KINDS.iter().map(|k| definition(k, &library)).collect()
}

fn definition(k: &Kind, library: &schema::Library) -> Value {
    let mut root = library.schema(k.kind);
    let string = |doc: &str| json!({"type": "string", "description": doc});
    if let Some(fields) = root["properties"].as_object_mut() {
        fields.insert("apiVersion".into(), string("Group and version of this object."));
        fields.insert("kind".into(), string("Kind of this object."));
        fields.insert("metadata".into(), json!({"type": "object"}));
    }
    let columns: Vec<Value> = k
        .columns
        .iter()
        .map(|(name, kind, path, description, priority)| {
            let mut c = json!({"name": name, "type": kind, "jsonPath": path});
            if !description.is_empty() {
                c["description"] = json!(description);
            }
            if *priority > 0 {
                c["priority"] = json!(priority);
            }
            c
        })
        .collect();
    let version = |name: &str, deprecated: bool| {
        let mut v =
            json!({"name": name, "served": true, "storage": name == k.storage, "schema": {"openAPIV3Schema": root}});
        if deprecated {
            v["deprecated"] = json!(true);
            v["deprecationWarning"] = json!(format!("kubevirt.io/{name} {} is deprecated", k.kind));
        }
        if !columns.is_empty() {
            v["additionalPrinterColumns"] = json!(columns);
        }
        if let Some(s) = k.subresources {
            v["subresources"] = s();
        }
        v
    };
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{}.{}", k.plural, crate::names::GROUP), "labels": {"kubevirt.io": ""}},
        "spec": {
            "group": crate::names::GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": k.kind,
                "listKind": format!("{}List", k.kind),
                "plural": k.plural,
                "singular": k.kind.to_lowercase(),
                "shortNames": k.short,
                "categories": ["all"],
            },
            "conversion": {"strategy": "None"},
            "versions": [version("v1", k.deprecated), version("v1alpha3", true)],
        },
    })
}
