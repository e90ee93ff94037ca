//! CustomResourceDefinitions of `kubevirt.io` and its sibling groups, complete: every field that a user may set is known, so
//! nothing is pruned. Whether a field *does* something is admission's business; for whole kinds the table here says it
//! ([`missing`]).
//!
//! The source is the `*.schema` files beside this module, in a notation of our own ([`schema`]); named types are shared,
//! so that the spec of an instance is written once for VirtualMachine, VirtualMachineInstance and the sets.

mod schema;

use serde_json::{Value, json};

/// What the definition of a kind holds beside its schema.
struct Kind {
    group: &'static str,
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    /// One object for all namespaces.
    cluster: bool,
    /// Listed by `kubectl get all`.
    all: bool,
    /// (name, type, JSON path, description, priority)
    columns: &'static [Column],
    subresources: Option<fn() -> Value>,
    versions: &'static [Version],
    /// Why objects of this kind would do nothing, where that is so: completes "... is not supported yet: ".
    missing: Option<&'static str>,
}

/// (name, type, JSON path, description, priority)
type Column = (&'static str, &'static str, &'static str, &'static str, u8);

/// A version that is served. The first that is `stored` is the one in etcd.
struct Version {
    name: &'static str,
    stored: bool,
    deprecated: bool,
}

const fn version(name: &'static str) -> Version {
    Version { name, stored: false, deprecated: false }
}

const fn stored(name: &'static str) -> Version {
    Version { name, stored: true, deprecated: false }
}

const fn deprecated(v: Version) -> Version {
    Version { deprecated: true, ..v }
}

const AGE: Column = ("Age", "date", ".metadata.creationTimestamp", "", 0);
const READY: Column = ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", "", 0);

const fn column(name: &'static str, kind: &'static str, path: &'static str) -> Column {
    (name, kind, path, "", 0)
}

fn status() -> Value {
    json!({"status": {}})
}

fn status_and_scale() -> Value {
    json!({"status": {}, "scale": {
        "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.labelSelector"}})
}

/// The kinds that came first.
const CORE: Kind = Kind {
    group: crate::names::GROUP,
    kind: "",
    plural: "",
    short: &[],
    cluster: false,
    all: true,
    columns: &[],
    subresources: None,
    versions: &[stored("v1"), deprecated(version("v1alpha3"))],
    missing: None,
};
const INSTANCETYPE: Kind = Kind { group: "instancetype.kubevirt.io", versions: &[stored("v1beta1")], ..CORE };
const SNAPSHOT: Kind = Kind {
    group: "snapshot.kubevirt.io",
    versions: &[version("v1alpha1"), stored("v1beta1")],
    subresources: Some(status),
    missing: Some("there are no snapshots"),
    ..CORE
};
const BACKUP: Kind = Kind {
    group: "backup.kubevirt.io",
    versions: &[stored("v1alpha1")],
    subresources: Some(status),
    missing: Some("there are no backups"),
    ..CORE
};
const DATA: Kind = Kind {
    group: "cdi.kubevirt.io",
    versions: &[stored("v1beta1")],
    missing: Some("nothing fills claims; make a PersistentVolumeClaim"),
    ..CORE
};
const PHASE: Column = column("Phase", "string", ".status.phase");
const SOURCE_KIND: Column = column("SourceKind", "string", ".spec.source.kind");
const SOURCE_NAME: Column = column("SourceName", "string", ".spec.source.name");
const READY_TO_USE: Column = column("ReadyToUse", "boolean", ".status.readyToUse");
const CREATION_TIME: Column = column("CreationTime", "date", ".status.creationTime");
const ERROR: Column = column("Error", "string", ".status.error.message");

