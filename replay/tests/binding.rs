//! Plans bound to a framework that is not PyTorch: what runs when, what lasts, and what a failure leaves.

use rote_plans::schedule::{DYNAMIC, Into};
use rote_plans::{BindingKind, Instr, Plan, Scalar, Schedule};
use rote_replay::{BoundPlan, Left, ReplayError};

use std::rc::Rc;

mod fake;
#[path = "../../plans/tests/sample/mod.rs"]
mod sample;

use fake::{Fake, Tensor};

/// All that the plan of [`sample::small`] does in its first run.
const FIRST: [&str; 10] = [
    "Save",
    "Restore",
    "view",
    "aten::mm",
    "all_reduce",
    "wait",
    "aten::add",
    "free",
    "test::every_argument",
    "aten::mul_",
];

struct Step {
    plan: Plan,
    bound: BoundPlan<Fake>,
    weight: Tensor,
}

impl Step {
    fn new(plan: Plan, schedule: &Schedule) -> Self {
        plan.check().expect("a valid plan");
        let program = Fake::on(Rc::default());
        let bound = BoundPlan::bind(program, &plan, schedule).expect("binds");
        let weight = Tensor::new((0..64).map(|i| i as f32).collect(), &[8, 8]);
        for &(kind, slot) in bound.bindings() {
            if kind == BindingKind::State {
                bound.program().put(slot, weight.clone());
            }
        }
        Step {
            plan,
            bound,
            weight,
        }
    }

    fn small() -> Self {
        Step::new(sample::small(), &Schedule::default())
    }

    /// Binds what a replay needs.
    fn prepare(&mut self, x: f32, rate: f64) {
        self.bound.program().machine.log.take();
        let numbers = [rate, -1.0, -rate];
        assert!(matches!(self.bound.scalars(), [Scalar::Read { .. }, ..]));
        self.bound.set_numbers(&numbers).expect("numbers are set");
        for &(kind, slot) in self.bound.bindings() {
            if kind == BindingKind::Arg {
                self.bound
                    .program()
                    .put(slot, Tensor::new(vec![x; 32], &[4, 8]));
            }
        }
    }

    /// A replay: its outputs, then its gradients.
    fn replay(&mut self, x: f32, rate: f64) -> Vec<Vec<f32>> {
        self.prepare(x, rate);
        self.bound.begin().expect("begins");
        self.bound.run().expect("runs");
        let results = self.results();
        self.bound.clear().expect("is cleared");
        self.bound.end().expect("ends");
        results
    }

    fn results(&self) -> Vec<Vec<f32>> {
        use rote_replay::Backend;
        let slots = self.bound.results().iter();
        let results = slots.map(|&(slot, fresh)| self.bound.program().output(slot, fresh));
        results
            .map(|tensor| tensor.expect("a tensor").elements())
            .collect()
    }

    fn log(&self) -> Vec<String> {
        self.bound.program().machine.log.borrow().clone()
    }
}

/// What the plan computes: x @ weight.T, summed over two ranks that have the same.
fn gradient(x: f32, weight: &[f32]) -> Vec<f32> {
    let row: Vec<f32> = weight
        .chunks(8)
        .map(|row| 2.0 * row.iter().map(|w| x * w).sum::<f32>())
        .collect();
    row.repeat(4)
}

#[test]
fn every_kind_of_instruction_runs_and_state_is_written_in_place() {
    let mut step = Step::small();
    for (x, rate) in [(1.0, 0.5), (2.0, 0.5), (-3.0, 0.25)] {
        let before = step.weight.elements();
        let generator = step.bound.program().machine.generator.get();
        let results = step.replay(x, rate);
        assert_eq!(results, [vec![-rate as f32], gradient(x, &before)]);
        let doubled: Vec<f32> = before.iter().map(|w| w * 2.0).collect();
        assert_eq!(step.weight.elements(), doubled);
        assert_eq!(step.bound.program().machine.generator.get(), generator);
    }
}

#[test]
fn views_of_the_state_are_made_in_the_first_run_only() {
    let mut step = Step::small();
    step.replay(1.0, 0.5);
    assert_eq!(step.log(), FIRST);
    step.replay(1.0, 0.5);
    assert_eq!(step.log(), [&FIRST[..2], &FIRST[3..]].concat());
    assert_eq!(step.bound.steps(), FIRST.len() - 1);
}

