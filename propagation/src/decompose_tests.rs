//! Decompositions against the rules of ops that have both, and on meshes.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::rule::Slot;
use super::tests::{ask, placed};
use super::*;

/// The strategies of a rule as text, sorted, for the first outputs alone.
fn strategies(rule: &Rule, outputs: usize) -> Vec<String> {
    let text = |slots: &[Slot]| {
        let one = |slot: &Slot| match slot {
            Slot::Fixed(placement) => placement.to_string(),
            Slot::Shard(dim, rule::Need::Nothing) => format!("S({dim})"),
            other => format!("{other:?}"),
        };
        slots.iter().map(one).collect::<Vec<_>>().join(" ")
    };
    let mut all: Vec<_> = rule
        .strategies()
        .map(|(o, i)| format!("{} -> {}", text(i), text(&o[..outputs])))
        .collect();
    all.sort();
    all.dedup();
    all
}

/// The strategies of an op's own rule, and those of a decomposition of it.
fn both(op: &str, decomposition: Decomposition, args: &[&str]) -> (Vec<String>, Vec<String>) {
    let mesh = Mesh::parse("2").unwrap();
    let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
    let query = Query { op, args: &args };
    let mut rules = Registry::standard().unwrap();
    rules.register_decomposition(op, decomposition).unwrap();
    let made = decompose::rule(&rules, &query, decomposition).unwrap();
    let own = rules.own_rule(&query).unwrap();
    assert_eq!(own.outputs[0].shape, made.outputs[0].shape, "{op}");
    let outputs = made.outputs.len();
    (strategies(&own, outputs), strategies(&made, outputs))
}

fn softmax(g: &mut Builder<'_>) -> Result<Vec<Value>, PropagationError> {
    let (x, dim) = (g.input(0)?, g.query.int(1, None)?);
    let dims = || Arg::Ints(vec![dim]);
    let top = g.op("aten::amax", [x.into(), dims().into(), true.into()])?;
    let less = g.op("aten::sub.Tensor", [x.into(), top.into()])?;
    let exp = g.op("aten::exp", [less.into()])?;
    let sum = g.op(
        "aten::sum.dim_IntList",
        [exp.into(), dims().into(), true.into()],
    )?;
    Ok(vec![g.op("aten::div.Tensor", [exp.into(), sum.into()])?])
}

fn log_softmax(g: &mut Builder<'_>) -> Result<Vec<Value>, PropagationError> {
    let (x, dim) = (g.input(0)?, g.query.int(1, None)?);
    let dims = || Arg::Ints(vec![dim]);
    let exp = g.op("aten::exp", [x.into()])?;
    let sum = g.op(
        "aten::sum.dim_IntList",
        [exp.into(), dims().into(), true.into()],
    )?;
    let log = g.op("aten::log", [sum.into()])?;
    Ok(vec![g.op("aten::sub.Tensor", [x.into(), log.into()])?])
}

fn layer_norm(g: &mut Builder<'_>) -> Result<Vec<Value>, PropagationError> {
    let (x, weight, bias) = (g.input(0)?, g.input(2)?, g.input(3)?);
    let dims = || Arg::Ints(vec![-1]);
    let mean = g.op("aten::mean.dim", [x.into(), dims().into(), true.into()])?;
    let less = g.op("aten::sub.Tensor", [x.into(), mean.into()])?;
    let square = g.op("aten::mul.Tensor", [less.into(), less.into()])?;
    let var = g.op(
        "aten::mean.dim",
        [square.into(), dims().into(), true.into()],
    )?;
    let var = g.op("aten::add.Scalar", [var.into(), 1e-5.into()])?;
    let scale = g.op("aten::rsqrt", [var.into()])?;
    let normal = g.op("aten::mul.Tensor", [less.into(), scale.into()])?;
    let scaled = g.op("aten::mul.Tensor", [normal.into(), weight.into()])?;
    Ok(vec![
        g.op("aten::add.Tensor", [scaled.into(), bias.into()])?,
    ])
}

/// A product as multiplication and sum, for three dims.
fn bmm(g: &mut Builder<'_>) -> Result<Vec<Value>, PropagationError> {
    let (a, b) = (g.input(0)?, g.input(1)?);
    let a = g.op("aten::unsqueeze", [a.into(), 3.into()])?;
    let b = g.op("aten::unsqueeze", [b.into(), 1.into()])?;
    let all = g.op("aten::mul.Tensor", [a.into(), b.into()])?;
    let dims = Arg::Ints(vec![2]);
    Ok(vec![
        g.op("aten::sum.dim_IntList", [all.into(), dims.into()])?,
    ])
}