const KINDS: &[Kind] = &[
    Kind {
        kind: "VirtualMachine",
        plural: "virtualmachines",
        short: &["vm", "vms"],
        columns: &[AGE, ("Status", "string", ".status.printableStatus", "Human Readable Status", 0), READY],
        subresources: Some(status),
        ..CORE
    },
    Kind {
        kind: "VirtualMachineInstance",
        plural: "virtualmachineinstances",
        short: &["vmi", "vmis"],
        columns: &[
            AGE,
            PHASE,
            column("IP", "string", ".status.interfaces[0].ipAddress"),
            column("NodeName", "string", ".status.nodeName"),
            READY,
            ("Live-Migratable", "string", ".status.conditions[?(@.type=='LiveMigratable')].status", "", 1),
            ("Paused", "string", ".status.conditions[?(@.type=='Paused')].status", "", 1),
        ],
        ..CORE
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
        ..CORE
    },
    Kind {
        kind: "VirtualMachineInstancePreset",
        plural: "virtualmachineinstancepresets",
        short: &["vmipreset", "vmipresets"],
        versions: &[deprecated(version("v1")), deprecated(stored("v1alpha3"))],
        ..CORE
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
        missing: Some("there is no live migration"),
        ..CORE
    },
    Kind {
        kind: "KubeVirt",
        plural: "kubevirts",
        short: &["kv", "kvs"],
        columns: &[AGE, PHASE],
        subresources: Some(status),
        ..CORE
    },
    Kind {
        kind: "VirtualMachineInstancetype",
        plural: "virtualmachineinstancetypes",
        short: &["vminstancetype", "vminstancetypes", "vmf", "vmfs"],
        ..INSTANCETYPE
    },
    Kind {
        kind: "VirtualMachineClusterInstancetype",
        plural: "virtualmachineclusterinstancetypes",
        short: &["vmclusterinstancetype", "vmclusterinstancetypes", "vmcf", "vmcfs"],
        cluster: true,
        all: false,
        ..INSTANCETYPE
    },
    Kind {
        kind: "VirtualMachinePreference",
        plural: "virtualmachinepreferences",
        short: &["vmpref", "vmprefs", "vmp", "vmps"],
        ..INSTANCETYPE
    },
    Kind {
        kind: "VirtualMachineClusterPreference",
        plural: "virtualmachineclusterpreferences",
        short: &["vmcp", "vmcps"],
        cluster: true,
        all: false,
        ..INSTANCETYPE
    },
    Kind {
        group: "pool.kubevirt.io",
        kind: "VirtualMachinePool",
        plural: "virtualmachinepools",
        short: &["vmpool", "vmpools"],
        columns: &[
            ("Desired", "integer", ".spec.replicas", "Number of desired VirtualMachines", 0),
            ("Current", "integer", ".status.replicas", "Number of managed and not final or deleted VirtualMachines", 0),
            (
                "Ready",
                "integer",
                ".status.readyReplicas",
                "Number of managed VirtualMachines which are ready to receive traffic",
                0,
            ),
            AGE,
        ],
        subresources: Some(status_and_scale),
        versions: &[version("v1alpha1"), stored("v1beta1")],
        missing: Some("there are no pools; a VirtualMachineInstanceReplicaSet keeps a number of instances"),
        ..CORE
    },
    Kind {
        group: "migrations.kubevirt.io",
        kind: "MigrationPolicy",
        plural: "migrationpolicies",
        cluster: true,
        all: false,
        subresources: Some(status),
        versions: &[stored("v1alpha1")],
        missing: Some("there is no live migration"),
        ..CORE
    },
    Kind {
        kind: "VirtualMachineSnapshot",
        plural: "virtualmachinesnapshots",
        short: &["vmsnapshot", "vmsnapshots"],
        columns: &[SOURCE_KIND, SOURCE_NAME, PHASE, READY_TO_USE, CREATION_TIME, ERROR],
        ..SNAPSHOT
    },
    Kind {
        kind: "VirtualMachineSnapshotContent",
        plural: "virtualmachinesnapshotcontents",
        short: &["vmsnapshotcontent", "vmsnapshotcontents"],
        columns: &[READY_TO_USE, CREATION_TIME, ERROR],
        ..SNAPSHOT
    },
    Kind {
        kind: "VirtualMachineRestore",
        plural: "virtualmachinerestores",
        short: &["vmrestore", "vmrestores"],
        columns: &[
            column("TargetKind", "string", ".spec.target.kind"),
            column("TargetName", "string", ".spec.target.name"),
            column("Complete", "boolean", ".status.complete"),
            column("RestoreTime", "date", ".status.restoreTime"),
        ],
        ..SNAPSHOT
    },
    Kind {
        group: "export.kubevirt.io",
        kind: "VirtualMachineExport",
        plural: "virtualmachineexports",
        short: &["vmexport", "vmexports"],
        columns: &[SOURCE_KIND, SOURCE_NAME, PHASE],
        subresources: Some(status),
        versions: &[deprecated(version("v1beta1")), stored("v1")],
        missing: Some("there are no exports"),
        ..CORE
    },
    Kind {
        kind: "VirtualMachineBackup",
        plural: "virtualmachinebackups",
        short: &["vmbackup", "vmbackups"],
        columns: &[
            SOURCE_KIND,
            SOURCE_NAME,
            column("Type", "string", ".status.type"),
            column("CheckpointName", "string", ".status.checkpointName"),
        ],
        ..BACKUP
    },
    Kind {
        kind: "VirtualMachineBackupTracker",
        plural: "virtualmachinebackuptrackers",
        short: &["vmbackuptracker", "vmbackuptrackers"],
        columns: &[
            SOURCE_KIND,
            SOURCE_NAME,
            column("LatestCheckpoint", "string", ".status.latestCheckpoint.name"),
            column("CheckpointTime", "date", ".status.latestCheckpoint.creationTime"),
        ],
        ..BACKUP
    },
    Kind {
        group: "clone.kubevirt.io",
        kind: "VirtualMachineClone",
        plural: "virtualmachineclones",
        short: &["vmclone", "vmclones"],
        columns: &[
            PHASE,
            column("SourceVirtualMachine", "string", ".spec.source.name"),
            column("TargetVirtualMachine", "string", ".spec.target.name"),
        ],
        subresources: Some(status),
        versions: &[version("v1alpha1"), stored("v1beta1")],
        missing: Some("there are no clones"),
        ..CORE
    },
    Kind {
        group: "plugin.kubevirt.io",
        kind: "Plugin",
        plural: "plugins",
        cluster: true,
        all: false,
        versions: &[stored("v1alpha1")],
        missing: Some("there are no hooks"),
        ..CORE
    },
    Kind {
        kind: "DataVolume",
        plural: "datavolumes",
        short: &["dv", "dvs"],
        columns: &[
            ("Phase", "string", ".status.phase", "The phase the data volume is in", 0),
            ("Progress", "string", ".status.progress", "Transfer progress in percentage if known, N/A otherwise", 0),
            ("Restarts", "integer", ".status.restartCount", "The number of times the transfer has been restarted.", 0),
            AGE,
        ],
        subresources: Some(status),
        ..DATA
    },
    Kind {
        kind: "DataImportCron",
        plural: "dataimportcrons",
        short: &["dic", "dics"],
        columns: &[("Format", "string", ".status.sourceFormat", "The format in which created sources are saved", 0)],
        ..DATA
    },
    Kind { kind: "DataSource", plural: "datasources", short: &["das"], ..DATA },
    Kind {
        kind: "StorageProfile",
        plural: "storageprofiles",
        cluster: true,
        all: false,
        subresources: Some(status),
        ..DATA
    },
    Kind { kind: "VolumeCloneSource", plural: "volumeclonesources", all: false, ..DATA },
    Kind { kind: "VolumeImportSource", plural: "volumeimportsources", all: false, ..DATA },
    Kind { kind: "VolumeUploadSource", plural: "volumeuploadsources", all: false, ..DATA },
];

