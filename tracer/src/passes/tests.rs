//! Passes on plans that the recorder makes of a few ops: what each takes out,
//! and what it must leave.

use rote_plans::schedule::Into;
use rote_plans::{Instr, Plan};

use super::{PASSES, Program, Selection, optimize};
use crate::event::{ArgEvent, OpEvent};
use crate::sample::{
    self, Tensor, collective, in_place, op, program, read, record, recorder, tensor,
};

fn passes(names: &str) -> Selection {
    Selection::parse(names).expect("names of passes")
}

/// The plan of ops on two arguments, through these passes.
fn run(names: &str, ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> Program {
    let mut recorder = recorder(args);
    record(&mut recorder, ops);
    let (plan, _) = sample::finish(recorder, outputs);
    let (program, report) = optimize(plan, passes(names));
    program.plan.check().expect("the plan is valid");
    for instr in &program.plan.instrs {
        if let Instr::View { base, out } = instr {
            let root = program.plan.values[*out as usize].root;
            assert_eq!(*base, root, "views are bound from their root");
        }
    }
    assert_eq!(report.len(), names.split(',').count());
    program
}

/// The plan with all its results in the arena that can lie there: it was recorded
/// with memory to spare.
fn placed(ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> Program {
    let mut program = run("arena", ops, outputs, args);
    program.recorded = 1 << 30;
    program.arrange(&[]);
    program
}

/// The local ops of a plan, by name.
fn ops(plan: &Plan) -> Vec<&str> {
    let name = |instr: &Instr| match instr {
        Instr::Local { op, .. } => plan.str(*op).strip_prefix("aten::"),
        _ => None,
    };
    plan.instrs.iter().filter_map(name).collect()
}

#[test]
fn a_selection_is_read_and_refused() {
    assert_eq!(passes(""), Selection::default());
    assert_eq!(passes("none"), Selection::NONE);
    assert!(passes("arena").has("arena") && !passes("arena").has("dead"));
    assert!(!passes("-arena").has("arena") && passes("-arena").has("dead"));
    assert!(!passes("all,-dead").has("dead") && passes("all,-dead").has("common"));
    let error = Selection::parse("arenas").expect_err("no such pass");
    assert!(error.to_string().contains("\"arenas\"") && error.to_string().contains("arena"));
}

#[test]
fn a_selection_without_passes_that_alter_collectives_has_all_others() {
    let all = passes("all");
    let kept = all.keeping_collectives();
    assert!(!kept.alters_collectives());
    for pass in PASSES {
        assert_eq!(all.has(pass.name), pass.keeps_bits);
        assert_eq!(
            kept.has(pass.name),
            pass.keeps_bits && !pass.alters_collectives
        );
        assert_eq!(
            passes(pass.name).alters_collectives(),
            pass.alters_collectives
        );
    }
}

#[test]
fn without_passes_a_plan_stays_as_it_was() {
    let (x, y, z) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[op("aten::neg", &[&x], &[&y]), op("aten::neg", &[&y], &[&z])],
    );
    let (plan, _) = sample::finish(recorder, &[&z]);
    let (same, report) = optimize(plan.clone(), Selection::NONE);
    assert_eq!((same.plan, report.len()), (plan, 0));
}

#[test]
fn the_same_op_runs_once() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let twice = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::neg", &[&x], &[&b]),
        op("aten::add", &[&a, &b], &[&c]),
    ];
    let found = run("common", &twice, &[&c], &[&x]);
    assert_eq!(program(&found.plan)[..2], ["neg %0 > %1", "add %1 %1 > %2"]);
}

#[test]
fn what_is_made_twice_to_save_memory_is_made_twice() {
    let x = tensor(1, &[1 << 12]);
    let [a, b, again] = [2, 3, 4].map(|storage| tensor(storage, &[1 << 12]));
    let [small, same, late, out] = [5, 6, 7, 8].map(|storage| tensor(storage, &[4]));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::cat", &[&a], &[&small]),
        op("aten::nonsense", &[&small], &[&b]),
        op("aten::exp", &[&b], &[&late]),
        op("aten::neg", &[&x], &[&again]), // as activation checkpointing does
        op("aten::sin", &[&again], &[&same]),
        op("aten::cat", &[&small, &same, &late], &[&out]),
    ];
    let found = run("common", &steps, &[&out], &[&x]);
    assert_eq!(
        ops(&found.plan),
        ["neg", "cat", "nonsense", "exp", "neg", "sin", "cat"]
    );
    assert!(super::most(&found.plan) <= found.recorded);
    // Where there is memory for it, it is made once.
    let room = tensor(9, &[1 << 14]);
    let mut steps = steps.to_vec();
    steps.insert(0, op("aten::nonsense", &[&x], &[&room]));
    let found = run("common", &steps, &[&out], &[&x]);
    assert_eq!(
        ops(&found.plan),
        ["nonsense", "neg", "cat", "nonsense", "exp", "sin", "cat"]
    );
}