fn addmm(g: &mut Builder<'_>) -> Result<Vec<Value>, PropagationError> {
    let (bias, a, b) = (g.input(0)?, g.input(1)?, g.input(2)?);
    let mm = g.op("aten::mm", [a.into(), b.into()])?;
    Ok(vec![g.op("aten::add.Tensor", [bias.into(), mm.into()])?])
}

#[test]
fn a_decomposition_says_what_the_rule_says() {
    for (op, decomposition, args) in [
        (
            "aten::_softmax",
            softmax as Decomposition,
            vec!["f32[4,6,3]", "1", "false"],
        ),
        ("aten::_softmax", softmax, vec!["f32[4,6]", "-1", "false"]),
        (
            "aten::_log_softmax",
            log_softmax,
            vec!["f32[4,6,3]", "0", "false"],
        ),
    ] {
        let (own, made) = both(op, decomposition, &args);
        assert!(own.len() > 1, "{op}");
        assert_eq!(made, own, "{op} {args:?}");
    }
}

/// Products are linear, so the rules pass means of one factor too, which a sum
/// over a dim does not claim. What is added last may be partial in more ways than
/// the rules of `addmm` and layer norm say: a mean of summands, or an extremum,
/// plus something is the mean or extremum of the sums.
#[test]
fn a_decomposition_differs_from_the_rule_in_partials_alone() {
    for (op, decomposition, args, but) in [
        (
            "aten::bmm",
            bmm as Decomposition,
            vec!["f32[2,4,6]", "f32[2,6,8]"],
            vec!["P(avg)"],
        ),
        (
            "aten::addmm",
            addmm,
            vec!["f32[8]", "f32[4,6]", "f32[6,8]"],
            vec!["P(avg)", "P(max)", "P(min)"],
        ),
        (
            "aten::native_layer_norm",
            layer_norm,
            vec!["f32[4,6,8]", "[8]", "f32[8]", "f32[8]", "1e-5"],
            vec!["P("],
        ),
    ] {
        let (own, made) = both(op, decomposition, &args);
        let kept = |all: &[String]| -> Vec<String> {
            let keeps = |s: &&String| !but.iter().any(|b| s.contains(b));
            all.iter().filter(keeps).cloned().collect()
        };
        assert_eq!(kept(&made), kept(&own), "{op}");
        assert!(kept(&own).len() > 2);
    }
}

