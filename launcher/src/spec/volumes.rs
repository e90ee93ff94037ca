//! `spec.volumes` and `spec.domain.devices.disks`.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::reader::{Cursor, SpecError};
use crate::config::Paths;
use crate::limits;
use crate::machine::{Bus, Cache, CloudInit, CloudInitKind, Data, Disk, Source};

/// Who a cloud-init data source is for.
pub(super) struct Instance<'a> {
    pub name: &'a str,
    pub namespace: &'a str,
    pub hostname: &'a str,
    pub uuid: &'a str,
}

pub(super) struct Volume {
    path: String,
    source: Source,
}

/// Names become parts of paths and of QEMU's options.
fn plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b))
}

pub(super) fn volumes(
    spec: &Cursor<'_>,
    paths: &Paths,
    instance: &Instance<'_>,
) -> Result<BTreeMap<String, Volume>, SpecError> {
    let mut all = BTreeMap::new();
    for (index, item) in spec.get("volumes").items()?.into_iter().enumerate() {
        let name = item.get("name").text()?.ok_or_else(|| item.get("name").error("is missing"))?;
        if !plain(name) {
            return Err(item.get("name").error(format!("is not a name: {name:?}")));
        }
        let claim = |c: Cursor<'_>| -> Source {
            c.skip(&["claimName", "name", "readOnly", "hotpluggable"]);
            Source::Claim { folder: paths.private.join("vmi-disks").join(name), device: paths.devices.join(name) }
        };
        let pvc = item.get("persistentVolumeClaim");
        let data_volume = item.get("dataVolume");
        let container = item.get("containerDisk");
        let empty = item.get("emptyDisk");
        let ephemeral = item.get("ephemeral");
        let no_cloud = item.get("cloudInitNoCloud");
        let config_drive = item.get("cloudInitConfigDrive");
        let source = if pvc.exists() {
            claim(pvc)
        } else if data_volume.exists() {
            claim(data_volume)
        } else if container.exists() {
            container.skip(&["image", "imagePullSecret", "imagePullPolicy"]);
            Source::Image {
                folder: paths.images.join(format!("disk_{index}")),
                file: container
                    .get("path")
                    .text()?
                    .map(|p| inside(p).ok_or_else(|| container.get("path").error("leaves the image")))
                    .transpose()?,
            }
        } else if empty.exists() {
            let capacity = empty.get("capacity");
            match capacity.quantity()? {
                Some(bytes) if bytes > 0 => Source::Scratch(bytes.next_multiple_of(512)),
                Some(_) => return Err(capacity.error("is zero")),
                None => return Err(capacity.error("is missing")),
            }
        } else if ephemeral.exists() {
            ephemeral.skip(&["persistentVolumeClaim"]);
            Source::Ephemeral { folder: paths.private.join("vmi-disks").join(name) }
        } else if no_cloud.exists() {
            Source::CloudInit(cloud_init(&no_cloud, CloudInitKind::NoCloud, name, paths, instance)?)
        } else if config_drive.exists() {
            Source::CloudInit(cloud_init(&config_drive, CloudInitKind::ConfigDrive, name, paths, instance)?)
        } else {
            let kind = item.unread().unwrap_or_else(|| item.path().to_owned());
            return Err(SpecError { path: kind, problem: "is no kind of volume that the qemu driver supports".into() });
        };
        if all.insert(name.to_owned(), Volume { path: item.path().into(), source }).is_some() {
            return Err(item.get("name").error(format!("two volumes are called {name:?}")));
        }
    }
    Ok(all)
}

/// A path inside an image volume, relative to its root.
fn inside(path: &str) -> Option<PathBuf> {
    let path = Path::new(path.trim_start_matches('/'));
    path.components().all(|c| matches!(c, Component::Normal(_))).then(|| path.to_owned())
}

fn cloud_init(
    field: &Cursor<'_>,
    kind: CloudInitKind,
    volume: &str,
    paths: &Paths,
    instance: &Instance<'_>,
) -> Result<CloudInit, SpecError> {
    let secret = |folder: &str, keys: [&str; 2]| {
        let folder = paths.private.join("secret").join(format!("{volume}-{folder}"));
        Data::Secret(keys.iter().map(|k| folder.join(k)).collect())
    };
    let pick = |plain: &str, base64: &str, reference: &str, mounted: Data| -> Result<Option<Data>, SpecError> {
        let (text, encoded, secret) = (field.get(plain), field.get(base64), field.get(reference));
        secret.skip(&["name"]);
        if [text.text()?.is_some(), encoded.text()?.is_some(), secret.exists()].into_iter().filter(|b| *b).count() > 1 {
            return Err(field.error(format!("{plain}, {base64} and {reference} exclude one another")));
        }
        let data = if let Some(t) = text.text()? {
            Data::Inline(t.as_bytes().to_vec())
        } else if let Some(e) = encoded.text()? {
            Data::Inline(STANDARD.decode(e.trim()).map_err(|_| encoded.error("is not base64"))?)
        } else if secret.exists() {
            mounted
        } else {
            return Ok(None);
        };
        if matches!(&data, Data::Inline(b) if b.len() > limits::CLOUD_INIT) {
            return Err(field.error("is larger than 1 MiB"));
        }
        Ok(Some(data))
    };
    let user = pick("userData", "userDataBase64", "secretRef", secret("udata", ["userdata", "userData"]))?;
    let network = pick(
        "networkData",
        "networkDataBase64",
        "networkDataSecretRef",
        secret("ndata", ["networkdata", "networkData"]),
    )?;
    if user.is_none() && network.is_none() {
        return Err(field.error("has neither user data nor network data"));
    }
    Ok(CloudInit {
        kind,
        user,
        network,
        instance_id: format!("{}.{}", instance.name, instance.namespace),
        hostname: instance.hostname.into(),
        uuid: instance.uuid.into(),
    })
}

