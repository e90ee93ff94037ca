//! What a VirtualMachine's instancetype and preference mean to its admission: the matchers, what they are inferred from, and the
//! objects that they name. What follows from these is [`state::instancetype`]'s.

use super::{
    AdmissionInput, AdmissionOutput, Context, Operation, Problems, Settings, at, default, defaults, fields, get, items,
    rules, text,
};
use crate::status::{CauseType, Status};
use serde_json::{Value, json};
use state::instancetype::{Matcher, Role, rules as pattern_rules, spec_of_record};
use std::{cell::RefCell, collections::BTreeMap};

/// An object on which an answer depends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// Its kind.
    pub kind: &'static str,
    /// Its namespace; empty for objects of the cluster.
    pub namespace: String,
    /// Its name; empty for the list of all objects of the kind.
    pub name: String,
}

/// Objects that an answer may depend on. Admission is pure: where it asks for one that is not here, the answer does not count,
/// and is to be had once what is [`Objects::missing`] was read.
#[derive(Debug, Default)]
pub struct Objects {
    known: BTreeMap<Wanted, Option<Value>>,
    missing: RefCell<Vec<Wanted>>,
}

impl Objects {
    /// Brings an object, or the knowledge that there is none.
    pub fn insert(&mut self, wanted: Wanted, object: Option<Value>) {
        self.known.insert(wanted, object);
    }

    /// What was asked for in vain since the last call.
    pub fn missing(&self) -> Vec<Wanted> {
        self.missing.take()
    }

    /// The objects of a kind in all namespaces; of VirtualMachines and what runs them perhaps one alone.
    pub(super) fn list(&self, kind: &'static str) -> &[Value] {
        let wanted = Wanted { kind, namespace: String::new(), name: String::new() };
        match self.known.get(&wanted) {
            Some(found) => found.as_ref().map_or(&[], |o| items(o, &["items"])),
            None => {
                self.missing.borrow_mut().push(wanted);
                &[]
            }
        }
    }

    fn look(&self, kind: &'static str, namespace: &str, name: &str) -> Option<&Value> {
        let wanted = Wanted { kind, namespace: namespace.into(), name: name.into() };
        match self.known.get(&wanted) {
            Some(found) => found.as_ref(),
            // Nothing can have such a name, and it might be another path.
            None if !is_name(&wanted.name) => None,
            None if !wanted.namespace.is_empty() && !rules::is_label(&wanted.namespace) => None,
            None => {
                self.missing.borrow_mut().push(wanted);
                None
            }
        }
    }
}

/// Whether an object can have this name. (A part of it may be longer than a label of the DNS, as those of records are.)
fn is_name(name: &str) -> bool {
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let all = name.as_bytes();
    let plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(b);
    all.len() <= 253 && all.iter().all(plain) && end(all.first()) && end(all.last())
}

/// The `spec` of the objects that a machine names; null for none.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub instancetype: Value,
    pub preference: Value,
}

impl Found {
    pub fn is_empty(&self) -> bool {
        self.instancetype.is_null() && self.preference.is_null()
    }
}

/// Holds the matchers against their rules and writes down what is inferred.
///
/// # Errors
/// 422 for a matcher that is none, 400 for one that cannot be inferred.
pub(super) fn settle(input: &mut AdmissionInput, context: &Context<'_>) -> Result<(), Status> {
    let mut problems = Problems::default();
    for role in Role::ALL {
        check_matcher(role, input, &mut problems);
    }
    if !problems.causes.is_empty() {
        return Err(Status::invalid(&input.kind, &input.name, &problems.causes));
    }
    for role in Role::ALL {
        let path = ["spec", role.field()];
        let matcher = get(&input.object, &path);
        let volume = text(matcher, &["inferFromVolume"]);
        if volume.is_empty() {
            continue;
        }
        let ignore = text(matcher, &["inferFromVolumeFailurePolicy"]) == "Ignore";
        let inference = Inference { role, namespace: &input.namespace, objects: context.objects, vm: &input.object };
        match inference.of_volume(volume) {
            Ok((name, kind)) => {
                if ignore && role == Role::Instancetype {
                    // It stood there for the case that nothing can be inferred.
                    remove(&mut input.object, &["spec", "template", "spec", "domain"], "memory");
                }
                let kind = Some(kind).filter(|k| !k.is_empty());
                *at(&mut input.object, &path) =
                    kind.map_or(json!({"name": name}), |k| json!({"name": name, "kind": k}));
            }
            Err(Failed { ignorable: true, .. }) if ignore => remove(&mut input.object, &["spec"], role.field()),
            Err(failed) => return Err(Status::new(400, "", failed.why)),
        }
    }
    Ok(())
}