#[test]
fn composite_ops_keep_what_need_not_move() {
    for (op, on, args, expected) in [
        (
            "aten::linear",
            "dp=2,tp=2",
            vec![
                "f32[8,4,6] @ S(0),R",
                "f32[10,6] @ R,S(0)",
                "f32[10] @ R,S(0)",
            ],
            "S(0),R R,S(0) R,S(0) -> S(0),S(2)",
        ),
        (
            "aten::linear",
            "tp=2",
            vec!["f32[8,4,6] @ S(1)", "f32[10,6]"],
            "S(1) R -> S(1)",
        ),
        (
            "aten::linear",
            "tp=2",
            vec!["f32[8,4,6] @ S(2)", "f32[10,6] @ S(1)"],
            "S(2) S(1) -> P(sum)",
        ),
        (
            "aten::linear",
            "tp=2",
            vec!["f32[7,5,6] @ _S(1,2)", "f32[10,6]"],
            "_S(1,2) R -> _S(1,2)",
        ),
        (
            "aten::matmul",
            "tp=2",
            vec!["f32[8,4] @ S(1)", "f32[4,6] @ S(0)"],
            "S(1) S(0) -> P(sum)",
        ),
        (
            "aten::matmul",
            "tp=2",
            vec!["f32[2,3,4,5] @ S(1)", "f32[3,5,6] @ S(0)"],
            "S(1) S(0) -> S(1)",
        ),
        (
            "aten::matmul",
            "tp=2",
            vec!["f32[3,4,5] @ S(1)", "f32[5]"],
            "S(1) R -> S(1)",
        ),
        (
            "aten::matmul",
            "tp=2",
            vec!["f32[5]", "f32[3,5,4] @ S(2)"],
            "R S(2) -> S(1)",
        ),
        (
            "aten::einsum",
            "tp=2",
            vec!["'bqd,bkd->bqk'", "{f32[2,4,6] @ S(2); f32[2,8,6] @ S(2)}"],
            "S(2) S(2) -> P(sum)",
        ),
        (
            "aten::einsum",
            "tp=2",
            vec!["'ij->ji'", "{f32[4,6] @ S(0)}"],
            "S(0) -> S(1)",
        ),
        (
            "aten::einsum",
            "tp=2",
            vec!["'ij,jk,kl->il'", "{f32[4,6] @ S(0); f32[6,5]; f32[5,4]}"],
            "S(0) R R -> S(0)",
        ),
        (
            "aten::tensordot",
            "tp=2",
            vec!["f32[4,6,5] @ S(1)", "f32[6,4] @ S(0)", "[0,1]", "[1,0]"],
            "S(1) S(0) -> P(sum)",
        ),
        (
            "aten::outer",
            "tp=2",
            vec!["f32[4]", "f32[6] @ S(0)"],
            "R S(0) -> S(1)",
        ),
        (
            "aten::bilinear",
            "tp=2",
            vec!["f32[4,6] @ S(0)", "f32[4,5] @ S(0)", "f32[3,6,5]"],
            "S(0) S(0) R -> S(0)",
        ),
        (
            "aten::scaled_dot_product_attention",
            "tp=2",
            vec![
                "f32[2,4,8,6] @ S(1)",
                "f32[2,4,8,6] @ S(1)",
                "f32[2,4,8,6] @ S(1)",
            ],
            "S(1) S(1) S(1) -> S(1)",
        ),
        (
            "aten::scaled_dot_product_attention",
            "tp=2",
            vec!["f32[2,4,8,6] @ S(2)", "f32[2,4,8,6]", "f32[2,4,8,6]"],
            "S(2) R R -> S(2)",
        ),
        (
            "aten::layer_norm",
            "tp=2",
            vec!["f32[8,4,6] @ S(1)", "[6]", "f32[6]", "f32[6]"],
            "S(1) R R -> S(1)",
        ),
        (
            "aten::softmax.int",
            "tp=2",
            vec!["f32[8,4] @ S(0)", "1"],
            "S(0) -> S(0)",
        ),
        ("aten::glu", "tp=2", vec!["f32[8,4] @ S(0)"], "S(0) -> S(0)"),
        (
            "aten::prelu",
            "tp=2",
            vec!["f32[8,4] @ S(1)", "f32[4] @ S(0)"],
            "S(1) S(0) -> S(1)",
        ),
        (
            "aten::mse_loss",
            "tp=2",
            vec!["f32[8,4] @ S(1)", "f32[8,4] @ S(1)"],
            "S(1) S(1) -> P(avg)",
        ),
        (
            "aten::mse_loss",
            "tp=2",
            vec!["f32[8,5] @ S(1)", "f32[8,5] @ S(1)", "2"],
            "S(1) S(1) -> P(sum)",
        ),
        (
            "aten::l1_loss",
            "tp=2",
            vec!["f32[8,5] @ S(1)", "f32[8,5] @ S(1)", "0"],
            "S(1) S(1) -> S(1)",
        ),
        (
            "aten::cross_entropy_loss",
            "tp=2",
            vec!["f32[8,5] @ S(0)", "i64[8] @ S(0)", "none", "2"],
            "S(0) S(0) -> P(sum)",
        ),
        (
            "aten::multiply.Tensor",
            "tp=2",
            vec!["f32[8] @ P(sum)", "f32[8]"],
            "P(sum) R -> P(sum)",
        ),
        (
            "aten::chunk",
            "tp=2",
            vec!["f32[8,4] @ S(1)", "3"],
            "S(1) -> S(1) S(1) S(1)",
        ),
        (
            "aten::ravel",
            "tp=2",
            vec!["f32[4,6] @ S(1)"],
            "S(1) -> _S(0,4)",
        ),
        (
            "aten::movedim.int",
            "tp=2",
            vec!["f32[4,6,5] @ S(0)", "0", "-1"],
            "S(0) -> S(2)",
        ),
    ] {
        let found = ask(op, on, &args).unwrap();
        assert_eq!(placed(&found), expected, "{op} {args:?}");
        assert_eq!(found.cost_us, 0.0);
    }
}

