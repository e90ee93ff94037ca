//! Cloud-init data sources as ISO 9660 images with Joliet names, as KubeVirt makes them: label `cidata` or `config-2`.
//!
//! An image is a function of the data: same VMI, same bytes.

use serde_json::json;

use crate::limits;
use crate::machine::{CloudInit, CloudInitKind, Data};

const SECTOR: usize = 2048;
/// System area, two volume descriptors, terminator.
const FIRST_FREE: usize = 19;
/// Empty sectors at the end, as many as other tools write: busybox looks for no file system on a smaller disk.
const TAIL: usize = 150;

/// The bytes of the image. Errors say what of the data could not be read.
pub fn image(data: &CloudInit) -> Result<Vec<u8>, String> {
    let user = data.user.as_ref().map(read).transpose().map_err(|e| format!("user data: {e}"))?;
    let network = data.network.as_ref().map(read).transpose().map_err(|e| format!("network data: {e}"))?;
    let mut files = Vec::new();
    let label = match data.kind {
        CloudInitKind::NoCloud => {
            let meta = json!({"instance-id": data.instance_id, "local-hostname": data.hostname});
            files.push(("meta-data", meta.to_string().into_bytes()));
            files.push(("user-data", user.unwrap_or_default()));
            if let Some(network) = network {
                files.push(("network-config", network));
            }
            "cidata"
        }
        CloudInitKind::ConfigDrive => {
            let meta = json!({"instance_id": data.instance_id, "hostname": data.hostname, "local_hostname": data.hostname,
                "name": data.hostname, "uuid": data.uuid});
            files.push(("openstack/latest/meta_data.json", meta.to_string().into_bytes()));
            if let Some(user) = user {
                files.push(("openstack/latest/user_data", user));
            }
            if let Some(network) = network {
                files.push(("openstack/latest/network_data.json", network));
            }
            "config-2"
        }
    };
    Ok(iso(label, &files))
}

fn read(data: &Data) -> Result<Vec<u8>, String> {
    match data {
        Data::Inline(bytes) => Ok(bytes.clone()),
        Data::Secret(paths) => {
            for path in paths {
                match std::fs::metadata(path) {
                    Ok(m) if m.len() > limits::CLOUD_INIT as u64 => return Err("is larger than 1 MiB".into()),
                    Ok(_) => return std::fs::read(path).map_err(|e| format!("reading the secret: {e}")),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Err(e) => return Err(format!("reading the secret: {e}")),
                }
            }
            let keys: Vec<_> = paths.iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy()).collect();
            Err(format!("the secret has none of the keys {}", keys.join(", ")))
        }
    }
}

/// A folder of the image: its name, its parent's index, and what is in it as (name, is a folder, index).
struct Folder {
    name: String,
    parent: usize,
    entries: Vec<(String, bool, usize)>,
}

