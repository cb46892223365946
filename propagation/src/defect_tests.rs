//! What users reported against DTensor, asked of this engine.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::tests::{ask, placed, steps};
use super::*;

/// A batched product of `(S(0),S(1))` on two mesh dims, which `torch.matmul`
/// runs as a view, a product and a view back, gathered everything: pytorch issue
/// 167106, the first program.
#[test]
fn a_matmul_of_two_mesh_dims_gathers_nothing() {
    let on = "cp0=2,cp1=2";
    for (n, shards, flat) in [
        (2, "S(0),S(1)", "S(0),S(0)"),
        (4, "S(0),S(1)", "S(0),_S(0,2)"),
    ] {
        let args = [
            format!("f32[{n},{n},3] @ {shards}"),
            format!("[{},3]", n * n),
        ];
        let rows = ask("aten::view", on, &args.each_ref().map(String::as_str)).unwrap();
        assert_eq!(placed(&rows), format!("{shards} -> {flat}"));
        let args = [
            format!("f32[{},3] @ {flat}", n * n),
            "f32[3,1] @ R,R".into(),
        ];
        let product = ask("aten::mm", on, &args.each_ref().map(String::as_str)).unwrap();
        assert_eq!(placed(&product), format!("{flat} R,R -> {flat}"));
        let args = [format!("f32[{},1] @ {flat}", n * n), format!("[{n},{n},1]")];
        let whole = ask(
            "aten::_unsafe_view",
            on,
            &args.each_ref().map(String::as_str),
        )
        .unwrap();
        assert_eq!(placed(&whole), format!("{flat} -> {shards}"));
    }
}

/// Layer norm and its gradient moved data for some shard dims that need not:
/// pytorch issue 120542. The shapes are those of PyTorch's test of it.
#[test]
fn layer_norm_moves_nothing_for_a_sharded_batch_and_only_then() {
    for (dim, moves) in [(0, 0), (1, 0), (2, 1)] {
        let (x, statistic) = match dim {
            2 => (
                format!("f32[20,5,10] @ S({dim})"),
                "f32[20,5,1] @ R".to_owned(),
            ),
            _ => (
                format!("f32[20,5,10] @ S({dim})"),
                format!("f32[20,5,1] @ S({dim})"),
            ),
        };
        let args = [&x, "[10]", "f32[10]", "f32[10]", "1e-5"];
        let found = ask("aten::native_layer_norm", "tp=4", &args).unwrap();
        let sent = found.inputs.iter().flat_map(|i| &i.steps);
        assert_eq!(
            sent.filter(|s| !s.kind.is_local()).count(),
            moves,
            "S({dim})"
        );
        let args = [
            &x,
            &x,
            "[10]",
            &statistic,
            &statistic,
            "f32[10]",
            "f32[10]",
            "[true,true,true]",
        ];
        let found = ask("aten::native_layer_norm_backward", "tp=4", &args).unwrap();
        assert_eq!(steps(&found).is_empty(), moves == 0, "S({dim})");
        if moves == 0 {
            let expected = format!("-> S({dim}) P(sum) P(sum)");
            assert!(placed(&found).ends_with(&expected), "{}", placed(&found));
        }
    }
}

/// `max` along a sharded dim gave a partial of the indices: pytorch issue 168940.
#[test]
fn indices_of_a_maximum_are_never_partial() {
    for op in ["aten::max.dim", "aten::min.dim"] {
        for placement in ["S(0)", "S(1)", "P(max)", "P(min)", "P(sum)"] {
            let x = format!("f32[4,4] @ {placement}");
            let found = ask(op, "tp=4", &[&x, "1"]).unwrap();
            let partial = |s: &Spec| matches!(s.placements[0], Placement::Partial(_));
            assert!(
                !found.outputs.iter().any(partial),
                "{op} {}",
                placed(&found)
            );
        }
        // The reported call: the reduced dim is gathered first.
        let found = ask(op, "tp=4", &["f32[4,4] @ S(1)", "1"]).unwrap();
        assert!(!steps(&found).is_empty(), "{}", placed(&found));
    }
}