#[test]
fn the_same_op_runs_again_after_a_write() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    for write in [&x, &a, &b] {
        let ops_ = [
            op("aten::neg", &[&x], &[&a]),
            in_place(
                "aten::add_",
                if std::ptr::eq(write, &b) { &x } else { write },
                &[],
            ),
            op("aten::neg", &[&x], &[&b]),
            in_place("aten::mul_", write, &[]),
            op("aten::add", &[&a, &b], &[&c]),
        ];
        let found = run("common", &ops_, &[&c], &[&x]);
        assert_eq!(ops(&found.plan), ["neg", "add_", "neg", "mul_", "add"]);
    }
}

#[test]
fn what_is_returned_twice_is_made_twice() {
    let x = tensor(1, &[4]);
    let (a, b) = (tensor(2, &[4]), tensor(3, &[4]));
    let twice = [op("aten::neg", &[&x], &[&a]), op("aten::neg", &[&x], &[&b])];
    let found = run("common", &twice, &[&a, &b], &[&x]);
    assert_eq!(ops(&found.plan), ["neg", "neg"]);
}

#[test]
fn random_numbers_are_drawn_as_often_as_recorded() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let mut draws = [
        op("aten::rand_like", &[&x], &[&a]),
        op("aten::rand_like", &[&x], &[&b]),
        op("aten::add", &[&a, &a], &[&c]),
    ];
    draws[0].seeded = true;
    draws[1].seeded = true;
    let found = run("common,dead,constants", &draws, &[&c], &[&x]);
    assert_eq!(ops(&found.plan), ["rand_like", "rand_like", "add"]);
    assert!(!found.schedule.once.contains(&true));
}

#[test]
fn what_nothing_needs_is_left_out() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        in_place("aten::add_", &a, &[&x]), // needed by nobody
        op("aten::exp", &[&x], &[&b]),
        in_place("aten::add_", &b, &[&x]), // needed by what is returned
        op("aten::sin", &[&b], &[&c]),
        in_place("aten::mul_", &x, &[]), // the caller's tensor
    ];
    let found = run("dead", &steps, &[&c], &[&x]);
    assert_eq!(ops(&found.plan), ["exp", "add_", "sin", "mul_"]);
}

#[test]
fn collectives_and_foreign_ops_are_needed() {
    let x = tensor(1, &[4]);
    let (a, b) = (tensor(2, &[4]), tensor(3, &[4]));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        collective(
            "_c10d_functional::all_reduce",
            &a,
            vec![ArgEvent::Str("sum")],
            &b,
        ),
        op("mylib::log", &[&x], &[]),
    ];
    let found = run("dead", &steps, &[], &[&x]);
    assert!(
        program(&found.plan)
            .iter()
            .any(|i| i.starts_with("AllReduce"))
    );
    assert_eq!(
        found
            .plan
            .instrs
            .iter()
            .filter(|i| matches!(i, Instr::Local { .. }))
            .count(),
        2
    );
}

#[test]
fn copies_go_unless_somebody_can_tell() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let plain = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::clone", &[&a], &[&b]),
        op("aten::exp", &[&b], &[&c]),
    ];
    let found = run("copies", &plain, &[&c], &[&x]);
    assert_eq!(ops(&found.plan), ["neg", "exp"]);
    for write in [&a, &b] {
        let mut steps = plain.to_vec();
        steps.insert(2, in_place("aten::mul_", write, &[]));
        let found = run("copies", &steps, &[&c], &[&x]);
        assert_eq!(ops(&found.plan), ["neg", "clone", "mul_", "exp"]);
    }
    let found = run("copies", &plain, &[&b, &c], &[&x]);
    assert_eq!(ops(&found.plan), ["neg", "clone", "exp"]);
    // An argument's data may lie anywhere, and the caller may change it.
    let argument = [
        op("aten::clone", &[&x], &[&b]),
        op("aten::exp", &[&b], &[&c]),
    ];
    let found = run("copies", &argument, &[&c], &[&x]);
    assert_eq!(ops(&found.plan), ["clone", "exp"]);
}

