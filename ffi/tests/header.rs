//! What C, C++ and Python are told of the library is generated: the headers in `include/`, the bridge's `abi.h` and
//! `python/rote/_numbers.py`. `ROTE_BLESS=1` writes them anew.

use std::fs;
use std::path::{Path, PathBuf};

mod numbers;

use numbers::{Numbers, cpp_classes, cpp_functions, cpp_struct};

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
            "propagate",
            "question",
            "sharding",
            "partial",
        ],
        structs: &[
            "../backends/callbacks/src/dl.rs",
            "../backends/callbacks/src/table.rs",
            "../backends/events/src/op.rs",
            "../backends/events/src/question.rs",
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
// one thread at a time, and so may a propagator. Other functions may be called
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
        is_fresh(&format!("include/{}", header.name), &generate(header));
    }
}

#[test]
fn the_header_of_the_bridge_is_fresh() {
    is_fresh("../backends/aten/bridge/abi.h", &abi());
}

#[test]
fn the_numbers_of_python_are_fresh() {
    is_fresh("python/rote/_numbers.py", &python());
}

fn is_fresh(path: &str, fresh: &str) {
    let path = Path::new(CRATE).join(path);
    if std::env::var_os("ROTE_BLESS").is_some() {
        return fs::write(&path, fresh).expect("is written");
    }
    let stale = fs::read_to_string(&path).unwrap_or_default();
    let same = |(old, new): &(&str, &str)| old == new;
    let line = stale.lines().zip(fresh.lines()).take_while(same).count();
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
    if header.name == "rote.h" {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("numbers.rs");
        fs::write(&copy, numbers_of_c()).expect("written");
        builder = builder.with_src(copy);
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

fn binding_kinds() -> Numbers {
    Numbers::of_enum("plans/src/binding.rs", "BindingKind")
}

fn guard_kinds() -> Numbers {
    Numbers::of_enum("plans/src/binding.rs", "GuardKind")
}

fn comparisons() -> Numbers {
    Numbers::of_enum("plans/src/binding.rs", "Comparison")
}

fn fact_kinds() -> Numbers {
    Numbers::of_enum("backends/aten/src/fact_kind.rs", "FactKind")
}

/// Numbers that C is told of beside those of the modules.
fn numbers_of_c() -> String {
    [
        binding_kinds().c("u32", "ROTE_BINDING_"),
        comparisons().c("u32", "ROTE_COMPARE_"),
        guard_kinds().c("u32", "ROTE_GUARD_"),
        Numbers::of_enum("plans/src/instr.rs", "CollectiveKind").c("u32", "ROTE_"),
        Numbers::of_enum("plans/src/placement.rs", "ReduceOp").c("i32", "ROTE_"),
    ]
    .concat()
}

/// What the bridge is told.
fn abi() -> String {
    let ops = "backends/events/src/op.rs";
    let question = "backends/events/src/question.rs";
    let frontend = "replay/src/frontend.rs";
    let (words, sys) = ("backends/aten/src/words.rs", "backends/aten/src/sys.rs");
    let (fields, modes) = (
        Numbers::of_enum(words, "Field"),
        Numbers::of_enum(words, "Mode"),
    );
    let parts = [
        Numbers::of_constants(sys, None, "u32").cpp_constants("uint32_t"),
        Numbers::of_constants(ops, Some("tag"), "u8")
            .about("The tag of an argument: which member of its union is set.")
            .cpp("Tag", "uint8_t", "k"),
        Numbers::of_enum(sys, "Into").cpp("Into", "uint8_t", "kInto"),
        Numbers::of_enum(frontend, "Part").cpp("Part", "uint32_t", "kPart"),
        Numbers::of_constants(ops, None, "u8")
            .about("Flags of a tensor.")
            .cpp("TensorFlags", "uint8_t", "k"),
        Numbers::of_constants("plans/src/value.rs", Some(""), "Marks")
            .about("What a plan says that a value is marked as.")
            .cpp("Marks", "uint8_t", "kMarked"),
        Numbers::of_constants(ops, None, "u32")
            .about("Flags of an op.")
            .cpp("OpFlags", "uint32_t", "k"),
        fields.cpp("Field", "uint32_t", "kField"),
        modes.cpp("Mode", "uint32_t", "kMode"),
        modes.cpp_count("kModes"),
        fact_kinds().cpp("FactKind", "uint32_t", "k"),
        fact_kinds().cpp_count("kFactKinds"),
        cpp_struct("plans/src/binding.rs", "Anchor"),
        cpp_struct(frontend, "WordSubject"),
        cpp_struct(ops, "Tensor"),
        cpp_struct(ops, "Arg"),
        cpp_struct(ops, "Op"),
        Numbers::of_constants(question, Some("kind"), "u8")
            .about("What a mesh dim holds of a tensor.")
            .cpp("PlacementKind", "uint8_t", "k"),
        Numbers::of_enum("plans/src/placement.rs", "ReduceOp")
            .cpp("ReduceOp", "uint8_t", "kReduce"),
        cpp_struct(question, "Placement"),
        cpp_struct(question, "Spec"),
        cpp_struct(question, "Written"),
        cpp_struct(question, "StatedRule"),
        cpp_struct(question, "Question"),
        cpp_struct(question, "Answer"),
        cpp_struct(sys, "Sink"),
        cpp_classes(sys),
        cpp_functions(sys, "rote_bridge_"),
    ];
    format!(
        "// What crosses the border between the bridge and Rust.\n\
         // Generated by `ROTE_BLESS=1 cargo test -p rote-ffi --test header`. Edit backends/ instead.\n\
         #pragma once\n#include <cstdint>\n\nstruct _object;\nusing PyObject = _object;\n\nnamespace rote {{\n\n{}\n}}  // namespace rote\n",
        parts.join("\n")
    )
}

/// The numbers that Python is told of.
fn python() -> String {
    let parts = [
        Numbers::of_constants("ffi/src/session.rs", None, "c_int")
            .about("What becomes of a call.")
            .python(""),
        Numbers::of_constants("ffi/src/record.rs", None, "c_int")
            .about("What becomes of a recording.")
            .python(""),
        Numbers::of_constants("ffi/src/record.rs", None, "u32")
            .about("No index, and kinds of followed floats.")
            .python(""),
        binding_kinds().python("BINDING_"),
        comparisons().python("COMPARE_"),
        guard_kinds().python(""),
        fact_kinds().python(""),
    ];
    format!(
        "\"\"\"Numbers that the library and Python exchange.\n\n\
         Generated by `ROTE_BLESS=1 cargo test -p rote-ffi --test header`. Edit the Rust sources instead.\n\"\"\"\n{}",
        parts.concat()
    )
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
