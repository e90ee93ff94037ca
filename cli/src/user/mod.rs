//! The user's commands.

mod cluster;
mod console;
mod explain;
mod forward;
mod output;
mod status;
pub mod stream;
mod top;
mod verbs;
mod version;

use crate::args::Command;
pub use cluster::{connect, plain};
pub use output::print;

/// Runs one of the user's commands.
pub fn run(command: Command) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        match command {
            Command::Status(options) => status::run(options).await,
            Command::Top(options) => top::run(options).await,
            Command::Explain(options) => explain::run(options).await,
            Command::Console(options) => console::run(options).await,
            Command::Vnc(options) => forward::vnc(options).await,
            Command::PortForward(options) => forward::ports(options).await,
            Command::Start(options) => verbs::start(options).await,
            Command::Stop(options) => verbs::stop(options).await,
            Command::Restart(options) => verbs::restart(options).await,
            Command::Pause(options) => verbs::instance(options, "pause", "paused").await,
            Command::Unpause(options) => verbs::instance(options, "unpause", "unpaused").await,
            Command::Reset(options) => verbs::instance(options, "reset", "reset").await,
            Command::SoftReboot(options) => verbs::instance(options, "softreboot", "asked to reboot").await,
            Command::Crds(options) => output::definitions(&options),
            Command::Version(options) => version::run(options).await,
            other => anyhow::bail!("{other:?} is not a command of users"),
        }
    });
    // A thread may still wait for the keyboard.
    runtime.shutdown_background();
    result
}
