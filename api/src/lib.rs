//! The vocabulary that every crate of virtfold shares: the objects of `kubevirt.io/v1`, their CustomResourceDefinitions,
//! and the names (labels, annotations, finalizers, reasons) that people and other programs see.
//!
//! Nothing here acts. The structs are *readers*: they hold the fields that virtfold reads, default what is missing, and
//! are never written back as a whole object, so fields that they do not know are not lost (writes are patches).

pub mod crd;
pub mod names;
pub mod types;

pub use types::*;
