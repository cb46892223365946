//! Passes that alter collectives, orders and ops, on plans of a few ops: what
//! they leave, that it does what was recorded, and that bugs in it are seen.

use rote_aten_ops::AtenOps;
use rote_plans::{Collective, Instr, Plan, Schedule};

use super::lacking::SomeOps;
use super::paper::{self, Collectives, RUNS, Seen};
use super::{Program, Selection, collectives, optimize};
use rote_tracer::event::{ArgEvent, OpEvent};
use rote_tracer::sample::{F64, Tensor, collective, in_place, op, record, recorder, tensor, wait};

/// A program after passes, and what the recorded plan does.
struct Altered {
    passes: Selection,
    expected: Seen,
    program: Program,
}

impl Altered {
    /// The plan of ops on arguments, through these passes: it does what was recorded.
    fn by(names: &str, ops: &[OpEvent<'_>], outputs: &[&Tensor], args: &[&Tensor]) -> Self {
        let passes = Selection::parse(names).expect("names of passes");
        let mut recorder = recorder(args);
        record(&mut recorder, ops);
        let (plan, _) = rote_tracer::sample::finish(recorder, outputs);
        let expected = paper::run(&plan, &Schedule::default(), RUNS).expect("the plan runs");
        let own = SomeOps::of(&plan);
        let (fewest, _) = optimize(plan.clone(), passes, &own);
        assert_eq!(own.lacks(&fewest), None);
        let (program, _) = optimize(plan, passes, &AtenOps);
        program.plan.check().expect("the plan is valid");
        let altered = Altered {
            passes,
            expected,
            program,
        };
        assert_eq!(
            altered.wrong(&altered.program),
            None,
            "the passes are right"
        );
        altered
    }

    fn wrong(&self, program: &Program) -> Option<String> {
        match paper::run(&program.plan, &program.schedule, RUNS) {
            Ok(seen) => (self.expected).difference(&seen, Collectives::of(self.passes)),
            Err(wrong) => Some(wrong),
        }
    }

    /// Bytes that each collective sends.
    fn sends(&self) -> Vec<u64> {
        let plan = &self.program.plan;
        let bytes = |c: &Collective| {
            let value = &plan.values[c.input as usize];
            let numel: i64 = plan.dims(value.shape).iter().product();
            numel.unsigned_abs() * value.dtype.bytes().unwrap_or(0)
        };
        collectives(plan).map(bytes).collect()
    }

    /// Whether a program with another order of instructions is seen to be wrong.
    /// Definitions follow.
    fn sees(&self, plant: impl FnOnce(&mut Plan)) -> bool {
        let mut planted = self.program.clone();
        planted.schedule = Schedule::default();
        plant(&mut planted.plan);
        super::emit::define(&mut planted.plan);
        self.wrong(&planted).is_some()
    }

    /// The same of two instructions that change places, each told by its name and
    /// its place among those of that name.
    fn sees_swapped(&self, first: (&'static str, usize), second: (&'static str, usize)) -> bool {
        self.sees(|plan| {
            let at = [first, second].map(|(name, nth)| find(plan, name, nth));
            plan.instrs.swap(at[0], at[1]);
        })
    }
}

fn reduce<'a>(input: &'a Tensor, out: &'a Tensor) -> OpEvent<'a> {
    let sum = vec![ArgEvent::Str("sum")];
    collective("_c10d_functional::all_reduce", input, sum, out)
}

fn reduce_in_place(target: &Tensor) -> OpEvent<'_> {
    let sum = vec![ArgEvent::Str("sum")];
    let mut event = collective("_c10d_functional::all_reduce_", target, sum, target);
    event.args[0].written = true;
    event
}

fn gather<'a>(input: &'a Tensor, out: &'a Tensor) -> OpEvent<'a> {
    let name = "_c10d_functional::all_gather_into_tensor";
    collective(name, input, vec![ArgEvent::Int(2)], out)
}

fn scatter<'a>(input: &'a Tensor, out: &'a Tensor) -> OpEvent<'a> {
    let name = "_c10d_functional::reduce_scatter_tensor";
    let middle = vec![ArgEvent::Str("sum"), ArgEvent::Int(2)];
    collective(name, input, middle, out)
}