pub(super) fn disks(devices: &Cursor<'_>, mut volumes: BTreeMap<String, Volume>) -> Result<Vec<Disk>, SpecError> {
    let mut disks = Vec::new();
    for item in devices.get("disks").items()? {
        let name = item.get("name").text()?.ok_or_else(|| item.get("name").error("is missing"))?;
        if !plain(name) {
            return Err(item.get("name").error(format!("is not a name: {name:?}")));
        }
        let (target, cdrom) = (item.get("disk"), item.get("cdrom"));
        let is_cdrom = cdrom.exists();
        let target = if is_cdrom { cdrom } else { target };
        let bus = match target.get("bus").text()? {
            None | Some("sata") => Bus::Sata,
            Some("virtio") if !is_cdrom => Bus::Virtio,
            Some("scsi") => Bus::Scsi,
            Some("usb") => Bus::Usb,
            Some(other) => return Err(target.get("bus").error(format!("is not supported: {other:?}"))),
        };
        let read_only = target.get("readonly");
        let read_only = if is_cdrom {
            if read_only.flag()? == Some(false) {
                return Err(read_only.error("a CD-ROM cannot be written"));
            }
            true
        } else {
            read_only.flag()?.unwrap_or(false)
        };
        if is_cdrom && target.get("tray").text()?.is_some_and(|t| t != "closed") {
            return Err(target.get("tray").error("only closed is supported"));
        }
        let cache = match item.get("cache").text()? {
            None | Some("writeback") => Cache::Writeback,
            Some("none") => Cache::None,
            Some("writethrough") => Cache::Writethrough,
            Some(other) => return Err(item.get("cache").error(format!("unknown mode {other:?}"))),
        };
        let native_io = match item.get("io").text()? {
            None | Some("threads" | "default") => false,
            Some("native") if cache == Cache::None => true,
            Some("native") => return Err(item.get("io").error("native needs cache none")),
            Some(other) => return Err(item.get("io").error(format!("unknown mode {other:?}"))),
        };
        let on_error = match item.get("errorPolicy").text()? {
            None | Some("stop") => "stop",
            Some("report") => "report",
            Some("ignore") => "ignore",
            Some("enospace") => "enospc",
            Some(other) => return Err(item.get("errorPolicy").error(format!("unknown policy {other:?}"))),
        };
        let custom = item.get("blockSize").get("custom");
        let block_size = match (custom.get("logical").number()?, custom.get("physical").number()?) {
            (None, None) => None,
            (logical, physical) => {
                let logical = logical.or(physical).unwrap_or(512);
                let physical = physical.unwrap_or(logical);
                if !logical.is_power_of_two() || !physical.is_power_of_two() || logical < 512 || physical < logical {
                    return Err(custom.error("sizes are powers of two from 512 on, physical not below logical"));
                }
                Some((logical, physical))
            }
        };
        let serial = item.get("serial").text()?;
        if serial.is_some_and(|s| s.len() > 256 || s.contains(|c: char| c.is_control())) {
            return Err(item.get("serial").error("is not printable or longer than 256 characters"));
        }
        item.skip(&["tag"]);
        let boot_index = item.get("bootOrder").number()?;
        if boot_index == Some(0) {
            return Err(item.get("bootOrder").error("begins at 1"));
        }
        let source = match volumes.remove(name) {
            Some(v) => Some(v.source),
            None if disks.iter().any(|d: &Disk| d.name == name) => {
                return Err(item.get("name").error(format!("two disks are called {name:?}")));
            }
            None if is_cdrom => None,
            None => return Err(item.get("name").error(format!("there is no volume {name:?}"))),
        };
        disks.push(Disk {
            name: name.into(),
            path: item.path().into(),
            source,
            bus,
            cdrom: is_cdrom,
            read_only,
            boot_index,
            serial: serial.map(Into::into),
            cache,
            native_io,
            shareable: item.get("shareable").flag()?.unwrap_or(false),
            block_size,
            io_thread: item.get("dedicatedIOThread").flag()?.unwrap_or(false),
            on_error,
        });
    }
    if let Some((name, volume)) = volumes.into_iter().next() {
        return Err(SpecError { path: volume.path, problem: format!("no disk uses volume {name:?}") });
    }
    boot_order(&mut disks);
    Ok(disks)
}

/// Without a wish of the user's the firmware tries the disks in the order of the list; generated data sources never boot.
fn boot_order(disks: &mut [Disk]) {
    if disks.iter().any(|d| d.boot_index.is_some()) {
        return;
    }
    let mut next = 1;
    for disk in disks {
        if !matches!(disk.source, Some(Source::CloudInit(_) | Source::Scratch(_)) | None) {
            disk.boot_index = Some(next);
            next += 1;
        }
    }
}
