//! A C program meets `librote.so` through `include/rote.h`: it compiles without
//! a warning, and wrong calls give errors, not crashes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rote_plans::{Binding, BindingKind, Instr, NONE, Plan, PlanFile};

use c::{CRATE, SCRATCH, Succeeds, compile, library};

mod c;
#[path = "../../plans/tests/sample/mod.rs"]
mod sample;

#[test]
fn a_c_program_runs_against_the_library() {
    let directory = tempfile::tempdir_in(SCRATCH).expect("temporary directory");
    let program = directory.path().join("c_abi");
    let version = format!("-DROTE_EXPECTED_VERSION=\"{}\"", env!("CARGO_PKG_VERSION"));
    c::program("ffi/tests/c_abi.c", &[&version], &program);

    let recorded = directory.path().join("recorded.rote");
    let (garbage, plan) = (
        directory.path().join("garbage.rote"),
        directory.path().join("plan.rote"),
    );
    fs::write(
        &garbage,
        "no plan, but longer than a header is: ".repeat(10),
    )
    .expect("written");
    sample::small().write(&plan).expect("written");
    let run = Command::new(program)
        .arg(directory.path().join("missing.rote"))
        .args([garbage, plan, stub_bridge(directory.path())])
        .arg(directory.path().join("plans"))
        .arg(&recorded)
        .output()
        .expect("the program runs");
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success(), "{}: {said}", run.status);
    assert_eq!(said, "", "no wrong call makes the library print");

    let plan = PlanFile::open(recorded).expect("opens").to_plan();
    let program: Vec<String> = plan
        .instrs
        .iter()
        .map(|instr| brief(&plan, instr))
        .collect();
    // x, w, x * w, its sum over the ranks, relu of that.
    let expected = [
        "aten::mul %2",
        "AllReduce %2 %3",
        "free %2",
        "wait %3",
        "aten::relu %4",
        "free %3",
    ];
    assert_eq!(program, expected);
    let binding = |binding: &Binding| (binding.kind, plan.str(binding.path), binding.spec != NONE);
    let bindings: Vec<_> = plan.bindings.iter().map(binding).collect();
    assert_eq!(
        bindings,
        [
            (BindingKind::Arg, "x", true),
            (BindingKind::State, "w", false)
        ]
    );
    assert_eq!(plan.outputs[0].value, 4);
    assert_eq!(plan.result, r#"{"t": 0}"#);
    assert_eq!(plan.dims(plan.groups[0].ranks), [0, 1]);
    assert_eq!(plan.fingerprint.rank, 1);
}

#[test]
fn the_headers_are_cpp_too() {
    compile("CXX", "c++", "c++11")
        .args(["-x", "c++", "-fsyntax-only"])
        .arg(Path::new(CRATE).join("include/rote_torch.h"))
        .succeeds();
}

#[test]
fn the_headers_declare_exactly_what_the_library_exports() {
    let symbols = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=just-symbols"])
        .arg(library())
        .succeeds();
    let exported: BTreeSet<&str> = symbols.lines().collect();

    let read = |name: &str| fs::read_to_string(Path::new(CRATE).join(name)).expect("read");
    let header = read("include/rote.h") + &read("include/rote_torch.h");
    let code: Vec<&str> = header.lines().filter(|l| !l.starts_with("//")).collect();
    let code = code.join("\n");
    let declared: BTreeSet<&str> = code
        .split(|c: char| !c.is_alphanumeric() && c != '_' && c != '(')
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("rote_"))
        .collect();

    assert_eq!(declared, exported);
}

/// An instruction in few words.
fn brief(plan: &Plan, instr: &Instr) -> String {
    match instr {
        Instr::Local { op, outs, .. } => format!("{} %{}", plan.str(*op), plan.ids(*outs)[0]),
        Instr::Collective(c) => format!("{:?} %{} %{}", c.kind, c.input, c.output),
        Instr::Wait { value } => format!("wait %{value}"),
        Instr::Free { value } => format!("free %{value}"),
        other => format!("{other:?}"),
    }
}

/// A bridge that has every function and does nothing.
fn stub_bridge(directory: &Path) -> PathBuf {
    let bridge = directory.join("stub_bridge.so");
    compile("CC", "cc", "c11")
        .args(["-shared", "-fPIC"])
        .arg(Path::new(CRATE).join("../backends/aten/tests/stub_bridge.c"))
        .arg("-o")
        .arg(&bridge)
        .succeeds();
    bridge
}