/// The instruction of an op, counted among those of its name.
fn find(plan: &Plan, wanted: &str, nth: usize) -> usize {
    let is = |instr: &Instr| match instr {
        Instr::Local { op, .. } => plan.str(*op) == wanted,
        Instr::Wait { .. } => wanted == "wait",
        Instr::Collective(_) => wanted == "collective",
        _ => false,
    };
    let found = (0..plan.instrs.len()).filter(|i| is(&plan.instrs[*i]));
    found.clone().nth(nth).expect("the op is there")
}

fn tensors<const N: usize>(storage: u64, sizes: &[i64]) -> [Tensor; N] {
    std::array::from_fn(|i| tensor(storage + i as u64, sizes))
}

#[test]
fn small_reductions_become_one() {
    let x = tensor(1, &[20]);
    let [a, b, c, ra, rb, rc, out] = tensors(2, &[20]);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        reduce(&a, &ra),
        wait(&ra),
        op("aten::exp", &[&x], &[&b]),
        reduce(&b, &rb),
        wait(&rb),
        op("aten::sin", &[&x], &[&c]),
        reduce(&c, &rc),
        wait(&rc),
        op("custom::norm", &[&ra, &rb, &rc], &[&out]),
    ];
    for passes in ["buckets", "all", "all,-arena"] {
        let found = Altered::by(passes, &steps, &[&out], &[&x]);
        // Two pieces of 20 and their gaps to 32, and the third.
        assert_eq!(found.sends(), [4 * 96], "{passes}");
        assert_eq!(found.program.carries, [[0, 1, 2]]);
    }
}

#[test]
fn results_that_outlive_the_run_have_storages_of_their_own() {
    let x = tensor(1, &[20]);
    let [a, b, ra, rb] = tensors(2, &[20]);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        reduce(&a, &ra),
        wait(&ra),
        op("aten::exp", &[&x], &[&b]),
        reduce(&b, &rb),
        wait(&rb),
    ];
    let half = ra.view(&[10], &[1], 10);
    for outputs in [vec![&ra, &rb], vec![&half, &rb], vec![&rb]] {
        let found = Altered::by("buckets", &steps, &outputs, &[&x]);
        assert_eq!(found.sends().len(), 1);
    }
}

#[test]
fn rows_of_gathers_and_scatters_are_put_together() {
    let x = tensor(1, &[4, 6]);
    let [a, b, ga, gb] = [[2, 6], [6, 1], [4, 6], [12, 1]];
    let [a, b] = [tensor(2, &a), tensor(3, &b)];
    let [ga, gb] = [tensor(4, &ga), tensor(5, &gb)];
    let [sa, sb] = [tensor(6, &[2, 6]), tensor(7, &[6, 1])];
    let out = tensor(8, &[4]);
    let turned = x.view(&[6, 4], &[1, 6], 0);
    let st = tensor(9, &[3, 4]);
    let steps = [
        op("aten::one", &[&x], &[&a]),
        op("aten::two", &[&x], &[&b]),
        gather(&a, &ga),
        gather(&b, &gb),
        wait(&ga),
        wait(&gb),
        scatter(&ga, &sa),
        wait(&sa),
        scatter(&gb, &sb),
        wait(&sb),
        scatter(&turned, &st),
        wait(&st),
        op("aten::three", &[&sa, &sb, &st], &[&out]),
    ];
    let found = Altered::by("buckets", &steps, &[&out, &gb, &sb], &[&x]);
    assert_eq!(found.sends(), [4 * 32, 4 * 2 * 48]);
    assert_eq!(found.program.carries, [vec![0, 1], vec![2, 3, 4]]);
}

#[test]
fn reductions_in_place_are_copied_back() {
    let (x, y) = (tensor(1, &[20]), tensor(2, &[20]));
    let [a, out] = tensors(3, &[20]);
    let part = y.view(&[4], &[1], 4);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        reduce_in_place(&a),
        wait(&a),
        reduce_in_place(&part), // of the caller's
        wait(&part),
        op("aten::add", &[&a, &y], &[&out]),
    ];
    let found = Altered::by("buckets", &steps, &[&out], &[&x, &y]);
    assert_eq!(found.sends(), [4 * 48]);
}

