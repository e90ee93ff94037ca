//! What is checked about virtfold as a whole.
//!
//! [`rules`] are the rules of the repository itself: which crate may depend on which, and what no file may contain.
//! [`world`] is a world of plain data around the real machines of `state/`. It links against `state`, the semantics and the
//! store of the embedded API server and the launcher's latch, and against nothing else of a component.
//! `sim` (a feature) is a network of simulated hosts on which the production drivers run; [`runs`] starts such runs, and [`tally`] counts
//! what runs come to.
//! [`e2e`] starts the real `virtfold` binary, real etcd and real guests, and hurts them from outside. It links against no
//! component: what a person sees (API objects, consoles, processes, files) is all that is judged.
//! [`rounds`] hurts all of these processes in rounds, and judges by the invariants of [`world`].
//! [`storm`] hurts a cluster that a person has, by its API.
//! [`kubernetes`] does the same on a real kube-apiserver, and counts and measures what we cost it.

pub mod e2e;
pub mod kubernetes;
pub mod rounds;
pub mod rules;
pub mod runs;
#[cfg(feature = "sim")]
pub mod sim;
pub mod storm;
pub mod tally;
pub mod world;
