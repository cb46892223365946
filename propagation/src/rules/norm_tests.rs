//! What becomes of the norms of shards.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::super::{Arg, Mesh, Propagation, Query, Topology, plan, propagate, standard_rules};
use super::super::{Kind, Placement, check_partials};

fn asked(op: &str, mesh: &str, args: &[&str]) -> Propagation {
    let mesh = Mesh::parse(mesh).unwrap();
    let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
    let query = Query { op, args: &args };
    let rules = standard_rules().unwrap();
    propagate(rules, &query, &mesh, &Topology::one_node(&mesh)).unwrap()
}

/// How an op takes its inputs and gives its outputs on two ranks.
fn chosen(op: &str, args: &[&str]) -> String {
    let found = asked(op, "d=2", args);
    let inputs: Vec<_> = found.inputs.iter().map(|i| i.to[0].to_string()).collect();
    let outputs = found.outputs.iter().map(|o| o.placements[0].to_string());
    let outputs: Vec<_> = outputs.collect();
    format!("{} -> {}", inputs.join(" "), outputs.join(" "))
}

#[test]
fn each_order_has_its_partial() {
    for (order, partial) in [
        ("2", "P(norm2)"),
        ("2.0", "P(norm2)"),
        ("2.5", "P(norm2.5)"),
        ("-1", "P(norm-1)"),
        ("0", "P(sum)"),
        ("1", "P(sum)"),
        ("inf", "P(max)"),
        ("-inf", "P(min)"),
    ] {
        let args = ["f32[8,4] @ S(0)", order];
        let expected = format!("S(0) -> {partial}");
        assert_eq!(chosen("aten::linalg_vector_norm", &args), expected);
        assert_eq!(chosen("aten::norm.Scalar", &args), expected);
        let list = ["{f32[8,4] @ S(0)}", order];
        assert_eq!(chosen("aten::_foreach_norm.Scalar", &list), expected);
    }
    // No shard is without elements for 5 over 2 ranks, but for 5 over 4.
    let args = ["f32[5] @ S(0)", "-1"];
    let four = asked("aten::linalg_vector_norm", "d=4", &args);
    assert_eq!(four.inputs[0].to, [Placement::Replicate]);
}

/// `torch.nn.utils.clip_grad_norm_` reduces one number, not one per gradient.
#[test]
fn norms_of_norms_wait_for_one_reduction() {
    let list = ["{f32[8,4] @ S(0),S(1);f32[7] @ S(0),S(0)}", "2.0"];
    let norms = asked("aten::_foreach_norm.Scalar", "a=2,b=2", &list);
    let shown =
        |p: &Propagation| -> Vec<String> { p.outputs.iter().map(ToString::to_string).collect() };
    assert_eq!(shown(&norms), ["f32[] @ P(norm2),P(norm2)"; 2]);
    let list = format!("{{{}}}", shown(&norms).join(";"));
    let stacked = asked("aten::stack", "a=2,b=2", &[&list]);
    assert_eq!(shown(&stacked), ["f32[2] @ P(norm2),P(norm2)"]);
    let total = asked(
        "aten::linalg_vector_norm",
        "a=2,b=2",
        &[&shown(&stacked)[0], "2.0"],
    );
    assert_eq!(shown(&total), ["f32[] @ P(norm2),P(norm2)"]);
    let sent = [&norms, &stacked, &total].map(|p| p.bytes());
    assert_eq!(sent, [0; 3]);
}

