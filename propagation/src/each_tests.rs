//! Ops on lists: each entry as the op on single tensors, shared tensors once.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::tests::ask;
use super::work::counted;
use super::*;

/// Placements of inputs as taken, then of outputs; or what is wrong.
fn placed(op: &str, on: &str, args: &[&str]) -> String {
    match ask(op, on, args) {
        Ok(found) => super::tests::placed(&found),
        Err(error) => error.to_string(),
    }
}

#[test]
fn entries_do_not_depend_on_each_other() {
    let placements = ["R", "S(0)", "S(1)", "P(sum)", "P(max)", "_S(0,2)"];
    let pairs = placements
        .iter()
        .flat_map(|a| placements.iter().map(move |b| (a, b)));
    for op in ["add", "mul", "maximum", "add_", "div_"] {
        let (mut left, mut right, mut expected, mut cost) = (vec![], vec![], vec![], 0.0);
        for (a, b) in pairs.clone() {
            let (a, b) = (format!("f32[8,4] @ {a}"), format!("f32[8,4] @ {b}"));
            let overload = if op == "maximum" { "" } else { ".Tensor" };
            let one = ask(&format!("aten::{op}{overload}"), "4", &[&a, &b]);
            // In place, some pairs cannot be had: they make the list fail too.
            let Ok(one) = one else { continue };
            left.push(a);
            right.push(b);
            cost += one.cost_us;
            expected.push(one);
        }
        assert!(expected.len() > 15, "{op}");
        let lists = [left, right].map(|l| format!("{{{}}}", l.join("; ")));
        let list_op = format!("aten::_foreach_{op}.List");
        let found = ask(&list_op, "4", &[&lists[0], &lists[1]]).unwrap();
        assert!((found.cost_us - cost).abs() < 1e-6);
        for (i, one) in expected.iter().enumerate() {
            assert_eq!(found.inputs[i], one.inputs[0], "{op} {i}");
            assert_eq!(found.inputs[expected.len() + i], one.inputs[1], "{op} {i}");
            if op.ends_with('_') {
                assert!(found.outputs.is_empty());
            } else {
                assert_eq!(found.outputs[i], one.outputs[0]);
            }
        }
    }
}

#[test]
fn an_entry_that_cannot_be_written_fails_the_list() {
    let said = placed(
        "aten::_foreach_abs_",
        "2",
        &["{f32[8] @ S(0); f32[8] @ P(sum)}"],
    );
    assert!(said.starts_with("aten::_foreach_abs_: argument 0 is written"));
}

#[test]
fn a_shared_tensor_lies_one_way_for_all_entries() {
    let ask = |list, shared| placed("aten::_foreach_mul.Tensor", "2", &[list, shared]);
    // A product is linear in either factor, not in both.
    assert_eq!(
        ask("{f32[8]; f32[4]}", "f32[] @ P(sum)"),
        "R R P(sum) -> P(sum) P(sum)"
    );
    assert_eq!(
        ask("{f32[8] @ P(sum); f32[4]}", "f32[] @ P(sum)"),
        "P(sum) R R -> P(sum) R"
    );
    // A sum of sums: the replicated ones are made partial.
    let found = placed(
        "aten::_foreach_add.Tensor",
        "2",
        &["{f32[8]; f32[4] @ P(sum)}", "f32[]"],
    );
    assert_eq!(found, "P(sum) P(sum) P(sum) -> P(sum) P(sum)");
    assert_eq!(
        ask("{f32[8] @ S(0); f32[4]}", "f32[]"),
        "S(0) R R -> S(0) R"
    );
}

#[test]
fn numbers_are_those_of_the_entry() {
    // A positive factor keeps the largest the largest.
    assert_eq!(
        placed(
            "aten::_foreach_mul.ScalarList",
            "2",
            &["{f32[8] @ P(max); f32[8] @ P(max)}", "[2.0,-2.0]"]
        ),
        "P(max) P(max) -> P(max) P(min)"
    );
    let short = placed(
        "aten::_foreach_mul.ScalarList",
        "2",
        &["{f32[8]; f32[8]}", "[2.0]"],
    );
    assert!(
        short.contains("a number for each of 2 entries, found 1 numbers"),
        "{short}"
    );
}

/// A step of Adam on a sharded parameter with a gradient that is yet a sum.
fn adam(more: &[&str]) -> String {
    let sharded = "{f32[8,4] @ S(0)}";
    let mut args = vec![
        sharded,
        "{f32[8,4] @ P(sum)}",
        sharded,
        sharded,
        "{}",
        "{f32[]}",
        "0.01",
        "0.9",
        "0.99",
        "0.1",
        "1e-8",
        "false",
        "false",
    ];
    args.extend(more);
    placed("aten::_fused_adam_", "2", &args)
}