#[test]
fn views_of_a_copy_become_views_of_its_source() {
    let x = tensor(1, &[32]);
    let whole = tensor(2, &[32]);
    let half = whole.view(&[16], &[1], 16);
    let copy = tensor(3, &[16]);
    let part = copy.view(&[4], &[1], 2);
    let out = tensor(4, &[4]);
    let steps = [
        op("aten::neg", &[&x], &[&whole]),
        op("aten::clone", &[&half], &[&copy]),
        op("aten::exp", &[&part], &[&out]),
    ];
    let found = run("copies", &steps, &[&out], &[&x]);
    assert_eq!(ops(&found.plan), ["neg", "exp"]);
    let view = found.plan.values.iter().find(|v| v.offset == 18);
    assert!(view.is_some_and(|v| found.plan.values[v.root as usize].storage_bytes == 128));
}

#[test]
fn pieces_that_are_joined_as_they_lie_are_the_whole() {
    let x = tensor(1, &[4, 16]);
    let whole = tensor(2, &[4, 16]);
    let halves = [
        whole.view(&[2, 16], &[16, 1], 0),
        whole.view(&[2, 16], &[16, 1], 32),
    ];
    let (again, out) = (tensor(3, &[4, 16]), tensor(4, &[4, 16]));
    let join = |a: &Tensor, b: &Tensor| {
        let mut cat = op("aten::cat", &[], &[]);
        cat.args
            .push(read(ArgEvent::Tensors(vec![a.event(), b.event()])));
        cat.args.push(read(ArgEvent::Int(0)));
        run(
            "copies",
            &[
                op("aten::neg", &[&x], &[&whole]),
                OpEvent {
                    args: cat.args.clone(),
                    outs: vec![again.arg()],
                    ..cat.clone()
                },
                op("aten::exp", &[&again], &[&out]),
            ],
            &[&out],
            &[&x],
        )
    };
    assert_eq!(ops(&join(&halves[0], &halves[1]).plan), ["neg", "exp"]);
    assert_eq!(
        ops(&join(&halves[1], &halves[0]).plan),
        ["neg", "cat", "exp"]
    );
}

#[test]
fn evenly_spaced_pieces_are_joined_by_one_copy() {
    let x = tensor(1, &[8, 4]);
    let whole = tensor(2, &[8, 4]);
    let piece = |at: i64| whole.view(&[2, 4], &[4, 1], at);
    let even = [0, 8, 16, 24].map(piece);
    let uneven = [0, 8, 24, 16].map(piece);
    let (joined, out) = (tensor(3, &[2, 16]), tensor(4, &[2, 16]));
    let join = |pieces: &[Tensor]| {
        let mut cat = op("aten::cat", &[], &[]);
        let events = pieces.iter().map(Tensor::event).collect();
        cat.args.push(read(ArgEvent::Tensors(events)));
        cat.args.push(read(ArgEvent::Int(1)));
        cat.outs.push(joined.arg());
        let steps = [
            op("aten::neg", &[&x], &[&whole]),
            cat,
            op("aten::exp", &[&joined], &[&out]),
        ];
        run("joins", &steps, &[&out], &[&x]).plan
    };
    let plan = join(&even);
    assert_eq!(ops(&plan), ["neg", "empty_strided", "copy_", "exp"]);
    let views: Vec<_> = (plan.values.iter())
        .filter(|v| plan.dims(v.shape) == [2, 4, 4])
        .map(|v| (plan.dims(v.strides).to_vec(), v.offset))
        .collect();
    assert_eq!(views, [(vec![4, 8, 1], 0), (vec![16, 4, 1], 0)]);
    assert_eq!(ops(&join(&uneven)), ["neg", "cat", "exp"]);
}

