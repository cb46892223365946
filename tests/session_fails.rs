//! A replay that fails leaves what eager leaves: nothing, if the call can be made again, or else all that was done by
//! then.

use rote::Outcome;

mod plain;

use plain::Argument;
use plain::captured::{Captured, How, Model, Step, config, rows, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;

type Returned = Result<Vec<Tensor>, String>;

fn captured(step: Step) -> (Captured, tempfile::TempDir) {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(step, config(plans.path()));
    step.learn(|| vec![rows(3, 1.0)]);
    (step, plans)
}

fn call(step: &mut Captured) -> How {
    step.call(|| vec![rows(3, 2.0)])
}

fn failed(how: &How) -> &str {
    match how {
        How::Failed(why) => why,
        other => panic!("{other:?} has not failed"),
    }
}

#[test]
fn a_replay_that_fails_before_it_has_written_is_undone_and_the_call_runs_eagerly() {
    let (mut step, _plans) = captured(train);
    for later in [false, true] {
        step.machine.log.take();
        step.machine.failing.replace(vec!["aten::mm"]); // once: eager does not fail
        assert_eq!(
            call(&mut step),
            How::Eager,
            "after a replay that went well: {later}"
        );
        assert!(
            step.session.take_left().is_none(),
            "eager leaves what it does"
        );
        let log = step.machine.log.take();
        let products = log.iter().filter(|what| *what == "aten::mm");
        assert_eq!(
            products.count(),
            3,
            "one in the replay and two in eager: {log:?}"
        );
        assert_eq!(call(&mut step), How::Replayed(0));
    }
    assert_eq!(step.session.stats().fallbacks, 2);
}

#[test]
fn an_error_that_eager_raises_too_is_that_of_eager() {
    let (mut step, _plans) = captured(train);
    step.fail("aten::mm");
    step.machine.failing.replace(vec!["aten::mm"; 2]); // in the replay, and again in eager
    assert_eq!(failed(&call(&mut step)), "aten::mm: out of memory");
    let kept = How::Recorded(Outcome::Kept(1));
    assert_eq!(
        call(&mut step),
        kept,
        "no gradient is left, as at the first call"
    );
    assert_eq!(call(&mut step), How::Replayed(0));
}

#[test]
fn draws_of_a_replay_that_fails_are_taken_back() {
    fn noisy(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let x = tensor(arguments, 0)?;
        let noise = eager.op("aten::rand_like", &[x], &[])?;
        let y = eager.op("aten::mm", &[&noise, &model.weight()], &[])?;
        Ok(vec![y])
    }
    let (mut step, _plans) = captured(noisy);
    assert_eq!(call(&mut step), How::Replayed(0));
    step.machine.failing.replace(vec!["aten::mm"]);
    assert_eq!(call(&mut step), How::Eager);
    assert_eq!(call(&mut step), How::Replayed(0));
}

#[test]
fn a_replay_that_fails_after_a_write_is_an_error_and_leaves_the_new_gradient() {
    for op in ["aten::add_", "aten::add"] {
        let (mut step, _plans) = captured(train);
        for _ in 0..2 {
            step.fail(op);
            // The weight and its gradient are compared with those that eager leaves.
            let how = call(&mut step);
            let why = failed(&how);
            assert!(
                why.starts_with("instruction") && why.ends_with("out of memory"),
                "{why}"
            );
            assert!(step.twin.weight().grad.borrow().is_some());
            assert_eq!(call(&mut step), How::Replayed(0), "it replays again");
        }
    }
}

#[test]
fn a_program_whose_op_has_failed_is_bound_anew() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut config = config(plans.path());
    config.passes = "arena".parse().expect("passes");
    let mut step = Captured::new(train, config);
    let id = step.learn(|| vec![rows(3, 1.0)]);
    // The first replay shows what ops make, and later ones have an arena.
    for _ in 0..2 {
        assert_eq!(call(&mut step), How::Replayed(id));
    }
    let variant = step.session.variant(id).expect("the variant");
    let (_, arena) = variant.passes.last().expect("the pass");
    assert!(arena.changed > 0, "{arena:?}");
    step.machine.failing.replace(vec!["aten::mm"]); // which leaves nothing in its place
    assert_eq!(call(&mut step), How::Eager);
    assert_eq!(call(&mut step), How::Replayed(id));
}

#[test]
fn what_the_gradient_was_before_is_told_where_eager_still_has_it() {
    /// Divides the weight, and drops its gradient after that.
    fn late(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let (x, weight) = (tensor(arguments, 0)?, model.weight());
        eager.op("aten::mul_", &[&weight], &[0.5])?;
        let y = eager.op("test::every_argument", &[x], &[1.0, 2.0])?;
        weight.grad.take();
        let z = eager.op("aten::add", &[x, x], &[1.0])?;
        let gradient = eager.op("aten::mm", &[&weight, &weight], &[])?;
        weight.grad.replace(Some(gradient));
        Ok(vec![y, z])
    }
    let (mut step, _plans) = captured(late);
    for (op, left) in [
        ("test::every_argument", true),
        ("aten::add", false),
        ("aten::mm", false),
    ] {
        assert_eq!(call(&mut step), How::Replayed(0));
        step.fail(op);
        let how = call(&mut step);
        assert_eq!(failed(&how).split(": ").last(), Some("out of memory"));
        assert_eq!(step.twin.weight().grad.borrow().is_some(), left, "{op}");
        step.change(|model| {
            let gradient = Tensor::new(vec![0.0; 16], &[4, 4]);
            model.weight().grad.replace(Some(gradient));
        });
    }
}

#[test]
fn a_gradient_that_the_step_reads_is_there_until_its_successor_is() {
    fn adds_up(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let weight = model.weight();
        eager.op("aten::mul_", &[&weight], &[0.5])?;
        let before = weight.grad.borrow().clone();
        let gradient = match before {
            Some(before) => eager.op("aten::add", &[&before, &weight], &[1.0])?,
            None => eager.op("aten::add", &[&weight, &weight], &[1.0])?,
        };
        weight.grad.replace(Some(gradient));
        let y = eager.op("aten::mm", &[tensor(arguments, 0)?, &weight], &[])?;
        Ok(vec![y])
    }
    let (mut step, _plans) = captured(adds_up);
    for op in ["aten::add", "aten::mm"] {
        assert_eq!(call(&mut step), How::Replayed(0));
        step.fail(op);
        let how = call(&mut step);
        assert!(
            failed(&how).starts_with("instruction"),
            "in a replay: {how:?}"
        );
    }
}

#[test]
fn a_replay_that_fails_after_a_collective_is_an_error() {
    fn summed(eager: &mut Eager<'_>, _: &Model, arguments: &[Argument]) -> Returned {
        let started = eager.all_reduce(tensor(arguments, 0)?)?;
        let sum = eager.wait(started)?;
        Ok(vec![eager.op("aten::add", &[&sum, &sum], &[1.0])?])
    }
    let (mut step, _plans) = captured(summed);
    step.fail("aten::add");
    let how = call(&mut step);
    assert!(
        failed(&how).ends_with("out of memory"),
        "other ranks have what it sent: {how:?}"
    );
    assert_eq!(call(&mut step), How::Replayed(0));
}
