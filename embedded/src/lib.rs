//! embedded
pub mod etcd;
pub mod lock;
pub mod netns;
pub mod pki;
pub mod procs;
pub mod storage;
pub mod auth;
pub mod kinds;
pub mod semantics;
pub mod server;
pub mod cluster;
pub mod volumes;
pub mod images;
pub mod pods;