#[test]
fn collectives_that_differ_or_depend_on_each_other_stay_apart() {
    let x = tensor(1, &[16]);
    let [a, b, ra, rb, out] = tensors(2, &[16]);
    let (mut wide, mut rwide) = (tensor(8, &[16]), tensor(9, &[16]));
    for tensor in [&mut wide, &mut rwide] {
        tensor.dtype = F64;
        tensor.storage_bytes *= 2;
    }
    let sends = |steps: &[OpEvent<'_>]| Altered::by("buckets", steps, &[&out], &[&x]).sends();
    let first = [op("aten::neg", &[&x], &[&a]), reduce(&a, &ra), wait(&ra)];
    let with = |more: &[OpEvent<'_>]| sends(&[first.to_vec(), more.to_vec()].concat());
    let end = op("aten::add", &[&ra, &rb], &[&out]);
    assert_eq!(with(&[reduce(&x, &rb), wait(&rb), end.clone()]), [128]);
    let maximum = collective(
        "_c10d_functional::all_reduce",
        &x,
        vec![ArgEvent::Str("max")],
        &rb,
    );
    assert_eq!(with(&[maximum, wait(&rb), end.clone()]), [64, 64]);
    let other = op("aten::wide", &[&x], &[&wide]);
    let end_wide = op("aten::cat", &[&ra, &rwide], &[&out]);
    assert_eq!(
        with(&[other, reduce(&wide, &rwide), wait(&rwide), end_wide]),
        [64, 128]
    );
    let dependent = op("aten::exp", &[&ra], &[&b]);
    assert_eq!(
        with(&[dependent, reduce(&b, &rb), wait(&rb), end.clone()]),
        [64, 64]
    );
    let acts = op("mylib::barrier", &[], &[]);
    assert_eq!(with(&[acts, reduce(&x, &rb), wait(&rb), end]), [64, 64]);
}

#[test]
fn large_collectives_and_full_buckets_stay_apart() {
    let elements = |bytes: i64| bytes / 4;
    for (bytes, members, expected) in [(128 << 10, 33, 2), ((128 << 10) + 4, 3, 3)] {
        let x = tensor(1, &[elements(bytes)]);
        let results: Vec<Tensor> = (0..members).map(|i| tensor(2 + i, &x.sizes)).collect();
        let mut recorder = recorder(&[&x]);
        for result in &results {
            record(&mut recorder, &[reduce(&x, result), wait(result)]);
        }
        let (plan, _) = rote_tracer::sample::finish(recorder, &[]);
        let (program, _) = optimize(plan, Selection::parse("buckets").expect("a pass"), &AtenOps);
        assert_eq!(collectives(&program.plan).count(), expected);
    }
}

#[test]
fn bugs_in_buckets_are_seen() {
    let x = tensor(1, &[16]);
    let [a, b, ra, rb, out] = tensors(2, &[16]);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        reduce(&a, &ra),
        in_place("aten::add_", &a, &[&x]), // what was sent is overwritten
        op("aten::exp", &[&x], &[&b]),
        reduce(&b, &rb),
        wait(&ra),
        wait(&rb),
        op("aten::sub", &[&ra, &rb], &[&out]),
    ];
    let found = Altered::by("buckets", &steps, &[&out, &a], &[&x]);
    assert_eq!(found.sends(), [128]);
    assert!(
        !found.sees_swapped(("aten::copy_", 0), ("aten::copy_", 0)),
        "nothing is planted"
    );
    assert!(
        found.sees_swapped(("aten::copy_", 0), ("aten::add_", 0)),
        "an input that changed is sent"
    );
    assert!(
        found.sees_swapped(("aten::copy_", 1), ("collective", 0)),
        "a piece is sent before it is there"
    );
    assert!(
        found.sees_swapped(("wait", 0), ("aten::sub", 0)),
        "a result is needed before the wait"
    );
    let shift = |nth: usize| {
        found.sees(|plan| {
            let pieces = plan.values.iter_mut().filter(|value| value.offset == 16);
            pieces.into_iter().nth(nth).expect("a second piece").offset = 0;
        })
    };
    assert!(
        shift(0) && shift(1),
        "pieces lie over each other, or results are mixed up"
    );
}

#[test]
fn sums_of_floats_over_more_ranks_need_a_name_of_their_own() {
    let x = tensor(1, &[16]);
    let [ra, rb] = tensors(2, &[16]);
    let [ga, gb] = tensors(4, &[48]);
    let left = |names: &str, ranks: &[i64], sum: &'static str| {
        let of = |name: &str| match name {
            "maximum" => vec![ArgEvent::Str("max")],
            _ => vec![ArgEvent::Str("sum")],
        };
        let reduce = |out| collective("_c10d_functional::all_reduce", &x, of(sum), out);
        let gather = |out| {
            let name = "_c10d_functional::all_gather_into_tensor";
            collective(name, &x, vec![ArgEvent::Int(3)], out)
        };
        let mut recorder = recorder(&[&x]);
        let pairs = [reduce(&ra), wait(&ra), reduce(&rb), wait(&rb)];
        record(&mut recorder, &pairs);
        if ranks.len() == 3 {
            record(
                &mut recorder,
                &[gather(&ga), wait(&ga), gather(&gb), wait(&gb)],
            );
        }
        let (mut plan, _) = rote_tracer::sample::finish(recorder, &[]);
        plan.fingerprint.world_size = ranks.len() as u32;
        plan.groups[0].ranks = super::emit::dims(&mut plan, ranks);
        let (program, _) = optimize(plan, Selection::parse(names).expect("passes"), &AtenOps);
        let is_sum = |c: &&Collective| c.reduce.is_some();
        let sums = collectives(&program.plan).filter(is_sum).count();
        (sums, collectives(&program.plan).count() - sums)
    };
    assert_eq!(left("buckets", &[0, 1], "sum"), (1, 0));
    assert_eq!(left("buckets", &[0, 1], "maximum"), (2, 0));
    assert_eq!(left("buckets", &[0, 1, 2], "sum"), (2, 1));
    assert_eq!(left("sums", &[0, 1, 2], "sum"), (1, 2));
    assert_eq!(left("buckets,sums", &[0, 1, 2], "maximum"), (1, 1));
    assert!(!Selection::parse("all").expect("passes").has("sums"));
}

