//! Claims and volumes: bound, provisioned from class `local`, protected while a pod uses them, reclaimed.
//!
//! The volume names the claim first (`spec.claimRef` with its UID), then the claim names the volume: a crash in between is
//! finished by the next pass, and a claim that goes in between leaves a volume that is released.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::notes::{By, Notes};
use super::{Caches, Controller, Options};
use crate::semantics::quantity::Quantity;
use crate::volumes::{self, Wanted};

/// Name of the class, and the provisioner that its volumes carry.
pub const CLASS: &str = "local";
/// Provisioner of class `local`.
pub const PROVISIONER: &str = "virtfold.io/local";
/// Annotation of a claim: name of a file in the import folder that its volume begins with.
pub const IMPORT: &str = "virtfold.io/import";

const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";
/// A volume that could not be made is tried again after this.
const AGAIN: Duration = Duration::from_secs(15);

/// The controller.
pub struct Claims {
    client: Client,
    caches: Caches,
    notes: Notes,
    options: Options,
    /// What was said about a claim last, so that it is said once.
    said: std::collections::BTreeMap<String, String>,
}

fn storage(
    spec: Option<&std::collections::BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
) -> i128 {
    spec.and_then(|m| m.get("storage")).and_then(|q| Quantity::parse(&q.0)).map_or(0, Quantity::whole)
}

fn requested(claim: &PersistentVolumeClaim) -> i128 {
    storage(claim.spec.as_ref().and_then(|s| s.resources.as_ref()).and_then(|r| r.requests.as_ref()))
}

fn capacity(volume: &PersistentVolume) -> i128 {
    storage(volume.spec.as_ref().and_then(|s| s.capacity.as_ref()))
}

fn class_of(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|s| s.storage_class_name.as_deref()).unwrap_or(CLASS)
}

fn phase(status: Option<&String>) -> &str {
    status.map_or("", String::as_str)
}

/// Whether a volume may serve a claim that nobody has tied to another.
fn fits(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let (Some(have), Some(want)) = (volume.spec.as_ref(), claim.spec.as_ref()) else { return false };
    let modes = want
        .access_modes
        .as_ref()
        .is_none_or(|modes| modes.iter().all(|m| have.access_modes.as_ref().is_some_and(|h| h.contains(m))));
    let mode = |m: Option<&String>| m.map_or("Filesystem".to_owned(), Clone::clone);
    modes
        && volume.metadata.deletion_timestamp.is_none()
        && have.storage_class_name.as_deref().unwrap_or_default() == class_of(claim)
        && mode(have.volume_mode.as_ref()) == mode(want.volume_mode.as_ref())
        && capacity(volume) >= requested(claim)
        && want.selector.is_none()
}

