//! What a Kubernetes API server does to an object, as pure functions: from the old object and a request to a new object
//! or a [`Status`]. No clock, no randomness, no storage: what comes from outside is in [`Moment`].
//!
//! * [`status`]: the errors, worded and shaped as kube-apiserver does;
//! * [`resource`]: what the functions must know of a kind, built in or defined by a CustomResourceDefinition;
//! * [`write`]: creation, update, status update, deletion: metadata, generation, finalizers, grace, preconditions;
//! * [`patch`]: JSON patch, merge patch, strategic merge patch;
//! * [`owners`], [`typed`], [`fields`]: who owns which fields, and server-side apply;
//! * [`selector`]: label and field selectors;
//! * [`strict`]: decoding that notices duplicate fields;
//! * [`schema`]: structural schemas: checking, defaulting, pruning, unknown fields;
//! * [`names`], [`quantity`], [`amounts`]: the small grammars.
//!
//! The embedded API server and the simulator's model of it call the same functions.

pub mod amounts;
pub mod fields;
pub mod names;
pub mod owners;
pub mod patch;
pub mod quantity;
pub mod resource;
pub mod schema;
pub mod selector;
pub mod status;
pub mod strict;
pub mod typed;
pub mod value;
pub mod write;

pub use resource::Resource;
pub use status::{FieldError, Status};

/// What a write takes from outside: the time and fresh randomness.
#[derive(Debug, Clone)]
pub struct Moment {
    /// Seconds since 1970.
    pub seconds: i64,
    /// A fresh UID.
    pub uid: String,
    /// Five fresh characters for generateName.
    pub suffix: String,
}

impl Moment {
    /// The moment as `metadata` writes it, `seconds` later.
    #[must_use]
    pub fn rfc3339(&self, later: i64) -> String {
        rfc3339(self.seconds + later)
    }
}

/// Seconds since 1970 as metadata writes them.
#[must_use]
pub fn rfc3339(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).map(|t| t.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()).unwrap_or_default()
}

/// Seconds since 1970 of a time as metadata writes it.
#[must_use]
pub fn seconds(text: &str) -> Option<i64> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_second)
}

/// The alphabet of generated names: no vowels, nothing that looks like another.
pub const SUFFIX_ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
