//! The KubeVirt object: what a cluster decides for its machines. There is one in a cluster; the gateway reads it
//! ([`Settings::configured_by`]), and nothing is deployed by it.

use super::{AdmissionInput, AdmissionOutput, Context, Operation, Problems, Settings, fields, get, items, text};
use crate::status::{CauseType, Status};
use serde_json::Value;

/// Its kind.
pub(crate) const KIND: &str = "KubeVirt";
/// Kinds whose objects keep it from being deleted, where it says so.
const WORKLOADS: [&str; 3] = ["VirtualMachine", "VirtualMachineInstance", "VirtualMachineInstanceReplicaSet"];
const BLOCK: &str = "BlockUninstallIfWorkloadsExist";

/// What becomes of the instancetype and the preference that a machine names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReferencePolicy {
    /// They stay named, and count as they were when they were found.
    #[default]
    Reference,
    /// A machine for which nothing was recorded yet is stored with what they bring instead.
    Expand,
    /// Every machine is, when its spec is written.
    ExpandAll,
}

impl Settings {
    /// These settings, but for what the KubeVirt object of the cluster says.
    #[must_use]
    pub fn configured_by(&self, kubevirt: &Value) -> Self {
        let configuration = get(kubevirt, &["spec", "configuration"]);
        let said = |path: &[&str], otherwise: &str| match text(configuration, path) {
            "" => otherwise.to_owned(),
            word => word.to_owned(),
        };
        let machine = said(&["machineType"], &self.machine_type);
        Self {
            trusted: self.trusted.clone(),
            cpu_model: said(&["cpuModel"], &self.cpu_model),
            eviction_strategy: said(&["evictionStrategy"], &self.eviction_strategy),
            machine_type: said(&["architectureConfiguration", "amd64", "machineType"], &machine),
            reference_policy: match text(configuration, &["instancetype", "referencePolicy"]) {
                "expand" => ReferencePolicy::Expand,
                "expandAll" => ReferencePolicy::ExpandAll,
                _ => self.reference_policy,
            },
        }
    }
}

pub(super) fn admit(input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let other = |o: &&Value| get(o, &["metadata", "uid"]) != get(&input.object, &["metadata", "uid"]);
    if input.operation == Operation::Create && context.objects.list(KIND).iter().any(|o| other(&o)) {
        return Err(Status::new(400, "", "KubeVirt is already created"));
    }
    let mut p = Problems::default();
    let spec = get(&input.object, &["spec"]);
    fields::check(fields::CLUSTER, spec, "spec", "", &mut p);
    check(spec, &mut p);
    if p.causes.is_empty() {
        return Ok(AdmissionOutput { object: input.object, warnings: p.warnings });
    }
    Err(Status::invalid(&input.kind, &input.name, &p.causes))
}

fn check(spec: &Value, p: &mut Problems) {
    let configuration = get(spec, &["configuration"]);
    p.one_of(
        CauseType::Invalid,
        "spec.configuration.evictionStrategy",
        get(configuration, &["evictionStrategy"]),
        &["None", "LiveMigrate", "LiveMigrateIfPossible", "External"],
    );
    p.one_of(
        CauseType::Invalid,
        "spec.uninstallStrategy",
        get(spec, &["uninstallStrategy"]),
        &["RemoveWorkloads", BLOCK],
    );
    for path in [&["machineType"][..], &["architectureConfiguration", "amd64", "machineType"]] {
        let kind = text(configuration, path);
        if !(kind.is_empty() || kind.starts_with("q35") || kind.starts_with("pc-q35")) {
            let field = format!("spec.configuration.{}", path.join("."));
            p.invalid(&field, format!("{field} is not supported: {kind} (allowed values: [q35* pc-q35*])"));
        }
    }
    let gates = |key: &str| items(configuration, &["developerConfiguration", key]);
    for gate in gates("featureGates").iter().filter(|g| gates("disabledFeatureGates").contains(g)) {
        let field = "spec.configuration.developerConfiguration.featureGates";
        p.add(CauseType::Forbidden, field, format!("{field}: {gate} is enabled and disabled"));
    }
    if get(spec, &["infra", "replicas"]).as_i64() == Some(0) {
        p.invalid("spec.infra.replicas", "spec.infra.replicas must not be 0");
    }
}

/// Its end, which machines may hold up.
pub(super) fn admit_end(input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let object = input.old_object.unwrap_or(input.object);
    if text(&object, &["spec", "uninstallStrategy"]) == BLOCK && text(&object, &["status", "phase"]) == "Deployed" {
        let found: Vec<&str> = WORKLOADS.into_iter().filter(|kind| !context.objects.list(kind).is_empty()).collect();
        if !found.is_empty() {
            let why = format!("there are still objects of the kinds {}; delete them first", found.join(", "));
            return Err(Status::new(400, "", format!("KubeVirt cannot be deleted: {why}")));
        }
    }
    Ok(AdmissionOutput { object, warnings: Vec::new() })
}
