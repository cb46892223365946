//! `include/rote.h` says what the library has: it is generated from `src/`, and
//! whoever changes one changes the other.

use std::fs;
use std::path::{Path, PathBuf};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The modules, in the order in which a reader of the header meets them.
const MODULES: [&str; 8] = [
    "status", "log", "bridge", "session", "record", "recorder", "plan", "validate",
];

/// Where the structs of the header are defined, beside whoever else uses them.
const STRUCTS: &str = "../backends/aten/src/op.rs";

#[test]
fn the_header_is_fresh() {
    let path = Path::new(CRATE).join("include/rote.h");
    let fresh = generate();
    if std::env::var_os("ROTE_BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made the folder");
        fs::write(&path, &fresh).expect("wrote the header");
        return;
    }
    let stale = fs::read_to_string(&path).unwrap_or_default();
    let line = stale
        .lines()
        .zip(fresh.lines())
        .take_while(|(old, new)| old == new)
        .count();
    assert!(
        stale == fresh,
        "{} is stale from line {} on\n  there:  {}\n  should: {}\n\
         regenerate it: ROTE_BLESS=1 cargo test -p rote-ffi --test header",
        path.display(),
        line + 1,
        stale.lines().nth(line).unwrap_or("(end)"),
        fresh.lines().nth(line).unwrap_or("(end)"),
    );
}

#[test]
fn every_constant_has_the_prefix() {
    for line in generate().lines() {
        if let Some(constant) = line.strip_prefix("#define ") {
            assert!(
                constant.starts_with("ROTE_"),
                "{line}: name it in cbindgen.toml"
            );
        }
    }
}

fn generate() -> String {
    let config = cbindgen::Config::from_file(Path::new(CRATE).join("cbindgen.toml"))
        .expect("cbindgen.toml is read");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in MODULES {
        builder = builder.with_src(readable(module));
    }
    builder = builder.with_src(Path::new(CRATE).join(STRUCTS));
    let mut header = Vec::new();
    builder
        .generate()
        .expect("the sources are parsed")
        .write(&mut header);
    String::from_utf8(header).expect("UTF-8")
}

/// A copy of a module as a reader of C needs it: the subject of the module above
/// its first function, and what Rust calls safety called by what it is.
fn readable(module: &str) -> PathBuf {
    let path = Path::new(CRATE).join("src").join(module);
    let source = fs::read_to_string(path.with_extension("rs")).expect("read");
    let subject = source.lines().next().unwrap_or_default();
    let subject = subject
        .trim_start_matches("//! ")
        .trim_end_matches('.')
        .to_owned();

    let text = source;
    let function = text.find("\n#[unsafe(no_mangle)]").expect("a function");
    let is_doc = |line: &&str| line.starts_with("///");
    let docs: usize = text[..function]
        .rsplit('\n')
        .take_while(is_doc)
        .map(|line| line.len() + 1)
        .sum();
    let (before, after) = text.split_at((function + 1).saturating_sub(docs));
    let text = format!("{before}/// ---- {subject} ----\n///\n{after}");

    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(module);
    let copy = copy.with_extension("rs");
    fs::write(&copy, text.replace("/// # Safety\n", "/// Requires:\n")).expect("written");
    copy
}
