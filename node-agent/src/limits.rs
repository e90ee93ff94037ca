//! Every bound of this crate, with its reason.

use std::time::Duration;

/// Messages that wait for the hub. Its senders wait; nothing is dropped.
pub const HUB: usize = 1024;
/// Messages that wait for a controller. One that does not read loses its session, which loses nothing.
pub const SESSION: usize = 4096;
/// Time for a controller to say Hello.
pub const HELLO: Duration = Duration::from_secs(10);
/// One request to the API server. Without a bound, a request that is lost in a partition waits for the kernel.
pub const API: Duration = Duration::from_secs(15);
/// A watch is reopened after this; the server ends it a little before.
pub const WATCH: Duration = Duration::from_secs(330);
/// What the server is asked to end a watch after.
pub const WATCH_SECONDS: u32 = 290;
/// First pause after the API server or a launcher failed.
pub const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Longest pause between tries to reach a launcher: its socket may appear at any time.
pub const LAUNCHER_RETRY: Duration = Duration::from_secs(1);
/// Longest pause between tries to reach the API server.
pub const API_RETRY: Duration = Duration::from_secs(10);
/// A launcher answers within milliseconds; one that is stopped never does.
pub const LAUNCHER: Duration = Duration::from_secs(5);
/// One launcher's figures, for a scrape that has ten seconds in all.
pub const STATS: Duration = Duration::from_secs(5);
/// Launchers that are asked for their figures at once.
pub const STATS_AT_ONCE: usize = 16;
/// An instruction may wait for QEMU's monitor.
pub const EXECUTE: Duration = Duration::from_secs(30);
/// Making a pod's network: a few runs of `ip` and `nft`.
pub const NETWORK: Duration = Duration::from_secs(30);
/// A verb whose caller names no time.
pub const VERB: Duration = Duration::from_secs(60);
/// Verbs and streams that are served at the same time.
pub const REQUESTS: usize = 256;
/// Chunk of a byte stream.
pub const CHUNK: usize = 16 << 10;
/// Chunks that wait in a byte stream.
pub const CHUNKS: usize = 16;
/// A silent connection is asked after this, and given up after as much again.
pub const KEEPALIVE: Duration = Duration::from_secs(5);
