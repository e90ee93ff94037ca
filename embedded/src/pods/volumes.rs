//! The volumes of a pod: from what the pod says to what can be mounted.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, fchown};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use api::names::LAUNCHER_UID;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, DownwardAPIVolumeFile, KeyToPath, PersistentVolume, PersistentVolumeClaim, Pod,
    ProjectedVolumeSource, Secret, ServiceAccount, Volume,
};
use kube::Api;
use nix::libc::O_NOFOLLOW;

use super::bundle::{MemoryFile, Source, VolumeMount};
use super::fields::{self, Facts};
use crate::images::{ImageError, ImageStore, PullPolicy, PullSecret};

/// How long one request to the API server may take.
const REQUEST: std::time::Duration = std::time::Duration::from_secs(10);
/// Size of an emptyDir in memory that names no limit.
const MEMORY_LIMIT: u64 = 64 << 20;

/// Why the volumes cannot be had. All but `Unsupported` may pass.
#[derive(Debug, thiserror::Error)]
pub(super) enum VolumeError {
    /// This runner never will.
    #[error("{0}")]
    Unsupported(String),
    /// Something that the pod names is not there.
    #[error("{0}")]
    Missing(String),
    /// The API server did not answer as it should.
    #[error("cannot read {what}")]
    Api {
        /// Of which object.
        what: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// An image cannot be had.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The file system.
    #[error("volume {volume}")]
    Io {
        /// Which volume.
        volume: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Where volumes come from.
pub(super) struct Volumes<'a> {
    /// The API.
    pub client: kube::Client,
    /// Images.
    pub images: &'a Arc<ImageStore>,
    /// `DATA/volumes`.
    pub root: &'a Path,
    /// The pod's own folder for emptyDir.
    pub empty: PathBuf,
}

fn no_hop(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    path.components().all(|c| matches!(c, Component::Normal(_))).then(|| path.to_owned())
}

fn files(
    data: &BTreeMap<String, Vec<u8>>,
    items: Option<&Vec<KeyToPath>>,
    default_mode: Option<i32>,
    optional: bool,
    what: &str,
) -> Result<Vec<MemoryFile>, VolumeError> {
    let mode = |m: Option<i32>| m.or(default_mode).and_then(|m| u32::try_from(m).ok()).unwrap_or(0o644);
    let Some(items) = items.filter(|i| !i.is_empty()) else {
        return Ok(data
            .iter()
            .map(|(k, v)| MemoryFile { path: k.clone(), bytes: v.clone(), mode: mode(None) })
            .collect());
    };
    let mut found = Vec::new();
    for item in items {
        let Some(path) = no_hop(&item.path) else {
            return Err(VolumeError::Unsupported(format!("path {:?} of {what} leaves the volume", item.path)));
        };
        match data.get(&item.key) {
            Some(bytes) => {
                found.push(MemoryFile {
                    path: path.to_string_lossy().into_owned(),
                    bytes: bytes.clone(),
                    mode: mode(item.mode),
                });
            }
            None if optional => {}
            None => return Err(VolumeError::Missing(format!("references non-existent key {:?} of {what}", item.key))),
        }
    }
    Ok(found)
}

impl Volumes<'_> {
    async fn get<K>(&self, api: Api<K>, name: &str, kind: &str) -> Result<Option<K>, VolumeError>
    where
        K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        match tokio::time::timeout(REQUEST, api.get_opt(name)).await {
            Ok(answer) => {
                answer.map_err(|source| VolumeError::Api { what: format!("{kind} {name:?}"), source: Box::new(source) })
            }
            Err(_) => Err(VolumeError::Missing(format!("no answer about {kind} {name:?}"))),
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Option<BTreeMap<String, Vec<u8>>>, VolumeError> {
        let secret: Option<Secret> = self.get(Api::namespaced(self.client.clone(), namespace), name, "secret").await?;
        Ok(secret.map(|s| s.data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.0)).collect()))
    }

