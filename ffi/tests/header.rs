//! The headers in `include/` say what the library has: they are generated from `src/`, and whoever changes one changes
//! the other.

use std::fs;
use std::path::{Path, PathBuf};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// A header of the library.
struct Header {
    name: &'static str,
    guard: &'static str,
    /// The headers that it needs.
    needs: &'static [&'static str],
    /// The modules, in the order in which a reader meets them.
    modules: &'static [&'static str],
    /// Where its structs are defined, beside whoever else uses them.
    structs: &'static [&'static str],
    about: &'static str,
}

const HEADERS: [Header; 2] = [
    Header {
        name: "rote.h",
        guard: "ROTE_H",
        needs: &[],
        modules: &[
            "status",
            "log",
            "framework",
            "session",
            "record",
            "recorder",
            "plan",
        ],
        structs: &[
            "../backends/callbacks/src/dl.rs",
            "../backends/callbacks/src/table.rs",
            "../backends/events/src/op.rs",
        ],
        about: "
// The C ABI of Rote: link with librote.so (-lrote) or load it at run time.
//
// Rote records the ops and collectives of a training step in a plan file, and
// replays the plan from then on. docs/frameworks.md shows how a framework uses
// this header.
//
// Results. A function that returns `int` returns 0 or a positive status that
// its documentation names, or `ROTE_ERROR`. A function that returns a pointer
// returns null on failure. `rote_last_error()` then returns the message.
//
// Text is UTF-8 and ends with a zero byte. A text that may be empty may also be
// null. Text that a function returns belongs to the library and lives until the
// calling thread's next call. The library copies text that is passed in.
//
// Handles are opaque. `rote_session_for` makes a session, and
// `rote_session_free` frees it. `rote_recorder_new` makes a recorder, and
// `rote_recorder_free` frees it.
//
// Threads. A session belongs to the thread that made it. A call from another
// thread is an error. While a session calls a function of the framework, a call
// of that function to the session is an error too. A recorder may be used by
// one thread at a time. Functions without a session or recorder may be called
// from any thread. Sessions of PyTorch (rote_torch.h) may change threads, and
// each call holds Python's GIL.
",
    },
    Header {
        name: "rote_torch.h",
        guard: "ROTE_TORCH_H",
        needs: &["rote.h"],
        modules: &["bridge", "torch_session", "torch_record", "validate"],
        structs: &[],
        about: "
// The part of Rote's C ABI for PyTorch: the bridge, and sessions and recordings
// of Python objects. rote.h has all other functions.
//
// Python objects are passed as `void *` (a `PyObject *`), so that this header
// does not need Python's. References are borrowed, unless the documentation
// says that a reference is new. Every function here must be called with the GIL
// held, and a session may be used by one thread at a time.
",
    },
];

#[test]
fn the_headers_are_fresh() {
    for header in &HEADERS {
        let path = Path::new(CRATE).join("include").join(header.name);
        let fresh = generate(header);
        if std::env::var_os("ROTE_BLESS").is_some() {
            fs::create_dir_all(path.parent().expect("a folder")).expect("made the folder");
            fs::write(&path, &fresh).expect("wrote the header");
            continue;
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
}

#[test]
fn every_constant_has_the_prefix() {
    for header in &HEADERS {
        for line in generate(header).lines() {
            if let Some(constant) = line.strip_prefix("#define ") {
                assert!(
                    constant.starts_with("ROTE_"),
                    "{line}: name it in cbindgen.toml"
                );
            }
        }
    }
}

fn generate(header: &Header) -> String {
    let mut config = cbindgen::Config::from_file(Path::new(CRATE).join("cbindgen.toml"))
        .expect("cbindgen.toml is read");
    config.header = Some(header.about.to_owned());
    config.include_guard = Some(header.guard.to_owned());
    config.includes = header.needs.iter().map(|name| (*name).to_owned()).collect();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in header.modules {
        builder = builder.with_src(readable(module));
    }
    for structs in header.structs {
        builder = builder.with_src(Path::new(CRATE).join(structs));
    }
    let mut text = Vec::new();
    builder
        .generate()
        .expect("the sources are parsed")
        .write(&mut text);
    String::from_utf8(text).expect("UTF-8")
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
