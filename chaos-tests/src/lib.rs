//! What is checked about virtfold as a whole.
//!
//! [`rules`] are the rules of the repository itself: which crate may depend on which, and what no file may contain.
//! [`e2e`] starts the real `virtfold` binary, real etcd and real guests, and hurts them from outside. Nothing here links
//! against a component: what a person sees (API objects, consoles, processes, files) is all that is judged.
//! [`kubernetes`] does the same on a real kube-apiserver, and counts and measures what we cost it.

pub mod e2e;
pub mod kubernetes;
pub mod rules;
pub mod world;