fn remove(value: &mut Value, path: &[&str], key: &str) {
    if let Some(fields) = at(value, path).as_object_mut() {
        fields.remove(key);
    }
}

fn check_matcher(role: Role, input: &AdmissionInput, p: &mut Problems) {
    let path = ["spec", role.field()];
    let (field, matcher) = (path.join("."), get(&input.object, &path));
    if matcher.is_null() {
        return;
    }
    let given = |key: &str| !text(matcher, &[key]).is_empty();
    let old = input.old_object.as_ref().map_or(&Value::Null, |o| get(o, &path));
    let revision = text(old, &["revisionName"]);
    if input.operation == Operation::Update
        && !revision.is_empty()
        && revision == text(matcher, &["revisionName"])
        && text(old, &["name"]) != text(matcher, &["name"])
    {
        let why = "the Matcher Name has been updated without updating the RevisionName";
        return p.invalid(format!("{field}.revisionName"), why);
    }
    if !given("name") && !given("inferFromVolume") {
        let what = match role {
            Role::Instancetype => "InstancetypeMatcher",
            Role::Preference => "PreferenceMatcher",
        };
        let why = format!("Either Name or InferFromVolume should be provided within the {what}");
        p.add(CauseType::NotFound, &field, why);
    }
    for (key, word) in [("name", "Name"), ("kind", "Kind")] {
        if given("inferFromVolume") && given(key) {
            let why = format!("{word} already set, should be cleared before setting inferFromVolume");
            p.add(CauseType::NotSupported, format!("{field}.{key}"), why);
        }
    }
    let policy = text(matcher, &["inferFromVolumeFailurePolicy"]);
    if !["", "Ignore", "Reject"].contains(&policy) {
        let why = format!("Invalid value '{policy}' for InferFromVolumeFailurePolicy");
        p.invalid(format!("{field}.inferFromVolumeFailurePolicy"), why);
    }
    for key in ["name", "revisionName"] {
        if given(key) && !is_name(text(matcher, &[key])) {
            p.invalid(
                format!("{field}.{key}"),
                format!("{field}.{key} is not a valid name: {:?}", text(matcher, &[key])),
            );
        }
    }
    if role.pattern(text(matcher, &["kind"])).is_none() {
        let why = format!("{field}.kind: there is no such kind of {}: {}", role.field(), text(matcher, &["kind"]));
        p.invalid(format!("{field}.kind"), why);
    }
}

/// Why nothing was inferred; whether a matcher may say that this does not matter.
struct Failed {
    why: String,
    ignorable: bool,
}

impl Failed {
    fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), ignorable: false }
    }

    fn ignorable(why: impl Into<String>) -> Self {
        Self { why: why.into(), ignorable: true }
    }
}

/// Name and kind.
type Named = Result<(String, String), Failed>;

/// Names that stand in labels of what a volume is made of.
struct Inference<'a> {
    role: Role,
    namespace: &'a str,
    objects: &'a Objects,
    vm: &'a Value,
}

