//! Tables, YAML, JSON, colours.

use std::io::{IsTerminal, Write};

use serde_json::Value;

use crate::args::{Crds, Output};

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
    let code = match status {
        "Running" | "True" => 32,
        "Stopped" | "Succeeded" | "Paused" => 2,
        "Starting"
        | "Stopping"
        | "Provisioning"
        | "WaitingForVolumeBinding"
        | "Pending"
        | "Scheduling"
        | "Scheduled" => 33,
        _ => 31,
    };
    format!("\x1b[{code}m{status}\x1b[0m")
}

/// Prints rows under a head, columns aligned.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> std::io::Result<()> {
    let visible = |text: &str| {
        // Colour codes take no room.
        let mut inside = false;
        text.chars()
            .filter(|c| {
                let was = inside;
                match c {
                    '\x1b' => inside = true,
                    'm' if inside => inside = false,
                    _ => {}
                }
                !was && *c != '\x1b'
            })
            .count()
    };
    let mut widths: Vec<usize> = head.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(visible(cell));
        }
    }
    let mut out = std::io::stdout().lock();
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width.saturating_sub(visible(cell)) + 3));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