#[test]
fn norms_pass_what_keeps_their_ratios() {
    for (op, args, expected) in [
        (
            "aten::view",
            &["f32[4] @ P(norm2)", "[2,2]"][..],
            "P(norm2) -> P(norm2)",
        ),
        (
            "aten::stack",
            &["{f32[] @ P(norm3);f32[] @ P(norm3)}"],
            "P(norm3) P(norm3) -> P(norm3)",
        ),
        (
            "aten::mul.Tensor",
            &["f32[4] @ P(norm2)", "0.5"],
            "P(norm2) -> P(norm2)",
        ),
        (
            "aten::div.Tensor",
            &["f32[4] @ P(norm2)", "3"],
            "P(norm2) -> P(norm2)",
        ),
        (
            "aten::linalg_vector_norm",
            &["f32[4] @ P(norm2)", "2"],
            "P(norm2) -> P(norm2)",
        ),
        (
            "aten::constant_pad_nd",
            &["f32[4] @ P(norm2)", "[1,1]"],
            "P(norm2) -> P(norm2)",
        ),
        (
            "aten::_to_copy",
            &["f32[4] @ P(norm2)", "f64"],
            "P(norm2) -> P(norm2)",
        ),
        // 3 and 4 make 5. Negated, they make 5 as well; with 1 added, sqrt(41);
        // as integers, 0.6 and 0.8 would make 0.
        ("aten::mul.Tensor", &["f32[4] @ P(norm2)", "-0.5"], "R -> R"),
        ("aten::neg", &["f32[3] @ P(norm2)"], "R -> R"),
        ("aten::add.Tensor", &["f32[3] @ P(norm2)", "1"], "R -> R"),
        (
            "aten::add.Tensor",
            &["f32[3] @ P(norm2)", "f32[3] @ P(norm2)"],
            "R R -> R",
        ),
        ("aten::sum", &["f32[3] @ P(norm2)"], "R -> R"),
        (
            "aten::linalg_vector_norm",
            &["f32[3] @ P(norm2)", "3"],
            "R -> R",
        ),
        (
            "aten::linalg_vector_norm",
            &["f32[3] @ P(sum)", "1"],
            "R -> R",
        ),
        (
            "aten::constant_pad_nd",
            &["f32[4] @ P(norm2)", "[1,1]", "1.0"],
            "R -> R",
        ),
        ("aten::_to_copy", &["f32[3] @ P(norm2)", "i64"], "R -> R"),
        // Of a negative number no norm can be made.
        ("aten::stack", &["{f32[] @ P(norm2);f32[] @ R}"], "R R -> R"),
        (
            "aten::stack",
            &["{f32[] @ P(norm2);f32[] @ P(norm3)}"],
            "R R -> R",
        ),
    ] {
        assert_eq!(chosen(op, args), expected, "{op} {args:?}");
    }
}

#[test]
fn norms_are_reduced_as_sums_are_and_made_of_nothing() {
    let mesh = Mesh::parse("d=4").unwrap();
    let Arg::Tensor(spec) = Arg::parse("f32[8]", &mesh).unwrap() else {
        panic!("no tensor");
    };
    let meta = spec.meta.unwrap();
    let way = |from: &str, to: &str| {
        let [from, to] = [from, to].map(|p| [Placement::parse(p).unwrap()]);
        plan(&meta, mesh.sizes(), &Topology::one_node(&mesh), &from, &to)
    };
    for (to, kind) in [("R", Kind::AllReduce), ("S(0)", Kind::ReduceScatter)] {
        let (steps, cost) = way("P(norm2)", to).unwrap();
        assert_eq!(steps.iter().map(|s| s.kind).collect::<Vec<_>>(), [kind]);
        assert_eq!(cost, way("P(sum)", to).unwrap().1);
    }
    for from in ["R", "S(0)", "P(sum)", "P(norm3)"] {
        assert!(way(from, "P(norm2)").is_none(), "{from}");
    }
}

#[test]
fn strictly_norms_are_not_reduced_unasked() {
    let mesh = Mesh::parse("d=2").unwrap();
    let args = [Arg::parse("f32[4] @ P(norm2)", &mesh).unwrap()];
    let refused = |op: &str| {
        let query = Query { op, args: &args };
        check_partials(standard_rules().unwrap(), &query, &mesh).is_err()
    };
    assert!(refused("aten::neg") && !refused("aten::clone"));
}