impl Claims {
    /// A controller over shared caches.
    #[must_use]
    pub fn new(client: Client, caches: Caches, notes: Notes, options: Options) -> Self {
        Self { client, caches, notes, options, said: std::collections::BTreeMap::new() }
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Says something about a claim, once.
    fn say(&mut self, claim: &PersistentVolumeClaim, warning: bool, reason: &str, text: String) {
        let uid = claim.uid().unwrap_or_default();
        if self.said.get(&uid) != Some(&text) {
            self.notes.say(By::Controllers, claim, warning, reason, "Provisioning", text.clone());
            self.said.insert(uid, text);
        }
    }

    async fn bind(&mut self, claim: &PersistentVolumeClaim) -> Result<Option<Duration>, kube::Error> {
        let namespace = claim.namespace().unwrap_or_default();
        let uid = claim.uid().unwrap_or_default();
        let named = claim.spec.as_ref().and_then(|s| s.volume_name.clone()).filter(|n| !n.is_empty());
        let all = self.caches.volumes.all();
        let mine = |v: &PersistentVolume| {
            v.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).is_some_and(|r| r.uid.as_deref() == Some(&uid))
        };
        let reserved = |v: &PersistentVolume| {
            v.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).is_some_and(|r| {
                r.uid.as_deref().unwrap_or_default().is_empty()
                    && r.name.as_deref() == Some(&claim.name_any())
                    && r.namespace.as_deref() == Some(&namespace)
            })
        };
        let free = |v: &PersistentVolume| v.spec.as_ref().is_some_and(|s| s.claim_ref.is_none());
        let volume = match &named {
            Some(name) => all.iter().find(|v| v.name_any() == *name && (mine(v) || reserved(v) || free(v))),
            None => all
                .iter()
                .find(|v| mine(v) || reserved(v))
                .or_else(|| all.iter().filter(|v| free(v) && fits(v, claim)).min_by_key(|v| capacity(v))),
        };
        if let Some(volume) = volume {
            let volume = volume.clone();
            return self.join(&volume, claim).await.map(|()| None);
        }
        if let Some(name) = named {
            let text = format!("volume \"{name}\" not found or bound to a different claim");
            self.say(claim, true, "FailedBinding", text);
            return Ok(None);
        }
        let class_name = class_of(claim).to_owned();
        if class_name.is_empty() {
            let text = "no persistent volumes available for this claim and no storage class is set".to_owned();
            self.say(claim, false, "FailedBinding", text);
            return Ok(None);
        }
        let Some(class) = self.caches.classes.get("", &class_name) else {
            let text = format!("storageclass.storage.k8s.io \"{class_name}\" not found");
            self.say(claim, true, "ProvisioningFailed", text);
            return Ok(None);
        };
        if class.provisioner != PROVISIONER {
            let text =
                format!("waiting for a volume to be created by the external provisioner '{}'", class.provisioner);
            self.say(claim, false, "ExternalProvisioning", text);
            return Ok(None);
        }
        if class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer") && !self.has_consumer(claim) {
            let text = "waiting for first consumer to be created before binding".to_owned();
            self.say(claim, false, "WaitForFirstConsumer", text);
            return Ok(None);
        }
        if claim.spec.as_ref().and_then(|s| s.volume_mode.as_deref()) == Some("Block") {
            let text = format!("class {class_name} has no volumes of mode Block");
            self.say(claim, true, "ProvisioningFailed", text);
            return Ok(None);
        }
        Box::pin(self.provision(claim, &class)).await
    }

    fn has_consumer(&self, claim: &PersistentVolumeClaim) -> bool {
        self.caches.pods.all().iter().any(|pod| uses(pod, claim))
    }

    async fn provision(
        &mut self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
    ) -> Result<Option<Duration>, kube::Error> {
        let namespace = claim.namespace().unwrap_or_default();
        let (name, uid) = (claim.name_any(), claim.uid().unwrap_or_default());
        let bytes = u64::try_from(requested(claim)).unwrap_or(0);
        let import = claim.annotations().get(IMPORT).cloned();
        let options = self.options.clone();
        let made = {
            let (namespace, name, uid) = (namespace.clone(), name.clone(), uid.clone());
            tokio::task::spawn_blocking(move || {
                let wanted =
                    Wanted { namespace: &namespace, claim: &name, uid: &uid, bytes, import: import.as_deref() };
                volumes::provision(&options.volumes, &options.imports, &wanted)
            })
            .await
        };
        let folder = match made {
            Ok(Ok(folder)) => folder,
            Ok(Err(error)) => {
                let text = format!("failed to provision volume with StorageClass \"{}\": {error}", class.name_any());
                self.say(claim, true, "ProvisioningFailed", text);
                return Ok(Some(AGAIN));
            }
            Err(_) => return Ok(Some(AGAIN)),
        };
        let spec = claim.spec.clone().unwrap_or_default();
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {
                "name": format!("pvc-{uid}"),
                "annotations": {PROVISIONED_BY: PROVISIONER, BOUND_BY_CONTROLLER: "yes"},
                "finalizers": [VOLUME_PROTECTION],
            },
            "spec": {
                "capacity": {"storage": spec.resources.and_then(|r| r.requests).and_then(|r| r.get("storage").cloned())},
                "accessModes": spec.access_modes,
                "volumeMode": "Filesystem",
                "storageClassName": class.name_any(),
                "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
                "hostPath": {"path": folder, "type": "Directory"},
                "claimRef": reference(claim),
            },
        });
        let volume: PersistentVolume = serde_json::from_value(volume).map_err(kube::Error::SerdeError)?;
        let volume = match self.volumes().create(&PostParams::default(), &volume).await {
            Ok(volume) => volume,
            // An earlier pass made it and the cache has not seen it.
            Err(kube::Error::Api(status)) if status.code == 409 => self.volumes().get(&volume.name_any()).await?,
            Err(error) => return Err(error),
        };
        self.say(
            claim,
            false,
            "ProvisioningSucceeded",
            format!("Successfully provisioned volume {}", volume.name_any()),
        );
        self.join(&volume, claim).await.map(|()| None)
    }

    /// Makes volume and claim name each other.
    async fn join(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), kube::Error> {
        let bound = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).and_then(|r| r.uid.clone());
        if bound != claim.uid() {
            let patch = json!({
                "metadata": {"uid": volume.uid(), "resourceVersion": volume.resource_version(),
                             "annotations": {BOUND_BY_CONTROLLER: "yes"}},
                "spec": {"claimRef": reference(claim)},
            });
            self.volumes().patch(&volume.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        if phase(volume.status.as_ref().and_then(|s| s.phase.as_ref())) != "Bound" {
            let patch = json!({"metadata": {"uid": volume.uid()}, "status": {"phase": "Bound"}});
            self.volumes().patch_status(&volume.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        let claims = self.claims(&claim.namespace().unwrap_or_default());
        let mut finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
        if !finalizers.iter().any(|f| f == CLAIM_PROTECTION) {
            finalizers.push(CLAIM_PROTECTION.into());
        }
        let patch = json!({
            "metadata": {"uid": claim.uid(), "resourceVersion": claim.resource_version(), "finalizers": finalizers,
                         "annotations": {BIND_COMPLETED: "yes", BOUND_BY_CONTROLLER: "yes",
                                         "volume.kubernetes.io/storage-provisioner": PROVISIONER}},
            "spec": {"volumeName": volume.name_any()},
        });
        claims.patch(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        let spec = volume.spec.clone().unwrap_or_default();
        let patch = json!({
            "metadata": {"uid": claim.uid()},
            "status": {"phase": "Bound", "accessModes": spec.access_modes, "capacity": spec.capacity},
        });
        claims.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }

    /// A volume on its own: free, released, or to be removed.
    async fn settle(&mut self, volume: &PersistentVolume, claims: &BTreeSet<String>) -> Result<(), kube::Error> {
        let spec = volume.spec.clone().unwrap_or_default();
        let is = phase(volume.status.as_ref().and_then(|s| s.phase.as_ref())).to_owned();
        let claim_uid = spec.claim_ref.as_ref().and_then(|r| r.uid.clone()).filter(|u| !u.is_empty());
        let Some(claim_uid) = claim_uid else {
            if volume.metadata.deletion_timestamp.is_some() {
                return self.let_go(volume).await;
            }
            return if is == "Available" { Ok(()) } else { self.set_phase(volume, "Available").await };
        };
        if claims.contains(&claim_uid) {
            return Ok(());
        }
        // The cache of claims has none: the server is asked before anything is removed.
        let reference = spec.claim_ref.clone().unwrap_or_default();
        let (namespace, name) = (reference.namespace.unwrap_or_default(), reference.name.unwrap_or_default());
        if let Some(live) = self.claims(&namespace).get_opt(&name).await?
            && live.uid().as_deref() == Some(&claim_uid)
        {
            return Ok(());
        }
        if is != "Released" {
            self.set_phase(volume, "Released").await?;
        }
        let ours = volume.annotations().get(PROVISIONED_BY).is_some_and(|p| p == PROVISIONER);
        if ours && spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete") {
            let root = self.options.volumes.clone();
            let (n, c, u) = (namespace.clone(), name.clone(), claim_uid.clone());
            let removed = tokio::task::spawn_blocking(move || volumes::reclaim(&root, &n, &c, &u)).await;
            if let Ok(Err(error)) = removed {
                tracing::warn!(%error, volume = volume.name_any(), "the files of a volume could not be removed");
                return Err(kube::Error::Service(Box::new(error)));
            }
            let params = DeleteParams {
                preconditions: Some(Preconditions { uid: volume.uid(), resource_version: None }),
                ..DeleteParams::default()
            };
            match self.volumes().delete(&volume.name_any(), &params).await {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                other => drop(other?),
            }
            return self.let_go(volume).await;
        }
        if volume.metadata.deletion_timestamp.is_some() {
            return self.let_go(volume).await;
        }
        Ok(())
    }

    async fn set_phase(&self, volume: &PersistentVolume, phase: &str) -> Result<(), kube::Error> {
        let patch = json!({"metadata": {"uid": volume.uid()}, "status": {"phase": phase}});
        self.volumes().patch_status(&volume.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }

    async fn let_go(&self, volume: &PersistentVolume) -> Result<(), kube::Error> {
        let Some(left) = without(volume.metadata.finalizers.as_ref(), VOLUME_PROTECTION) else { return Ok(()) };
        let patch = json!({"metadata": {"uid": volume.uid(), "finalizers": left}});
        match self.volumes().patch(&volume.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// A claim that is being deleted goes when no pod uses it.
    async fn release(&self, claim: &PersistentVolumeClaim) -> Result<(), kube::Error> {
        let Some(left) = without(claim.metadata.finalizers.as_ref(), CLAIM_PROTECTION) else { return Ok(()) };
        if self.has_consumer(claim) {
            return Ok(());
        }
        let patch = json!({
            "metadata": {"uid": claim.uid(), "resourceVersion": claim.resource_version(), "finalizers": left},
        });
        let claims = self.claims(&claim.namespace().unwrap_or_default());
        match claims.patch(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }
}

fn reference(claim: &PersistentVolumeClaim) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(), "name": claim.name_any(),
        "uid": claim.uid(), "resourceVersion": claim.resource_version(),
    })
}

/// The finalizers without one of them; none when it is not among them.
fn without(finalizers: Option<&Vec<String>>, finalizer: &str) -> Option<Vec<String>> {
    let all = finalizers?;
    all.iter().any(|f| f == finalizer).then(|| all.iter().filter(|f| *f != finalizer).cloned().collect())
}

/// Whether a pod that has not ended uses a claim.
fn uses(pod: &k8s_openapi::api::core::v1::Pod, claim: &PersistentVolumeClaim) -> bool {
    let ended = matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"));
    !ended
        && pod.namespace() == claim.namespace()
        && pod
            .spec
            .as_ref()
            .and_then(|s| s.volumes.as_ref())
            .into_iter()
            .flatten()
            .filter_map(|v| v.persistent_volume_claim.as_ref())
            .any(|c| c.claim_name == claim.name_any())
}

impl Controller for Claims {
    const NAME: &'static str = "claims";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        let mut again: Option<Duration> = None;
        let mut failed = None;
        let claims = self.caches.claims.all();
        for claim in &claims {
            let result = if claim.metadata.deletion_timestamp.is_some() {
                self.release(claim).await.map(|()| None)
            } else if phase(claim.status.as_ref().and_then(|s| s.phase.as_ref())) == "Bound" {
                Ok(None)
            } else {
                Box::pin(self.bind(claim)).await
            };
            match result {
                Ok(wait) => again = [again, wait].into_iter().flatten().min(),
                // The others are not held up.
                Err(error) => failed = Some(error),
            }
        }
        let uids: BTreeSet<String> = claims.iter().filter_map(|c| c.uid()).collect();
        self.said.retain(|uid, _| uids.contains(uid));
        for volume in self.caches.volumes.all() {
            if let Err(error) = self.settle(&volume, &uids).await {
                failed = Some(error);
            }
        }
        failed.map_or(Ok(again), Err)
    }
}
