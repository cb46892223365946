//! What breaks a program is seen: bugs are planted in what passes have made of
//! plans of a few ops, and the run on paper differs.

use rote_aten_ops::AtenOps;
use rote_plans::{Instr, Marks, Plan, Schedule, ValueId};

use super::paper::{self, Collectives, RUNS};
use super::{Program, Selection, effects, optimize};
use rote_tracer::event::{ArgEvent, OpEvent};
use rote_tracer::sample::{Tensor, collective, in_place, op, recorder, tensor};

/// The plan of ops on an argument, through the passes that leave collectives alone;
/// and what it does.
fn optimized(ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> (Program, paper::Seen) {
    let all = Selection::parse("all").expect("all passes");
    optimized_by(all.keeping_collectives(), ops, outputs, args)
}

fn optimized_by(
    passes: Selection,
    ops: &[OpEvent<'_>],
    outputs: &[&Tensor],
    args: &[&Tensor],
) -> (Program, paper::Seen) {
    let mut recorder = recorder(args);
    rote_tracer::sample::record(&mut recorder, ops);
    let (recorded, _) = rote_tracer::sample::finish(recorder, outputs);
    let expected = paper::run(&recorded, &Schedule::default(), RUNS).expect("the plan runs");
    let (program, _) = optimize(recorded, passes, &AtenOps);
    let wrong = judge_altered(&program, &expected, Collectives::of(passes));
    assert_eq!(wrong, None, "the passes are right");
    (program, expected)
}

fn judge(program: &Program, expected: &paper::Seen) -> Option<String> {
    judge_altered(program, expected, Collectives::AsRecorded)
}

fn judge_altered(
    program: &Program,
    expected: &paper::Seen,
    collectives: Collectives,
) -> Option<String> {
    match paper::run(&program.plan, &program.schedule, RUNS) {
        Ok(seen) => expected.difference(&seen, collectives),
        Err(wrong) => Some(wrong),
    }
}

/// The instruction of an op that a plan has once.
fn find(plan: &Plan, wanted: &str) -> usize {
    let is = |instr: &Instr| matches!(instr, Instr::Local { op, .. } if plan.str(*op) == wanted);
    plan.instrs.iter().position(is).expect("the op is there")
}

/// The first result of the only op of a name.
fn result(plan: &Plan, name: &str) -> ValueId {
    let made = plan.instrs[find(plan, name)];
    let Instr::Local { outs, .. } = made else {
        panic!("a local op")
    };
    plan.ids(outs)[0]
}

/// Leaves out what drops values.
fn keep_all(plan: &mut Plan) {
    let frees = |instr: &Instr| matches!(instr, Instr::Free { .. });
    let keep: Vec<bool> = plan.instrs.iter().map(|instr| !frees(instr)).collect();
    effects::retain(plan, &keep);
}

#[test]
fn a_read_moved_over_a_write_is_seen() {
    let (x, a, b) = (tensor(1, &[16]), tensor(2, &[16]), tensor(3, &[16]));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        in_place("aten::add_", &x, &[&x]),
        op("aten::exp", &[&x], &[&b]),
    ];
    let (mut program, expected) = optimized(&steps, &[&a, &b], &[&x]);
    let (read, write) = (
        find(&program.plan, "aten::neg"),
        find(&program.plan, "aten::add_"),
    );
    program.plan.instrs.swap(read, write);
    for value in &mut program.plan.values {
        if value.def == rote_plans::Def::Instr(read as u32) {
            value.def = rote_plans::Def::Instr(write as u32);
        }
    }
    assert!(judge(&program, &expected).is_some());
}

/// Three results of which the first two are read last.
fn chain() -> ([Tensor; 4], Tensor) {
    (
        [2, 3, 4, 5].map(|storage| tensor(storage, &[16])),
        tensor(1, &[16]),
    )
}

#[test]
fn a_buffer_that_is_reused_early_is_seen() {
    let ([a, b, c, out], x) = chain();
    let steps = [
        op("aten::mm", &[&x, &x], &[&a]),
        op("aten::mm", &[&a, &x], &[&b]),
        op("aten::mm", &[&b, &x], &[&c]),
        op("aten::cat", &[&a, &c], &[&out]),
    ];
    let (mut program, expected) = optimized(&steps, &[&out], &[&x]);
    program.recorded = 1 << 30; // memory to spare: all of them in the arena
    program.arrange(&AtenOps, &[]);
    let placed: Vec<usize> = (0..program.plan.values.len())
        .filter(|v| program.schedule.offset(*v as u32).is_some())
        .collect();
    assert_eq!(placed.len(), 3);
    for (i, j) in [(0, 1), (0, 2), (1, 2)] {
        let mut planted = program.clone();
        planted.schedule.offsets[placed[j]] = planted.schedule.offsets[placed[i]];
        assert!(
            judge(&planted, &expected).is_some(),
            "{i} and {j} live at once"
        );
    }
}

#[test]
fn a_tensor_that_is_dropped_early_is_seen() {
    let ([a, b, ..], x) = chain();
    let steps = [
        op("aten::mm", &[&x, &x], &[&a]),
        op("aten::mm", &[&a, &x], &[&b]),
    ];
    let (mut program, expected) = optimized(&steps, &[&b], &[&x]);
    program.schedule = Schedule::default();
    assert_eq!(judge(&program, &expected), None);
    let is_free = |instr: &Instr| matches!(instr, Instr::Free { .. });
    let free = program
        .plan
        .instrs
        .iter()
        .position(is_free)
        .expect("a free");
    program.plan.instrs.swap(free, free - 1);
    assert!(judge(&program, &expected).is_some());
}

#[test]
fn a_fold_of_what_depends_on_an_argument_is_seen() {
    let ([a, b, c, out], x) = chain();
    let steps = [
        op("aten::ones", &[], &[&a]),
        op("aten::neg", &[&x], &[&b]),
        op("aten::exp", &[&a], &[&c]),
        op("aten::maximum", &[&b, &c], &[&out]),
    ];
    let (mut program, expected) = optimized(&steps, &[&out], &[&x]);
    assert!(program.schedule.once(find(&program.plan, "aten::exp")));
    let at = find(&program.plan, "aten::neg");
    program.schedule.once[at] = true;
    let result = result(&program.plan, "aten::neg");
    program.schedule.offsets[result as usize] = rote_plans::schedule::DYNAMIC;
    assert!(judge(&program, &expected).is_some());
}

#[test]
fn a_constant_that_is_read_before_it_changes_is_seen() {
    let ([a, b, c, _], x) = chain();
    let steps = [
        op("aten::zeros", &[], &[&a]),
        op("aten::mm", &[&a, &x], &[&b]),
        in_place("aten::neg_", &a, &[]),
        op("aten::mm", &[&a, &b], &[&c]),
    ];
    let (mut program, expected) = optimized(&steps, &[&c], &[&x]);
    program.schedule = Schedule::default();
    program.schedule.once = vec![false; program.plan.instrs.len()];
    for name in ["aten::zeros", "aten::neg_"] {
        program.schedule.once[find(&program.plan, name)] = true;
    }
    assert!(judge(&program, &expected).is_some());
}

#[test]
fn an_op_left_out_and_a_collective_out_of_order_are_seen() {
    let ([a, b, c, d], x) = chain();
    let reduce = |from, to| {
        collective(
            "_c10d_functional::all_reduce",
            from,
            vec![ArgEvent::Str("sum")],
            to,
        )
    };
    let neg = op("aten::neg", &[&x], &[&a]);
    let exp = op("aten::exp", &[&x], &[&b]);
    let steps = [neg, exp, reduce(&a, &c), reduce(&b, &d)];
    let (program, expected) = optimized(&steps, &[], &[&x]);
    let mut swapped = program.clone();
    swapped.schedule = Schedule::default();
    keep_all(&mut swapped.plan);
    let at: Vec<usize> = (0..swapped.plan.instrs.len())
        .filter(|i| matches!(swapped.plan.instrs[*i], Instr::Collective(_)))
        .collect();
    assert_eq!(at.len(), 2);
    assert_eq!(judge(&swapped, &expected), None);
    swapped.plan.instrs.swap(at[0], at[1]);
    assert!(judge(&swapped, &expected).is_some());
    swapped.plan.instrs.remove(at[1]);
    assert!(judge(&swapped, &expected).is_some());
}

#[test]
fn a_negation_that_is_forgotten_is_seen() {
    let ([a, b, out, written], x) = chain();
    for mark in [Marks::NEG, Marks::CONJ] {
        let turned = |of: &Tensor| Tensor {
            marks: mark,
            ..of.clone()
        };
        let (view, target) = (turned(&a), turned(&written));
        let steps = [
            op("aten::sin", &[&x], &[&a]),
            op("aten::_neg_view", &[&a], &[&view]),
            op("aten::clone", &[&view], &[&b]),
            op("aten::mm", &[&b, &view], &[&out]),
            op("aten::zeros", &[], &[&written]),
            op("aten::_neg_view", &[&written], &[&target]),
            in_place("aten::copy_", &target, &[&b]),
        ];
        let (program, expected) = optimized(&steps, &[&out, &written, &target], &[&x]);
        // The copy holds other bytes than what it copies: it is no view of it.
        let (source, copy) = (
            result(&program.plan, "aten::sin"),
            result(&program.plan, "aten::clone"),
        );
        let mut viewed = program.clone();
        viewed.schedule = Schedule::default();
        assert_eq!(judge(&viewed, &expected), None);
        let at = find(&viewed.plan, "aten::clone");
        viewed.plan.values[copy as usize].root = source;
        viewed.plan.instrs[at] = Instr::View {
            base: source,
            out: copy,
        };
        keep_all(&mut viewed.plan);
        assert!(judge(&viewed, &expected).is_some(), "{mark}: a copy");
        viewed.plan.values[copy as usize].marks = mark;
        let kernels = judge(&viewed, &expected);
        assert!(kernels.is_some(), "{mark}: kernels see another tensor");
        // Whatever is marked: what is read, what is written, what is returned.
        for value in 0..program.plan.values.len() {
            let mut forgotten = program.clone();
            let marks = &mut forgotten.plan.values[value].marks;
            if std::mem::take(marks) != Marks::NONE {
                assert!(judge(&forgotten, &expected).is_some(), "{mark}: %{value}");
            }
        }
    }
}

#[test]
fn a_version_that_does_not_rise_is_seen() {
    let x = tensor(1, &[16]);
    // The bytes stay as they are.
    let steps = [in_place("aten::copy_", &x, &[&x])];
    let (mut program, expected) = optimized_by(Selection::NONE, &steps, &[], &[&x]);
    assert_eq!(judge(&program, &expected), None);
    program.plan.instrs.clear();
    let wrong = judge(&program, &expected).expect("nothing is written");
    assert!(wrong.contains("version"), "{wrong}");
}

#[test]
fn looks_beyond_what_was_recorded_are_seen() {
    let ([a, b, ..], x) = chain();
    let piece = |of: &Tensor| of.view(&[8], &[1], 4);
    let (of_caller, of_own) = (piece(&x), piece(&a));
    let steps = [
        op("aten::sin", &[&of_caller], &[&a]),
        op("aten::mm", &[&of_own, &of_own], &[&b]),
    ];
    let (program, expected) = optimized_by(Selection::NONE, &steps, &[&b], &[&of_caller]);
    assert_eq!(judge(&program, &expected), None);
    let mut seen = 0;
    for value in 0..program.plan.values.len() {
        for offset in [-32, 32] {
            let mut beyond = program.clone();
            let made = &mut beyond.plan.values[value];
            if made.root != value as ValueId {
                made.offset = offset;
                assert!(judge(&beyond, &expected).is_some(), "%{value} at {offset}");
                seen += 1;
            }
        }
    }
    assert!(seen > 0, "no value is a view");
}