#[test]
fn constants_are_made_once() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let steps = [
        op("aten::ones", &[], &[&a]),
        op("aten::neg", &[&a], &[&b]),
        op("aten::mul", &[&b, &x], &[&c]),
    ];
    let found = run("constants", &steps, &[&c], &[&x]);
    let once: Vec<bool> = (0..found.plan.instrs.len())
        .filter(|i| matches!(found.plan.instrs[*i], Instr::Local { .. }))
        .map(|i| found.schedule.once(i))
        .collect();
    assert_eq!(once, [true, true, false]);
}

#[test]
fn what_a_run_writes_is_no_constant() {
    let x = tensor(1, &[4]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[4]));
    let steps = [
        op("aten::zeros", &[], &[&a]),
        in_place("aten::add_", &a, &[&x]), // differs at every run
        op("aten::neg", &[&a], &[&b]),
        op("aten::mul", &[&b, &x], &[&c]),
    ];
    let found = run("constants", &steps, &[&c], &[&x]);
    assert!(!found.schedule.once.contains(&true));
    // Read as it was before a write: a later run would find what the write left.
    let steps = [
        op("aten::zeros", &[], &[&a]),
        op("aten::mul", &[&a, &x], &[&b]),
        in_place("aten::add_", &a, &[]),
        op("aten::mul", &[&a, &b], &[&c]),
    ];
    let found = run("constants", &steps, &[&c], &[&x]);
    assert!(!found.schedule.once.contains(&true));
    // Returned tensors are fresh at every call.
    let found = run("constants", &[op("aten::ones", &[], &[&a])], &[&a], &[]);
    assert!(!found.schedule.once.contains(&true));
}

/// A chain of ops that all can lie in the arena, ending in one that is returned.
fn chain(storages: std::ops::Range<u64>, bytes: &[i64]) -> Vec<Tensor> {
    storages.zip(bytes).map(|(s, n)| tensor(s, &[*n])).collect()
}

#[test]
fn results_that_live_at_once_do_not_share_bytes() {
    let x = tensor(1, &[64]);
    let t = chain(2..8, &[64, 32, 16, 64, 128, 8]);
    let steps = [
        op("aten::cat", &[&x], &[&t[0]]),
        op("aten::cat", &[&t[0]], &[&t[1]]),
        op("aten::cat", &[&t[0]], &[&t[2]]),
        op("aten::cat", &[&t[1], &t[2]], &[&t[3]]),
        op("aten::cat", &[&t[3], &t[2]], &[&t[4]]),
        op("aten::cat", &[&t[4]], &[&t[5]]),
    ];
    let found = placed(&steps, &[&t[5]], &[&x]);
    for (offset, value) in found.schedule.offsets.iter().zip(&found.plan.values) {
        assert!(*offset == u64::MAX || offset + value.storage_bytes <= found.schedule.arena_bytes);
    }
    let placed = found.schedule.offsets.iter().filter(|o| **o != u64::MAX);
    assert_eq!(
        placed.count(),
        5,
        "all but the argument and what is returned"
    );
    check_places(&found);
    let sum: u64 = found.plan.values.iter().map(|v| v.storage_bytes).sum();
    assert!(found.schedule.arena_bytes < sum, "bytes are shared");
}

/// Runs a plan on paper: every read must find what was written last under its
/// name, whatever shares its bytes.
fn check_places(program: &Program) {
    let plan = &program.plan;
    let mut holds: Vec<Option<u32>> = vec![None; program.schedule.arena_bytes as usize];
    let range = |root: u32| {
        program.schedule.offset(root).map(|from| {
            let from = from as usize;
            from..from + plan.values[root as usize].storage_bytes as usize
        })
    };
    for instr in &plan.instrs {
        let outs = super::effects::outs(plan, instr);
        for value in sample::touched(plan, instr) {
            let root = plan.values[value as usize].root;
            if !outs.contains(&value) {
                if let Some(range) = range(root) {
                    assert!(holds[range].iter().all(|h| *h == Some(root)), "%{root}");
                }
            }
        }
        for out in outs
            .into_iter()
            .filter(|v| plan.values[*v as usize].root == *v)
        {
            if let Some(range) = range(out) {
                holds[range].fill(Some(out));
            }
        }
    }
}

