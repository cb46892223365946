//! The second opinion on a plan: what was moved for global ops beside what the
//! cheapest strategies would have moved.

use rote::opinion::{json, section};
use rote_plans::*;

#[path = "../plans/tests/sample/mod.rs"]
mod sample;

use sample::Builder;

/// A global op on a mesh of 4 ranks that shards of [16,8] were gathered for:
/// 128 B on each rank, of which each sends 3 times 128 B.
fn gathered(b: &mut Builder, op: &str, source: &str, args: &[&str]) {
    let output = b.value(&[16, 8], Def::Instr(b.next()));
    let gather = collective(CollectiveKind::AllGather, output);
    redistributed(b, op, source, args, gather);
}

/// A collective over all 4 ranks of the first argument, 128 B on each.
fn collective(kind: CollectiveKind, output: ValueId) -> Instr {
    let reduces = matches!(
        kind,
        CollectiveKind::AllReduce | CollectiveKind::ReduceScatter
    );
    Instr::Collective(Collective {
        kind,
        reduce: reduces.then_some(ReduceOp::Sum),
        group: 0,
        root: 0,
        input: 0,
        output,
        input_splits: Range::default(),
        output_splits: Range::default(),
    })
}

/// A global op that `moves` runs for.
fn redistributed(b: &mut Builder, op: &str, source: &str, args: &[&str], moves: Instr) {
    let sharded = b.spec(&[Placement::Shard { dim: 0 }], &[16, 8]);
    let whole = b.spec(&[Placement::Replicate], &[16, 8]);
    let start = b.next();
    b.plan.instrs.push(moves);
    let instrs = Range { start, len: 1 };
    let source = b.text(source);
    let at = b.plan.redistributions.len() as u32;
    b.plan.redistributions.push(Redistribution {
        from: sharded,
        to: whole,
        source,
        bytes: 128,
        instrs,
    });
    let op = b.text(op);
    let args: Vec<StrId> = args.iter().map(|arg| b.text(arg)).collect();
    let (args, inputs, outputs) = (b.ids(&args), b.ids(&[sharded]), b.ids(&[whole]));
    b.plan.strategies.push(Strategy {
        op,
        source,
        args,
        inputs,
        outputs,
        instrs,
        redistributions: Range { start: at, len: 1 },
    });
}

fn builder() -> Builder {
    let mut b = Builder::new(4, 0);
    sample::tp(&mut b);
    b.binding(BindingKind::Arg, "args[0]", &[4, 8], NONE);
    b
}

fn said(plan: &Plan) -> String {
    section(PlanFile::from_plan(plan).expect("valid").plan())
}

const X: &str = "f32[16,8] @ S(0)";

#[test]
fn what_need_not_have_moved_is_said_with_the_bytes() {
    let mut b = builder();
    gathered(&mut b, "aten::relu", "train.py:3", &[X]);
    gathered(&mut b, "aten::neg", "train.py:4", &[X]);
    gathered(&mut b, "aten::relu", "train.py:3", &[X]);
    // Sorting needs all of dim 0: no strategy moves less than all to all or,
    // at this size, gathers and keeps a part.
    gathered(&mut b, "aten::sort", "train.py:5", &[X, "0"]);
    let expected = "  second opinion (times, bytes that a rank would send less)
       2      384 B  aten::relu at train.py:3: DTensor moved S(0) -> R (out R): 384 B; cheapest keeps S(0) (out S(0)): 0 B
       1      384 B  aten::neg at train.py:4: DTensor moved S(0) -> R (out R): 384 B; cheapest keeps S(0) (out S(0)): 0 B
    in total 1.1 KiB less: DTensor moved 1.1 KiB for these, the cheapest strategies would 0 B
    the cheapest already: 1 more
";
    assert_eq!(said(&b.plan), expected);
    let file = PlanFile::from_plan(&b.plan).expect("valid");
    let json = json(file.plan());
    assert_eq!(json.as_array().map(Vec::len), Some(3));
    assert_eq!(
        (&json[0]["times"], &json[0]["saved"]),
        (&2.into(), &384.into())
    );
    assert_eq!(json[0]["moved"][0]["to"], "R");
    assert_eq!(
        (&json[2]["op"], &json[2]["saved"]),
        (&"aten::sort".into(), &0.into())
    );
}

/// DTensor reduces norms before it takes their norm (`clip_grad_norm_`).
#[test]
fn norms_of_shards_are_known_by_dtensors_name() {
    let mut b = builder();
    let norms = "f32[8] @ _NormP(2.0)";
    let output = b.value(&[16, 8], Def::Instr(b.next()));
    let reduce = collective(CollectiveKind::AllReduce, output);
    let op = "aten::linalg_vector_norm";
    redistributed(&mut b, op, "train.py:3", &[norms, "2.0"], reduce);
    let said = said(&b.plan);
    assert!(
        said.contains("cheapest keeps P(norm2) (out P(norm2)): 0 B"),
        "{said}"
    );
}

