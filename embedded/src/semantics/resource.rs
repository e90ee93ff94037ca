//! What the pure functions know of a kind.

use std::sync::Arc;

use serde_json::Value;

use super::FieldError;
use super::names::NameRule;
use super::schema::Schema;
use super::value::text;

/// What a built-in kind does beyond what all kinds do. Every method has the neutral default.
pub trait Behaviour: Send + Sync {
    /// Fills in what the user left out, on every write.
    fn default(&self, _object: &mut Value) {}
    /// Before creation: sets what only the server may set.
    fn prepare_create(&self, _object: &mut Value) {}
    /// Before an update of the object itself (not of its status).
    fn prepare_update(&self, _old: &Value, _new: &mut Value) {}
    /// What is wrong with an object by itself.
    fn validate(&self, _object: &Value, _errors: &mut Vec<FieldError>) {}
    /// What may not change this way.
    fn validate_update(&self, _old: &Value, _new: &Value, _errors: &mut Vec<FieldError>) {}
    /// Seconds of grace that a deletion has; none where the kind knows no grace.
    fn grace(&self, _object: &Value, _asked: Option<i64>) -> Option<i64> {
        None
    }
    /// Whether something beside `metadata.finalizers` still holds a deleted object.
    fn held(&self, _object: &Value) -> bool {
        false
    }
    /// How names are spelled.
    fn name_rule(&self) -> NameRule {
        NameRule::Subdomain
    }
    /// Field paths that a field selector may use, beside name and namespace.
    fn selectable(&self) -> &'static [&'static str] {
        &[]
    }
    /// The value of such a field where it is not simply the one at the path.
    fn field(&self, _object: &Value, _path: &str) -> Option<String> {
        None
    }
}

/// A kind without peculiarities.
#[derive(Debug, Clone, Copy)]
pub struct Plain;
impl Behaviour for Plain {}

/// Where a scale subresource finds its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scale {
    /// Path of the wanted number (`.spec.replicas`).
    pub spec_path: String,
    /// Path of the actual number.
    pub status_path: String,
    /// Path of the label selector in text form.
    pub selector_path: Option<String>,
}

/// A column of a server-side table that a CRD asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Heading.
    pub name: String,
    /// JSON type of the cells.
    pub kind: String,
    /// Format of the cells.
    pub format: String,
    /// Explanation.
    pub description: String,
    /// 0 is shown always, more only with `-o wide`.
    pub priority: i64,
    /// JSON path into the object.
    pub path: String,
}

/// One served resource: one version of one kind.
#[derive(Clone)]
pub struct Resource {
    /// API group, "" for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Name in paths.
    pub plural: String,
    /// Singular name.
    pub singular: String,
    /// Kind.
    pub kind: String,
    /// Kind of lists.
    pub list_kind: String,
    /// Short names.
    pub short_names: Vec<String>,
    /// Categories (`all`).
    pub categories: Vec<String>,
    /// Whether objects live in namespaces.
    pub namespaced: bool,
    /// Whether there is a status subresource.
    pub status: bool,
    /// The scale subresource, if any.
    pub scale: Option<Scale>,
    /// Names of further subresources (`binding`, `log`, ...).
    pub subresources: Vec<&'static str>,
    /// Whether it comes from a CustomResourceDefinition.
    pub custom: bool,
    /// Only `create` is possible and nothing is stored (the review kinds).
    pub virtual_only: bool,
    /// Whether `metadata.generation` is kept.
    pub generation: bool,
    /// Schema, where one is known.
    pub schema: Option<Arc<Schema>>,
    /// The schema as published, null where there is none (kept for custom resources alone).
    pub published: Arc<Value>,
    /// Columns of a CRD.
    pub columns: Vec<Column>,
    /// Field paths that a CRD declares selectable.
    pub selectable_fields: Vec<String>,
    /// Group and plural under which objects are stored (events of both groups share theirs).
    pub stored_as: (String, String),
    /// `apiVersion` of stored objects.
    pub stored_version: String,
    /// An object of this kind of which nothing has been said: what is in it was not added by anybody.
    pub blank: Arc<Value>,
    /// Peculiarities.
    pub behaviour: Arc<dyn Behaviour>,
    /// A warning for who uses this version, "" for none.
    pub deprecation: String,
}

impl std::fmt::Debug for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} {}", self.group, self.version, self.plural)
    }
}

impl Default for Resource {
    fn default() -> Self {
        Self {
            group: String::new(),
            version: "v1".into(),
            plural: String::new(),
            singular: String::new(),
            kind: String::new(),
            list_kind: String::new(),
            short_names: Vec::new(),
            categories: Vec::new(),
            namespaced: true,
            status: false,
            scale: None,
            subresources: Vec::new(),
            custom: false,
            virtual_only: false,
            generation: false,
            schema: None,
            published: Arc::new(Value::Null),
            columns: Vec::new(),
            selectable_fields: Vec::new(),
            stored_as: (String::new(), String::new()),
            stored_version: "v1".into(),
            blank: Arc::new(Value::Object(serde_json::Map::new())),
            behaviour: Arc::new(Plain),
            deprecation: String::new(),
        }
    }
}

impl Resource {
    /// `group/version`, or the version alone in the core group.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// The prefix of all keys of this resource, with a slash at its end.
    #[must_use]
    pub fn prefix(&self) -> String {
        let (group, plural) = &self.stored_as;
        let group = if group.is_empty() { "core" } else { group };
        format!("/registry/{group}/{plural}/")
    }

    /// The prefix of the keys of one namespace ("" for all).
    #[must_use]
    pub fn prefix_in(&self, namespace: &str) -> String {
        if namespace.is_empty() || !self.namespaced { self.prefix() } else { format!("{}{namespace}/", self.prefix()) }
    }

    /// The key of one object.
    #[must_use]
    pub fn key(&self, namespace: &str, name: &str) -> String {
        if self.namespaced {
            format!("{}{namespace}/{name}", self.prefix())
        } else {
            format!("{}{name}", self.prefix())
        }
    }

    /// Whether a field selector may use the path.
    #[must_use]
    pub fn selectable(&self, path: &str) -> bool {
        path == "metadata.name"
            || (path == "metadata.namespace" && self.namespaced)
            || self.behaviour.selectable().contains(&path)
            || self.selectable_fields.iter().any(|f| f == path)
    }

    /// The value of a selectable field as text.
    #[must_use]
    pub fn field(&self, object: &Value, path: &str) -> String {
        if let Some(v) = self.behaviour.field(object, path) {
            return v;
        }
        let pointer: String = path.split('.').flat_map(|p| ["/", p]).collect();
        match object.pointer(&pointer) {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Bool(b)) => b.to_string(),
            Some(Value::Number(n)) => n.to_string(),
            _ => String::new(),
        }
    }

    /// The generation-relevant part differs.
    #[must_use]
    pub fn spec_differs(&self, old: &Value, new: &Value) -> bool {
        let (Some(a), Some(b)) = (old.as_object(), new.as_object()) else { return old != new };
        let counts = |key: &str| key != "metadata" && !(key == "status" && (self.status || !self.custom));
        a.iter().filter(|(k, _)| counts(k)).any(|(k, v)| b.get(k) != Some(v))
            || b.keys().filter(|k| counts(k)).any(|k| !a.contains_key(k))
    }

    /// The name in the words of errors.
    #[must_use]
    pub fn name_of<'a>(&self, object: &'a Value) -> &'a str {
        text(object, "/metadata/name")
    }
}
