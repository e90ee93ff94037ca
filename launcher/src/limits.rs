//! Every bound of this crate, with its reason.

use std::time::Duration;

/// How long a launcher whose domain is over waits for a watcher to have taken the outcome. As KubeVirt's: long
/// enough for a node agent that is being restarted, short enough not to hold the pod.
pub const OUTCOME_DELIVERY: Duration = Duration::from_secs(15);
/// How long the gRPC server gets to flush what it has accepted once the launcher wants to exit.
pub const SERVER_FLUSH: Duration = Duration::from_secs(2);
/// The power button is pressed again after this time: guests that are still booting ignore the first ones.
pub const POWER_BUTTON_AGAIN: Duration = Duration::from_secs(5);
/// First pause before a guest that a disk error has stopped is let go on: there may be room again. Doubles, as KubeVirt's.
pub const DISK_RETRY: Duration = Duration::from_secs(10);
/// Its longest pause. A guest that has run for longer than that begins anew.
pub const DISK_RETRY_MAX: Duration = Duration::from_secs(180);
/// How long QEMU gets to end by itself once asked to (`quit`, SIGTERM) before SIGKILL.
pub const QUIT_GRACE: Duration = Duration::from_secs(3);
/// QEMU answers most commands within milliseconds; under emulation on a busy machine within seconds.
pub const QMP_TIMEOUT: Duration = Duration::from_secs(15);
/// The same for what is only asked to be told: who asks goes on without it.
pub const FIGURES: Duration = Duration::from_secs(2);
/// From exec to the first answer of the monitor. A large guest with prefaulted memory takes its time.
pub const QEMU_START: Duration = Duration::from_secs(60);
/// An image that somebody else has locked is waited for so long: whoever had it may just be ending. As a rule it is a machine that
/// goes on, and then the start fails with that.
pub const LOCK: Duration = Duration::from_secs(10);
/// Between two tries for it.
pub const LOCK_AGAIN: Duration = Duration::from_millis(500);
/// One run of qemu-img (create an overlay, check the metadata of a large image on a slow disk).
pub const QEMU_IMG: Duration = Duration::from_secs(120);
/// A picture of the screen: it travels in one message, and those take 4 MiB.
pub const SCREEN: u64 = 3 << 20;
/// A line of the monitor; `query-*` answers stay far below.
pub const QMP_LINE: usize = 4 << 20;
/// A reply of the guest agent: it comes from the guest, so nothing longer is kept in memory.
pub const AGENT_REPLY: usize = 1 << 20;
/// How long the guest agent may take over one command.
pub const AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// A freeze flushes every file system of the guest.
pub const AGENT_FREEZE_TIMEOUT: Duration = Duration::from_secs(60);
/// Unfreeze by itself where the caller of freeze named no time, as KubeVirt does.
pub const UNFREEZE_AFTER: Duration = Duration::from_secs(300);
/// Events of one hypervisor that wait to be folded in. A warm boot under SeaBIOS brings dozens of resets.
pub const EVENTS: usize = 1024;
/// Requests that wait for the domain's loop.
pub const ASKS: usize = 64;
/// Verbs whose replies are remembered; the oldest is forgotten first.
pub const VERBS: usize = 256;
/// Instructions whose answers are remembered. Ids derive from levels, so an honest controller sends a handful.
pub const INSTRUCTIONS: usize = 256;
/// How long after a soft reboot by power button a power-off still belongs to it.
pub const SOFT_REBOOT: Duration = Duration::from_secs(180);
/// Time to live of a verb that names none.
pub const VERB_TTL: Duration = Duration::from_secs(60);
/// What a new console client is shown of the past.
pub const CONSOLE_BACKLOG: usize = 64 << 10;
/// Size at which `console.log` is moved to `console.log.1`: at most twice this is on disk.
pub const CONSOLE_LOG: u64 = 1 << 20;
/// What is kept of QEMU's standard error for the outcome's message.
pub const STDERR_TAIL: usize = 4 << 10;
/// Kubernetes keeps 4096 bytes of a termination message; the outcome's other fields need some of them.
pub const OUTCOME_MESSAGE: usize = 2 << 10;
/// User data and network data together: the largest Secret that Kubernetes stores.
pub const CLOUD_INIT: usize = 1 << 20;
/// Steps that are kept for a node agent that is away.
pub const STEPS: usize = 32;
/// Characters of why one failed.
pub const STEP_MESSAGE: usize = 512;
/// Descriptors that a node agent may hand over.
pub const DESCRIPTORS: usize = 64;
/// Length of a descriptor's name.
pub const DESCRIPTOR_NAME: usize = 64;