#[test]
fn optimizers_write_gradients_only_to_scale_them() {
    assert_eq!(adam(&[]), "S(0) S(0) S(0) S(0) R -> ");
    assert!(adam(&["f32[]"]).contains("written in place"));
    assert_eq!(
        adam(&["none", "f32[] @ P(max)"]),
        "S(0) S(0) S(0) S(0) R R -> "
    );
}

#[test]
fn what_is_not_finite_is_noted_by_every_shard() {
    let unscale = |list, note| {
        placed(
            "aten::_amp_foreach_non_finite_check_and_unscale_",
            "2,2",
            &[list, note, "f32[1] @ R,R"],
        )
    };
    assert_eq!(
        unscale("{f32[8] @ S(0),R; f32[4] @ R,R}", "f32[1] @ R,R"),
        "S(0),R R,R P(max),R R,R -> "
    );
    assert_eq!(
        unscale("{f32[8] @ S(0),R}", "f32[1] @ P(max),P(max)"),
        "S(0),R P(max),P(max) R,R -> "
    );
    // A piece of a sum may be infinite where the sum is not.
    assert!(unscale("{f32[8] @ P(sum),R}", "f32[1] @ R,R").contains("written in place"));
}

#[test]
fn hundreds_of_entries_are_as_many_questions() {
    let list = |n: usize| {
        let one = "f32[64,64] @ S(0),P(sum),R";
        format!("{{{}}}", vec![one; n].join(";"))
    };
    let cost = |n| {
        let (a, b) = (list(n), list(n));
        let found = ask("aten::_foreach_mul.List", "2,2,2", &[&a, &b]).unwrap();
        assert_eq!(found.inputs.len(), 2 * n);
        found.cost_us
    };
    assert!((cost(300) - 300.0 * cost(1)).abs() < 1e-3);
}

/// Lists of an op with entries of different shapes that lie without any order on 6 mesh
/// dims of 2 ranks.
fn without_order(lists: usize, entries: usize) -> Vec<String> {
    let random = &mut super::tests::Random(3);
    let mut entry = |i: usize| {
        let shape = format!(
            "{},{},{}",
            64 * (1 + i % 7),
            64 * (1 + i / 7 % 7),
            64 * (1 + i / 49)
        );
        super::tests::random_spec(random, &shape, 3, 6)
    };
    let list = |_| (0..entries).map(&mut entry).collect::<Vec<_>>();
    let lists: Vec<_> = (0..lists).map(list).collect();
    lists
        .iter()
        .map(|l| format!("{{{}}}", l.join(";")))
        .collect()
}

/// Counted instead of timed. Descents that try every row to the end take a third more.
#[test]
fn hundreds_of_different_entries_take_bounded_work() {
    for (op, lists, most) in [
        ("aten::_foreach_add.List", 2, 1_600_000),
        ("aten::_foreach_addcmul.Scalar", 3, 2_400_000),
        ("aten::_fused_adam", 5, 3_600_000),
    ] {
        let mut args = without_order(lists, 300);
        if op == "aten::_fused_adam" {
            args.push(format!("{{{}}}", vec!["f32[]"; 300].join(";")));
            let numbers = ["0.01", "0.9", "0.99", "0.1", "1e-8", "false", "false"];
            args.extend(numbers.map(str::to_owned));
        }
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (found, work) = counted(|| ask(op, "2,2,2,2,2,2", &args));
        assert!(found.is_ok(), "{op}");
        let [states, joins, operations] = work;
        let told = format!("{op}: {states} states, {joins} joins, {operations} operations");
        // Each entry may end one state and one join beyond its share of two ops.
        assert!(states <= 16_000 + 300, "{told}");
        assert!(joins <= 2_000_000 + 300, "{told}");
        assert!(operations <= most, "{told}, at most {most}");
    }
}

#[test]
fn candidates_are_the_entries_candidates_combined() {
    let mesh = Mesh::parse("2").unwrap();
    let count = |op: &str, args: &[&str]| {
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        let topology = Topology::one_node(&mesh);
        let found = candidates(standard_rules().unwrap(), &query, &mesh, &topology).unwrap();
        assert!(found.is_sorted_by(|a, b| a.cost_us <= b.cost_us));
        found.len()
    };
    let one = count("aten::exp", &["f32[8] @ P(max)"]);
    let other = count("aten::exp", &["f32[8] @ S(0)"]);
    let both = count("aten::_foreach_exp", &["{f32[8] @ P(max); f32[8] @ S(0)}"]);
    assert_eq!(both, one * other);
}