#[test]
fn combinations_that_move_something_inside_are_dropped() {
    for (op, args, expected) in [
        // The scores would have to be whole along the keys.
        (
            "aten::scaled_dot_product_attention",
            vec!["f32[2,4,8,6]", "f32[2,4,8,6] @ S(2)", "f32[2,4,8,6] @ S(2)"],
            "S(2)",
        ),
        // The causal mask is made inside and replicated.
        (
            "aten::scaled_dot_product_attention",
            vec![
                "f32[2,4,8,6] @ S(2)",
                "f32[2,4,8,6]",
                "f32[2,4,8,6]",
                "none",
                "0.0",
                "true",
            ],
            "S(2)",
        ),
        // Means of unequal numbers of elements.
        (
            "aten::mse_loss",
            vec!["f32[8,5] @ S(1)", "f32[8,5] @ S(1)"],
            "S(1)",
        ),
        // Two partial factors of a square.
        (
            "aten::mse_loss",
            vec!["f32[8] @ P(sum)", "f32[8] @ P(sum)"],
            "P(sum)",
        ),
        ("aten::glu", vec!["f32[8,4] @ S(1)"], "S(1)"),
        (
            "aten::cross_entropy_loss",
            vec!["f32[8,6] @ S(1)", "i64[8]"],
            "S(1)",
        ),
    ] {
        let found = ask(op, "tp=2", &args).unwrap();
        assert!(found.cost_us > 0.0, "{op} {args:?}: {}", placed(&found));
        assert!(!placed(&found).starts_with(expected), "{}", placed(&found));
    }
}

#[test]
fn a_mean_needs_even_shards_on_all_mesh_dims_together() {
    let ask = |size: u64| {
        let arg = format!("f32[{size}] @ S(0),S(0)");
        let found = ask("aten::mse_loss", "2,2", &[&arg, &arg]).unwrap();
        placed(&found)
    };
    assert_eq!(ask(8), "S(0),S(0) S(0),S(0) -> P(avg),P(avg)");
    assert!(
        ask(6).ends_with("P(avg),R") || ask(6).ends_with("R,R"),
        "{}",
        ask(6)
    );
}

#[test]
fn forms_follow_and_errors_name_the_op_inside() {
    let found = ask(
        "aten::matmul.out",
        "tp=2",
        &["f32[3,4,5] @ S(0)", "f32[5,6]", "f32[3,4,6] @ S(0)"],
    );
    assert_eq!(placed(&found.unwrap()), "S(0) R S(0) -> S(0)");
    for (op, args, message) in [
        (
            "aten::mse_loss",
            vec!["f32[4]", "f32[3]"],
            "aten::sub.Tensor inside aten::mse_loss: argument 1: expected a shape that broadcasts \
             with [4], found f32[3]",
        ),
        (
            "aten::linear",
            vec!["f32[4,6]", "f32[8,5]"],
            "aten::linear: argument 1: expected size 6 at i of oi, found f32[8,5]",
        ),
        (
            "aten::einsum",
            vec!["'ij->ii'", "{f32[4,4]}"],
            "aten::einsum: argument 0: expected an equation such as 'bik,bkj->bij' or \
             '...ij->...ji', found \"ij->ii\"",
        ),
        (
            "aten::einsum",
            vec!["'ii->i'", "{f32[4,5]}"],
            "aten::einsum: argument 1: expected size 4 at i of ii, found f32[4,5]",
        ),
        (
            "mm",
            vec!["f32[4,4]", "f32[4,4]"],
            "mm: no sharding rule is registered for this op; names of ops begin with their \
             namespace, such as aten::mm",
        ),
        (
            "aten::nothing_of_the_kind",
            vec!["f32[4]"],
            "aten::nothing_of_the_kind: no sharding rule is registered for this op",
        ),
    ] {
        assert_eq!(ask(op, "2", &args).unwrap_err().to_string(), message);
    }
}

#[test]
fn callers_may_bring_decompositions() {
    let mut rules = Registry::standard().unwrap();
    let double = |g: &mut Builder<'_>| {
        let x = g.input(0)?;
        Ok(vec![g.op("aten::add.Tensor", [x.into(), x.into()])?])
    };
    rules.register_decomposition("my::double", double).unwrap();
    assert!(rules.register_decomposition("my::double", double).is_err());
    let mesh = Mesh::parse("2").unwrap();
    let args = [Arg::parse("f32[4] @ P(sum)", &mesh).unwrap()];
    let query = Query {
        op: "my::double",
        args: &args,
    };
    let found = propagate(&rules, &query, &mesh, &Topology::one_node(&mesh)).unwrap();
    assert_eq!(placed(&found), "P(sum) -> P(sum)");
    assert_eq!(rules.matched("my::double").unwrap().1, "decomposition");
}
