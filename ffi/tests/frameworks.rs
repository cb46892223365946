//! Frameworks in C: `examples/train_mlp.c` records a step, replays it and opens stored plans; a framework that does
//! wrong, or is called wrongly, is told so: that one is the framework of the example, with faults put in. Both are clean
//! under AddressSanitizer.

use std::fs;
use std::io::Write as _;
use std::process::Command;

use c::{SCRATCH, Succeeds, compile};

mod c;

const EXAMPLE: &str = "examples/train_mlp.c";
const WRONG: &str = "ffi/tests/c_framework.c";

/// What instruments a program so that wrong uses of memory, leaks and undefined behaviour end it.
const SANITIZE: [&str; 2] = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
];

#[test]
fn the_example_trains_and_opens_its_plans() {
    the_example_runs(&[], &["", "none", "all,+overlap,+buckets"]);
}

#[test]
fn the_example_is_clean_under_address_sanitizer() {
    if is_sanitized("the_example_is_clean_under_address_sanitizer") {
        the_example_runs(&SANITIZE, &[""]);
    }
}

#[test]
fn wrong_frameworks_and_wrong_calls_are_told_so() {
    a_wrong_framework_runs(&[]);
}

#[test]
fn wrong_frameworks_are_clean_under_address_sanitizer() {
    if is_sanitized("wrong_frameworks_are_clean_under_address_sanitizer") {
        a_wrong_framework_runs(&SANITIZE);
    }
}

/// Three runs of the example for each choice of passes: one records, one adopts, one trusts.
fn the_example_runs(flags: &[&str], passes: &[&str]) {
    let directory = tempfile::tempdir_in(SCRATCH).expect("temporary directory");
    let program = directory.path().join("train_mlp");
    c::program(EXAMPLE, flags, &program);
    for (nth, passes) in passes.iter().enumerate() {
        let plans = directory.path().join(format!("plans{nth}"));
        let run = |trust: Option<&str>| {
            let mut command = Command::new(&program);
            command.env("ROTE_PASSES", passes);
            command.arg(&plans).args(trust).succeeds()
        };
        says(
            &run(None),
            [
                "12 steps on 4 ranks: 2 recorded, 10 replayed, equal bit for bit",
                "4 steps of another batch: 2 recorded, 2 replayed, equal bit for bit",
                "0 plans opened from disk",
            ],
        );
        says(
            &run(None),
            [
                "12 steps on 4 ranks: 1 recorded, 11 replayed, equal bit for bit",
                "4 steps of another batch: 1 recorded, 3 replayed, equal bit for bit",
                "2 plans opened from disk",
            ],
        );
        says(
            &run(Some("trust")),
            [
                "12 steps on 4 ranks: 0 recorded, 12 replayed, equal bit for bit",
                "4 steps of another batch: 0 recorded, 4 replayed, equal bit for bit",
                "2 plans opened from disk and trusted",
            ],
        );
    }
}

/// What the example says, but for the times of a step, which come last.
fn says(said: &str, expected: [&str; 3]) {
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..lines.len().min(3)], expected, "{said}");
    assert_eq!(lines.len(), 4, "{said}");
    assert!(lines[3].starts_with("microseconds of a step: "), "{said}");
}

fn a_wrong_framework_runs(flags: &[&str]) {
    let directory = tempfile::tempdir_in(SCRATCH).expect("temporary directory");
    let program = directory.path().join("c_framework");
    c::program(WRONG, flags, &program);
    let mut command = Command::new(program);
    command.env_remove("ROTE_PASSES");
    let said = command.arg(directory.path().join("plans")).succeeds();
    assert_eq!(said, "", "no wrong call makes the library print");
}

/// Whether the compiler has the sanitizers; where it has not, the log says which test is skipped.
fn is_sanitized(test: &str) -> bool {
    let found = can_compile(&SANITIZE);
    if !found {
        let why = format!("skipped {test}: the C compiler has no AddressSanitizer\n");
        let _ = std::io::stderr().write_all(why.as_bytes()); // cargo would hide `eprintln`
    }
    found
}

/// Whether the compiler can make programs with these flags, and they run.
fn can_compile(flags: &[&str]) -> bool {
    let directory = tempfile::tempdir_in(SCRATCH).expect("temporary directory");
    let (source, made) = (
        directory.path().join("empty.c"),
        directory.path().join("empty"),
    );
    fs::write(&source, "int main(void) { return 0; }\n").expect("written");
    let mut compiler = compile("CC", "cc", "c11");
    let compiled = compiler.args(flags).arg(source).arg("-o").arg(&made);
    let succeeds = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    succeeds(compiled) && succeeds(&mut Command::new(made))
}
