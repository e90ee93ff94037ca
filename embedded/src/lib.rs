//! embedded
pub mod auth;
pub mod cluster;
pub mod etcd;
pub mod images;
pub mod kinds;
pub mod lock;
pub mod netns;
pub mod pki;
pub mod pods;
pub mod procs;
pub mod semantics;
pub mod server;
pub mod storage;
pub mod volumes;
