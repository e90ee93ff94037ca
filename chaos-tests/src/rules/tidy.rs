//! What no file of the repository may contain, and that the links in its pages lead somewhere.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// A source file with more lines than this should have been several.
const LINES_MAX: usize = 900;
/// Nothing large belongs into the history.
const BYTES_MAX: usize = 1 << 20;

/// Words that may stand nowhere, in halves so that they do not stand here.
const WORDS: &[(&str, &str, &str)] = &[
    ("pypi", ".org", "name packages, not registry hosts"),
    ("pythonhosted", ".org", "name packages, not registry hosts"),
    ("crates", ".io", "name packages, not registry hosts"),
    ("registry.npmjs", ".org", "name packages, not registry hosts"),
    ("proxy.golang", ".org", "name packages, not registry hosts"),
    ("maven", ".org", "name packages, not registry hosts"),
    ("deb.debian", ".org", "name packages, not registry hosts"),
    ("security.debian", ".org", "name packages, not registry hosts"),
    ("/work", "/main", "a path of one machine"),
    ("/work", "/shared", "a path of one machine"),
    ("/tmp/", "brief", "a path of one machine"),
    ("/root/", ".", "a path of one machine"),
    ("<<<<", "<<< ", "an unfinished merge"),
    (">>>>", ">>> ", "an unfinished merge"),
];

/// Words that may not stand in Rust code.
const RUST_WORDS: &[(&str, &str, &str)] = &[
    ("todo", "!(", "finish it"),
    ("unimplemented", "!(", "finish it"),
    ("dbg", "!(", "left over"),
    ("#[ig", "nore]", "a test that does not run proves nothing; give a reason, or print SKIPPED and why"),
];

/// A file of the repository.
pub struct File {
    /// Its path from the root.
    pub path: String,
    /// What is in it.
    pub text: String,
}

/// All text files that git knows or would add.
pub fn files() -> Result<Vec<File>> {
    let root = super::root();
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&root)
        .output()
        .context("start git")?;
    if !listed.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&listed.stderr));
    }
    let mut files = Vec::new();
    for path in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|path| !path.is_empty()) {
        // A file that is listed and not there was deleted a moment ago.
        if let Ok(bytes) = std::fs::read(root.join(path)) {
            if bytes.len() > BYTES_MAX {
                bail!("{path} has {} bytes: nothing over {BYTES_MAX} belongs here", bytes.len());
            }
            if let Ok(text) = String::from_utf8(bytes) {
                files.push(File { path: path.to_owned(), text });
            }
        }
    }
    Ok(files)
}

/// What is wrong with one file, one sentence each. `exists` tells whether a path from the root leads to something.
pub fn violations(file: &File, exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut wrong = Vec::new();
    let rust = file.path.ends_with(".rs");
    let generated = file.path.ends_with("Cargo.lock") || file.path == "LICENSE" || file.path.ends_with(".snap");
    if !generated {
        for (number, line) in file.text.lines().enumerate() {
            let words = WORDS.iter().chain(if rust { RUST_WORDS } else { &[] });
            for (start, end, why) in words {
                let word = format!("{start}{end}");
                if line.contains(&word) {
                    wrong.push(format!("{}:{}: '{word}': {why}", file.path, number + 1));
                }
            }
        }
        let lines = file.text.lines().count();
        if rust && lines > LINES_MAX {
            wrong.push(format!("{}: {lines} lines, more than {LINES_MAX}: split it by topic", file.path));
        }
    }
    if file.path.ends_with(".md") {
        for link in links(&file.text) {
            if let Some(target) = local_target(&file.path, link)
                && !exists(&target)
            {
                wrong.push(format!("{}: the link to '{link}' leads nowhere", file.path));
            }
        }
    }
    wrong
}

/// Rows of a page's tables (but for their heads) whose last column names no test, or one that no Rust file has. A test is
/// named by its path in code quotes: `crate` `module::test`.
pub fn rows_without_test(page: &str, files: &[File]) -> Vec<String> {
    let rust: Vec<&File> = files.iter().filter(|file| file.path.ends_with(".rs")).collect();
    let known = |name: &str| rust.iter().any(|file| file.text.contains(&format!("fn {name}(")));
    let lines: Vec<&str> = page.lines().collect();
    let is_head = |n: usize| lines.get(n + 1).is_some_and(|next| next.starts_with("|-"));
    let mut wrong = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        if !line.starts_with('|') || line.starts_with("|-") || is_head(n) {
            continue;
        }
        let last = line.trim_end_matches('|').rsplit('|').next().unwrap_or_default().trim();
        let names: Vec<&str> =
            last.split('`').filter_map(|part| part.rsplit_once("::")).map(|(_, name)| name).collect();
        if names.is_empty() {
            wrong.push(format!("line {}: '{last}' names no test", n + 1));
        }
        wrong.extend(names.iter().filter(|t| !known(t)).map(|t| format!("line {}: there is no test '{t}'", n + 1)));
    }
    wrong
}

/// The targets of the links in a Markdown text, outside of code blocks.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code || line.starts_with("    ") {
            continue;
        }
        for piece in line.split("](").skip(1) {
            if let Some(end) = piece.find(')') {
                found.push(&piece[..end]);
            }
        }
    }
    found
}

/// The path from the root that a link in a page means; `None` for links that leave the repository or stay in the page.
fn local_target(page: &str, link: &str) -> Option<String> {
    let link = link.split('#').next().unwrap_or_default();
    if link.is_empty() || link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let mut parts: Vec<&str> = match link.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => Path::new(page).parent()?.to_str()?.split('/').filter(|part| !part.is_empty()).collect(),
    };
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}