    async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<BTreeMap<String, Vec<u8>>>, VolumeError> {
        let map: Option<ConfigMap> =
            self.get(Api::namespaced(self.client.clone(), namespace), name, "configmap").await?;
        Ok(map.map(|m| {
            let text = m.data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.into_bytes()));
            text.chain(m.binary_data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.0))).collect()
        }))
    }

    /// The ConfigMaps that the environment refers to.
    pub async fn environment_maps(
        &self,
        namespace: &str,
        container: &Container,
    ) -> Result<BTreeMap<String, BTreeMap<String, String>>, VolumeError> {
        let mut maps = BTreeMap::new();
        let references =
            container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()?.config_map_key_ref.as_ref());
        for reference in references {
            let name = &reference.name;
            match self.config_map(namespace, name).await? {
                Some(data) => {
                    let text = data.into_iter().map(|(k, v)| (k, String::from_utf8_lossy(&v).into_owned())).collect();
                    maps.insert(name.clone(), text);
                }
                None if reference.optional == Some(true) => {}
                None => return Err(VolumeError::Missing(format!("configmap {name:?} not found"))),
            }
        }
        Ok(maps)
    }

    /// The credentials that the pod names for its images.
    async fn pull_secrets(&self, pod: &Pod, namespace: &str) -> Result<Vec<PullSecret>, VolumeError> {
        let mut secrets = Vec::new();
        for reference in pod.spec.iter().flat_map(|s| s.image_pull_secrets.iter().flatten()) {
            // One that is missing is no failure: the image may be public, as the kubelet has it.
            if let Some(data) = self.secret(namespace, &reference.name).await? {
                secrets.extend(data.values().filter_map(|bytes| PullSecret::parse(bytes)));
            }
        }
        Ok(secrets)
    }

    /// What to mount into the container.
    pub async fn resolve(
        &self,
        pod: &Pod,
        container: &Container,
        facts: &Facts,
    ) -> Result<Vec<VolumeMount>, VolumeError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut sources = BTreeMap::new();
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|m| m.name == name);
        for volume in pod.spec.iter().flat_map(|s| s.volumes.iter().flatten()) {
            if mounted(&volume.name) {
                sources.insert(volume.name.as_str(), self.source(pod, namespace, container, volume, facts).await?);
            }
        }
        let mut mounts = Vec::new();
        for mount in container.volume_mounts.iter().flatten() {
            let Some((source, read_only)) = sources.get(mount.name.as_str()) else {
                return Err(VolumeError::Unsupported(format!("the pod has no volume {:?}", mount.name)));
            };
            let sub_path = mount.sub_path.as_deref().filter(|p| !p.is_empty());
            let source = match (source, sub_path) {
                _ if mount.sub_path_expr.as_deref().is_some_and(|e| !e.is_empty()) => {
                    return Err(VolumeError::Unsupported(format!(
                        "subPathExpr of volume {:?} is not supported",
                        mount.name
                    )));
                }
                (source, None) => source.clone(),
                // What a launcher could have put there is not followed.
                (Source::Path(_), Some(path)) if *read_only => match (source, no_hop(path)) {
                    (Source::Path(base), Some(path)) => Source::Path(base.join(path)),
                    _ => return Err(VolumeError::Unsupported(format!("subPath {path:?} leaves its volume"))),
                },
                (_, Some(path)) => {
                    return Err(VolumeError::Unsupported(format!(
                        "subPath {path:?} of volume {:?} is not supported",
                        mount.name
                    )));
                }
            };
            if !mount.mount_path.starts_with('/') || mount.mount_path.split('/').any(|p| p == "..") {
                return Err(VolumeError::Unsupported(format!("mount path {:?} is not absolute", mount.mount_path)));
            }
            mounts.push(VolumeMount {
                destination: mount.mount_path.trim_end_matches('/').to_owned(),
                source,
                read_only: *read_only || mount.read_only == Some(true),
            });
        }
        Ok(mounts)
    }

    async fn source(
        &self,
        pod: &Pod,
        namespace: &str,
        container: &Container,
        volume: &Volume,
        facts: &Facts,
    ) -> Result<(Source, bool), VolumeError> {
        let name = &volume.name;
        let io = |source| VolumeError::Io { volume: name.clone(), source };
        if let Some(empty) = &volume.empty_dir {
            if empty.medium.as_deref() == Some("Memory") {
                let limit = empty.size_limit.as_ref().and_then(fields::bytes).and_then(|b| u64::try_from(b).ok());
                return Ok((Source::Memory(limit.unwrap_or(MEMORY_LIMIT)), false));
            }
            let folder = self.empty.join(name);
            own_folder(&folder).map_err(io)?;
            return Ok((Source::Path(folder), false));
        }
        if let Some(secret) = &volume.secret {
            let secret_name = secret.secret_name.as_deref().unwrap_or_default();
            let optional = secret.optional == Some(true);
            let what = format!("secret {secret_name:?}");
            return match self.secret(namespace, secret_name).await? {
                Some(data) => Ok((
                    Source::Files(files(&data, secret.items.as_ref(), secret.default_mode, optional, &what)?),
                    true,
                )),
                None if optional => Ok((Source::Files(Vec::new()), true)),
                None => Err(VolumeError::Missing(format!("{what} not found"))),
            };
        }
        if let Some(map) = &volume.config_map {
            let optional = map.optional == Some(true);
            let what = format!("configmap {:?}", map.name);
            return match self.config_map(namespace, &map.name).await? {
                Some(data) => {
                    Ok((Source::Files(files(&data, map.items.as_ref(), map.default_mode, optional, &what)?), true))
                }
                None if optional => Ok((Source::Files(Vec::new()), true)),
                None => Err(VolumeError::Missing(format!("{what} not found"))),
            };
        }
        if let Some(downward) = &volume.downward_api {
            let items = downward.items.iter().flatten();
            return Ok((Source::Files(downward_files(pod, container, items, downward.default_mode, facts)?), true));
        }
        if let Some(projected) = &volume.projected {
            return Ok((Source::Files(self.projected(pod, namespace, container, projected, facts).await?), true));
        }
        if let Some(image) = &volume.image {
            let reference = image.reference.as_deref().unwrap_or_default();
            let policy = PullPolicy::of(image.pull_policy.as_deref(), reference);
            let secrets = self.pull_secrets(pod, namespace).await?;
            let image = self.images.ensure(reference, policy, &secrets).await?;
            return Ok((Source::Path(image.root), true));
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            let path = self.claim(namespace, &claim.claim_name, container, name).await?;
            return Ok((Source::Path(path), claim.read_only == Some(true)));
        }
        if volume.host_path.is_some() {
            return Err(VolumeError::Unsupported(format!(
                "volume {name:?}: hostPath is refused, a launcher sees nothing of its node"
            )));
        }
        Err(VolumeError::Unsupported(format!("volume {name:?} is of a kind that this node does not know")))
    }

    async fn projected(
        &self,
        pod: &Pod,
        namespace: &str,
        container: &Container,
        projected: &ProjectedVolumeSource,
        facts: &Facts,
    ) -> Result<Vec<MemoryFile>, VolumeError> {
        let mode = projected.default_mode;
        let mut all = Vec::new();
        for source in projected.sources.iter().flatten() {
            if let Some(secret) = &source.secret {
                let optional = secret.optional == Some(true);
                let what = format!("secret {:?}", secret.name);
                match self.secret(namespace, &secret.name).await? {
                    Some(data) => all.extend(files(&data, secret.items.as_ref(), mode, optional, &what)?),
                    None if optional => {}
                    None => return Err(VolumeError::Missing(format!("{what} not found"))),
                }
            }
            if let Some(map) = &source.config_map {
                let optional = map.optional == Some(true);
                let what = format!("configmap {:?}", map.name);
                match self.config_map(namespace, &map.name).await? {
                    Some(data) => all.extend(files(&data, map.items.as_ref(), mode, optional, &what)?),
                    None if optional => {}
                    None => return Err(VolumeError::Missing(format!("{what} not found"))),
                }
            }
            if let Some(downward) = &source.downward_api {
                all.extend(downward_files(pod, container, downward.items.iter().flatten(), mode, facts)?);
            }
            if let Some(token) = &source.service_account_token {
                let account = pod.spec.as_ref().and_then(|s| s.service_account_name.as_deref()).unwrap_or("default");
                let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
                let spec = TokenRequestSpec {
                    audiences: Some(token.audience.iter().cloned().collect()),
                    expiration_seconds: token.expiration_seconds,
                    bound_object_ref: Some(BoundObjectReference {
                        api_version: Some("v1".into()),
                        kind: Some("Pod".into()),
                        name: pod.metadata.name.clone(),
                        uid: pod.metadata.uid.clone(),
                    }),
                };
                let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
                let answer =
                    api.create_token_request(account, &kube::api::PostParams::default(), &request).await.map_err(
                        |source| VolumeError::Api { what: format!("a token of {account:?}"), source: Box::new(source) },
                    )?;
                let bytes = answer.status.and_then(|s| s.token).map(String::into_bytes).unwrap_or_default();
                let Some(path) = no_hop(&token.path) else {
                    return Err(VolumeError::Unsupported(format!("path {:?} leaves the volume", token.path)));
                };
                all.push(MemoryFile { path: path.to_string_lossy().into_owned(), bytes, mode: 0o600 });
            }
        }
        Ok(all)
    }

    async fn claim(
        &self,
        namespace: &str,
        name: &str,
        container: &Container,
        volume: &str,
    ) -> Result<PathBuf, VolumeError> {
        let what = format!("persistentvolumeclaim {name:?}");
        let claim: PersistentVolumeClaim = self
            .get(Api::namespaced(self.client.clone(), namespace), name, "persistentvolumeclaim")
            .await?
            .ok_or_else(|| VolumeError::Missing(format!("{what} not found")))?;
        let bound = claim.spec.as_ref().and_then(|s| s.volume_name.as_deref()).filter(|v| !v.is_empty());
        let Some(bound) = bound else {
            return Err(VolumeError::Missing(format!("{what} is not bound to a volume yet")));
        };
        let block = claim.spec.as_ref().and_then(|s| s.volume_mode.as_deref()) == Some("Block");
        if block || container.volume_devices.iter().flatten().any(|d| d.name == volume) {
            return Err(VolumeError::Unsupported(format!("{what} is a block device, which this node does not offer")));
        }
        let pv: PersistentVolume = self
            .get(Api::all(self.client.clone()), bound, "persistentvolume")
            .await?
            .ok_or_else(|| VolumeError::Missing(format!("persistentvolume {bound:?} not found")))?;
        let spec = pv.spec.unwrap_or_default();
        let path = spec.local.map(|l| l.path).or_else(|| spec.host_path.map(|h| h.path));
        let Some(path) = path.map(PathBuf::from).filter(|p| p.is_absolute()) else {
            return Err(VolumeError::Unsupported(format!("persistentvolume {bound:?} has no local path")));
        };
        let io = |source| VolumeError::Io { volume: volume.to_owned(), source };
        if path.starts_with(self.root) {
            own_folder(&path).map_err(io)?;
        } else if !path.exists() {
            return Err(VolumeError::Missing(format!(
                "path {} of persistentvolume {bound:?} does not exist",
                path.display()
            )));
        }
        own_disk(&path).map_err(io)?;
        Ok(path)
    }
}

