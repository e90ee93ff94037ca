//! `virtfold replay`: runs journals through the machines of this build, and shows where they do something else now.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use state::Timestamp;
use state::journal::{CellKind, Piece, pieces};
use state::replay::{Difference, Filter, Replay, Report, What};

use crate::Usage;
use crate::args::Output;

/// How often the progress is shown.
const PROGRESS: Duration = Duration::from_millis(200);
/// Places of a difference that are shown.
const PLACES: usize = 20;

/// `virtfold replay`.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 every command is the same, 1 something differs, 2 something cannot be read or the \
    command line is wrong."
)]
pub struct Options {
    /// Journals: files, or folders of them (DATA/journal has those of all components)
    #[arg(value_name = "FILE|DIR", required = true)]
    pub paths: Vec<PathBuf>,
    /// Stop at this time (RFC 3339), or at this step of the cell
    #[arg(long, value_name = "TIME|SEQ")]
    pub until: Option<String>,
    /// Only this cell: vm/NAMESPACE/NAME, set/NAMESPACE/NAME, node/NAME, agent/UID-OF-POD
    #[arg(long, value_name = "KIND/NAME")]
    pub cell: Option<String>,
    /// How to print
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
}

/// What was found in the files beside records.
#[derive(Default)]
struct Found {
    files: u64,
    bytes: u64,
    blocks: u64,
    damage: Vec<Damage>,
}

#[derive(serde::Serialize)]
struct Damage {
    file: PathBuf,
    offset: usize,
    bytes: usize,
}

/// Runs it. Whatever goes wrong is exit code 2, so that 1 means a difference and nothing else.
pub fn run(options: &Options) -> u8 {
    let result = replay(options).and_then(|(found, report, took)| {
        let code = code(&found, &report);
        let printed = match options.output {
            Some(output) => crate::user::print(&[as_json(&found, &report, code)], output),
            None => text(&found, &report, took, code).map_err(Into::into),
        };
        match printed {
            Err(e) if e.downcast_ref::<io::Error>().is_none_or(|e| e.kind() != io::ErrorKind::BrokenPipe) => Err(e),
            Ok(()) | Err(_) => Ok(code),
        }
    });
    result.unwrap_or_else(|error| {
        eprintln!("virtfold: {error:#}");
        2
    })
}

fn code(found: &Found, report: &Report) -> u8 {
    match () {
        () if report.differing > 0 => 1,
        () if found.blocks == 0 || report.unreadable > 0 || report.compared == 0 => 2,
        () => 0,
    }
}

