//! Whatever changes between calls, and whatever fails, a session returns and leaves what eager does.
//!
//! Each case draws a step, passes and a row of calls. `Captured::call` compares each with the step's twin.

use std::rc::Rc;

use rote::passes::Selection;

mod plain;

use plain::Argument;
use plain::captured::{Captured, How, Model, Step, config, rows, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;

type Returned = Result<Vec<Tensor>, String>;

/// Numbers that repeat with their seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005);
        self.0 = self.0.wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Adds to the gradient that is there.
fn accumulates(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
    let (x, weight) = (tensor(arguments, 0)?, model.weight());
    let y = eager.op("aten::mm", &[x, &weight], &[])?;
    let rate = eager.read("optimizer.rate", model.rate.get())?;
    let gradient = eager.op("aten::add", &[&weight, &weight], &[rate.value])?;
    let before = weight.grad.borrow().clone();
    match before {
        Some(before) => _ = eager.op("aten::add_", &[&before, &gradient], &[1.0])?,
        None => _ = weight.grad.replace(Some(gradient)),
    }
    Ok(vec![
        eager.op("aten::add", &[&y, &y], &[model.scale.get()])?,
        y,
    ])
}

/// Draws noise, and decides by what guards see.
fn decides(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
    let x = tensor(arguments, 0)?;
    let noise = eager.op("aten::rand_like", &[x], &[])?;
    if model.note.borrow().starts_with("as") {
        eager.op("aten::mul_", &[x], &[0.5])?;
    }
    let rate = eager.read("optimizer.rate", model.rate.get())?;
    let y = match eager.looked_at(rate)? > 0.2 {
        true => eager.op("aten::add", &[x, &noise], &[rate.value])?,
        false => eager.op("aten::add", &[&noise, x], &[model.scale.get()])?,
    };
    Ok(vec![y, x.clone()])
}

/// Sums over the ranks, of which the other one sends the same.
fn sums(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
    let x = tensor(arguments, 0)?;
    let first = eager.all_reduce(x)?;
    let y = eager.op("aten::mm", &[x, &model.weight()], &[])?;
    let second = eager.all_reduce(&y)?;
    let (first, second) = (eager.wait(first)?, eager.wait(second)?);
    eager.op("aten::mul_", &[&model.weight()], &[model.scale.get() / 8.0])?;
    Ok(vec![eager.op("aten::add", &[&first, &second], &[1.0])?])
}

/// A step, with ops at which its replays can fail.
#[derive(Clone, Copy)]
struct Drawn {
    step: Step,
    /// Up to these, nothing was done that lasts: the call is made again, eagerly.
    early: &'static [&'static str],
    /// Before these, or by them, something was.
    late: &'static [&'static str],
}

const STEPS: [Drawn; 4] = [
    Drawn {
        step: train,
        early: &["aten::mm"],
        late: &["aten::add_", "aten::add"],
    },
    Drawn {
        step: accumulates,
        early: &["aten::mm"],
        late: &[],
    },
    Drawn {
        step: decides,
        early: &["aten::rand_like"],
        late: &[],
    },
    Drawn {
        step: sums,
        early: &[],
        late: &["aten::mm", "aten::mul_"],
    },
];

/// Changes something that the step can reach.
fn change(random: &mut Random, step: &Captured) {
    let (kind, pick) = (random.below(7), random.below(3));
    step.change(|model| match kind {
        0 => model.scale.set(pick as f64 + 2.0),
        1 => model.rate.set([0.125, 0.25, 0.5][pick as usize]),
        2 => {
            _ = model.note.replace(Rc::from(
                ["as it was", "as ever", "otherwise"][pick as usize],
            ))
        }
        3 => _ = model.weight().grad.take(),
        4 => {
            let gradient = Tensor::new(vec![pick as f32; 16], &[4, 4]);
            model.weight().grad.replace(Some(gradient));
        }
        5 => {
            let weight = model.weight();
            let other = Tensor::new(weight.elements(), &weight.shape);
            other.grad.replace(weight.grad.take());
            model.weight.replace(other);
        }
        _ => model.weight().write(&[pick as f32 / 2.0 - 0.5; 16]),
    });
}

/// Lets an op fail in the next call, and in eager too unless the call can be made again.
fn fail(random: &mut Random, step: &mut Captured, drawn: Drawn, arguments: &[Argument]) {
    let replays = step.session.holds(arguments.into()).expect("guards");
    if !replays {
        step.fail(random.of(&["aten::mm", "aten::add", "aten::add_", "aten::mul_"]));
        return;
    }
    let all: Vec<&str> = [drawn.early, drawn.late].concat();
    let op = random.of(&all);
    match drawn.early.contains(&op) {
        true => step.machine.failing.borrow_mut().push(op),
        false => step.fail(op),
    }
}

/// What becomes of a case: replays, failures.
fn case(seed: u64) -> (usize, usize) {
    let mut random = Random(seed);
    let plans = tempfile::tempdir().expect("a directory");
    let mut config = config(plans.path());
    config.max_variants = 1 + random.below(4) as usize;
    config.passes = random.of(&[Selection::NONE, Selection::default()]);
    let drawn = random.of(&STEPS);
    let mut step = Captured::new(drawn.step, config.clone());
    step.scribbling = random.below(2) == 0;
    let (mut replays, mut failures) = (0, 0);
    for _ in 0..40 {
        if random.below(4) == 0 {
            change(&mut random, &step);
        }
        let (count, first) = (
            2 + 3 * random.below(6).div_ceil(5) as i64,
            random.below(5) as f32,
        );
        let arguments = || vec![rows(count, first)];
        if random.below(8) == 0 && !step.trusting {
            fail(&mut random, &mut step, drawn, &arguments());
        }
        match step.call(arguments) {
            How::Replayed(_) | How::Trusted => replays += 1,
            How::Failed(_) => failures += 1,
            _ => {}
        }
        step.machine.failing.take();
        step.twin_machine.failing.take();
        if random.below(30) == 0 {
            step = step.in_a_later_session(config.clone());
            step.trusting = random.below(2) == 0;
        }
    }
    (replays, failures)
}

#[test]
fn every_call_of_every_case_does_what_eager_does() {
    let cases = (0..120).map(case);
    let (replays, failures) = cases.fold((0, 0), |all, case| (all.0 + case.0, all.1 + case.1));
    assert!(
        replays > 1500 && failures > 150,
        "{replays} replays, {failures} failures"
    );
}
