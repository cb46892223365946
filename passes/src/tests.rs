//! Passes on plans that the recorder makes of a few ops: what each takes out,
//! and what it must leave.

#[cfg(not(miri))]
mod arena;
mod order;

use rote_aten_ops::AtenOps;
use rote_plans::{Instr, Plan};

use super::lacking::SomeOps;
use super::{PASSES, Program, Selection, optimize};
use rote_tracer::event::{ArgEvent, OpEvent};
use rote_tracer::sample::{
    self, Tensor, collective, in_place, op, program, read, record, recorder, tensor, written,
};

fn passes(names: &str) -> Selection {
    Selection::parse(names).expect("names of passes")
}

/// The plan of ops on two arguments, through these passes.
fn run(names: &str, ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> Program {
    let mut recorder = recorder(args);
    record(&mut recorder, ops);
    let (plan, _) = sample::finish(recorder, outputs);
    let recorded = SomeOps::of(&plan);
    let (fewest, _) = optimize(plan.clone(), passes(names), &recorded);
    assert_eq!(recorded.lacks(&fewest), None);
    let (program, report) = optimize(plan, passes(names), &AtenOps);
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
    let (same, report) = optimize(plan.clone(), Selection::NONE, &AtenOps);
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
    assert!(super::most(&found.plan, &AtenOps) <= found.recorded);
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

/// How many ops of this name are left.
fn left(plan: &Plan, name: &str) -> usize {
    ops(plan).iter().filter(|op| **op == name).count()
}

#[test]
fn what_reads_a_copy_into_a_tensor_reads_its_source() {
    let (x, bucket) = (tensor(1, &[8]), tensor(2, &[8]));
    let [gradient, out] = [3, 4].map(|storage| tensor(storage, &[3]));
    let part = bucket.view(&[3], &[1], 1); // not aligned
    let half = gradient.view(&[2], &[1], 0);
    let steps = [
        op("aten::neg", &[&x], &[&bucket]),
        op("aten::nonsense", &[&x], &[&gradient]),
        in_place("aten::copy_", &gradient, &[&part]),
        op("aten::exp", &[&gradient], &[&out]),
    ];
    let with = |at: usize, more: OpEvent<'_>| -> Program {
        let mut steps: Vec<OpEvent<'_>> = steps.to_vec();
        steps.insert(at, more);
        run("copies", &steps, &[&out], &[&x])
    };
    let found = run("copies", &steps, &[&out], &[&x]).plan;
    assert_eq!(ops(&found), ["neg", "nonsense", "exp"]);
    let is_op = |instr: &&Instr| matches!(instr, Instr::Local { .. });
    let exp = found.instrs.iter().rfind(is_op).expect("exp");
    let read = sample::touched(&found, exp)[0];
    assert_eq!(found.values[read as usize].offset, 1);
    // The caller has it.
    let returned = run("copies", &steps, &[&out, &gradient], &[&x]).plan;
    assert_eq!(left(&returned, "copy_"), 1);
    // One of the two is written before the last reader; before or after that matters to none.
    for (at, kept) in [(2, 0), (3, 1), (4, 0)] {
        let found = with(at, in_place("aten::zero_", &bucket, &[]));
        assert_eq!(left(&found.plan, "copy_"), kept, "{at}");
    }
    let found = with(3, in_place("aten::zero_", &gradient, &[]));
    assert_eq!(left(&found.plan, "copy_"), 1);
    // Somebody reads a part of it, or does not go by elements.
    let other = tensor(5, &[2]);
    assert_eq!(
        left(&with(3, op("aten::sin", &[&half], &[&other])).plan, "copy_"),
        1
    );
    let other = tensor(5, &[3]);
    for (name, kept) in [
        ("aten::sin", 0),
        ("aten::_foreach_sin", 0),
        ("aten::cumsum", 1),
    ] {
        let found = with(3, op(name, &[&gradient], &[&other]));
        assert_eq!(left(&found.plan, "copy_"), kept, "{name}");
    }
    // What is aligned, anybody takes.
    let begin = bucket.view(&[3], &[1], 0);
    let aligned = [
        steps[0].clone(),
        op("aten::nonsense", &[&x], &[&gradient]),
        in_place("aten::copy_", &gradient, &[&begin]),
        op("aten::cumsum", &[&gradient], &[&out]),
    ];
    let found = run("copies", &aligned, &[&out], &[&x]).plan;
    assert_eq!(ops(&found), ["neg", "nonsense", "cumsum"]);
}

#[test]
fn a_fused_optimizer_step_leaves_gradients() {
    let x = tensor(1, &[8]);
    let bucket = tensor(2, &[8]);
    let part = bucket.view(&[3], &[1], 1);
    let [weight, gradient] = [3, 4].map(|storage| tensor(storage, &[3]));
    let steps = |grad_scale: ArgEvent<'static>| {
        let mut fused = op("aten::_fused_sgd_", &[], &[]);
        fused.args = vec![
            written(ArgEvent::Tensors(vec![weight.event()])),
            written(ArgEvent::Tensors(vec![gradient.event()])),
            read(ArgEvent::Float(0.1)),
            read(grad_scale),
            read(ArgEvent::None),
        ];
        let steps = [
            op("aten::neg", &[&x], &[&bucket]),
            op("aten::nonsense", &[&x], &[&weight]),
            op("aten::nonsense", &[&x], &[&gradient]),
            in_place("aten::copy_", &gradient, &[&part]),
            fused,
        ];
        run("copies", &steps, &[&weight], &[&x]).plan
    };
    assert_eq!(left(&steps(ArgEvent::None), "copy_"), 0);
    assert_eq!(left(&steps(ArgEvent::Float(2.0)), "copy_"), 1);
}