fn replay(options: &Options) -> anyhow::Result<(Found, Report, Duration)> {
    let mut files = vec![];
    for path in &options.paths {
        files.extend(telemetry::journal::segments(path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    // The segments of one journal in the order in which they were written, in whatever order they were named.
    files.sort();
    files.dedup();
    let total: u64 = files.iter().filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
    let mut progress = Progress::new(total);
    let mut replay = Replay::new(filter(options)?);
    let mut found = Found::default();
    let began = Instant::now();
    for file in files {
        let bytes = match std::fs::read(&file) {
            Ok(bytes) => bytes,
            // Whoever writes it has dropped it since.
            Err(e) if e.kind() == io::ErrorKind::NotFound && !options.paths.contains(&file) => continue,
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", file.display())),
        };
        found.files += 1;
        found.bytes += bytes.len() as u64;
        for piece in pieces(&bytes) {
            match piece {
                Piece::Block(block) => {
                    found.blocks += 1;
                    replay.block(&block);
                    progress.show(found.bytes - bytes.len() as u64, replay.report());
                }
                Piece::Damage { offset, bytes } => found.damage.push(Damage { file: file.clone(), offset, bytes }),
            }
        }
    }
    progress.end();
    Ok((found, replay.finish(), began.elapsed()))
}

fn filter(options: &Options) -> anyhow::Result<Filter> {
    let mut filter = Filter::default();
    if let Some(cell) = &options.cell {
        filter.cell = Some(parse_cell(cell)?);
    }
    if let Some(until) = &options.until {
        match (until.parse::<u64>(), Timestamp::parse(until)) {
            (Ok(_), _) if filter.cell.is_none() => {
                return Err(Usage("a step is one of a cell: --until SEQ needs --cell".into()).into());
            }
            (Ok(seq), _) => filter.until_seq = Some(seq),
            // A time without fractions means its whole second, as it is printed.
            (Err(_), Some(at)) if at.0 % 1000 == 0 => filter.until = Some(Timestamp(at.0 + 999)),
            (Err(_), Some(at)) => filter.until = Some(at),
            (Err(_), None) => {
                return Err(
                    Usage(format!("--until {until}: neither a step nor a time like 2026-01-31T10:00:00Z")).into()
                );
            }
        }
    }
    Ok(filter)
}

fn parse_cell(text: &str) -> anyhow::Result<(CellKind, String)> {
    let wrong =
        || Usage(format!("--cell {text}: vm/NAMESPACE/NAME, set/NAMESPACE/NAME, node/NAME or agent/UID is expected"));
    let (kind, name) = text.split_once('/').filter(|(_, name)| !name.is_empty()).ok_or_else(wrong)?;
    let kind = kind.to_lowercase();
    let kind = match kind.as_str() {
        "vmi" => CellKind::Vm,
        _ => CellKind::ALL.into_iter().find(|k| k.name().to_lowercase() == kind).ok_or_else(wrong)?,
    };
    let named_in_default = matches!(kind, CellKind::Vm | CellKind::Set) && !name.contains('/');
    Ok((kind, if named_in_default { format!("default/{name}") } else { name.to_owned() }))
}

fn as_json(found: &Found, report: &Report, code: u8) -> serde_json::Value {
    json!({
        "same": code == 0,
        "build": crate::journal::build(),
        "files": found.files,
        "bytes": found.bytes,
        "blocks": found.blocks,
        "damage": found.damage,
        "report": report,
    })
}

fn text(found: &Found, report: &Report, took: Duration, code: u8) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if let Some(first) = report.differences.first() {
        difference(&mut out, first)?;
        let more = report.differing - 1;
        if more > 0 {
            writeln!(out, "{more} more cell(s) differ; -o json lists them.\n")?;
        }
    }
    let ours = crate::journal::build();
    for build in report.builds.keys().filter(|b| **b != ours) {
        writeln!(out, "recorded by build {build}; this is build {ours}")?;
    }
    if let Some(first) = &report.first_unreadable {
        writeln!(out, "{} record(s) cannot be read by this build; the first: {first}", report.unreadable)?;
    }
    for d in found.damage.iter().take(PLACES) {
        writeln!(out, "{}: {} byte(s) at {} are damaged", d.file.display(), d.bytes, d.offset)?;
    }
    let damaged: usize = found.damage.iter().map(|d| d.bytes).sum();
    writeln!(
        out,
        "{} record(s) of {} cell(s) in {} file(s), {} bytes, {damaged} of them damaged",
        report.records, report.cells, found.files, found.bytes
    )?;
    writeln!(
        out,
        "{} step(s) and {} command(s) compared in {:.1} s; {} step(s) passed over",
        report.compared,
        report.commands,
        took.as_secs_f64(),
        report.passed_over
    )?;
    if report.gaps + report.missing_blocks + report.dropped > 0 {
        writeln!(
            out,
            "{} gap(s): {} block(s) missing, {} record(s) dropped by the component",
            report.gaps, report.missing_blocks, report.dropped
        )?;
    }
    let verdict = match code {
        0 => "the same".to_owned(),
        1 => format!("{} cell(s) differ", report.differing),
        _ if found.blocks == 0 => "no journal is there".to_owned(),
        _ if report.unreadable > 0 => "not all of it can be read".to_owned(),
        _ => "there is nothing to compare".to_owned(),
    };
    writeln!(out, "replay: {verdict}")
}

fn difference(out: &mut impl Write, d: &Difference) -> io::Result<()> {
    let by = &d.recorded_by;
    let epoch = by.epoch.map(|e| format!(", epoch {e}")).unwrap_or_default();
    let what = match d.what {
        What::Commands => "what follows from this event differs",
        What::State => "the cell before this event differs",
    };
    writeln!(out, "{} {}, step {}, {}: {what}", d.kind.name(), d.cell, d.seq, d.at)?;
    writeln!(out, "  recorded by {} (build {}, process {}{epoch})", by.component, by.build, by.process)?;
    let event = serde_json::to_string_pretty(&d.event).map_err(io::Error::other)?;
    writeln!(out, "  event:\n    {}", event.replace('\n', "\n    "))?;
    for place in d.diff.iter().take(PLACES) {
        writeln!(out, "  {place}")?;
    }
    if d.diff.len() > PLACES {
        writeln!(out, "  and {} more place(s)", d.diff.len() - PLACES)?;
    }
    writeln!(out)
}

/// A line that is written over, on terminals.
struct Progress {
    total: u64,
    shown: Option<Instant>,
    on: bool,
}

impl Progress {
    fn new(total: u64) -> Self {
        Self { total, shown: None, on: io::stderr().is_terminal() }
    }

    fn show(&mut self, bytes: u64, report: &Report) {
        if !self.on || self.shown.is_some_and(|at| at.elapsed() < PROGRESS) {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = (bytes * 100).checked_div(self.total).unwrap_or(0);
        eprint!(
            "\r{percent:3} %  {} steps, {} cells, {} differ\x1b[K",
            report.compared, report.cells, report.differing
        );
    }

    fn end(&self) {
        if self.shown.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use state::vm::{Input, Vm};
    use state::{Event, Key};
    use telemetry::journal::{Config, Journal};

    fn options(paths: &[&std::path::Path], until: Option<&str>, cell: Option<&str>) -> Options {
        Options {
            paths: paths.iter().map(|p| (*p).to_owned()).collect(),
            until: until.map(Into::into),
            cell: cell.map(Into::into),
            output: None,
        }
    }

    #[test]
    fn exit_codes_tell_the_same_from_a_difference_from_what_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(run(&options(&[dir.path()], None, None)), 2, "nothing is there");
        assert_eq!(run(&options(&[&dir.path().join("x")], None, None)), 2);
        let mut journal = Journal::open(Some(Config::new(dir.path().into(), "controller", "b")), "p", None);
        let mut vm = Vm::new(Key::new("default", "web"));
        for at in 1..=3 {
            journal.step("default/web", None, &mut vm, &Event::new(Timestamp(at * 1000), Input::Elapsed));
        }
        drop(journal);
        let code = |until: Option<&str>, cell: Option<&str>| run(&options(&[dir.path()], until, cell));
        assert_eq!(code(None, None), 0);
        for cell in ["vm/web", "vmi/default/web", "Vm/default/web"] {
            assert_eq!(code(Some("2"), Some(cell)), 0);
        }
        assert_eq!(code(Some("1970-01-01T00:00:02Z"), None), 0);
        for (until, cell) in [
            (Some("2"), None),
            (Some("soon"), None),
            (None, Some("vm")),
            (None, Some("pod/x")),
            (None, Some("vm/other")),
            (Some("1970-01-01T00:00:00Z"), None),
        ] {
            assert_eq!(code(until, cell), 2, "{until:?} {cell:?}");
        }
        // A file that is none, and one that is damaged at its end.
        let garbage = dir.path().join("garbage");
        std::fs::write(&garbage, "VFJ2 and nothing else").unwrap();
        assert_eq!(run(&options(&[&garbage], None, None)), 2);
        let file = telemetry::journal::segments(dir.path()).unwrap().pop().unwrap();
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, [&whole[..], b"VFJ2 torn"].concat()).unwrap();
        assert_eq!(run(&options(&[&file, &file], None, None)), 0);
        // The machine of then asked for something.
        let Some(Piece::Block(block)) = pieces(&whole).next() else { panic!() };
        let mut lines: Vec<u8> = block.raw().flat_map(|l| [l, b"\n"].concat()).collect();
        let wake =
            String::from_utf8(lines).unwrap().replacen("\"commands\":[]", "\"commands\":[{\"Wake\":{\"at\":9}}]", 1);
        lines = wake.into_bytes();
        let hurt = state::journal::Encoder::new().unwrap().block(&block.head, &lines).unwrap();
        std::fs::write(&file, hurt).unwrap();
        assert_eq!(code(None, None), 1);
    }
}
