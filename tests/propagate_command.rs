//! `rote propagate`, as a person at a terminal meets it.

use std::io::Write;
use std::process::{Command, Stdio};

/// Exit status, standard output, standard error.
fn said(args: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rote"))
        .arg("propagate")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("rote runs");
    let mut pipe = child.stdin.take().expect("a pipe");
    // A command that reads nothing may be gone already.
    let _ = pipe.write_all(stdin.as_bytes());
    drop(pipe);
    let output = child.wait_with_output().expect("rote ends");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn inputs_that_match_move_nothing() {
    let (code, out, err) = said(
        &[
            "aten::mm",
            "--mesh",
            "dp=8,tp=2",
            "f32[64,32] @ S(0),R",
            "f32[32,128] @ R,S(1)",
        ],
        "",
    );
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        lines[..4],
        [
            "input 0    f32[64,32] @ S(0),R",
            "input 1    f32[32,128] @ R,S(1)",
            "output 0   f32[64,128] @ S(0),S(1)  PartitionSpec('dp', 'tp')",
            "cost       0.0 us",
        ]
    );
    assert!(lines[4].starts_with("time "), "{out}");
}

#[test]
fn strides_are_printed_where_they_are_given() {
    let args = ["aten::relu", "--mesh", "tp=4", "f32[64,32]{1,64} @ S(0)"];
    let (code, out, err) = said(&args, "");
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let line = "output 0   f32[64,32]{1,64} @ S(0)  PartitionSpec('tp', None)";
    assert!(out.lines().any(|l| l == line), "{out}");
    let list = "{f32[2,3]{1,2}; f32[2,3]}";
    let question = format!(r#"{{"op": "aten::cat", "mesh": "d=1", "args": ["{list}", "1"]}}"#);
    let plain = r#"{"op": "aten::t", "mesh": "d=1", "args": ["f32[2,3]"]}"#;
    let (_, out, _) = said(&["--batch", "--json"], &format!("{question}\n{plain}\n"));
    let answers: Vec<serde_json::Value> = (out.lines())
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(answers[0]["outputs"][0]["shape"], serde_json::json!([2, 6]));
    assert_eq!(
        answers[1]["outputs"][0]["strides"],
        serde_json::json!([1, 3])
    );
    for (bad, message) in [
        (
            "f32[2,3]{1}",
            "cannot read \"f32[2,3]{1}\": expected 2 strides, one per dim\n",
        ),
        (
            "f32[2,3]{1,x}",
            "cannot read \"f32[2,3]{1,x}\": expected strides such as {32,1}\n",
        ),
    ] {
        let (code, _, err) = said(&["aten::relu", "--mesh", "tp=4", bad], "");
        assert_eq!((code, err.as_str()), (Some(1), message));
    }
}

#[test]
fn collectives_come_with_their_bytes() {
    let args = [
        "aten::mm",
        "--mesh",
        "tp=4",
        "f32[64,32] @ S(0)",
        "f32[32,128] @ S(1)",
    ];
    let (code, out, _) = said(&args, "");
    assert_eq!(code, Some(0));
    // 64 x 32 floats over 4 ranks: each sends its 2,048 bytes to 3 others.
    let step = "  tp       all_gather S(0) -> R, 6144 B per rank, 8.5 us";
    assert!(out.lines().any(|l| l == step), "{out}");
    let (code, out, _) = said(&[&args[..], &["--json"]].concat(), "");
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(json["inputs"][0]["steps"][0]["bytes"], 6144);
    assert_eq!(json["outputs"][0]["placements"][0], "S(1)");
    let (code, out, _) = said(&[&args[..], &["--all", "--json"]].concat(), "");
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let costs: Vec<f64> = (json["candidates"].as_array().expect("a list").iter())
        .map(|c| c["cost_us"].as_f64().expect("a cost"))
        .collect();
    assert!(costs.len() > 3 && costs.is_sorted(), "{costs:?}");
}

#[test]
fn errors_name_op_argument_expected_and_found() {
    for (args, message) in [
        (
            vec!["aten::mm", "--mesh", "tp=2", "f32[4,4]"],
            "aten::mm: expected 2 arguments, found 1\n",
        ),
        (
            vec!["aten::relu", "--mesh", "tp=2", "f32[4,4] @ S(2)"],
            "aten::relu: argument 0: expected shard dims below 2, the dims of f32[4,4], found \
             S(2)\n",
        ),
        (
            vec!["aten::relu", "--mesh", "dp=2,tp=2", "f32[4,4] @ S(0)"],
            "aten::relu: argument 0: expected 2 placements, one per mesh dim of dp=2,tp=2, found \
             1: S(0)\n",
        ),
        (
            vec!["aten::relu", "--mesh", "tp", "f32[4,4]"],
            "cannot read \"tp\": expected a mesh such as dp=8,tp=2\n",
        ),
    ] {
        let (code, out, err) = said(&args, "");
        assert_eq!((code, out.as_str(), err.as_str()), (Some(1), "", message));
    }
}

#[test]
fn strict_refuses_what_would_be_reduced_silently() {
    let args = ["aten::gelu", "--mesh", "tp=2", "f32[4] @ P(sum)"];
    let (code, out, _) = said(&args, "");
    assert_eq!(code, Some(0));
    assert!(out.contains("all_reduce P(sum) -> R"), "{out}");
    let (code, out, err) = said(&[&args[..], &["--strict"]].concat(), "");
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert_eq!(
        err,
        "aten::gelu: argument 0: expected no partial on mesh dim tp that has to be reduced \
         before the op, found f32[4] @ P(sum)\n"
    );
}

#[test]
fn a_decision_says_why() {
    let args = [
        "aten::mm",
        "--why",
        "--mesh",
        "tp=4",
        "f32[64,32] @ S(0)",
        "f32[32,128] @ S(1)",
    ];
    let (code, out, _) = said(&args, "");
    assert_eq!(code, Some(0));
    for line in [
        "rule       aten::mm (matmul)",
        "tp         R,S(1) -> S(1)",
        "  not      P(sum),R -> P(sum)       no way to bring input 0 there",
    ] {
        assert!(out.lines().any(|l| l == line), "{out}");
    }
    let (_, out, _) = said(&[&args[..], &["--json"]].concat(), "");
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let dim = &json["why"]["mesh_dims"][0];
    assert_eq!(dim["strategy"], "R,S(1) -> S(1)");
    let others = dim["others"].as_array().expect("a list");
    let rows = others.iter().find(|o| o["strategy"] == "S(0),R -> S(0)");
    // The second factor is twice as large as the first.
    let cost = rows.expect("sharded rows")["cost_us"].as_f64();
    assert!(cost > json["cost_us"].as_f64(), "{out}");
}

#[test]
fn a_batch_answers_line_by_line() {
    let questions = concat!(
        r#"{"op": "aten::relu", "mesh": "tp=2", "args": ["f32[4] @ P(max)"]}"#,
        "\nnonsense\n",
        r#"{"op": "aten::sum.dim_IntList", "mesh": "2", "args": ["f32[4,6] @ S(0)", "[0]", "true"]}"#,
    );
    let (code, out, err) = said(&["--batch", "--json"], questions);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let answers: Vec<serde_json::Value> = (out.lines())
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    assert_eq!(answers.len(), 3);
    assert_eq!(answers[0]["outputs"][0]["placements"][0], "P(max)");
    assert!(answers[1]["error"].is_string());
    assert_eq!(answers[2]["outputs"][0]["placements"][0], "P(sum)");
    assert_eq!(answers[2]["outputs"][0]["shape"], serde_json::json!([1, 6]));
}

#[test]
fn names_are_told_which_rule_answers_for_them() {
    let names = "aten::add_.Tensor\n\naten::max.dim_max\naten::_foreach_mul.List\naten::nothing\n";
    let (code, out, err) = said(&["--ops", "--json", "-"], names);
    assert_eq!((code, err.as_str()), (Some(1), ""));
    let lines: Vec<_> = out.lines().collect();
    for (line, rule, form) in [
        (0, "aten::add.Tensor", "in place"),
        (1, "aten::max.dim", "out"),
        (2, "aten::mul.Tensor", "each"),
    ] {
        assert!(
            lines[line].contains(&format!("\"rule\":\"{rule}\"")),
            "{out}"
        );
        assert!(
            lines[line].contains(&format!("\"form\":\"{form}\"")),
            "{out}"
        );
    }
    assert_eq!(lines[3], "{\"op\":\"aten::nothing\",\"rule\":null}");
    let (code, out, _) = said(&["--ops"], "");
    assert_eq!(code, Some(0));
    assert!(out.lines().any(|l| l.starts_with("aten::mm ")), "{out}");
    let (code, out, _) = said(&["--ops", "aten::normal_", "aten::mm.out"], "");
    assert_eq!(code, Some(0));
    assert!(out.ends_with("out, by the rule of aten::mm\n"), "{out}");
}
