//! The `rote` command, as a person at a terminal meets it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rote_plans::{Plan, PlanStore, Scalar};

#[path = "../plans/tests/sample/mod.rs"]
mod sample;

fn rote(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rote"))
        .args(args)
        .output()
        .expect("rote runs")
}

/// Exit status, standard output, standard error.
fn said(args: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = rote(args);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Files {
            directory: tempfile::tempdir().expect("temporary directory"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn plan(&self, name: &str, change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = sample::small();
        change(&mut plan);
        let path = self.path(name);
        plan.write(&path).expect("written");
        text(&path)
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").into()
}

#[test]
fn show_says_what_a_plan_is() {
    let files = Files::new();
    let plan = files.plan("plan.rote", |_| ());
    let (code, out, err) = said(&["show", &plan]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    for line in [
        "plan         train.py:train_step",
        "recorded     rote 0.1.0, torch 2.15.0, rank 1 of world size 2",
        "  state      %1 model.weight: f32[8,8], S(1) of [8,16], written",
        "  tp         all_reduce sum          1 call       128 B",
        "  argument   args[0].shape is (4, 8)",
        // An all-reduce of 128 B among 2 ranks: each sends 128 B.
        "       1      128 B  aten::mm at train.py:12: DTensor moved P(sum) -> R (out P(sum)): 128 B; \
         cheapest keeps R; S(1) (out S(1)): 0 B",
    ] {
        assert!(out.lines().any(|l| l == line), "{line}\n{out}");
    }
    let (code, out, _) = said(&["show", "--ops", &plan]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("\n3  %3 f32[4,8] = aten::mm(%0, %2) grad\n"),
        "{out}"
    );
    let (code, out, _) = said(&["show", &plan, "--strategies"]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("train.py:12  aten::mm  (-; S(1)) -> (P(sum))"),
        "{out}"
    );
    let (code, out, _) = said(&["show", &plan, "--json"]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(json["fingerprint"]["framework"], "torch 2.15.0");
    assert_eq!(json["ops"].as_array().map(Vec::len), Some(10));
    let opinion = &json["second_opinion"][0];
    assert_eq!(
        (&opinion["bytes"], &opinion["saved"]),
        (&128.into(), &128.into())
    );
    assert_eq!(opinion["cheapest"]["outputs"][0], "S(1)");
}

#[test]
fn show_takes_a_store() {
    let files = Files::new();
    let directory = files.path("store");
    let store = PlanStore::open(&directory).expect("store");
    let (code, out, err) = said(&["show", &text(&directory)]);
    assert_eq!((code, out), (Some(1), String::new()));
    assert_eq!(err, format!("{}: holds no plan\n", directory.display()));

    let mut plan = sample::small();
    store.write("0a", &plan).expect("written");
    let (code, out, _) = said(&["show", &text(&directory)]);
    assert_eq!(code, Some(0));
    assert!(
        out.starts_with("plan         train.py:train_step\n"),
        "{out}"
    );

    plan.fingerprint.rank = 0;
    let other = store.write("0a", &plan).expect("written");
    let (code, out, _) = said(&["show", &text(&directory)]);
    assert_eq!((code, out.lines().count()), (Some(0), 2));
    assert!(
        out.starts_with(&format!(
            "{}  train.py:train_step, rank 0 of world size 2,",
            other.display()
        )),
        "{out}"
    );
    let (code, out, _) = said(&["show", "--json", &text(&directory.join("0a"))]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&json[0]["rank"], &json[1]["rank"]), (&0.into(), &1.into()));
}

#[test]
fn show_pairs_the_plans_of_a_region() {
    let files = Files::new();
    let directory = files.path("store");
    let store = PlanStore::open(&directory).expect("store");
    let mut plan = sample::small();
    let mut named = |key: &str, function: &str| {
        plan.function = function.into();
        text(&store.write(key, &plan).expect("written"))
    };
    let forward = named("0a", "model.py:Block.forward");
    let first = named("0c", "Block.forward.backward1 of 0a");
    let second = named("0b", "Block.forward.backward2 of 0a");
    let other = named("0d", "Block.forward.backward of 0e");
    let shown = |path: &str| said(&["show", path]).1;
    let line = |role: &str, path: &str| format!("{role:<12} {path}\n");
    assert!(shown(&forward).ends_with(&(line("backward", &first) + &line("backward", &second))));
    assert!(shown(&second).ends_with(&line("forward", &forward)));
    assert!(!shown(&other).contains("\nforward "), "its forward is gone");
    let (_, out, _) = said(&["show", "--json", &forward]);
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(json["backward"], serde_json::json!([first, second]));
}

#[test]
fn check_tells_whole_plans_from_damaged_ones() {
    let files = Files::new();
    let plan = files.plan("plan.rote", |_| ());
    assert_eq!(
        said(&["check", &plan]),
        (
            Some(0),
            format!("{plan}: ok\n1 plan ok, 0 problems\n"),
            String::new()
        )
    );

    let store = PlanStore::open(files.path("store")).expect("store");
    let whole = text(&store.write("0a", &sample::small()).expect("written"));
    let torn = store.path("0b", 0).expect("a key");
    let misplaced = store.path("0b", 7).expect("a key");
    std::fs::create_dir(files.path("store/0b")).expect("made");
    let bytes = std::fs::read(&whole).expect("read");
    std::fs::write(&torn, &bytes[..bytes.len() / 2]).expect("written");
    std::fs::write(&misplaced, &bytes).expect("written");
    std::fs::write(files.path("store/notes.txt"), "not a plan").expect("written");
    let missing = text(&files.path("missing.rote"));
    let (code, out, err) = said(&["check", &text(&files.path("store")), &missing]);
    assert_eq!(code, Some(1));
    assert_eq!(out, format!("{whole}: ok\n1 plan ok, 3 problems\n"));
    let lines: Vec<_> = err.lines().collect();
    assert_eq!(lines.len(), 3, "{err}");
    let payload = bytes.len() - 64;
    let found = bytes.len() / 2 - 64;
    assert_eq!(
        lines[0],
        format!(
            "{}: header says {payload} bytes follow it, the file has {found}",
            torn.display()
        )
    );
    assert_eq!(
        lines[1],
        format!(
            "{}: the name of the file says rank 7, the plan was recorded on rank 1",
            misplaced.display()
        )
    );
    assert!(
        lines[2].starts_with(&format!("cannot open {missing}: ")),
        "{err}"
    );
}

#[test]
fn diff_has_the_exit_status_of_diff() {
    let files = Files::new();
    let a = files.plan("a.rote", |_| ());
    let same = files.plan("same.rote", |plan| plan.strings.push("not used".into()));
    let b = files.plan("b.rote", |plan| plan.scalars[1] = Scalar::Const(2.0));
    assert_eq!(
        said(&["diff", &a, &same]),
        (Some(0), String::new(), String::new())
    );
    let expected = "scalars: 1..2 of A are 1..2 of B\n  A: -1.0\n  B: 2.0\n";
    assert_eq!(
        said(&["diff", &a, &b]),
        (Some(1), expected.into(), String::new())
    );
    let (code, out, err) = said(&["diff", &a, "/nowhere.rote"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.starts_with("cannot open /nowhere.rote: "), "{err}");
    assert_eq!(said(&["diff", &a]).0, Some(2));
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let files = Files::new();
    let path = files.path("large.rote");
    sample::large(20_000).write(&path).expect("written");
    let mut child = Command::new(env!("CARGO_BIN_EXE_rote"))
        .args(["show", "--ops", &text(&path)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("rote runs");
    drop(child.stdout.take());
    let Output { status, stderr, .. } = child.wait_with_output().expect("rote ends");
    assert_eq!(String::from_utf8_lossy(&stderr), "");
    assert!(status.success());
}

#[test]
fn every_command_has_its_help() {
    for (args, expected) in [
        (vec!["--help"], "Shows plans that Rote has recorded"),
        (vec!["show", "--help"], "P(sum)"),
        (vec!["check", "--help"], "exits with 1"),
        (vec!["diff", "--help"], "2 if a plan cannot be read"),
        (vec!["--version"], "rote 0."),
    ] {
        let (code, out, _) = said(&args);
        assert_eq!(code, Some(0), "{args:?}");
        assert!(out.contains(expected), "{args:?}: {out}");
    }
}

#[test]
fn passes_are_listed_and_say_what_they_do() {
    let (code, names, _) = said(&["passes", "--names"]);
    assert_eq!(code, Some(0));
    let (_, listed, _) = said(&["passes"]);
    // All but `sums`, which may change bits.
    assert_eq!(names.lines().count() + 1, listed.lines().count());
    assert!(listed.contains("\nsums ") && !names.contains("sums"));
    assert!(listed.contains("arena        on "), "{listed}");

    let files = Files::new();
    let plan = files.plan("plan.rote", |_| ());
    let (code, out, err) = said(&["show", "--passes", &plan]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    for name in names.lines() {
        assert!(out.contains(name), "{name} in {out}");
    }
    let (code, out, err) = said(&["show", "--passes=none", "--ops", &plan]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(
        out.contains("arena        off") && out.contains("aten::"),
        "{out}"
    );
    let (_, out, _) = said(&["show", "--passes=arena", "--json", &plan]);
    assert!(out.contains("\"on\": true") && out.contains("\"on\": false"));
    let (code, _, err) = said(&["show", "--passes=arenas", &plan]);
    assert!(
        code == Some(2) && err.contains("unknown pass \"arenas\""),
        "{err}"
    );
}
