//! Where arguments lie in their storages: anywhere, unless the step reaches around them or asks where they are.

use rote::Outcome;

mod plain;

use plain::Argument;
use plain::captured::{Captured, How, Model, Step, config, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;

/// Rows of a data set: three of eight, from one on.
fn batch(first: i64) -> Vec<Argument> {
    let data = Tensor::new((0..32).map(|i| i as f32).collect(), &[8, 4]);
    vec![Argument::Tensor(data.view(&[3, 4], &[4, 1], first * 4))]
}

fn captured(step: Step) -> (Captured, tempfile::TempDir) {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(step, config(plans.path()));
    step.learn(|| batch(2));
    (step, plans)
}

#[test]
fn an_argument_at_another_place_of_its_storage_is_replayed() {
    let (mut step, _plans) = captured(train);
    for first in [0, 2, 5] {
        assert_eq!(step.call(|| batch(first)), How::Replayed(0));
    }
}

/// Adds to each row the one before it, which is no part of the argument for the first.
fn differences(
    eager: &mut Eager<'_>,
    _: &Model,
    arguments: &[Argument],
) -> Result<Vec<Tensor>, String> {
    let x = tensor(arguments, 0)?;
    let before = x.view(&x.shape, &x.strides, -4);
    Ok(vec![eager.op("aten::add", &[x, &before], &[-1.0])?])
}

#[test]
fn a_step_that_reaches_around_an_argument_is_replayed_in_that_place_only() {
    let (mut step, _plans) = captured(differences);
    assert_eq!(step.call(|| batch(2)), How::Replayed(0));
    assert_eq!(step.call(|| batch(3)), How::Recorded(Outcome::Candidate));
    let misses = &step.session.stats().guard_misses;
    assert_eq!(misses.get("args[0].storage"), Some(&1), "{misses:?}");
    assert_eq!(step.call(|| batch(3)), How::Recorded(Outcome::Kept(1)));
    assert_eq!(step.call(|| batch(2)), How::Replayed(0));
    assert_eq!(step.call(|| batch(3)), How::Replayed(1));
}

#[test]
fn calls_in_other_places_confirm_each_other_only_where_they_are() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(differences, config(plans.path()));
    let calls = [2, 3, 2, 3].map(|first| step.call(|| batch(first)));
    let kept = |id| How::Recorded(Outcome::Kept(id));
    let candidate = How::Recorded(Outcome::Candidate);
    assert_eq!(calls, [candidate.clone(), candidate, kept(0), kept(1)]);
}

#[test]
fn a_step_that_asks_where_an_argument_lies_is_replayed_in_that_place_only() {
    fn by_place(
        eager: &mut Eager<'_>,
        _: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let x = tensor(arguments, 0)?;
        let place = eager.place(x)?;
        Ok(vec![eager.op("aten::add", &[x, x], &[place as f64])?])
    }
    let (mut step, _plans) = captured(by_place);
    assert_eq!(step.call(|| batch(2)), How::Replayed(0));
    assert_eq!(step.call(|| batch(3)), How::Recorded(Outcome::Candidate));
}

#[test]
fn a_stored_plan_of_another_place_is_not_trusted() {
    let (first, plans) = captured(differences);
    drop(first);
    for (place, how) in [(3, How::Recorded(Outcome::Candidate)), (2, How::Trusted)] {
        let mut second = Captured::new(differences, config(plans.path()));
        second.trusting = true;
        assert_eq!(second.call(|| batch(place)), how);
    }
}