#[test]
fn one_line_says_that_all_was_the_cheapest() {
    let mut b = builder();
    assert_eq!(said(&b.plan), "", "nothing was moved");
    gathered(&mut b, "aten::sort", "train.py:5", &[X, "0"]);
    assert_eq!(
        said(&b.plan),
        "  second opinion: what DTensor moved for 1 op was the cheapest\n"
    );
    gathered(&mut b, "aten::sort", "train.py:6", &[X, "0"]);
    assert_eq!(
        said(&b.plan),
        "  second opinion: what DTensor moved for 2 ops was the cheapest each time\n"
    );
}

#[test]
fn where_there_is_no_opinion_the_reason_is_said() {
    let mut b = builder();
    gathered(&mut b, "test::unheard_of", "train.py:3", &[X]);
    gathered(&mut b, "aten::relu", "", &[]);
    gathered(&mut b, "aten::relu", "train.py:4", &["f32[16,8] @ S(7)"]);
    gathered(
        &mut b,
        "aten::relu",
        "train.py:5",
        &["f32[16,8] @ Custom()"],
    );
    gathered(&mut b, "aten::relu", "train.py:6", &[X]);
    let other = Mesh {
        dim_names: Range::default(),
        ..b.plan.meshes[0]
    };
    b.plan.meshes.push(other);
    let last = b.plan.specs.len() - 2;
    let elsewhere = Spec {
        mesh: 1,
        ..b.plan.specs[last]
    };
    b.plan.specs.push(elsewhere);
    let last = b.plan.specs.len() as u32 - 1;
    b.plan.strategies[4].inputs = b.ids(&[last]);
    assert_eq!(
        said(&b.plan),
        "  no second opinion (times)
       1  test::unheard_of at train.py:3: no sharding rule is registered for this op
       1  aten::relu: its arguments were not recorded
       1  aten::relu at train.py:4: argument 0: expected shard dims below 2, the dims of f32[16,8], found S(7)
       1  aten::relu at train.py:5: cannot read \"Custom()\": expected a placement: R, S(dim), _S(dim,split_factor), P(op)
       1  aten::relu at train.py:6: its tensors lie on several meshes
"
    );
}

#[test]
fn an_op_inside_another_is_judged_and_not_the_outer_one() {
    let mut b = builder();
    gathered(&mut b, "aten::relu", "train.py:3", &[X]);
    let inner = b.plan.strategies[0];
    let op = b.text("test::outer");
    b.plan.strategies.insert(0, Strategy { op, ..inner });
    let said = said(&b.plan);
    assert!(
        said.contains("aten::relu") && !said.contains("outer"),
        "{said}"
    );
}

#[test]
fn what_the_user_asked_for_is_not_judged() {
    let mut b = builder();
    gathered(&mut b, "aten::relu", "train.py:3", &[X]);
    b.plan.strategies.clear();
    assert_eq!(said(&b.plan), "");
}

#[test]
fn bytes_are_those_that_a_rank_sends() {
    // Of 128 B over 4 ranks: to 3 others all of it, or a quarter each, or both
    // a quarter of the sum and a quarter of the result.
    for (kind, shape, sent) in [
        (CollectiveKind::AllGather, [16, 8], "384 B"),
        (CollectiveKind::AllReduce, [4, 8], "192 B"),
        (CollectiveKind::ReduceScatter, [1, 8], "96 B"),
        (CollectiveKind::AllToAll, [4, 8], "96 B"),
    ] {
        let mut b = builder();
        let output = b.value(&shape, Def::Instr(b.next()));
        redistributed(&mut b, "aten::relu", "", &[X], collective(kind, output));
        let said = said(&b.plan);
        assert!(
            said.contains(&format!(" (out R): {sent}; ")),
            "{kind:?}: {said}"
        );
    }
    // DTensor's own all-to-all: [4,8] becomes [16,2].
    let mut b = builder();
    let output = b.value(&[16, 2], Def::Instr(b.next()));
    let args = [Arg::Value(0), Arg::Int(0), Arg::Int(1)];
    b.local("_dtensor::shard_dim_alltoall", &args, &[output]);
    let swap = b.plan.instrs.pop().expect("the local op");
    redistributed(&mut b, "aten::relu", "", &[X], swap);
    let said = said(&b.plan);
    assert!(said.contains(" (out R): 96 B; "), "{said}");
}

#[test]
fn no_argument_of_a_plan_makes_it_panic() {
    let odd = [
        "",
        "{",
        "{;}",
        "[",
        "[,]",
        "'",
        "?",
        "? @ S(0)",
        "none",
        "-1",
        "99999999999999999999",
        "nan",
        "f32[]",
        "f32[18446744073709551615,4] @ S(0)",
        "f32[0,4] @ S(0)",
        "f32[16,8] @ S(0),S(0),S(0)",
        "f32[16,8] @ _S(0,0)",
        "f32[16,8] @ _S(0,4294967295)",
        "f32[16,8] @ P(mask)",
        "{none; f32[16,8] @ S(0)}",
        "\u{1b}[2J",
    ];
    for op in [
        "aten::relu",
        "aten::mm",
        "aten::sum.dim_IntList",
        "aten::view",
        "aten::cat",
        "",
    ] {
        for first in odd {
            for second in odd {
                let mut b = builder();
                gathered(&mut b, op, "train.py:3", &[first, second]);
                let said = said(&b.plan);
                assert!(
                    said.contains("second opinion") && !said.contains('\u{1b}'),
                    "{said}"
                );
            }
        }
    }
}