impl Inference<'_> {
    fn of_volume(&self, volume: &str) -> Named {
        let volumes = items(self.vm, &["spec", "template", "spec", "volumes"]);
        let found = volumes.iter().find(|v| text(v, &["name"]) == volume);
        let found = found.ok_or_else(|| Failed::new(format!("unable to find volume {volume} to infer defaults")))?;
        let (claim, data) =
            (text(found, &["persistentVolumeClaim", "claimName"]), text(found, &["dataVolume", "name"]));
        if !claim.is_empty() {
            return self.of_object("PersistentVolumeClaim", self.namespace, claim);
        }
        if !data.is_empty() {
            return self.of_data_volume(data);
        }
        let why = format!("unable to infer defaults from volume {volume} as type is not supported");
        Err(Failed::ignorable(why))
    }

    fn of_labels(&self, object: &Value) -> Named {
        let label = format!("instancetype.kubevirt.io/default-{}", self.role.field());
        let labels = get(object, &["metadata", "labels"]);
        match labels.get(&label).and_then(Value::as_str) {
            Some(name) => Ok((name.into(), text(labels, &[&format!("{label}-kind")]).into())),
            None => Err(Failed::ignorable(format!("unable to find required {label} label on the volume"))),
        }
    }

    fn of_object(&self, kind: &'static str, namespace: &str, name: &str) -> Named {
        let found = self.objects.look(kind, namespace, name);
        self.of_labels(found.ok_or_else(|| Failed::new(format!("{kind} {namespace}/{name} not found")))?)
    }

    fn of_data_volume(&self, name: &str) -> Named {
        let templates = items(self.vm, &["spec", "dataVolumeTemplates"]);
        if let Some(template) = templates.iter().find(|t| text(t, &["metadata", "name"]) == name) {
            return self.of_data_volume_spec(get(template, &["spec"]));
        }
        // One that has done its work may be gone; its claim has its name.
        let Some(found) = self.objects.look("DataVolume", self.namespace, name) else {
            return self.of_object("PersistentVolumeClaim", self.namespace, name);
        };
        self.of_labels(found).or_else(|_| self.of_data_volume_spec(get(found, &["spec"])))
    }

    fn of_data_volume_spec(&self, spec: &Value) -> Named {
        if let Some(named) = self.of_source(get(spec, &["source"])) {
            return named;
        }
        let reference = get(spec, &["sourceRef"]);
        match text(reference, &["kind"]) {
            "DataSource" => {
                let namespace = Some(text(reference, &["namespace"])).filter(|n| !n.is_empty());
                self.of_data_source(namespace.unwrap_or(self.namespace), text(reference, &["name"]))
            }
            "" => {
                let why = "unable to infer defaults from DataVolumeSpec as DataVolumeSource is not supported";
                Err(Failed::ignorable(why))
            }
            kind => {
                let why = format!("unable to infer defaults from DataVolumeSourceRef as Kind {kind} is not supported");
                Err(Failed::ignorable(why))
            }
        }
    }

    fn of_data_source(&self, namespace: &str, name: &str) -> Named {
        let found = self.objects.look("DataSource", namespace, name);
        let found = found.ok_or_else(|| Failed::new(format!("DataSource {namespace}/{name} not found")))?;
        let why = "unable to infer defaults from DataSource that doesn't provide DataVolumeSourcePVC or \
                   DataVolumeSourceSnapshot";
        self.of_labels(found)
            .or_else(|_| self.of_source(get(found, &["spec", "source"])).unwrap_or_else(|| Err(Failed::ignorable(why))))
    }

    /// The claim or the snapshot that is copied.
    fn of_source(&self, source: &Value) -> Option<Named> {
        [("pvc", "PersistentVolumeClaim"), ("snapshot", "VolumeSnapshot")].into_iter().find_map(|(key, kind)| {
            let from = get(source, &[key]);
            from.is_object().then(|| self.of_object(kind, text(from, &["namespace"]), text(from, &["name"])))
        })
    }
}

/// What a machine names. What is not to be found is a matter for a warning: it may come later.
pub(super) fn find(namespace: &str, vm: &Value, context: &Context<'_>, p: &mut Problems) -> Found {
    let mut found = Found::default();
    for matcher in Role::ALL.into_iter().filter_map(|role| Matcher::of(role, vm)) {
        match one(namespace, &matcher, context.objects) {
            Ok(spec) => match matcher.role {
                Role::Instancetype => found.instancetype = spec,
                Role::Preference => found.preference = spec,
            },
            Err(what) => p.warn(format!(
                "spec.{}: {what} could not be found; no instance is made before it exists",
                matcher.role.field()
            )),
        }
    }
    found
}

/// The `spec` of what a matcher names, or its name.
fn one(namespace: &str, matcher: &Matcher, objects: &Objects) -> Result<Value, String> {
    if let Some(revision) = &matcher.revision {
        let found = objects.look("ControllerRevision", namespace, revision);
        let spec = found.and_then(|r| spec_of_record(matcher.role, r)).cloned();
        return spec.ok_or_else(|| format!("ControllerRevision {namespace}/{revision}"));
    }
    let Some(pattern) = matcher.pattern() else { return Err(format!("{} {}", matcher.kind, matcher.name)) };
    let namespace = if pattern.namespaced() { namespace } else { "" };
    let found = objects.look(pattern.name(), namespace, &matcher.name);
    found.map(|o| get(o, &["spec"]).clone()).ok_or_else(|| format!("{} {:?}", pattern.name(), matcher.name))
}

/// What a preference fills in before a machine is stored, because it must not change from one start to the next.
pub(super) fn fill(vm: &mut Value, found: &Found) {
    let preferred = |path: &[&str]| text(&found.preference, path).to_owned();
    let (architecture, machine) =
        (preferred(&["preferredArchitecture"]), preferred(&["machine", "preferredMachineType"]));
    let spec = ["spec", "template", "spec"];
    for (path, value) in [(&["architecture"][..], architecture), (&["domain", "machine", "type"], machine)] {
        if !value.is_empty() {
            default(vm, &[&spec[..], path].concat(), value);
        }
    }
}

