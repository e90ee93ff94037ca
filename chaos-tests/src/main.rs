//! `virtfold-chaos`: the second binary of the workspace, for tests alone.
//!
//! `virtfold-chaos janitor DATA` waits until its standard input ends, which happens when the test program that started it is gone in
//! whatever way, and then takes down the cluster whose data folder is DATA.

use anyhow::{Result, bail};
use std::{io::Read, path::Path};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["janitor", data] => {
            let mut sink = Vec::new();
            std::io::stdin().read_to_end(&mut sink)?;
            chaos_tests::e2e::leaks::sweep(Path::new(data))
        }
        _ => bail!("usage: virtfold-chaos janitor DATA"),
    }
}