#[test]
fn lists_of_a_step_that_reads_buckets_keep_what_they_name() {
    let (x, bucket) = (tensor(1, &[8]), tensor(2, &[6]));
    let parts = [bucket.view(&[3], &[1], 0), bucket.view(&[3], &[1], 3)];
    let gradients = [3, 4].map(|storage| tensor(storage, &[3]));
    let weights = [5, 6].map(|storage| tensor(storage, &[3]));
    let moments = [7, 8].map(|storage| tensor(storage, &[3]));
    let lists = [&weights, &gradients, &moments].map(|[a, b]| vec![a.event(), b.event()]);
    let mut fused = op("aten::_fused_sgd_", &[], &[]);
    fused.args = lists.map(|list| written(ArgEvent::Tensors(list))).to_vec();
    fused
        .args
        .extend([read(ArgEvent::None), read(ArgEvent::None)]);
    let mut steps = vec![op("aten::nonsense", &[&x], &[&bucket])];
    // Equal gradients: one of them is made once the copies are gone.
    steps.extend(gradients.iter().map(|to| op("aten::neg", &[&x], &[to])));
    let pairs = || gradients.iter().zip(&parts);
    steps.extend(pairs().map(|(gradient, part)| in_place("aten::add_", part, &[gradient])));
    steps.extend(pairs().map(|(gradient, part)| in_place("aten::copy_", gradient, &[part])));
    steps.push(fused);
    let [a, b] = &weights;
    let [c, d] = &moments;
    let found = run("copies,common", &steps, &[], &[&x, a, b, c, d]).plan;
    assert_eq!((left(&found, "copy_"), left(&found, "neg")), (0, 1));
    let last = found.instrs.iter().rev();
    let is_fused = |instr: &&Instr| matches!(instr, Instr::Local { op, .. } if found.str(*op).contains("fused"));
    let fused = last.clone().find(is_fused).expect("the step");
    let Instr::Local { args, .. } = fused else {
        unreachable!()
    };
    let lists: Vec<Vec<u32>> = (found.args[args.indices()].iter())
        .filter_map(|arg| match arg {
            rote_plans::Arg::Values(list) => Some(found.ids(*list).to_vec()),
            _ => None,
        })
        .collect();
    let bound = |list: &Vec<u32>| list.iter().all(|value| found.is_bound(*value));
    assert!(bound(&lists[0]) && bound(&lists[2]), "{lists:?}");
    let offsets: Vec<_> = (lists[1].iter())
        .map(|value| found.values[*value as usize].offset)
        .collect();
    assert_eq!(offsets, [0, 3]);
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