const FILES: &[(&str, &str)] = &[
    ("kubernetes.schema", include_str!("kubernetes.schema")),
    ("domain.schema", include_str!("domain.schema")),
    ("vmi.schema", include_str!("vmi.schema")),
    ("vm.schema", include_str!("vm.schema")),
    ("sets.schema", include_str!("sets.schema")),
    ("instancetype.schema", include_str!("instancetype.schema")),
    ("storage.schema", include_str!("storage.schema")),
    ("cdi.schema", include_str!("cdi.schema")),
    ("plugin.schema", include_str!("plugin.schema")),
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
    let version = |v: &Version| {
        let mut out = json!({"name": v.name, "served": true, "storage": v.stored, "schema": {"openAPIV3Schema": root}});
        if v.deprecated {
            out["deprecated"] = json!(true);
            out["deprecationWarning"] = json!(format!("{}/{} {} is deprecated", k.group, v.name, k.kind));
        }
        if !columns.is_empty() {
            out["additionalPrinterColumns"] = json!(columns);
        }
        if let Some(s) = k.subresources {
            out["subresources"] = s();
        }
        out
    };
    let mut names = json!({
        "kind": k.kind,
        "listKind": format!("{}List", k.kind),
        "plural": k.plural,
        "singular": k.kind.to_lowercase(),
    });
    if !k.short.is_empty() {
        names["shortNames"] = json!(k.short);
    }
    if k.all {
        names["categories"] = json!(["all"]);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{}.{}", k.plural, k.group), "labels": {"kubevirt.io": ""}},
        "spec": {
            "group": k.group,
            "scope": if k.cluster { "Cluster" } else { "Namespaced" },
            "names": names,
            "conversion": {"strategy": "None"},
            "versions": k.versions.iter().map(version).collect::<Vec<_>>(),
        },
    })
}

/// Groups and versions that are served, each once.
pub fn versions() -> Vec<(&'static str, &'static str)> {
    let mut all: Vec<_> = KINDS.iter().flat_map(|k| k.versions.iter().map(|v| (k.group, v.name))).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Whether the kinds of a group are defined here.
pub fn is_own(group: &str) -> bool {
    KINDS.iter().any(|k| k.group == group)
}

/// The kinds of which objects would do nothing, and why.
pub fn all_missing() -> impl Iterator<Item = (&'static str, &'static str)> {
    KINDS.iter().filter_map(|k| Some((k.kind, k.missing?)))
}

/// Why an object of this kind would do nothing, where that is so.
pub fn missing(kind: &str) -> Option<&'static str> {
    KINDS.iter().find(|k| k.kind == kind).and_then(|k| k.missing)
}