#[test]
fn ranks_put_the_same_collectives_together() {
    let x = tensor(1, &[16]);
    let [a, b, ra, rb, out] = tensors(2, &[16]);
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        reduce(&a, &ra),
        wait(&ra),
        op("aten::exp", &[&x], &[&b]),
        reduce(&b, &rb),
        wait(&rb),
        op("aten::sub", &[&ra, &rb], &[&out]),
    ];
    let of_rank = |rank: u32| {
        let mut recorder = recorder(&[&x]);
        record(&mut recorder, &steps);
        let (mut plan, _) = rote_tracer::sample::finish(recorder, &[&out]);
        plan.fingerprint.rank = rank;
        optimize(plan, Selection::parse("all").expect("all passes"), &AtenOps)
            .0
            .carries
    };
    assert_eq!(of_rank(0), of_rank(1));
}

#[test]
fn bugs_in_the_order_around_collectives_are_seen() {
    let x = tensor(1, &[16]);
    let [a, b, c, d] = tensors(2, &[16]);
    let whole = tensor(6, &[32]);
    let draws = [&c, &d].map(|out| {
        let mut draw = op("aten::rand_like", &[&x], &[out]);
        draw.seeded = true;
        draw
    });
    let [first, second] = draws;
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        gather(&a, &whole),
        wait(&whole),
        in_place("aten::mul_", &a, &[]), // what was sent
        op("aten::exp", &[&whole], &[&b]),
        first,
        second,
    ];
    let found = Altered::by("overlap", &steps, &[&a, &b, &c, &d], &[&x]);
    assert!(
        !found.sees_swapped(("wait", 0), ("wait", 0)),
        "nothing is planted"
    );
    assert!(
        found.sees_swapped(("wait", 0), ("aten::mul_", 0)),
        "what is sent is written"
    );
    assert!(
        found.sees_swapped(("wait", 0), ("aten::exp", 0)),
        "what is received is read"
    );
    assert!(
        found.sees_swapped(("aten::neg", 0), ("collective", 0)),
        "nothing is there to be sent"
    );
    let draws = [("aten::rand_like", 0), ("aten::rand_like", 1)];
    assert!(
        found.sees_swapped(draws[0], draws[1]),
        "random numbers are drawn in another order"
    );
}
