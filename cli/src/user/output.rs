//! Tables, YAML, JSON, colours.

use std::io::{IsTerminal, Write};

use serde_json::Value;

use crate::args::{Crds, Output};
use crate::machines::{Tone, tone};

/// Prints values as JSON or YAML documents.
pub fn print(values: &[Value], output: Output) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for (i, value) in values.iter().enumerate() {
        if output == Output::Json {
            // As an error of the output, so that one who reads only the beginning is known as such.
            serde_json::to_writer_pretty(&mut out, value).map_err(std::io::Error::from)?;
            writeln!(out)?;
        } else {
            if i > 0 {
                writeln!(out, "---")?;
            }
            write!(out, "{}", serde_saphyr::to_string(value)?)?;
        }
    }
    Ok(())
}

/// `virtfold crds`.
pub fn definitions(options: &Crds) -> anyhow::Result<u8> {
    let mut objects = api::crd::all();
    if options.roles {
        objects.extend(embedded::cluster::bootstrap::roles());
        objects.extend(gateway::policy::objects(&crate::gateway::trusted()));
    }
    if let Some(place) = &options.gateway {
        objects.extend(crate::gateway::registered(place));
    }
    print(&objects, options.output)?;
    Ok(0)
}

/// Colours a status where the output is a terminal.
pub fn colour(status: &str) -> String {
    if !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some() {
        return status.to_owned();
    }
    let code = match tone(status) {
        Tone::Good => 32,
        Tone::Off => 2,
        Tone::Busy => 33,
        Tone::Bad => 31,
    };
    format!("\x1b[{code}m{status}\x1b[0m")
}

/// Splits text into its escape sequences, which take no room, and the characters between them.
fn pieces(text: &str) -> impl Iterator<Item = (bool, char)> {
    let mut inside = false;
    text.chars().map(move |c| {
        let was = inside;
        match c {
            '\x1b' => inside = true,
            'm' if inside => inside = false,
            _ => {}
        }
        (!was && c != '\x1b', c)
    })
}

/// The first columns of a line; escape sequences stay.
pub fn cut(line: &str, columns: usize) -> String {
    let mut left = columns;
    pieces(line)
        .filter_map(|(visible, c)| {
            if visible {
                left = left.checked_sub(1)?;
            }
            Some(c)
        })
        .collect()
}

/// Rows under a head, columns aligned.
pub fn lines(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let visible = |text: &str| pieces(text).filter(|(visible, _)| *visible).count();
    let mut widths: Vec<usize> = head.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(visible(cell));
        }
    }
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width.saturating_sub(visible(cell)) + 3));
        }
        line.trim_end().to_owned()
    };
    std::iter::once(&head).chain(rows).map(line).collect()
}

/// Prints rows under a head, columns aligned.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    lines(head, rows).iter().try_for_each(|line| writeln!(out, "{line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_cut_whatever_their_colours() {
        let rows = [
            vec!["a".to_owned(), "\x1b[32mRunning\x1b[0m".into(), "x".into()],
            vec!["long".into(), "b".into(), "y".into()],
        ];
        let all = lines(&["NAME", "STATUS", "LAST"], &rows);
        assert_eq!(all, ["NAME   STATUS    LAST", "a      \x1b[32mRunning\x1b[0m   x", "long   b         y"]);
        assert_eq!(cut(&all[1], 9), "a      \x1b[32mRu\x1b[0m");
        assert_eq!(cut("äöü", 2), "äö");
    }
}