fn downward_files<'a>(
    pod: &Pod,
    container: &Container,
    items: impl Iterator<Item = &'a DownwardAPIVolumeFile>,
    default_mode: Option<i32>,
    facts: &Facts,
) -> Result<Vec<MemoryFile>, VolumeError> {
    let mut found = Vec::new();
    for item in items {
        let value = match (&item.field_ref, &item.resource_field_ref) {
            (Some(f), _) => fields::field(pod, f, facts),
            (None, Some(r)) => fields::resource(container, r, facts),
            (None, None) => Ok(String::new()),
        };
        let bytes = value.map_err(VolumeError::Unsupported)?.into_bytes();
        let Some(path) = no_hop(&item.path) else {
            return Err(VolumeError::Unsupported(format!("path {:?} leaves the volume", item.path)));
        };
        let mode = item.mode.or(default_mode).and_then(|m| u32::try_from(m).ok()).unwrap_or(0o644);
        found.push(MemoryFile { path: path.to_string_lossy().into_owned(), bytes, mode });
    }
    Ok(found)
}

/// Makes a folder that belongs to the launcher.
pub(super) fn own_folder(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    chown(folder, Some(LAUNCHER_UID), Some(LAUNCHER_UID))?;
    std::fs::set_permissions(folder, Permissions::from_mode(0o770))
}