#[test]
fn what_a_collective_reads_stays_until_the_wait() {
    let x = tensor(1, &[64]);
    let [a, b, c, d] = [2, 3, 4, 5].map(|storage| tensor(storage, &[64]));
    let gathered = tensor(6, &[128]);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        collective(
            "_c10d_functional::all_gather_into_tensor",
            &a,
            vec![ArgEvent::Int(2)],
            &gathered,
        ),
        op("aten::exp", &[&x], &[&b]), // must not write over what is being sent
        op("aten::cat", &[&b], &[&c]),
        sample::wait(&gathered),
        op("aten::cat", &[&gathered, &c], &[&d]),
    ];
    let found = placed(&steps, &[&d], &[&x]);
    let place = |storage_bytes: u64, nth: usize| {
        let roots = found.plan.values.iter().enumerate();
        let mut roots = roots.filter(|(_, v)| v.storage_bytes == storage_bytes);
        roots
            .nth(nth)
            .and_then(|(id, _)| found.schedule.offset(id as u32))
    };
    let (a, b, c) = (place(256, 0), place(256, 1), place(256, 2));
    assert!(a.is_some() && a != b && a != c, "{a:?} {b:?} {c:?}");
}

/// Two large results that live together, and later a result of an op that cannot
/// write to the arena, with `before` ops of the same kind while they live.
fn two_moments(before: usize) -> Program {
    let x = tensor(1, &[64]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[1 << 10]));
    let [sum, late, out] = [5, 6, 7].map(|storage| tensor(storage, &[16]));
    let big = tensor(8, &[1 << 10]);
    let mut steps = vec![
        op("aten::cat", &[&x], &[&a]),
        op("aten::cat", &[&a], &[&b]),
        op("aten::cat", &[&a, &b], &[&c]),
    ];
    let early: Vec<Tensor> = (0..before as u64)
        .map(|i| tensor(20 + i, &[1 << 10]))
        .collect();
    for tensor in &early {
        steps.push(op("aten::nonsense", &[&a, &b], &[tensor]));
    }
    steps.extend([
        op("aten::cat", &[&a, &b, &c], &[&sum]),
        op("aten::nonsense", &[&sum], &[&big]),
        op("aten::cat", &[&big], &[&late]),
        op("aten::cat", &[&late], &[&out]),
    ]);
    run("arena", &steps, &[&out], &[&x])
}

/// How many roots that could lie in the arena do not.
fn left_out(program: &Program) -> usize {
    let mut all = program.clone();
    all.recorded = 1 << 30;
    all.arrange(&[]);
    let placed = |program: &Program| {
        program
            .schedule
            .offsets
            .iter()
            .filter(|o| **o != u64::MAX)
            .count()
    };
    placed(&all) - placed(program)
}

/// The most bytes that a run on paper holds.
fn most(program: &Program) -> u64 {
    let seen = super::paper::run(&program.plan, &program.schedule, 2).expect("the plan runs");
    seen.most
}

#[test]
fn buffers_leave_the_arena_rather_than_need_more_memory_than_recorded() {
    let found = two_moments(0);
    let (large, allowed) = (4 << 10, found.recorded + 512);
    assert!((3 * large..3 * large + 1024).contains(&found.recorded));
    assert_eq!(left_out(&found), 1, "the fewest that make room for one");
    assert!(found.schedule.arena_bytes >= 2 * large, "the others stay");
    assert!(most(&found) <= allowed, "{} > {allowed}", most(&found));
    let mut all = found.clone();
    all.recorded = 1 << 30;
    all.arrange(&[]);
    assert!(most(&all) >= 4 * large, "{}", most(&all));
    check_places(&found);
}

#[test]
fn nothing_leaves_the_arena_where_memory_suffices() {
    // What is beside the arena later was there at its fullest moment too.
    let found = two_moments(1);
    assert_eq!(left_out(&found), 0);
    assert!(most(&found) <= found.recorded + 512);
}

#[test]
fn what_ops_allocate_for_themselves_makes_room_too() {
    let found = two_moments(1);
    let nonsense = |(i, instr): (usize, &Instr)| match instr {
        Instr::Local { op, .. } if found.plan.str(*op) == "aten::nonsense" => Some(i),
        _ => None,
    };
    let late = found
        .plan
        .instrs
        .iter()
        .enumerate()
        .filter_map(nonsense)
        .next_back();
    // The late op needs as much as two large results for itself, once.
    let large = 4 << 10;
    let mut allocated = vec![0; found.plan.instrs.len()];
    allocated[late.expect("the op is there")] = 3 * large; // its result is large too
    let mut seen = found.clone();
    seen.arrange(&allocated);
    assert_eq!(left_out(&seen), 2);
    let beside = 3 * large;
    assert!(seen.schedule.arena_bytes + beside <= seen.recorded + 512);
}

