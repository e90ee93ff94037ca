//! Objects in Kubernetes' protobuf encoding, which kubectl sends for what it makes itself (`create secret`, `auth can-i`,
//! `create token`, ...). Answers are always JSON, which those clients take.
//!
//! The kinds that such clients send are described here by field number; another kind is refused with 415.

use base64::Engine;
use serde_json::{Map, Value};

use crate::semantics::Status;

/// What a field holds.
#[derive(Clone, Copy)]
enum Holds {
    Text,
    /// A number whose zero means "not said".
    Number,
    /// A number whose zero is said.
    Optional,
    Flag,
    Bytes,
    Time,
    MicroTime,
    Quantity,
    One(&'static [Field]),
    Many(&'static Holds),
    Map(&'static Holds),
}

type Field = (u64, &'static str, Holds);

use Holds::{Bytes, Flag, Many, Map as Dict, MicroTime, Number, One, Optional, Quantity, Text, Time};

const OWNER: &[Field] = &[
    (1, "kind", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "controller", Flag),
    (7, "blockOwnerDeletion", Flag),
];
const META: &[Field] = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (7, "generation", Number),
    (8, "creationTimestamp", Time),
    (9, "deletionTimestamp", Time),
    (10, "deletionGracePeriodSeconds", Optional),
    (11, "labels", Dict(&Text)),
    (12, "annotations", Dict(&Text)),
    (13, "ownerReferences", Many(&One(OWNER))),
    (14, "finalizers", Many(&Text)),
];
const METADATA: Field = (1, "metadata", One(META));
const REFERENCE: &[Field] = &[
    (1, "kind", Text),
    (2, "namespace", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "resourceVersion", Text),
    (7, "fieldPath", Text),
];
const SELECTOR: &[Field] = &[
    (1, "matchLabels", Dict(&Text)),
    (2, "matchExpressions", Many(&One(&[(1, "key", Text), (2, "operator", Text), (3, "values", Many(&Text))]))),
];
const RULE: &[Field] = &[
    (1, "verbs", Many(&Text)),
    (2, "apiGroups", Many(&Text)),
    (3, "resources", Many(&Text)),
    (4, "resourceNames", Many(&Text)),
    (5, "nonResourceURLs", Many(&Text)),
];
const SUBJECT: &[Field] = &[(1, "kind", Text), (2, "apiGroup", Text), (3, "name", Text), (4, "namespace", Text)];
const BINDING: &[Field] = &[
    METADATA,
    (2, "subjects", Many(&One(SUBJECT))),
    (3, "roleRef", One(&[(1, "apiGroup", Text), (2, "kind", Text), (3, "name", Text)])),
];
const OF_RESOURCE: Field = (
    1,
    "resourceAttributes",
    One(&[
        (1, "namespace", Text),
        (2, "verb", Text),
        (3, "group", Text),
        (4, "version", Text),
        (5, "resource", Text),
        (6, "subresource", Text),
        (7, "name", Text),
    ]),
);
const OF_PATH: Field = (2, "nonResourceAttributes", One(&[(1, "path", Text), (2, "verb", Text)]));
const ACCESS: &[Field] = &[
    METADATA,
    (
        2,
        "spec",
        One(&[
            OF_RESOURCE,
            OF_PATH,
            (3, "user", Text),
            (4, "groups", Many(&Text)),
            (5, "extra", Dict(&One(&[(1, "items", Many(&Text))]))),
            (6, "uid", Text),
        ]),
    ),
];
const DELETE_OPTIONS: &[Field] = &[
    (1, "gracePeriodSeconds", Optional),
    (2, "preconditions", One(&[(1, "uid", Text), (2, "resourceVersion", Text)])),
    (3, "orphanDependents", Flag),
    (4, "propagationPolicy", Text),
    (5, "dryRun", Many(&Text)),
];
const SERIES: &[Field] = &[(1, "count", Number), (2, "lastObservedTime", MicroTime)];

/// The fields of a kind.
fn kind(api_version: &str, kind: &str) -> Option<&'static [Field]> {
    Some(match (api_version, kind) {
        ("v1", "Secret") => &[
            METADATA,
            (2, "data", Dict(&Bytes)),
            (3, "type", Text),
            (4, "stringData", Dict(&Text)),
            (5, "immutable", Flag),
        ],
        ("v1", "ConfigMap") => {
            &[METADATA, (2, "data", Dict(&Text)), (3, "binaryData", Dict(&Bytes)), (4, "immutable", Flag)]
        }
        ("v1", "Namespace") => {
            &[METADATA, (2, "spec", One(&[(1, "finalizers", Many(&Text))])), (3, "status", One(&[(1, "phase", Text)]))]
        }
        ("v1", "ServiceAccount") => &[
            METADATA,
            (2, "secrets", Many(&One(REFERENCE))),
            (3, "imagePullSecrets", Many(&One(&[(1, "name", Text)]))),
            (4, "automountServiceAccountToken", Flag),
        ],
        ("v1", "Binding") => &[METADATA, (2, "target", One(REFERENCE))],
        ("v1", "ResourceQuota") => {
            &[METADATA, (2, "spec", One(&[(1, "hard", Dict(&Quantity)), (2, "scopes", Many(&Text))]))]
        }
        ("v1", "PersistentVolumeClaim") => &[
            METADATA,
            (
                2,
                "spec",
                One(&[
                    (1, "accessModes", Many(&Text)),
                    (2, "resources", One(&[(1, "limits", Dict(&Quantity)), (2, "requests", Dict(&Quantity))])),
                    (3, "volumeName", Text),
                    (4, "selector", One(SELECTOR)),
                    (5, "storageClassName", Text),
                    (6, "volumeMode", Text),
                    (7, "dataSource", One(&[(1, "apiGroup", Text), (2, "kind", Text), (3, "name", Text)])),
                    (
                        8,
                        "dataSourceRef",
                        One(&[(1, "apiGroup", Text), (2, "kind", Text), (3, "name", Text), (4, "namespace", Text)]),
                    ),
                ]),
            ),
        ],
        ("v1", "Event") => &[
            METADATA,
            (2, "involvedObject", One(REFERENCE)),
            (3, "reason", Text),
            (4, "message", Text),
            (5, "source", One(&[(1, "component", Text), (2, "host", Text)])),
            (6, "firstTimestamp", Time),
            (7, "lastTimestamp", Time),
            (8, "count", Number),
            (9, "type", Text),
            (10, "eventTime", MicroTime),
            (11, "series", One(SERIES)),
            (12, "action", Text),
            (13, "related", One(REFERENCE)),
            (14, "reportingComponent", Text),
            (15, "reportingInstance", Text),
        ],
        ("rbac.authorization.k8s.io/v1", "Role") => &[METADATA, (2, "rules", Many(&One(RULE)))],
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => &[
            METADATA,
            (2, "rules", Many(&One(RULE))),
            (3, "aggregationRule", One(&[(1, "clusterRoleSelectors", Many(&One(SELECTOR)))])),
        ],
        ("rbac.authorization.k8s.io/v1", "RoleBinding" | "ClusterRoleBinding") => BINDING,
        ("authorization.k8s.io/v1", "SelfSubjectAccessReview") => {
            &[METADATA, (2, "spec", One(&[OF_RESOURCE, OF_PATH]))]
        }
        ("authorization.k8s.io/v1", "SubjectAccessReview" | "LocalSubjectAccessReview") => ACCESS,
        ("authorization.k8s.io/v1", "SelfSubjectRulesReview") => {
            &[METADATA, (2, "spec", One(&[(1, "namespace", Text)]))]
        }
        ("authentication.k8s.io/v1", "SelfSubjectReview") => &[METADATA],
        ("authentication.k8s.io/v1", "TokenReview") => {
            &[METADATA, (2, "spec", One(&[(1, "token", Text), (2, "audiences", Many(&Text))]))]
        }
        ("authentication.k8s.io/v1", "TokenRequest") => &[
            METADATA,
            (
                2,
                "spec",
                One(&[
                    (1, "audiences", Many(&Text)),
                    (
                        3,
                        "boundObjectRef",
                        One(&[(1, "kind", Text), (2, "apiVersion", Text), (3, "name", Text), (4, "uid", Text)]),
                    ),
                    (4, "expirationSeconds", Optional),
                ]),
            ),
        ],
        ("policy/v1", "Eviction") => &[METADATA, (2, "deleteOptions", One(DELETE_OPTIONS))],
        (_, "DeleteOptions") => DELETE_OPTIONS,
        ("scheduling.k8s.io/v1", "PriorityClass") => &[
            METADATA,
            (2, "value", Number),
            (3, "globalDefault", Flag),
            (4, "description", Text),
            (5, "preemptionPolicy", Text),
        ],
        ("coordination.k8s.io/v1", "Lease") => &[
            METADATA,
            (
                2,
                "spec",
                One(&[
                    (1, "holderIdentity", Text),
                    (2, "leaseDurationSeconds", Optional),
                    (3, "acquireTime", MicroTime),
                    (4, "renewTime", MicroTime),
                    (5, "leaseTransitions", Optional),
                ]),
            ),
        ],
        _ => return None,
    })
}

/// The four bytes that every object begins with.
const MAGIC: &[u8] = b"k8s\0";
/// How deep messages may lie in each other.
const DEPTH_MAX: usize = 16;

enum Raw<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut out = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        out |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(out);
        }
    }
    None
}

