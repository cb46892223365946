//! Where a module says of what modules it is made, in a table, it names all of them and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const CRATES: [&str; 11] = [
    "ffi/src",
    "src",
    "replay/src",
    "backends/aten/src",
    "backends/callbacks/src",
    "backends/events/src",
    "tracer/src",
    "passes/src",
    "validation/src",
    "propagation/src",
    "plans/src",
];

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The modules in the first column of a table in the file's own documentation.
fn listed(text: &str) -> Option<BTreeSet<&str>> {
    let lines = text.lines().take_while(|line| line.starts_with("//!"));
    let mut rows = lines.skip_while(|line| !line.starts_with("//! | module |"));
    rows.next()?;
    let rows = rows.skip(1).take_while(|line| line.starts_with("//! |"));
    let names = rows.filter_map(|row| row.split('|').nth(1));
    let names = names.flat_map(|cell| cell.split(','));
    Some(
        names
            .map(|name| {
                name.trim()
                    .trim_matches(['[', ']', '`'])
                    .trim_start_matches("mod@")
            })
            .collect(),
    )
}

/// The modules that a file has, those for tests and for macros apart.
fn declared(text: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut apart = false;
    for line in text.lines() {
        let words = line
            .trim_start_matches("pub(crate) ")
            .trim_start_matches("pub(super) ");
        let name = words.trim_start_matches("pub ").strip_prefix("mod ");
        if let Some(name) = name.and_then(|name| name.strip_suffix(';')) {
            if !apart {
                found.insert(name);
            }
        }
        apart = line.starts_with("#[cfg(test)]") || (apart && line.starts_with("#["));
    }
    found
}

#[test]
fn tables_of_modules_are_whole() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    CRATES
        .iter()
        .for_each(|folder| files(&root.join(folder), &mut found));
    let mut tables = 0;
    let mut wrong = Vec::new();
    for path in found {
        let text = fs::read_to_string(&path).expect("a text");
        let Some(listed) = listed(&text) else {
            continue;
        };
        tables += 1;
        let declared = declared(&text);
        let lacks: Vec<_> = declared.difference(&listed).collect();
        let strange: Vec<_> = listed.difference(&declared).collect();
        if !lacks.is_empty() || !strange.is_empty() {
            wrong.push(format!(
                "{} lacks {lacks:?}, and lists {strange:?}, which it does not have",
                path.display()
            ));
        }
    }
    assert!(tables >= 8, "{tables} tables");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
