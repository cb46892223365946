//! Results at their places in the arena, and within the memory that was recorded.

use rote_aten_ops::AtenOps;
use rote_plans::Instr;
use rote_plans::schedule::Into;

use super::{ops, passes, run};
use crate::{Program, effects, optimize, paper};
use rote_tracer::event::{ArgEvent, OpEvent};
use rote_tracer::sample::{self, Tensor, collective, in_place, op, tensor};

/// The plan with all its results in the arena that can lie there: it was recorded
/// with memory to spare.
fn placed(ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> Program {
    with_room(&run("arena", ops, outputs, args))
}

/// The program as it would be had it been recorded with memory to spare.
fn with_room(program: &Program) -> Program {
    let mut all = program.clone();
    all.recorded = 1 << 30;
    all.arrange(&AtenOps, &[]);
    all
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
        let outs = effects::outs(plan, instr);
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

/// Whether the output of a gather lies over the memory of its input, which starts at so many of `elements`. `twice`:
/// the part is gathered once more, meanwhile; `late`: the memory is read once more.
fn gathers_in_place(elements: i64, start: i64, [twice, late]: [bool; 2]) -> bool {
    let x = tensor(1, &[64]);
    let memory = tensor(2, &[elements]);
    let part = memory.view(&[64], &[1], start);
    let [first, gathered, out] = [3, 4, 5].map(|storage| tensor(storage, &[128]));
    let sum = tensor(6, &[256 + elements]);
    let gather = |output| {
        let name = "_c10d_functional::all_gather_into_tensor";
        collective(name, &part, vec![ArgEvent::Int(2)], output)
    };
    let mut steps = vec![
        op("aten::empty", &[], &[&memory]),
        in_place("aten::copy_", &part, &[&x]),
    ];
    if twice {
        steps.push(gather(&first));
    }
    let last = if late { &memory } else { &x };
    steps.extend([gather(&gathered), sample::wait(&gathered)]);
    steps.push(op("aten::cat", &[&gathered], &[&out]));
    if twice {
        steps.push(sample::wait(&first));
        steps.push(op("aten::cat", &[&first, &out, last], &[&sum]));
    } else {
        steps.push(op("aten::cat", &[&out, last], &[&sum]));
    }
    let found = placed(&steps, &[&sum], &[&x]);
    paper::run(&found.plan, &found.schedule, 2).expect("what lies in one place does no harm");
    let mut instrs = found.plan.instrs.iter().rev();
    let gather = instrs.find_map(|instr| match instr {
        Instr::Collective(collective) => Some(*collective),
        _ => None,
    });
    let gather = gather.expect("the plan has the gather");
    let place = |value| found.schedule.offset(effects::root(&found.plan, value));
    let [input, output] = [gather.input, gather.output].map(place);
    assert!(input.is_some() && output.is_some(), "both are in the arena");
    input == output
}

#[test]
fn a_gather_lies_over_its_input_where_that_is_its_own_part() {
    let once = [false, false];
    assert!(gathers_in_place(128, 0, once));
    assert!(!gathers_in_place(128, 64, once), "the other rank's part");
    assert!(!gathers_in_place(192, 0, once), "not as large");
    assert!(
        !gathers_in_place(128, 0, [false, true]),
        "read behind the gather"
    );
    assert!(!gathers_in_place(128, 0, [true, false]), "being sent");
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
    let placed = |program: &Program| {
        program
            .schedule
            .offsets
            .iter()
            .filter(|o| **o != u64::MAX)
            .count()
    };
    placed(&with_room(program)) - placed(program)
}

/// The most bytes that a run on paper holds.
fn most(program: &Program) -> u64 {
    let seen = paper::run(&program.plan, &program.schedule, 2).expect("the plan runs");
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
    let all = most(&with_room(&found));
    assert!(all >= 4 * large, "{all}");
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
    seen.arrange(&AtenOps, &allocated);
    assert_eq!(left_out(&seen), 2);
    let beside = 3 * large;
    assert!(seen.schedule.arena_bytes + beside <= seen.recorded + 512);
}

#[test]
fn a_pass_that_would_keep_too_much_alive_is_left_out() {
    let x = tensor(1, &[1 << 12]);
    let [whole, other] = [2, 3].map(|storage| tensor(storage, &[1 << 12]));
    let part = whole.view(&[16], &[1], 16);
    let [copy, late, out] = [4, 5, 6].map(|storage| tensor(storage, &[16]));
    let steps = [
        op("aten::neg", &[&x], &[&whole]),
        op("aten::clone", &[&part], &[&copy]), // a view of it would keep all of it
        op("aten::neg", &[&x], &[&other]),
        op("aten::cat", &[&other], &[&late]),
        op("aten::cat", &[&copy, &late], &[&out]),
    ];
    let mut recorder = sample::recorder(&[&x]);
    sample::record(&mut recorder, &steps);
    let (plan, _) = sample::finish(recorder, &[&out]);
    let (without, _) = optimize(plan.clone(), passes("none"), &AtenOps);
    let (found, report) = optimize(plan.clone(), passes("copies"), &AtenOps);
    assert!(report[0].1.what.starts_with("left out"), "{report:?}");
    assert_eq!(report[0].1.changed, 0);
    assert_eq!(found.plan, without.plan);
    // Where there is memory for it, the copy goes.
    let mut room = steps.to_vec();
    let third = tensor(7, &[1 << 13]);
    room.push(op("aten::nonsense", &[&x], &[&third]));
    let found = run("copies", &room, &[&out], &[&x]);
    assert!(!ops(&found.plan).contains(&"clone"));
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
