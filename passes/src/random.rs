//! Random plans through the passes: on paper, every selection of passes does
//! what was recorded.

use proptest::prelude::*;
use rote_aten_ops::AtenOps;
use rote_plans::schedule::{DYNAMIC, Ops};
use rote_plans::{BindingKind, Def, Marks, Plan, Schedule, Value};

use super::lacking::SomeOps;
use super::paper::{Collectives, RUNS};
use super::{PASSES, Program, Selection, optimize, paper};
use rote_tracer::Recorder;
use rote_tracer::Refusal;
use rote_tracer::event::ArgEvent;
use rote_tracer::sample::{F64, Tensor, collective, in_place, op, read, recorder, tensor, wait};

/// Elements of every storage.
const ELEMENTS: i64 = 16;
/// What a random op does. Numbers pick among the tensors that exist, modulo how
/// many there are.
#[derive(Clone, Debug)]
enum Step {
    /// Makes a tensor from tensors, element by element or not.
    Make(&'static str, usize, usize),
    /// Makes a tensor from one and a number, or one that is read anew.
    Number(usize, i64),
    /// Makes a tensor from nothing.
    Factory(&'static str),
    /// Makes a tensor like another.
    Like(&'static str, usize),
    /// Looks at a tensor another way: how many elements, every how many, from where.
    View(usize, i64, i64, i64),
    /// Looks at a tensor conjugated or negated, or no longer so.
    Turn(usize, Marks),
    /// Writes to a tensor what it makes of another.
    Write(&'static str, usize, usize),
    /// Writes to a tensor what it makes of itself alone.
    Change(usize),
    /// Makes a tensor, and a view of it in the same op.
    FreshAndView(usize),
    /// Two results, one of another width.
    Two(usize),
    /// A collective, in place or not; waited for later, if at all.
    Collective(&'static str, usize, bool),
    Wait(usize),
    /// Draws random numbers.
    Draw(usize),
    /// An op that is not ATen's.
    Foreign(usize),
}

impl Step {
    /// The tensors that it looks at, waiting for them first.
    fn reads(&self) -> Vec<usize> {
        match self {
            Step::Make(_, a, b) | Step::Write(_, a, b) => vec![*a, *b],
            Step::Number(a, _)
            | Step::Like(_, a)
            | Step::Change(a)
            | Step::FreshAndView(a)
            | Step::Two(a)
            | Step::Collective(_, a, _)
            | Step::Wait(a)
            | Step::Draw(a)
            | Step::Foreign(a) => vec![*a],
            Step::Factory(_) | Step::View(..) | Step::Turn(..) => Vec::new(),
        }
    }
}

/// Writes to what an `empty` has made: a recording that hands it out as it is, is refused.
fn fill(recorder: &mut Recorder, name: &str, made: &Tensor) -> Result<(), Refusal> {
    if name.contains("empty") {
        return recorder.op(&in_place("aten::zero_", made, &[]));
    }
    Ok(())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pick = || 0..1000_usize;
    let step = prop_oneof![
        8 => (prop::sample::select(vec![
            "aten::neg", "aten::exp", "aten::add", "aten::maximum", "aten::cat", "aten::clone", "aten::clone",
            "aten::clone", "aten::mm", "aten::_to_copy",
        ]), pick(), pick()).prop_map(|(name, a, b)| Step::Make(name, a, b)),
        2 => (pick(), 0..3_i64).prop_map(|(a, n)| Step::Number(a, n)),
        3 => prop::sample::select(vec!["aten::ones", "aten::zeros", "aten::arange", "aten::empty"])
            .prop_map(Step::Factory),
        2 => (prop::sample::select(vec!["aten::ones_like", "aten::empty_like", "aten::new_zeros"]), pick())
            .prop_map(|(name, a)| Step::Like(name, a)),
        5 => (pick(), 1..9_i64, 1..3_i64, 0..9_i64).prop_map(|(a, n, s, o)| Step::View(a, n, s, o)),
        2 => (pick(), prop::sample::select(vec![Marks::CONJ, Marks::NEG])).prop_map(|(a, mark)| Step::Turn(a, mark)),
        6 => (prop::sample::select(vec!["aten::copy_", "aten::add_", "aten::mul_"]), pick(), pick())
            .prop_map(|(name, a, b)| Step::Write(name, a, b)),
        2 => pick().prop_map(Step::Change),
        1 => pick().prop_map(Step::FreshAndView),
        1 => pick().prop_map(Step::Two),
        4 => (prop::sample::select(vec!["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]), pick(),
              any::<bool>()).prop_map(|(name, a, here)| Step::Collective(name, a, here)),
        2 => pick().prop_map(Step::Wait),
        1 => pick().prop_map(Step::Draw),
        1 => pick().prop_map(Step::Foreign),
    ];
    prop::collection::vec(step, 1..40)
}

/// The plan of random ops on two arguments and two tensors of the state.
fn plan(steps: &[Step], outputs: &[usize]) -> Plan {
    let mut tensors: Vec<Tensor> = (1..5).map(|storage| tensor(storage, &[ELEMENTS])).collect();
    let mut recorder = recorder(&[&tensors[0], &tensors[1]]);
    for (i, state) in tensors[2..].iter().enumerate() {
        recorder.name_tensor(
            BindingKind::State,
            &format!("state[{i}]"),
            &state.event(),
            None,
            None,
        );
    }
    let mut storage = 10;
    let mut fresh = |elements: i64| {
        storage += 1;
        tensor(storage, &[elements])
    };
    // Results of collectives that nobody has waited for: whoever looks waits first.
    let mut pending: Vec<Tensor> = Vec::new();
    for step in steps {
        let looks = |i: &usize| tensors[i % tensors.len()].clone();
        for i in step.reads() {
            let storage = looks(&i).storage;
            for waited in pending.extract_if(.., |result| result.storage == storage) {
                recorder.op(&wait(&waited)).expect("a result is waited for");
            }
        }
        let at = looks;
        let mut made = Vec::new();
        let recorded = match step {
            Step::Make(name, a, b) => {
                let (a, b) = (at(a), at(b));
                let mut reads = vec![&a];
                if !matches!(
                    *name,
                    "aten::neg" | "aten::exp" | "aten::clone" | "aten::_to_copy"
                ) {
                    reads.push(&b);
                }
                let mut out = fresh(a.sizes[0]);
                if *name == "aten::_to_copy" {
                    out.dtype = F64;
                    out.storage_bytes *= 2;
                }
                made.push(out);
                let mut event = op(name, &reads, &[&made[0]]);
                event.overload = if *name == "aten::add" { "Tensor" } else { "" };
                recorder.op(&event)
            }
            Step::Number(a, number) => {
                let a = at(a);
                made.push(fresh(a.sizes[0]));
                let mut event = op("aten::mul", &[&a], &[&made[0]]);
                event.overload = "Scalar";
                event.args.push(read(ArgEvent::Float(*number as f64)));
                recorder.op(&event)
            }
            Step::Factory(name) => {
                made.push(fresh(ELEMENTS));
                let made = &made[0];
                (recorder.op(&op(name, &[], &[made]))).and_then(|_| fill(&mut recorder, name, made))
            }
            Step::Like(name, a) => {
                let a = at(a);
                made.push(fresh(a.sizes[0]));
                let made = &made[0];
                (recorder.op(&op(name, &[&a], &[made])))
                    .and_then(|_| fill(&mut recorder, name, made))
            }
            Step::View(a, size, stride, offset) => {
                let a = at(a);
                let width = a.dtype.bytes().unwrap_or(1) as i64;
                let view = a.view(&[*size], &[*stride], *offset);
                if (offset + (size - 1) * stride + 1) * width > a.storage_bytes as i64 {
                    continue;
                }
                made.push(view);
                recorder.op(&op("aten::as_strided", &[&a], &[&made[0]]))
            }
            Step::Turn(a, mark) => {
                let a = at(a);
                let mut turned = a.clone();
                turned.marks.0 ^= mark.0;
                made.push(turned);
                recorder.op(&op("aten::_neg_view", &[&a], &[&made[0]]))
            }
            Step::Write(name, a, b) => {
                let (target, source) = (at(a), at(b));
                let mut event = in_place(name, &target, &[&source]);
                if *name != "aten::copy_" {
                    event.overload = "Tensor";
                }
                recorder.op(&event)
            }
            Step::Change(a) => recorder.op(&in_place("aten::neg_", &at(a), &[])),
            Step::FreshAndView(a) => {
                let whole = fresh(ELEMENTS);
                made.extend([whole.view(&[3], &[2], 1), whole]);
                recorder.op(&op("custom::two", &[&at(a)], &[&made[1], &made[0]]))
            }
            Step::Two(a) => {
                made.extend([fresh(4), fresh(4)]);
                made[1].dtype = F64;
                made[1].storage_bytes *= 2;
                let a = at(a);
                let mut event = op("aten::max", &[&a], &[&made[0], &made[1]]);
                event.overload = "dim";
                recorder.op(&event)
            }
            Step::Collective(kind, a, here) => {
                let input = at(a);
                let here = *here && *kind == "all_reduce";
                let n = input.sizes[0];
                let elements = match *kind {
                    "all_gather_into_tensor" => 2 * n,
                    "reduce_scatter_tensor" => (n / 2).max(1),
                    _ => n,
                };
                let out = if here { input.clone() } else { fresh(elements) };
                made.extend((!here).then(|| out.clone()));
                let name = format!("_c10d_functional::{kind}{}", if here { "_" } else { "" });
                let middle = match *kind {
                    "all_reduce" => vec![ArgEvent::Str("sum")],
                    "reduce_scatter_tensor" => vec![ArgEvent::Str("sum"), ArgEvent::Int(2)],
                    _ => vec![ArgEvent::Int(2)],
                };
                let mut event = collective(&name, &input, middle, &out);
                event.args[0].written = here;
                let recorded = recorder.op(&event);
                pending.extend(recorded.is_ok().then_some(out));
                recorded
            }
            Step::Wait(_) => Ok(()),
            Step::Draw(a) => {
                let a = at(a);
                made.push(fresh(a.sizes[0]));
                let mut event = op("aten::rand_like", &[&a], &[&made[0]]);
                event.seeded = true;
                recorder.op(&event)
            }
            Step::Foreign(a) => recorder.op(&op("mylib::log", &[&at(a)], &[])),
        };
        if recorded.is_ok() {
            tensors.extend(made);
        }
    }
    let outputs: Vec<&Tensor> = outputs
        .iter()
        .map(|i| &tensors[i % tensors.len()])
        .collect();
    rote_tracer::sample::finish(recorder, &outputs).0
}

fn selections() -> Vec<(String, Selection)> {
    let names = ["all", "default", "none"].into_iter().map(str::to_owned);
    let alone = PASSES.iter().map(|pass| pass.name.to_owned());
    let without = PASSES.iter().map(|pass| format!("all,-{}", pass.name));
    (names.chain(alone).chain(without))
        .map(|name| {
            (
                name.clone(),
                Selection::parse(&name).expect("names of passes"),
            )
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn passes_do_what_was_recorded(
        steps in steps(),
        outputs in prop::collection::vec(0..1000_usize, 0..5),
        seed in any::<u64>(),
    ) {
        let recorded = plan(&steps, &outputs);
        let Ok(expected) = paper::run(&recorded, &Schedule::default(), RUNS) else {
            return Ok(()); // the ops themselves write to what is on its way
        };
        let some = SomeOps::and_others(&recorded, seed);
        for (name, selection) in selections() {
            let (found, _) = optimize(recorded.clone(), selection, &some);
            prop_assert_eq!(some.lacks(&found), None, "{}", name);
            let seen = paper::run(&found.plan, &found.schedule, RUNS);
            let wrong = seen.as_ref().map(|seen| expected.difference(seen, Collectives::of(selection)));
            prop_assert!(matches!(wrong, Ok(None)), "passes {name} with some ops: {wrong:?}");
            let (found, _) = optimize(recorded.clone(), selection, &AtenOps);
            prop_assert!(found.plan.check().is_ok(), "{name}");
            let seen = paper::run(&found.plan, &found.schedule, RUNS);
            let wrong = match &seen {
                Ok(seen) => expected.difference(seen, Collectives::of(selection)),
                Err(wrong) => Some(wrong.clone()),
            };
            prop_assert!(
                wrong.is_none(),
                "passes {name}: {}\nrecorded {:#?}\nfound {:#?}\n{:?}",
                wrong.unwrap_or_default(),
                rote_tracer::sample::program(&recorded),
                rote_tracer::sample::program(&found.plan),
                found.schedule,
            );
            let most = seen.map_or(0, |seen| seen.most);
            let alters = PASSES.iter().any(|pass| !pass.by_default && selection.has(pass.name));
            let allowed = allowed(&expected, &found, alters);
            prop_assert!(
                most <= allowed,
                "passes {name}: {most} bytes where {allowed} are allowed\nrecorded {:#?}\nfound {:#?}\n{:?}",
                rote_tracer::sample::program(&recorded),
                rote_tracer::sample::program(&found.plan),
                found.schedule,
            );
        }
    }
}

/// The most bytes that a program may hold: those of the recorded plan, or of its own
/// without an arena where passes that are off by default may have added some, or
/// constants that are kept; and what the arena pass allows for rounding, which is
/// what it grows by once where even that is too little.
fn allowed(recorded: &paper::Seen, program: &Program, alters: bool) -> u64 {
    let without = if alters {
        let schedule = Schedule {
            once: program.schedule.once.clone(),
            ..Schedule::default()
        };
        let seen = paper::run(&program.plan, &schedule, RUNS).expect("the plan runs");
        recorded.most.max(seen.most)
    } else {
        let once = |value: &&Value| matches!(value.def, Def::Instr(i) if program.schedule.once(i as usize));
        let kept = program.plan.values.iter().filter(once);
        recorded.most + kept.map(|value| value.storage_bytes).sum::<u64>()
    };
    let small = program.schedule.offsets.iter().filter(|o| **o != DYNAMIC);
    let alignment = (program.schedule.arena_device).map_or(0, |device| AtenOps.alignment(device));
    without + 2 * 512 + alignment * small.count() as u64 / 2
}
