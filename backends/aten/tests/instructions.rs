//! Instructions per replayed op are a tracked figure: what Rust executes in a
//! replay, over a bridge whose kernels do nothing, counted by callgrind. Counts
//! do not depend on the machine's load. A figure that grew by more than 5 % over
//! the one in `instructions_per_op.txt` fails.
//!
//! After a change that is worth its cost, or with another compiler, write the
//! new figure and commit it:
//!
//!     ROTE_UPDATE_INSTRUCTIONS=1 cargo test --package rote-aten --test instructions

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[allow(dead_code, reason = "the program that is counted replays it")]
mod fixed_plan;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");
/// How much the figure may grow.
const ALLOWED: f64 = 1.05;
/// Steps in the longer run, beyond those of the shorter one.
const STEPS: u64 = 20;

#[test]
fn instructions_per_op_do_not_grow() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        // Written past the capture of the test harness, to be seen.
        let why = "skipped instructions_per_op_do_not_grow: valgrind is not installed\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), why.as_bytes());
        return;
    }
    let program = release_build();
    // The difference leaves out loading and binding.
    let more = counted(&program, 1 + STEPS) - counted(&program, 1);
    let found = more as f64 / (STEPS * fixed_plan::OPS as u64) as f64;
    println!("{found:.2} instructions per replayed op");

    let file = Path::new(CRATE).join("tests/instructions_per_op.txt");
    if std::env::var_os("ROTE_UPDATE_INSTRUCTIONS").is_some() {
        fs::write(&file, format!("{found:.2}\n")).expect("is written");
        return;
    }
    let text = fs::read_to_string(&file).expect("the checked-in figure");
    let known: f64 = text.trim().parse().expect("a number");
    assert!(
        found <= known * ALLOWED,
        "{found:.2} instructions per replayed op, {known:.2} are checked in: {:+.1} % where 5 are allowed \
         (to accept it: ROTE_UPDATE_INSTRUCTIONS=1 cargo test --package rote-aten --test instructions)",
        100.0 * (found / known - 1.0),
    );
}

/// The example `replay_steps`, optimized as the library that people use.
fn release_build() -> PathBuf {
    let target = Path::new(SCRATCH).parent().expect("the target folder");
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "rote-aten",
            "--example",
            "replay_steps",
        ])
        .arg("--target-dir")
        .arg(target)
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the example replay_steps does not build");
    target.join("release/examples/replay_steps")
}

/// Instructions of a whole run of the program.
fn counted(program: &Path, steps: u64) -> u64 {
    let directory = tempfile::tempdir().expect("temporary directory");
    let out = directory.path().join("callgrind.out");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .arg(steps.to_string())
        .output()
        .expect("valgrind runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = fs::read_to_string(&out).expect("callgrind's figures");
    let total = text.lines().find_map(|line| {
        line.strip_prefix("totals: ")
            .or_else(|| line.strip_prefix("summary: "))
    });
    total.and_then(|n| n.trim().parse().ok()).expect("a total")
}
