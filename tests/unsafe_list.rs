//! docs/unsafe.md lists every unsafe block with its argument, and every unsafe function with what it asks of
//! its callers. `ROTE_BLESS=1 cargo test --test unsafe_list` renews it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const FOLDERS: [&str; 11] = [
    "plans/src",
    "propagation/src",
    "validation/src",
    "passes/src",
    "tracer/src",
    "replay/src",
    "backends/aten/src",
    "backends/callbacks/src",
    "backends/events/src",
    "src",
    "ffi/src",
];
const BEGINNING: &str = "# Unsafe code\n\n\
    Every unsafe block of the library with the argument for it, and every unsafe function with what it asks \
    of its callers. This page is made from the sources; `ROTE_BLESS=1 cargo test --test unsafe_list` renews it.\n";

/// Rust files below a folder, in order.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .expect("a folder of sources")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// What a line declares, if it is a function.
fn function(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let words = before.split_whitespace();
    let known = [
        "pub",
        "pub(crate)",
        "pub(super)",
        "const",
        "unsafe",
        "extern",
        "\"C\"",
    ];
    if !words.into_iter().all(|word| known.contains(&word)) {
        return None;
    }
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    Some(&after[..end])
}

/// The text of the comment that begins at a line, joined; each line of it begins with `mark`.
fn comment(lines: &[&str], mark: &str) -> String {
    let text = lines
        .iter()
        .map_while(|line| line.trim_start().strip_prefix(mark));
    text.take_while(|line| !line.trim_start().starts_with('#'))
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// One file's part of the page; empty without unsafe code.
fn part(name: &str, text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let (mut within, mut asked) = ("(top)", String::new());
    let mut part = String::new();
    for (i, line) in lines.iter().enumerate() {
        let bare = line.trim_start();
        if bare == "/// # Safety" {
            asked = comment(&lines[i + 1..], "///");
        } else if let Some(declared) = function(bare) {
            within = declared;
            if bare
                .split("fn ")
                .next()
                .is_some_and(|before| before.contains("unsafe"))
            {
                let asked = std::mem::take(&mut asked);
                assert!(!asked.is_empty(), "{name}:{}: no `# Safety`", i + 1);
                writeln!(part, "- `{within}` asks: {asked}").expect("text");
            }
        } else if let Some(first) = bare.strip_prefix("// SAFETY:") {
            let rest = comment(&lines[i + 1..], "// ");
            let argument = format!("{} {rest}", first.trim());
            writeln!(part, "- in `{within}`: {}", argument.trim()).expect("text");
        }
    }
    if part.is_empty() {
        part
    } else {
        format!("\n## {name}\n\n{part}")
    }
}

#[test]
fn every_unsafe_block_is_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut page = BEGINNING.to_owned();
    for folder in FOLDERS {
        let mut files = Vec::new();
        sources(&root.join(folder), &mut files);
        for path in files {
            let name = path
                .strip_prefix(root)
                .expect("below the root")
                .display()
                .to_string();
            page += &part(&name, &fs::read_to_string(&path).expect("a readable file"));
        }
    }
    let path = root.join("docs/unsafe.md");
    if std::env::var_os("ROTE_BLESS").is_some() {
        fs::write(&path, &page).expect("written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/unsafe.md is out of date: run `ROTE_BLESS=1 cargo test --test unsafe_list`"
    );
}
