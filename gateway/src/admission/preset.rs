//! VirtualMachineInstancePresets: parts of a domain that new instances with some labels get, where they say nothing themselves.

use super::{AdmissionInput, AdmissionOutput, Context, Problems, at, fields, get, text};
use crate::status::{CauseType, Status};
use serde_json::{Map, Value, json};
use state::selector::{RawSelector, Selector};
use std::collections::BTreeMap;

/// Its kind.
pub(crate) const KIND: &str = "VirtualMachineInstancePreset";
/// An instance with this annotation is left alone.
const EXCLUDE: &str = "virtualmachineinstancepresets.admission.kubevirt.io/exclude";
/// Before the name of a preset: the annotation of an instance that got something of it.
const APPLIED: &str = "virtualmachinepreset.kubevirt.io/";
/// What a preset may carry, below `spec.domain`.
const PARTS: [&[&str]; 7] =
    [&["memory"], &["cpu"], &["firmware"], &["clock"], &["features"], &["ioThreadsPolicy"], &["devices", "watchdog"]];
const REQUESTS: [&str; 2] = ["resources", "requests"];

/// Fills in what presets bring. Two that want different things are refused; what the instance says itself wins.
pub(super) fn apply(vmi: &mut Value, namespace: &str, context: &Context<'_>, p: &mut Problems) {
    if text(vmi, &["metadata", "annotations", EXCLUDE]) == "true" {
        return;
    }
    let labels: BTreeMap<String, String> = get(vmi, &["metadata", "labels"])
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
        .collect();
    let mut matching: Vec<&Value> = context
        .objects
        .list(KIND)
        .iter()
        .filter(|o| text(o, &["metadata", "namespace"]) == namespace)
        .filter(|o| selector(o).is_ok_and(|s| s.matches(&labels)))
        .collect();
    matching.sort_by_key(|o| text(o, &["metadata", "name"]));
    let mut wanted: BTreeMap<Vec<String>, (&str, &Value)> = BTreeMap::new();
    let name = |o: &'_ &Value| text(o, &["metadata", "name"]).to_owned();
    for preset in &matching {
        for (path, value) in parts(get(preset, &["spec", "domain"])) {
            match wanted.get(&path) {
                Some((other, there)) if *there != value => p.invalid(
                    format!("spec.domain.{}", path.join(".")),
                    format!("presets {other:?} and {:?} conflict in domain.{}", name(preset), path.join(".")),
                ),
                Some(_) => {}
                None => drop(wanted.insert(path, (text(preset, &["metadata", "name"]), value))),
            }
        }
    }
    if !p.causes.is_empty() {
        return;
    }
    for preset in matching {
        let mut used = false;
        for (path, value) in parts(get(preset, &["spec", "domain"])) {
            let path: Vec<&str> = ["spec", "domain"].into_iter().chain(path.iter().map(String::as_str)).collect();
            let place = at(vmi, &path);
            if place.is_null() {
                *place = value.clone();
            }
            used |= place == value;
        }
        if used {
            let name = name(&preset);
            *at(vmi, &["metadata", "annotations", &format!("{APPLIED}{name}")]) = json!("kubevirt.io/v1");
            p.warn(format!("preset {name:?} is applied; presets are deprecated, use a preference"));
        }
    }
}

/// What a preset carries: paths below `spec.domain` and values. Requests are told one by one.
fn parts(domain: &Value) -> Vec<(Vec<String>, &Value)> {
    let owned = |path: &[&str]| path.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let mut all: Vec<_> =
        PARTS.into_iter().map(|path| (owned(path), get(domain, path))).filter(|(_, v)| !v.is_null()).collect();
    let requests = get(domain, &REQUESTS).as_object().into_iter().flatten();
    all.extend(requests.map(|(key, v)| (owned(&[REQUESTS[0], REQUESTS[1], key.as_str()]), v)));
    all
}

fn selector(preset: &Value) -> Result<Selector, String> {
    let raw: RawSelector =
        serde_json::from_value(get(preset, &["spec", "selector"]).clone()).map_err(|e| e.to_string())?;
    Selector::parse(&raw).map_err(|e| e.to_string())
}

/// A preset itself.
pub(super) fn admit(input: AdmissionInput) -> Result<AdmissionOutput, Status> {
    let mut p = Problems::default();
    let domain = get(&input.object, &["spec", "domain"]);
    if domain.is_object() {
        fields::check(fields::INSTANCE, &json!({"domain": domain}), "spec", "", &mut p);
        others(domain, &mut p);
    } else {
        p.add(CauseType::Required, "spec.domain", "missing domain.");
    }
    if let Err(why) = selector(&input.object) {
        p.invalid("spec.selector", format!("spec.selector: {why}"));
    }
    p.warn("VirtualMachineInstancePreset is deprecated, use a VirtualMachinePreference");
    if p.causes.is_empty() {
        return Ok(AdmissionOutput { object: input.object, warnings: p.warnings });
    }
    Err(Status::invalid(&input.kind, &input.name, &p.causes))
}

/// Parts of a domain that presets do not carry.
fn others(domain: &Value, p: &mut Problems) {
    let empty = Map::new();
    let below = |key: &str| get(domain, &[key]).as_object().unwrap_or(&empty).clone();
    let top = domain.as_object().unwrap_or(&empty).keys().filter(|k| !["resources", "devices"].contains(&k.as_str()));
    let all = top.map(|k| vec![k.clone()]).chain(
        ["resources", "devices"]
            .into_iter()
            .flat_map(|top| below(top).into_iter().map(move |(key, _)| vec![top.to_owned(), key])),
    );
    for path in all {
        let carried = |known: &&[&str]| known.iter().copied().eq(path.iter().map(String::as_str));
        if !PARTS.iter().any(carried) && !carried(&&REQUESTS[..]) {
            let field = format!("spec.domain.{}", path.join("."));
            p.add(CauseType::NotSupported, &field, format!("{field} is not supported yet: presets do not carry it"));
        }
    }
}