#[test]
fn all_results_of_an_op_leave_the_arena_together() {
    let x = tensor(1, &[64]);
    let (values, mut indices) = (tensor(2, &[1 << 9]), tensor(3, &[1 << 9]));
    indices.dtype = sample::F64;
    indices.storage_bytes *= 2;
    let (a, b, big, out) = (
        tensor(4, &[16]),
        tensor(5, &[16]),
        tensor(6, &[1 << 10]),
        tensor(7, &[16]),
    );
    let mut both = op("aten::max", &[&x], &[&values, &indices]);
    both.overload = "dim";
    let steps = [
        both,
        op("aten::cat", &[&values, &indices], &[&a]),
        op("aten::nonsense", &[&a], &[&big]),
        op("aten::cat", &[&big], &[&b]),
        op("aten::cat", &[&b], &[&out]),
    ];
    let found = run("arena", &steps, &[&out], &[&x]);
    assert_eq!(left_out(&found), 2);
    assert!(most(&found) <= found.recorded + 512);
}

#[test]
fn an_element_wise_result_lies_over_an_argument_that_dies() {
    let x = tensor(1, &[64]);
    let [a, b, c] = [2, 3, 4].map(|storage| tensor(storage, &[64]));
    let out = tensor(5, &[64]);
    let offsets = |steps: &[OpEvent<'_>]| {
        let found = placed(steps, &[&out], &[&x]);
        let placed = found.schedule.offsets.iter().filter(|o| **o != u64::MAX);
        placed.copied().collect::<Vec<_>>()
    };
    let dies = offsets(&[
        op("aten::neg", &[&x], &[&a]),
        op("aten::exp", &[&a], &[&b]),
        op("aten::cat", &[&b], &[&out]),
    ]);
    assert_eq!(dies[0], dies[1]);
    let lives = offsets(&[
        op("aten::neg", &[&x], &[&a]),
        op("aten::exp", &[&a], &[&b]),
        op("aten::cat", &[&a, &b], &[&out]),
    ]);
    assert_ne!(lives[0], lives[1]);
    // Not element by element.
    let matrix = offsets(&[
        op("aten::neg", &[&x], &[&a]),
        op("aten::cat", &[&a], &[&b]),
        op("aten::cat", &[&b], &[&out]),
    ]);
    assert_ne!(matrix[0], matrix[1]);
    // The argument is looked at in another way too.
    let turned = a.view(&[64], &[1], 0);
    let reversed = Tensor {
        sizes: vec![8, 8],
        strides: vec![1, 8],
        ..turned
    };
    let two_ways = offsets(&[
        op("aten::neg", &[&x], &[&a]),
        op("aten::maximum", &[&a, &reversed], &[&c]),
        op("aten::cat", &[&c], &[&out]),
    ]);
    assert_ne!(two_ways[0], two_ways[1]);
}

#[test]
fn ops_are_told_how_to_write_their_results() {
    let x = tensor(1, &[64]);
    let [a, b, c, out] = [2, 3, 4, 5].map(|storage| tensor(storage, &[64]));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::empty_like", &[&a], &[&b]),
        in_place("aten::copy_", &b, &[&a]),
        op("aten::clone", &[&b], &[&c]),
        op("aten::nonsense", &[&c], &[&out]),
    ];
    let found = placed(&steps, &[&out], &[&x]);
    let how: Vec<Into> = found.schedule.into.iter().map(|(_, how)| *how).collect();
    assert_eq!(how, [Into::Overload("out"), Into::Nothing, Into::Copy]);
}

#[test]
fn a_number_becomes_a_wrapped_tensor() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let mut scaled = op("aten::mul", &[&x], &[&y]);
    scaled.overload = "Scalar";
    scaled.args.push(read(ArgEvent::Float(2.0)));
    let found = run("scalars", &[scaled], &[&y], &[&x]);
    assert_eq!(program(&found.plan), ["mul %0 Wrapped(2) > %1"]);
    let Instr::Local { overload, .. } = found.plan.instrs[0] else {
        panic!("a local op");
    };
    assert_eq!(found.plan.str(overload), "Tensor");
}