/// Gives the launcher the folder of a disk and the files in it. Links are left alone: a launcher may have made them.
fn own_disk(folder: &Path) -> std::io::Result<()> {
    let mine = |m: &std::fs::Metadata| m.uid() == LAUNCHER_UID;
    if !mine(&std::fs::metadata(folder)?) {
        chown(folder, Some(LAUNCHER_UID), Some(LAUNCHER_UID))?;
    }
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        if meta.is_file() && meta.nlink() == 1 && !mine(&meta) {
            let file = std::fs::File::options().read(true).custom_flags(O_NOFOLLOW).open(entry.path())?;
            fchown(&file, Some(LAUNCHER_UID), Some(LAUNCHER_UID))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn files_of_a_volume_stay_in_it() {
        let data = BTreeMap::from([("k".to_owned(), b"v".to_vec())]);
        let item = |path: &str| vec![KeyToPath { key: "k".into(), path: path.into(), mode: Some(0o400) }];
        let found = files(&data, Some(&item("a/b")), None, false, "secret").unwrap();
        assert_eq!((found[0].path.as_str(), found[0].mode), ("a/b", 0o400));
        for path in ["../b", "/b", "a/../../b"] {
            assert!(
                matches!(files(&data, Some(&item(path)), None, false, "x"), Err(VolumeError::Unsupported(_))),
                "{path}"
            );
        }
        let missing = vec![KeyToPath { key: "other".into(), path: "x".into(), mode: None }];
        assert!(matches!(files(&data, Some(&missing), None, false, "x"), Err(VolumeError::Missing(_))));
        assert!(files(&data, Some(&missing), None, true, "x").unwrap().is_empty());
        assert_eq!(files(&data, None, Some(0o640), false, "x").unwrap()[0].mode, 0o640);
    }

    #[test]
    fn a_launchers_links_do_not_give_it_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("v");
        own_folder(&folder).unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, b"x").unwrap();
        std::os::unix::fs::symlink(&victim, folder.join("disk.img")).unwrap();
        std::fs::hard_link(&victim, folder.join("hard")).unwrap();
        std::fs::write(folder.join("real"), b"x").unwrap();
        own_disk(&folder).unwrap();
        assert_eq!(std::fs::metadata(&victim).unwrap().uid(), 0);
        assert_eq!(std::fs::metadata(folder.join("real")).unwrap().uid(), LAUNCHER_UID);
    }
}