#[test]
fn the_arena_keeps_the_place_of_a_result_and_what_lies_in_it_is_not_freed() {
    let plan = sample::small();
    let named = |name: &str| {
        let instrs = plan.instrs.iter().zip(0_u32..);
        let mut found = instrs.filter_map(|(instr, at)| match instr {
            Instr::Local { op, outs, .. } if plan.str(*op) == name => {
                Some((at, plan.ids(*outs)[0]))
            }
            _ => None,
        });
        found.next().expect("the op")
    };
    let ((at, spare), once) = (named("aten::add"), named("test::every_argument").0);
    let mut schedule = Schedule {
        once: vec![false; plan.instrs.len()],
        offsets: vec![DYNAMIC; plan.values.len()],
        arena_bytes: 256,
        arena_device: Some(sample::CPU),
        into: vec![(at, Into::Overload("out"))],
    };
    schedule.offsets[spare as usize] = 128;
    schedule.once[once as usize] = true;
    let mut step = Step::new(plan, &schedule);
    let place = step.bound.program().slots.borrow()[&spare].clone();
    assert_eq!(place.offset, 32);
    for x in [1.0, 2.0] {
        let results = step.replay(x, 0.5);
        let twice: Vec<f32> = results[1].iter().map(|y| y + y).collect();
        assert_eq!(place.elements(), twice);
        assert_eq!(results[0], [-0.5]);
    }
    let log = step.log();
    assert!(
        !log.iter()
            .any(|step| step == "free" || step == "test::every_argument"),
        "{log:?}"
    );
}

#[test]
fn a_run_that_fails_says_where_and_what_it_has_left() {
    for (failing, done, undone, written) in [
        ("aten::mm", 3, true, 0),
        ("aten::add", 6, false, 0),
        ("aten::mul_", 9, false, 0),
    ] {
        let mut step = Step::small();
        step.replay(1.0, 0.5);
        step.bound.program().machine.failing.replace(vec![failing]);
        step.prepare(1.0, 0.5);
        let error = step.bound.run().expect_err("fails");
        let ReplayError::Step { step: at, message } = error else {
            panic!("{error}");
        };
        assert_eq!(message, format!("{failing}: out of memory"));
        assert_eq!(step.log().last().map(String::as_str), Some(failing));
        let plan = &step.plan;
        let kinds = plan.instrs.get(done);
        assert!(matches!(kinds, Some(Instr::Local { op, .. }) if plan.str(*op) == failing));
        assert_eq!(step.bound.is_undone_at(plan, at), undone);
        assert_eq!(step.bound.written_before(plan, at).len(), written);
        let left = step.bound.left(plan, at).expect("gradients");
        // Eager drops the gradient before the first op, and has the new one once it is made.
        match (&left[..], failing) {
            ([Left::Nothing, Left::AsItWas], "aten::mm") => {}
            ([Left::Made(y), Left::AsItWas], _) => assert_eq!(y.elements()[0], 2.0 * 2.0 * 28.0),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_each_instruction_makes_or_writes_is_shown() {
    let mut step = Step::small();
    step.prepare(1.0, 0.5);
    let mut seen = Vec::new();
    let plan = &step.plan;
    step.bound
        .run_shown(plan, &mut |instr, value, tensor| {
            seen.push((instr, value, tensor.elements().len()))
        })
        .expect("runs");
    let sizes: Vec<usize> = seen.iter().map(|(_, _, size)| *size).collect();
    // The view, the product, after the wait too, the sum, the loss, the weight: as result and as written.
    assert_eq!(sizes, [64, 32, 32, 32, 1, 64, 64]);
}

#[test]
fn a_plan_with_an_op_that_the_framework_lacks_is_not_bound() {
    let plan = sample::large(4);
    let error =
        BoundPlan::bind(Fake::default(), &plan, &Schedule::default()).expect_err("lacks addmm");
    assert_eq!(
        error.to_string(),
        "cannot bind the plan: there is no op aten::addmm"
    );
    let short = Schedule {
        arena_bytes: 8,
        arena_device: Some(sample::CPU),
        offsets: vec![DYNAMIC],
        ..Schedule::default()
    };
    let error = BoundPlan::bind(Fake::default(), &plan, &short).expect_err("another plan's");
    assert_eq!(
        error.to_string(),
        "cannot bind the plan: the schedule is not one for this plan"
    );
}