#[test]
fn collectives_start_early_and_are_waited_for_late() {
    let x = tensor(1, &[64]);
    let [a, b, c, d] = [2, 3, 4, 5].map(|storage| tensor(storage, &[64]));
    let [first, second, e] = [6, 7, 8].map(|storage| tensor(storage, &[64]));
    let reduce = |input: &'static Tensor, out: &'static Tensor| {
        collective(
            "_c10d_functional::all_reduce",
            input,
            vec![ArgEvent::Str("sum")],
            out,
        )
    };
    let leak = |t: &Tensor| -> &'static Tensor { Box::leak(Box::new(t.clone())) };
    let (a_, b_, first_, second_) = (leak(&a), leak(&b), leak(&first), leak(&second));
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::exp", &[&x], &[&b]),
        reduce(a_, first_),
        sample::wait(&first),
        op("aten::sin", &[&x], &[&c]),
        reduce(b_, second_),
        sample::wait(&second),
        op("aten::cos", &[&first], &[&d]),
        op("aten::tan", &[&second], &[&e]),
    ];
    let found = run("overlap", &steps, &[&c, &d, &e], &[&x]);
    let order: Vec<String> = program(&found.plan)
        .into_iter()
        .filter(|line| !line.starts_with("free"))
        .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(
        order,
        [
            "neg",
            "AllReduce",
            "exp",
            "AllReduce",
            "sin",
            "wait",
            "cos",
            "wait",
            "tan"
        ]
    );
}

/// The order in which a plan is left, by the names of ops.
fn order(plan: &Plan) -> Vec<String> {
    let lines = program(plan).into_iter();
    let brief = lines.map(|line| line.split(' ').next().unwrap_or_default().to_owned());
    brief
        .filter(|name| name != "free" && name != "view")
        .collect()
}

#[test]
fn compute_that_needs_no_result_runs_while_it_is_under_way() {
    let x = tensor(1, &[64]);
    let [a, b, c, d, e, f] = [2, 3, 4, 5, 6, 7].map(|storage| tensor(storage, &[64]));
    let [first, second] = [8, 9].map(|storage| tensor(storage, &[128]));
    let gather = "_c10d_functional::all_gather_into_tensor";
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        collective(gather, &a, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&b]),
        op("aten::exp", &[&x], &[&c]), // makes what the next one sends
        collective(gather, &c, vec![ArgEvent::Int(2)], &second),
        sample::wait(&second),
        op("aten::bmm", &[&second], &[&d]),
        op("aten::sin", &[&x], &[&e]),
        op("aten::add", &[&b, &d, &e], &[&f]),
    ];
    let found = run("overlap", &steps, &[&f], &[&x]);
    assert_eq!(
        order(&found.plan),
        [
            "neg",
            "AllGather",
            "exp",
            "AllGather",
            "sin",
            "wait",
            "mm",
            "wait",
            "bmm",
            "add"
        ]
    );
    // What was sent may be written after the wait only, and random numbers, ops
    // outside of ATen and collectives keep their order.
    let mut draw = op("aten::rand_like", &[&x], &[&c]);
    draw.seeded = true;
    let steps = [
        collective(gather, &x, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        in_place("aten::add_", &x, &[]),
        op("mylib::log", &[&first], &[]),
        draw,
        op("mylib::log", &[], &[]),
        op("aten::sin", &[&x], &[&e]),
    ];
    let found = run("overlap", &steps, &[&c, &e], &[&x]);
    let expected = [
        "AllGather",
        "wait",
        "add_",
        "log",
        "rand_like",
        "log",
        "sin",
    ];
    assert_eq!(order(&found.plan), expected);
}

#[test]
fn only_so_much_runs_ahead_of_its_turn() {
    let big = 12 << 20; // elements of 4 bytes: two of them are more than the limit
    let x = tensor(1, &[64]);
    let [a, out] = [2, 3].map(|storage| tensor(storage, &[64]));
    let [b, c] = [4, 5].map(|storage| tensor(storage, &[big]));
    let first = tensor(8, &[128]);
    let gather = "_c10d_functional::all_gather_into_tensor";
    let steps = [
        collective(gather, &x, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&a]),
        op("aten::arange", &[], &[&b]),
        op("aten::zeros", &[], &[&c]),
        op("aten::add", &[&a, &b, &c], &[&out]),
    ];
    let found = run("overlap", &steps, &[&out], &[&x]);
    let expected = ["AllGather", "arange", "wait", "mm", "zeros", "add"];
    assert_eq!(order(&found.plan), expected);
}