/// The spec of the instance as it will be made, and what speaks against it. `None` where the machine sets what its instancetype
/// sets.
pub(super) fn applied(spec: &Value, metadata: &Value, found: &Found, base: &str, p: &mut Problems) -> Option<Value> {
    if let Some(conflict) = pattern_rules::spread(&found.instancetype, &found.preference) {
        p.invalid(conflict.field, conflict.message);
        return None;
    }
    let before = p.causes.len();
    let (mut spec, mut metadata) = (spec.clone(), metadata.clone());
    let done = state::instancetype::apply(&found.instancetype, &found.preference, &mut spec, &mut metadata, base);
    for conflict in done.err().into_iter().flatten() {
        p.invalid(conflict.field, conflict.message);
    }
    (p.causes.len() == before).then_some(spec)
}

/// What the preference requires and the machine (with everything filled in) does not have.
pub(super) fn require(found: &Found, spec: &Value, p: &mut Problems) {
    for lack in pattern_rules::requirements(&found.instancetype, &found.preference, spec) {
        p.add(CauseType::NotFound, lack.field, lack.message);
    }
}

/// A VirtualMachine with everything in it that its instancetype, its preference and the defaults bring.
///
/// # Errors
/// What it names and is not there, or the fields in which it conflicts.
pub(crate) fn expand(vm: &Value, namespace: &str, settings: &Settings, objects: &Objects) -> Result<Value, String> {
    let mut found = Found::default();
    let mut named = false;
    for matcher in Role::ALL.into_iter().filter_map(|role| Matcher::of(role, vm)) {
        let spec = one(namespace, &matcher, objects).map_err(|what| format!("{what} not found"))?;
        named = true;
        match matcher.role {
            Role::Instancetype => found.instancetype = spec,
            Role::Preference => found.preference = spec,
        }
    }
    let mut vm = vm.clone();
    if !named {
        return Ok(vm);
    }
    let path = ["spec", "template", "spec"];
    let (mut spec, mut metadata) = (get(&vm, &path).clone(), get(&vm, &["spec", "template", "metadata"]).clone());
    let base = path.join(".");
    state::instancetype::apply(&found.instancetype, &found.preference, &mut spec, &mut metadata, &base).map_err(
        |all| {
            let fields: Vec<String> = all.into_iter().map(|c| c.field).collect();
            format!("VM field(s) {} conflicts with selected instance type", fields.join(", "))
        },
    )?;
    // Which UUID a machine has is decided when it is stored.
    let anonymous = get(&spec, &["domain", "firmware", "uuid"]).is_null();
    defaults::spec(&mut spec, settings, &String::new);
    if anonymous {
        remove(&mut spec, &["domain", "firmware"], "uuid");
    }
    *at(&mut vm, &path) = spec;
    if metadata.is_object() {
        *at(&mut vm, &["spec", "template", "metadata"]) = metadata;
    }
    for role in Role::ALL {
        remove(&mut vm, &["spec"], role.field());
        if vm.get("status").is_some() {
            remove(&mut vm, &["status"], role.status_field());
        }
    }
    Ok(vm)
}

/// A new instancetype or preference. What it asks for and is not built is refused where a machine uses it; here it is told.
pub(super) fn admit(role: Role, input: AdmissionInput) -> Result<AdmissionOutput, Status> {
    let (mut p, spec) = (Problems::default(), get(&input.object, &["spec"]));
    let (table, wrong) = match role {
        Role::Instancetype => {
            if !get(spec, &["launchSecurity"]).is_null() {
                p.warn("launchSecurity is deprecated and will be removed in a future release. Use preference instead.");
            }
            (fields::INSTANCETYPE, pattern_rules::instancetype(spec))
        }
        Role::Preference => {
            let (wrong, warnings) = pattern_rules::preference(spec);
            p.warnings.extend(warnings);
            (fields::PREFERENCE, wrong)
        }
    };
    for problem in wrong {
        p.invalid(problem.field, problem.message);
    }
    if !p.causes.is_empty() {
        return Err(Status::invalid(&input.kind, &input.name, &p.causes));
    }
    fields::check(table, spec, "spec", "", &mut p);
    let told = p.causes.drain(..).map(|c| format!("{}; machines that use it are refused", c.message));
    p.warnings.extend(told.collect::<Vec<_>>());
    Ok(AdmissionOutput { object: input.object, warnings: p.warnings })
}