fn next<'a>(bytes: &mut &'a [u8]) -> Option<(u64, Raw<'a>)> {
    let key = varint(bytes)?;
    let mut take = |n: usize| {
        let (head, tail) = (bytes.get(..n)?, bytes.get(n..)?);
        *bytes = tail;
        Some(head)
    };
    let raw = match key & 7 {
        0 => Raw::Varint(varint(bytes)?),
        1 => Raw::Bytes(take(8)?),
        5 => Raw::Bytes(take(4)?),
        2 => {
            let n = usize::try_from(varint(bytes)?).ok()?;
            let (head, tail) = (bytes.get(..n)?, bytes.get(n..)?);
            *bytes = tail;
            Raw::Bytes(head)
        }
        _ => return None,
    };
    Some((key >> 3, raw))
}

fn message(mut bytes: &[u8], fields: &'static [Field], depth: usize) -> Option<Map<String, Value>> {
    let mut out = Map::new();
    if depth > DEPTH_MAX {
        return None;
    }
    while !bytes.is_empty() {
        let (tag, raw) = next(&mut bytes)?;
        let Some((_, name, holds)) = fields.iter().find(|(t, _, _)| *t == tag) else { continue };
        match holds {
            Holds::Many(of) => {
                if let Some(v) = value(&raw, **of, depth)?.or_else(|| empty(**of))
                    && let Value::Array(list) = out.entry(*name).or_insert_with(|| Value::Array(Vec::new()))
                {
                    list.push(v);
                }
            }
            Holds::Map(of) => {
                let Raw::Bytes(mut entry) = raw else { return None };
                let (mut key, mut held) = (String::new(), None);
                while !entry.is_empty() {
                    match next(&mut entry)? {
                        (1, Raw::Bytes(k)) => key = String::from_utf8(k.to_vec()).ok()?,
                        (2, v) => held = value(&v, **of, depth)?,
                        _ => {}
                    }
                }
                if let Value::Object(map) = out.entry(*name).or_insert_with(|| Value::Object(Map::new())) {
                    map.insert(key, held.or_else(|| empty(**of)).unwrap_or(Value::Null));
                }
            }
            single => {
                if let Some(v) = value(&raw, *single, depth)? {
                    out.insert((*name).to_owned(), v);
                }
            }
        }
    }
    Some(out)
}