/// An in-place op of a tensor and a number.
fn scaled<'a>(target: &'a Tensor, number: f64) -> OpEvent<'a> {
    let mut event = in_place("aten::mul_", target, &[]);
    event.overload = "Scalar";
    event.args.push(read(ArgEvent::Float(number)));
    event
}

fn added<'a>(target: &'a Tensor, source: &'a Tensor, factor: i64) -> OpEvent<'a> {
    let mut event = in_place("aten::add_", target, &[source]);
    event.overload = "Tensor";
    event.args.push(read(ArgEvent::Int(factor)));
    event
}

#[test]
fn updates_of_one_kind_become_one() {
    let [x, y, z] = [1, 2, 3].map(|storage| tensor(storage, &[8]));
    let all = [&x, &y, &z];
    let found = |steps: &[OpEvent<'_>]| {
        let plan = run("foreach", steps, &[], &all).plan;
        ops(&plan)
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let together = [scaled(&x, 0.5), scaled(&y, 0.5), scaled(&z, 0.5)];
    assert_eq!(found(&together), ["_foreach_mul_"]);
    let numbers = [scaled(&x, 0.5), scaled(&y, 0.25), scaled(&z, 0.5)];
    assert_eq!(found(&numbers), ["_foreach_mul_", "mul_"]);
    assert_eq!(
        found(&[added(&x, &z, 1), added(&y, &z, 1)]),
        ["_foreach_add_"]
    );
    // A factor may be added with one rounding or two.
    assert_eq!(
        found(&[added(&x, &z, 2), added(&y, &z, 2)]),
        ["add_", "add_"]
    );
    // Each reads what the one before has written, or writes what it has read.
    assert_eq!(
        found(&[added(&x, &z, 1), added(&y, &x, 1)]),
        ["add_", "add_"]
    );
    assert_eq!(
        found(&[added(&x, &z, 1), added(&z, &y, 1)]),
        ["add_", "add_"]
    );
    // The second of each moves over the others of the first.
    let momentum = [
        scaled(&x, 0.5),
        added(&x, &z, 1),
        scaled(&y, 0.5),
        added(&y, &z, 1),
    ];
    assert_eq!(found(&momentum), ["_foreach_mul_", "_foreach_add_"]);
    // Something else writes what both read, or looks at what each writes.
    let looks = op("mylib::log", &[&x, &y], &[]);
    for other in [scaled(&z, 2.0), looks] {
        let steps = [added(&x, &z, 1), other, added(&y, &z, 1)];
        assert!(!found(&steps).contains(&"_foreach_add_".to_owned()));
    }
    // The second moves up, or the first down.
    let written = scaled(&x, 2.0);
    assert_eq!(
        found(&[added(&x, &z, 1), written, added(&y, &z, 1)]),
        ["_foreach_add_", "mul_"]
    );
    let reads = op("mylib::log", &[&z, &y], &[]);
    assert_eq!(
        found(&[added(&x, &z, 1), reads, added(&y, &z, 1)]),
        ["_foreach_add_"]
    );
    // What is sent is written after the wait.
    let gathered = tensor(8, &[16]);
    let gather = "_c10d_functional::all_gather_into_tensor";
    let sent = [
        collective(gather, &y, vec![ArgEvent::Int(2)], &gathered),
        scaled(&x, 0.5),
        sample::wait(&gathered),
        scaled(&y, 0.5),
    ];
    assert_eq!(order(&run("foreach", &sent, &[], &all).plan)[1], "wait");
    // Parts of one storage, apart and not.
    let parts = [0, 4, 2].map(|at| x.view(&[4], &[1], at));
    let [a, b, c] = &parts;
    assert_eq!(found(&[scaled(a, 0.5), scaled(b, 0.5)]), ["_foreach_mul_"]);
    assert_eq!(found(&[scaled(a, 0.5), scaled(c, 0.5)]), ["mul_", "mul_"]);
    let large = tensor(9, &[(1 << 18) + 1]);
    let plan = run(
        "foreach",
        &[scaled(&large, 0.5), scaled(&x, 0.5)],
        &[],
        &[&large, &x],
    )
    .plan;
    assert_eq!(ops(&plan), ["mul_", "mul_"]);
}