/// Two trees over the same file contents: plain ISO 9660 names for those who know no better, Joliet for all others.
fn iso(label: &str, files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut folders = vec![Folder { name: String::new(), parent: 0, entries: Vec::new() }];
    for (index, (path, _)) in files.iter().enumerate() {
        let mut parts: Vec<&str> = path.split('/').collect();
        let file = parts.pop().unwrap_or_default();
        let mut at = 0;
        for part in parts {
            let known = folders[at].entries.iter().find(|(n, folder, _)| *folder && n == part).map(|e| e.2);
            at = known.unwrap_or_else(|| {
                let new = folders.len();
                folders.push(Folder { name: part.into(), parent: at, entries: Vec::new() });
                folders[at].entries.push((part.into(), true, new));
                new
            });
        }
        folders[at].entries.push((file.into(), false, index));
    }

    // Layout: per tree a path table in both byte orders and one sector a folder; then the files.
    let n = folders.len();
    let tables = |tree: usize| FIRST_FREE + tree * (2 + n);
    let mut next = tables(2);
    let extents: Vec<(usize, usize)> = files
        .iter()
        .map(|(_, content)| {
            let at = next;
            next += content.len().div_ceil(SECTOR).max(1);
            (at, content.len())
        })
        .collect();
    next += TAIL;
    let mut out = vec![0; next * SECTOR];
    for (tree, joliet) in [(0, false), (1, true)] {
        let first_folder = tables(tree) + 2;
        let name = |n: &str, folder: bool| if joliet { ucs2(n) } else { plain_name(n, folder) };
        let mut table_size = 0;
        for (order, at) in [(false, tables(tree)), (true, tables(tree) + 1)] {
            let table = path_table(&folders, first_folder, order, &name);
            table_size = table.len();
            out[at * SECTOR..at * SECTOR + table.len()].copy_from_slice(&table);
        }
        for (i, folder) in folders.iter().enumerate() {
            let mut bytes = record(&[0], first_folder + i, SECTOR, true);
            bytes.extend(record(&[1], first_folder + folder.parent, SECTOR, true));
            let mut entries: Vec<_> = folder.entries.iter().map(|(n, f, i)| (name(n, *f), *f, *i)).collect();
            entries.sort();
            for (name, is_folder, index) in entries {
                let (at, size) = if is_folder { (first_folder + index, SECTOR) } else { extents[index] };
                bytes.extend(record(&name, at, size, is_folder));
            }
            let at = (first_folder + i) * SECTOR;
            out[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let descriptor =
            descriptor(label, joliet, next, tables(tree), table_size, &record(&[0], first_folder, SECTOR, true));
        out[(16 + tree) * SECTOR..(17 + tree) * SECTOR].copy_from_slice(&descriptor);
    }
    out[18 * SECTOR..18 * SECTOR + 7].copy_from_slice(b"\xffCD001\x01");
    for ((at, _), (_, content)) in extents.iter().zip(files) {
        out[at * SECTOR..at * SECTOR + content.len()].copy_from_slice(content);
    }
    out
}

fn ucs2(name: &str) -> Vec<u8> {
    name.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

/// Upper case, no hyphen, version 1.
fn plain_name(name: &str, folder: bool) -> Vec<u8> {
    let mut plain: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_uppercase() } else { '_' })
        .collect();
    if !folder {
        if !plain.contains('.') {
            plain.push('.');
        }
        plain.push_str(";1");
    }
    plain.into_bytes()
}

/// A number in both byte orders.
fn both32(n: usize) -> [u8; 8] {
    let n = n as u32;
    let mut out = [0; 8];
    out[..4].copy_from_slice(&n.to_le_bytes());
    out[4..].copy_from_slice(&n.to_be_bytes());
    out
}

fn both16(n: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (n.to_le_bytes(), n.to_be_bytes());
    [a, b, c, d]
}

/// 2000-01-01 00:00 UTC: the image says nothing about when it was made.
const DATE: [u8; 7] = [100, 1, 1, 0, 0, 0, 0];

fn record(name: &[u8], at: usize, size: usize, folder: bool) -> Vec<u8> {
    let length = 33 + name.len() + (name.len() + 1) % 2;
    let mut r = vec![length as u8, 0];
    r.extend(both32(at));
    r.extend(both32(size));
    r.extend(DATE);
    r.extend([if folder { 2 } else { 0 }, 0, 0]);
    r.extend(both16(1));
    r.push(name.len() as u8);
    r.extend(name);
    r.resize(length, 0);
    r
}

fn path_table(folders: &[Folder], first: usize, big: bool, name: &dyn Fn(&str, bool) -> Vec<u8>) -> Vec<u8> {
    let mut table = Vec::new();
    for (i, folder) in folders.iter().enumerate() {
        let name = if i == 0 { vec![0] } else { name(&folder.name, true) };
        table.extend([name.len() as u8, 0]);
        let (at, parent) = ((first + i) as u32, (folder.parent + 1) as u16);
        if big {
            table.extend(at.to_be_bytes());
            table.extend(parent.to_be_bytes());
        } else {
            table.extend(at.to_le_bytes());
            table.extend(parent.to_le_bytes());
        }
        table.extend(&name);
        if name.len() % 2 == 1 {
            table.push(0);
        }
    }
    table
}

fn descriptor(label: &str, joliet: bool, sectors: usize, table: usize, table_size: usize, root: &[u8]) -> Vec<u8> {
    let mut d = vec![0u8; SECTOR];
    let mut put = |at: usize, bytes: &[u8]| d[at..at + bytes.len()].copy_from_slice(bytes);
    let text = |s: &str, len: usize| -> Vec<u8> {
        let mut bytes = if joliet { ucs2(s) } else { s.as_bytes().to_vec() };
        // Spaces by the standard; zeros in Joliet, since busybox takes spaces there for a part of the label.
        bytes.resize(len, if joliet { 0 } else { b' ' });
        bytes
    };
    put(0, &[if joliet { 2 } else { 1 }]);
    put(1, b"CD001\x01");
    put(8, &text("", 32));
    put(40, &text(label, 32));
    put(80, &both32(sectors));
    if joliet {
        put(88, b"%/E");
    }
    put(120, &both16(1));
    put(124, &both16(1));
    put(128, &both16(SECTOR as u16));
    put(132, &both32(table_size));
    put(140, &(table as u32).to_le_bytes());
    put(148, &((table + 1) as u32).to_be_bytes());
    put(156, root);
    for at in [190, 318, 446, 574] {
        put(at, &text("", 128));
    }
    put(702, &text("", 111));
    for at in [813, 830] {
        put(at, b"2000010100000000\x00");
    }
    for at in [847, 864] {
        put(at, b"0000000000000000\x00");
    }
    put(881, &[1]);
    d
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;

    fn data(kind: CloudInitKind) -> CloudInit {
        CloudInit {
            kind,
            user: Some(Data::Inline(b"#!/bin/sh\necho hi\n".to_vec())),
            network: Some(Data::Inline(vec![b'n'; 5000])),
            instance_id: "a.ns".into(),
            hostname: "a".into(),
            uuid: "u".into(),
        }
    }

    /// Label and files (path -> content), read as a kernel does: from the Joliet descriptor down its folders.
    fn files(image: &[u8]) -> (String, Vec<(String, Vec<u8>)>) {
        let text = |b: &[u8]| {
            let units: Vec<u16> = b.chunks_exact(2).map(|c| u16::from_be_bytes([c[0], c[1]])).collect();
            String::from_utf16(&units).unwrap().trim_end_matches('\0').to_owned()
        };
        let number = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize;
        let d = &image[17 * SECTOR..18 * SECTOR];
        assert_eq!((&d[..7], &d[88..91]), (&b"\x02CD001\x01"[..], &b"%/E"[..]));
        assert_eq!(number(&d[80..]) * SECTOR, image.len());
        let mut found = Vec::new();
        let mut folders = vec![(String::new(), number(&d[158..]))];
        while let Some((path, at)) = folders.pop() {
            let mut rest = &image[at * SECTOR..(at + 1) * SECTOR];
            while rest[0] != 0 {
                let (r, after) = rest.split_at(usize::from(rest[0]));
                rest = after;
                let name = &r[33..33 + usize::from(r[32])];
                if name.len() < 2 {
                    continue;
                }
                let full = format!("{path}{}", text(name));
                let (at, size) = (number(&r[2..]), number(&r[10..]));
                if r[25] & 2 != 0 {
                    folders.push((full + "/", at));
                } else {
                    found.push((full, image[at * SECTOR..at * SECTOR + size].to_vec()));
                }
            }
        }
        found.sort();
        (text(&d[40..72]), found)
    }

    /// What util-linux takes for the label: the guest finds the disk by it.
    fn label(image: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("i.iso");
        std::fs::write(&file, image).unwrap();
        let out = Command::new("blkid").args(["-p", "-o", "value", "-s", "LABEL"]).arg(&file).output().unwrap();
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    }

    #[test]
    fn both_layouts_read_back() {
        for (kind, wanted, names) in [
            (CloudInitKind::NoCloud, "cidata", vec!["meta-data", "network-config", "user-data"]),
            (
                CloudInitKind::ConfigDrive,
                "config-2",
                vec![
                    "openstack/latest/meta_data.json",
                    "openstack/latest/network_data.json",
                    "openstack/latest/user_data",
                ],
            ),
        ] {
            let image = image(&data(kind)).unwrap();
            let (got, files) = files(&image);
            assert_eq!((got.as_str(), label(&image).as_str()), (wanted, wanted));
            assert_eq!(files.iter().map(|f| f.0.as_str()).collect::<Vec<_>>(), names);
            assert_eq!(files[1].1, vec![b'n'; 5000]);
            assert_eq!(files[2].1, b"#!/bin/sh\necho hi\n");
            let meta: serde_json::Value = serde_json::from_slice(&files[0].1).unwrap();
            assert!(meta.to_string().contains("a.ns"));
        }
    }

    #[test]
    fn a_secret_is_read_from_its_mount_and_a_missing_key_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let paths = vec![dir.path().join("userdata"), dir.path().join("userData")];
        let mut d = data(CloudInitKind::NoCloud);
        d.user = Some(Data::Secret(paths.clone()));
        assert_eq!(image(&d).unwrap_err(), "user data: the secret has none of the keys userdata, userData");
        std::fs::write(&paths[1], b"secret text").unwrap();
        let bytes = image(&d).unwrap();
        assert!(bytes.windows(11).any(|w| w == b"secret text"));
    }
}