/// What an element is that says nothing.
fn empty(holds: Holds) -> Option<Value> {
    match holds {
        Holds::Text | Holds::Bytes => Some("".into()),
        Holds::One(_) => Some(Value::Object(Map::new())),
        _ => None,
    }
}

/// One value; `Some(None)` when it says nothing.
fn value(raw: &Raw<'_>, holds: Holds, depth: usize) -> Option<Option<Value>> {
    Some(match (holds, raw) {
        (Holds::Text, Raw::Bytes(b)) => {
            Some(String::from_utf8(b.to_vec()).ok()?).filter(|s| !s.is_empty()).map(Value::from)
        }
        (Holds::Bytes, Raw::Bytes(b)) => Some(base64::engine::general_purpose::STANDARD.encode(b).into()),
        (Holds::Number, Raw::Varint(n)) => Some(n.cast_signed()).filter(|n| *n != 0).map(Value::from),
        (Holds::Optional, Raw::Varint(n)) => Some(n.cast_signed().into()),
        (Holds::Flag, Raw::Varint(n)) => Some((*n != 0).into()),
        (Holds::Quantity, Raw::Bytes(b)) => {
            message(b, &[(1, "string", Text)], depth + 1)?.remove("string").or_else(|| Some("0".into()))
        }
        (Holds::Time | Holds::MicroTime, Raw::Bytes(b)) => {
            let parts = message(b, &[(1, "seconds", Optional), (2, "nanos", Optional)], depth + 1)?;
            let number = |k: &str| parts.get(k).and_then(Value::as_i64);
            match number("seconds") {
                None => None,
                Some(seconds) => {
                    let nanos = i32::try_from(number("nanos").unwrap_or(0)).ok()?;
                    let time = jiff::Timestamp::new(seconds, nanos).ok()?;
                    let form =
                        if matches!(holds, Holds::MicroTime) { "%Y-%m-%dT%H:%M:%S.%6fZ" } else { "%Y-%m-%dT%H:%M:%SZ" };
                    Some(time.strftime(form).to_string().into())
                }
            }
        }
        (Holds::One(fields), Raw::Bytes(b)) => {
            Some(message(b, fields, depth + 1)?).filter(|m| !m.is_empty()).map(Value::Object)
        }
        _ => return None,
    })
}

