//! One seed of the simulated network, in a process of its own: `virtfold-sim SEED [--journal] [--mutant NAME] [--scenario NAME] [--keep FOLDER]`. Prints the outcome as
//! one line of JSON; `virtfold-chaos run --layer 2` starts one a seed. Time and randomness of the whole program are simulated.

use anyhow::Context;
use chaos_tests::{
    runs::{NETWORK_MUTANTS, Options},
    sim::run,
    world::run::Scenario,
};
use rand::SeedableRng;

fn main() -> anyhow::Result<()> {
    let mut words = std::env::args().skip(1);
    let seed = words
        .next()
        .and_then(|s| s.parse::<u64>().ok())
        .context("usage: virtfold-sim SEED [--journal] [--mutant NAME] [--scenario NAME] [--keep FOLDER]")?;
    // Before anything is drawn: the first hash map of a thread asks for its key.
    mad_turmoil::rand::set_rng(rand::rngs::StdRng::seed_from_u64(seed));
    fastrand::seed(seed);
    let _clocks = mad_turmoil::time::SimClocksGuard::init();
    let (mut options, mut keep) = (Options::default(), None);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--journal" => options.record = true,
            "--mutant" => {
                let name = words.next().context("--mutant wants a name")?;
                let of = NETWORK_MUTANTS.iter().find(|(m, _)| format!("{m:?}") == name);
                options.mutant = Some(of.with_context(|| format!("{name}: there are {NETWORK_MUTANTS:?}"))?.0);
            }
            "--scenario" => {
                let name = words.next().context("--scenario wants a name")?;
                let of = Scenario::ALL.into_iter().find(|s| format!("{s:?}") == name);
                options.scenario = Some(of.with_context(|| format!("{name}: there are {:?}", Scenario::ALL))?);
            }
            "--keep" => keep = Some(words.next().context("--keep wants a folder")?),
            other => anyhow::bail!("unknown: {other}"),
        }
    }
    if let Ok(filter) = std::env::var("RUST_LOG") {
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    }
    let outcome = match keep {
        Some(folder) => run(seed, folder.as_ref(), &options)?,
        None => {
            let folder = tempfile::tempdir()?;
            run(seed, folder.path(), &options)?
        }
    };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}
