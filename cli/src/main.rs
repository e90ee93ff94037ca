//! The `virtfold` binary: the supervisor, every component as a subcommand, and the user's commands.

mod args;
mod component;
mod controller;
mod gateway;
mod journal;
mod launcher;
mod machines;
mod node_agent;
mod observed;
mod page;
mod replay;
mod simulate_nodes;
mod up;
mod user;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};

use args::{Cli, Command};

/// The command line was understood and makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|word| word == "launcher") {
        return match args::Alone::try_parse_from(&arguments[1..]) {
            Ok(alone) => end(launcher::run(alone.launcher)),
            Err(error) => misused(&error),
        };
    }
    let name = arguments.into_iter().next().unwrap_or_default();
    let mut command = Cli::command();
    // `kubectl virtfold ...` runs us under that name.
    if std::path::Path::new(&name).file_name().is_some_and(|n| n == "kubectl-virtfold") {
        command = command.bin_name("kubectl virtfold");
    }
    let parsed = command.clone().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return misused(&error),
    };
    telemetry::clock::follow();
    // One provider for all TLS of the process; a second call in one process would be the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match cli.command {
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut command, "virtfold", &mut std::io::stdout());
            Ok(0)
        }
        Command::Up(options) => up::run(options),
        Command::Down(options) => up::down::run(&options),
        Command::Replay(options) => Ok(replay::run(&options)),
        Command::Controller(options) => controller::run(&options),
        Command::Gateway(options) => gateway::run(&options),
        Command::SimulateNodes(options) => simulate_nodes::run(options),
        Command::NodeAgent { config } => node_agent::run(&config),
        Command::Launcher(options) => launcher::run(options),
        Command::GuestProbe(options) => launcher::probe(options),
        other => user::run(other),
    };
    end(result)
}

fn misused(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

fn end(result: anyhow::Result<u8>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Somebody who reads only the beginning of our output is no failure of ours.
            if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) {
                return ExitCode::SUCCESS;
            }
            eprintln!("virtfold: {error:#}");
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}