/// Decodes an object.
pub(super) fn decode(bytes: &[u8]) -> Result<Value, Status> {
    let wrong = || Status::bad_request("the body is no Kubernetes protobuf object");
    let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(wrong)?;
    let (mut types, mut inner) = (Map::new(), &[][..]);
    while !rest.is_empty() {
        match next(&mut rest).ok_or_else(wrong)? {
            (1, Raw::Bytes(b)) => {
                types = message(b, &[(1, "apiVersion", Text), (2, "kind", Text)], 0).ok_or_else(wrong)?;
            }
            (2, Raw::Bytes(b)) => inner = b,
            _ => {}
        }
    }
    let word = |k: &str| types.get(k).and_then(Value::as_str).unwrap_or_default();
    let Some(fields) = kind(word("apiVersion"), word("kind")) else {
        return Err(Status::unsupported_media_type(format!(
            "{} of {} is not taken in protobuf here; send application/json",
            word("kind"),
            word("apiVersion")
        )));
    };
    let mut object = message(inner, fields, 0).ok_or_else(wrong)?;
    // What is no list of texts on the wire but one in JSON.
    if let Some(extra) = object.get_mut("spec").and_then(|s| s.get_mut("extra")).and_then(Value::as_object_mut) {
        extra.values_mut().for_each(|v| *v = v.get_mut("items").map(Value::take).unwrap_or_default());
    }
    object.extend(types);
    Ok(Value::Object(object))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn field(tag: u8, bytes: &[u8]) -> Vec<u8> {
        [&[tag << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    #[test]
    fn objects_are_read_and_rubbish_is_refused() {
        let types = [field(1, b"v1"), field(2, b"Secret")].concat();
        let entry = [field(1, b"k"), field(2, b"hi")].concat();
        let object = [field(1, &field(1, b"s")), field(2, &entry), field(3, b"")].concat();
        let whole = [MAGIC.to_vec(), field(1, &types), field(2, &object)].concat();
        assert_eq!(
            decode(&whole).unwrap(),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "aGk="}})
        );
        for cut in 4..whole.len() {
            let _ = decode(&whole[..cut]);
        }
        assert_eq!(decode(b"{}").unwrap_err().code, 400);
        let other = [field(1, b"v1"), field(2, b"Pod")].concat();
        assert_eq!(decode(&[MAGIC.to_vec(), field(1, &other)].concat()).unwrap_err().code, 415);
    }
}
