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
    let sharded = b.spec(&[Placement::Shard { dim: 0 }], &[16, 8]);
    let whole = b.spec(&[Placement::Replicate], &[16, 8]);
    let start = b.next();
    let output = b.value(&[16, 8], Def::Instr(start));
    b.plan.instrs.push(Instr::Collective(Collective {
        kind: CollectiveKind::AllGather,
        reduce: None,
        group: 0,
        root: 0,
        input: 0,
        output,
        input_splits: Range::default(),
        output_splits: Range::default(),
    }));
    b.plan.instrs.push(Instr::Wait { value: output });
    let instrs = Range { start, len: 2 };
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