/// A strided shard was contracted with a plain one, with a wrong product: pytorch
/// issue 166598.
#[test]
fn strided_and_plain_shards_do_not_contract() {
    let on = "a=2,b=2";
    let args = ["f32[4,4] @ S(1),S(1)", "f32[4,4] @ _S(0,2),S(0)"];
    let found = ask("aten::mm", on, &args).unwrap();
    assert!(found.cost_us > 0.0, "{}", placed(&found));
    // Along the contracted dim both hold the same elements, or each all.
    let [a, b] = [&found.inputs[0].to, &found.inputs[1].to];
    for rank in data_tests::coordinates(&[2, 2]) {
        let along = |p, dim| Layout::of(4, dim, p, &[2, 2], &rank).unwrap();
        assert_eq!(along(a, 1), along(b, 0), "{}", placed(&found));
    }
    // The first product of the report, whose shards do match, moves nothing.
    let args = ["f32[4,4] @ S(1),S(1)", "f32[4,4] @ S(0),S(0)"];
    let found = ask("aten::mm", on, &args).unwrap();
    assert_eq!(placed(&found), "S(1),S(1) S(0),S(0) -> P(sum),P(sum)");
}

/// A scatter of real numbers into complex ones passed on their maximum, which is no
/// reduction of complex numbers: the collective fails, or ends the process.
#[test]
fn no_complex_tensor_is_an_extremum() {
    let (real, complex) = ("f32[4,4] @ P(max)", "c64[4,4] @ R");
    let asked: [(&str, &[&str]); 6] = [
        ("aten::diagonal_scatter", &[complex, "f32[4] @ P(max)"]),
        (
            "aten::select_scatter",
            &[complex, "f32[4] @ P(max)", "0", "1"],
        ),
        ("aten::slice_scatter", &[complex, real]),
        ("aten::copy", &[complex, real]),
        ("aten::where.self", &["bool[4,4] @ R", complex, real]),
        ("aten::_to_copy", &[real, "c64"]),
    ];
    for (op, args) in asked {
        let found = ask(op, "tp=2", args).unwrap();
        assert_eq!(found.outputs[0].placements, [Placement::Replicate], "{op}");
        assert!(found.cost_us > 0.0, "{op}: the maximum is reduced first");
    }
}

/// A bias of integers is no partial sum, so that the strategy which contracts a sharded
/// dim is out of reach: the answer gathers, and is not refused.
#[test]
fn a_replicated_tensor_of_integers_stays_one() {
    let args = ["i32[2,3,8] @ S(2),P(sum)", "i32[8,8] @ R,R", "i32[8] @ R,R"];
    let found = ask("aten::linear", "a=2,b=2", &args).unwrap();
    assert_eq!(found.inputs[2].to, [Placement::Replicate; 2]);
    // One of floats is.
    let args = ["f32[8] @ S(0)", "f32[8,8] @ R", "f32[8] @ R"];
    let found = ask("aten::addmv", "a=2", &[args[2], args[1], args[0]]).unwrap();
    assert_eq!(placed(&found), "P(sum) S(1) S(0) -> P(sum)");
    let args = args.map(|arg| arg.replace("f32", "i64"));
    let found = ask("aten::addmv", "a=2", &[&args[2], &args[1], &args[0]]).unwrap();
    assert_eq!(placed(&found), "R R R -> R");
}

/// `addmv` of an empty matrix returns a single added element as it is, of another shape
/// than the shard of the result.
#[test]
fn a_single_element_is_added_to_no_empty_shard() {
    for beta in ["1", "0.5"] {
        let args = ["i64[] @ R", "i64[1,3] @ S(0)", "i64[3] @ R", beta];
        let found = ask("aten::addmv", "tp=2", &args).unwrap();
        assert_eq!(placed(&found), "R R R -> R", "beta {beta}");
    }
}
