//! Structural schemas, of CustomResourceDefinitions as of built-in kinds: one structure for both.
//!
//! [`compile`] reads the JSON form; [`prune`] drops (and names) unknown fields; [`default`] fills in; [`validate`] checks
//! in the words of kube-apiserver; [`go_type`] finds the first value of a wrong type in a built-in kind, in the words of
//! Go's JSON decoder, which is what a user of kube-apiserver sees there.

mod check;
mod compile;
mod formats;
mod shape;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use regex::Regex;
use serde_json::Value;

pub use check::{go_type, validate};
pub use compile::{compile, compile_definitions, problems};
pub use shape::{default, drop_nulls, drop_wrong_nulls, prune};

/// Definitions that schemas refer to by name.
pub type Definitions = Arc<BTreeMap<String, Node>>;

/// A schema with the definitions that it refers to.
#[derive(Debug, Clone)]
pub struct Schema {
    /// The root.
    pub root: Node,
    /// What `reference` names.
    pub definitions: Definitions,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A map.
    Object,
    /// A list.
    Array,
    /// A text.
    String,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// true or false.
    Boolean,
}

impl Type {
    /// The word for it in schemas and messages.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }
}

/// What fields a map may have beside its properties.
#[derive(Debug, Clone, Default)]
pub enum Additional {
    /// Nothing is said: unknown ones are dropped.
    #[default]
    Unsaid,
    /// Anything.
    Any,
    /// Values of this shape.
    Shaped(Box<Node>),
}

/// How the items of a list relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListType {
    /// One value.
    #[default]
    Atomic,
    /// No two alike.
    Set,
    /// No two with the same keys.
    Map,
}

/// A pattern that is compiled when it is first needed.
#[derive(Debug, Clone)]
pub struct Pattern {
    /// As written.
    pub text: String,
    compiled: Arc<OnceLock<Option<Regex>>>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        Self { text: text.to_owned(), compiled: Arc::new(OnceLock::new()) }
    }
    fn matches(&self, value: &str) -> bool {
        self.compiled.get_or_init(|| Regex::new(&self.text).ok()).as_ref().is_none_or(|r| r.is_match(value))
    }
}

/// One place of a schema.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// Name of a definition that says everything else.
    pub reference: Option<String>,
    /// Type of the value.
    pub kind: Option<Type>,
    /// Whether null is a value.
    pub nullable: bool,
    /// Known fields. A map holds room for eleven values at once, so they stand elsewhere.
    pub properties: BTreeMap<String, Box<Node>>,
    /// Other fields.
    pub additional: Additional,
    /// Shape of list items.
    pub items: Option<Box<Node>>,
    /// Fields that must be there.
    pub required: Vec<String>,
    /// Values allowed.
    pub values: Vec<Value>,
    /// Pattern of a text.
    pub pattern: Option<Pattern>,
    /// Format of a value.
    pub format: String,
    /// Lower bound, and whether it is excluded.
    pub minimum: Option<(f64, bool)>,
    /// Upper bound, and whether it is excluded.
    pub maximum: Option<(f64, bool)>,
    /// The number divides by this.
    pub multiple_of: Option<f64>,
    /// Shortest text, least items, least fields.
    pub least: (Option<u64>, Option<u64>, Option<u64>),
    /// Longest text, most items, most fields.
    pub most: (Option<u64>, Option<u64>, Option<u64>),
    /// No two items alike.
    pub unique: bool,
    /// Unknown fields stay.
    pub preserve: bool,
    /// A whole number or a text.
    pub int_or_string: bool,
    /// A whole object with apiVersion, kind and metadata.
    pub embedded: bool,
    /// How list items relate.
    pub list_type: ListType,
    /// The keys of a list that is a map.
    pub list_keys: Vec<String>,
    /// A map that is one value, not made of parts with owners of their own.
    pub map_atomic: bool,
    /// A map that is made of parts here, although its type is one value elsewhere.
    pub map_granular: bool,
    /// The key by which a strategic merge patch tells the items of the list, "" where they are values; none where the list is
    /// replaced.
    pub merge_key: Option<String>,
    /// A strategic merge patch says with `$retainKeys` which fields stay.
    pub retain_keys: bool,
    /// Value where there is none.
    pub default: Option<Value>,
    /// All of these hold.
    pub all_of: Vec<Node>,
    /// One of these holds.
    pub any_of: Vec<Node>,
    /// Exactly one of these holds.
    pub one_of: Vec<Node>,
    /// This does not hold.
    pub not: Option<Box<Node>>,
    /// There is a default somewhere below.
    pub defaults_below: bool,
}

impl Schema {
    /// The node that a node stands for.
    #[must_use]
    pub fn resolve<'a>(&'a self, node: &'a Node) -> &'a Node {
        match &node.reference {
            Some(name) => self.definitions.get(name).unwrap_or(node),
            None => node,
        }
    }
}

/// The name of the definition of object metadata.
pub const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// `path.field`, or the field alone at the root.
fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}
