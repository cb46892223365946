//! `include/rote.h` says what the library has: it is generated from `src/`, and
//! whoever changes one changes the other.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The modules, in the order in which a reader of the header meets them.
const MODULES: [&str; 6] = ["status", "log", "bridge", "session", "record", "plan"];

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
    let line = stale.lines().zip(fresh.lines()).take_while(|(old, new)| old == new).count();
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

fn generate() -> String {
    let config = cbindgen::Config::from_file(Path::new(CRATE).join("cbindgen.toml")).expect("cbindgen.toml is read");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in MODULES {
        builder = builder.with_src(readable(module));
    }
    let mut header = Vec::new();
    builder.generate().expect("the sources are parsed").write(&mut header);
    String::from_utf8(header).expect("UTF-8")
}

/// A copy of a module as cbindgen can read it: it sees no functions that a
/// macro makes, so those of `recording_fn!` are written out.
fn readable(module: &str) -> PathBuf {
    const CALL: &str = "recording_fn! {\n";
    let source = fs::read_to_string(Path::new(CRATE).join("src").join(module).with_extension("rs")).expect("read");
    let mut parts = source.split(CALL);
    let mut written = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (call, rest) = part.split_once("\n}\n").expect("the call ends");
        let start = call.find("rote_").expect("a name");
        let (docs, signature) = call.split_at(start);
        let (name, arguments) = signature.split_once("(recording").expect("arguments");
        let arguments = &arguments[..arguments.find(") {").expect("a body")];
        write!(
            written,
            "{docs}///\n/// # Safety\n/// Pointers must be live, texts C strings, and the GIL held.\n\
             #[unsafe(no_mangle)]\n\
             pub unsafe extern \"C\" fn {name}(session: *mut RoteSession{arguments}) -> c_int {{}}\n{rest}"
        )
        .expect("written");
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(module).with_extension("rs");
    fs::write(&path, written).expect("written");
    path
}
