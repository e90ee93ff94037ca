//! `virtfold launcher`: one process per virtual machine, in its pod; and `virtfold guest-probe`, which asks it about the guest.

use std::time::Duration;

use crate::args;

/// Runs until the virtual machine has ended.
pub fn run(options: args::Launcher) -> anyhow::Result<u8> {
    let mut config = launcher::Config::new(&options.namespace, &options.name, &options.vmi_uid, &options.pod_uid);
    config.share_dir = options.share_dir;
    config.grace = Duration::from_secs(options.grace_period_seconds);
    // Its log is the container's: what `kubectl logs` shows.
    let telemetry =
        telemetry::Options { service: "virtfold-launcher", log_filter: "info".into(), ..telemetry::Options::default() };
    // One thread: the hypervisor's parent-death signal is tied to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let guard = telemetry::init(&telemetry)?;
        let code = launcher::run(config).await;
        guard.shutdown().await;
        Ok::<_, anyhow::Error>(code?)
    });
    runtime.shutdown_background();
    Ok(u8::try_from(code?).unwrap_or(1))
}

/// Asks once. The exit code is that of the command in the guest, as far as it is one of a probe; 1 where there is no answer.
pub fn probe(options: args::GuestProbe) -> anyhow::Result<u8> {
    let limit = Duration::from_secs(options.timeout_seconds);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(launcher::probe::ask(&options.share_dir, options.command, limit));
    let (exit, message) = answer.map_err(anyhow::Error::msg)?;
    if !message.is_empty() {
        println!("{message}");
    }
    Ok(u8::try_from(exit).unwrap_or(1))
}
