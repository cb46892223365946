//! What a session promises of replays: they do what eager does, and are made only while every guard holds.

use std::rc::Rc;

use rote::passes::Selection;
use rote::{Next, Outcome, Session};

mod plain;

use plain::captured::{Captured, How, Model, config, rows, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;
use plain::ranks::job;
use plain::{Argument, Plain, WORLD};

/// A captured training step, and the directory of its plans.
fn captured() -> (Captured, tempfile::TempDir) {
    let plans = tempfile::tempdir().expect("a directory");
    (Captured::new(train, config(plans.path())), plans)
}

fn misses(session: &Session<Plain>, subject: &str) -> u64 {
    let misses = &session.stats().guard_misses;
    misses.get(subject).copied().unwrap_or(0)
}

const KEPT: fn(u32) -> How = |id| How::Recorded(Outcome::Kept(id));
const CANDIDATE: How = How::Recorded(Outcome::Candidate);

#[test]
fn a_step_is_recorded_twice_and_then_replayed_with_the_results_of_eager() {
    let (mut step, _plans) = captured();
    let calls = (0..6).map(|i| step.call(|| vec![rows(3, i as f32)]));
    let calls: Vec<How> = calls.collect();
    // The first call finds no gradient, and the others do.
    let replayed = [How::Replayed(0), How::Replayed(0), How::Replayed(0)];
    assert_eq!(calls[..3], [CANDIDATE, CANDIDATE, KEPT(0)]);
    assert_eq!(calls[3..], replayed);
    let stats = step.session.stats();
    let counts = (
        stats.calls,
        stats.recordings,
        stats.replays,
        stats.fallbacks,
    );
    assert_eq!(counts, (6, 1, 3, 0));
}

#[test]
fn a_replay_runs_no_op_that_was_not_recorded() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.call(|| vec![rows(3, 2.0)]);
    step.machine.log.take();
    assert_eq!(step.call(|| vec![rows(3, 3.0)]), How::Replayed(0));
    let mut log = step.machine.log.take();
    log.retain(|what| what.starts_with("aten::"));
    assert_eq!(log, ["aten::mm", "aten::mm", "aten::add_", "aten::add"]);
}

#[test]
fn the_default_passes_change_no_bit() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut config = config(plans.path());
    config.passes = Selection::default();
    let mut step = Captured::new(train, config);
    step.learn(|| vec![rows(3, 1.0)]);
    for i in 0..5 {
        assert_eq!(step.call(|| vec![rows(3, i as f32)]), How::Replayed(0));
    }
}

#[test]
fn another_shape_misses_by_name_and_becomes_a_second_variant() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), CANDIDATE);
    assert_eq!(misses(&step.session, "args[0].shape"), 1);
    assert_eq!(step.call(|| vec![rows(5, 2.0)]), KEPT(1));
    for (count, id) in [(3, 0), (5, 1), (3, 0), (5, 1)] {
        assert_eq!(step.call(|| vec![rows(count, 4.0)]), How::Replayed(id));
    }
    assert_eq!(step.session.stats().fallbacks, 2);
}

#[test]
fn a_changed_value_of_the_host_misses_by_its_name() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.change(|model| model.scale.set(7.0));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), CANDIDATE);
    assert_eq!(misses(&step.session, "config.scale"), 1);
    step.change(|model| model.scale.set(3.0));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
}

#[test]
fn a_tensor_in_the_place_of_another_misses_by_its_name() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.change(|model| {
        let weight = model.weight();
        let copy = Tensor::new(weight.elements(), &weight.shape);
        copy.grad.replace(weight.grad.take());
        model.weight.replace(copy);
    });
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), CANDIDATE);
    assert_eq!(misses(&step.session, "model.weight.storage"), 1);
}

#[test]
fn values_that_are_equal_at_another_address_still_hold() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.change(|model| _ = model.note.replace(Rc::from("as it was")));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
    step.change(|model| _ = model.note.replace(Rc::from("otherwise")));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), CANDIDATE);
    assert_eq!(misses(&step.session, "config.note"), 1);
}

#[test]
fn values_that_words_cannot_tell_are_compared_in_full() {
    let (mut step, _plans) = captured();
    let with = |text: &str| vec![rows(3, 1.0), Argument::Text(Rc::from(text))];
    step.learn(|| with("left"));
    assert_eq!(step.call(|| with("left")), How::Replayed(0));
    assert_eq!(
        step.call(|| with("rite")),
        CANDIDATE,
        "as long as the other"
    );
    assert_eq!(misses(&step.session, "args[1].length"), 1);
}

#[test]
fn arguments_that_share_their_memory_with_others_or_the_state_miss() {
    fn difference(
        eager: &mut Eager<'_>,
        model: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let (a, b) = (tensor(arguments, 0)?, tensor(arguments, 1)?);
        eager.op("aten::mul_", &[a], &[0.5])?;
        eager.op("aten::add_", &[&model.weight(), b], &[1.0])?;
        Ok(vec![eager.op("aten::add", &[a, b], &[-1.0])?])
    }
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(difference, config(plans.path()));
    step.learn(|| vec![rows(4, 1.0), rows(4, 2.0)]);
    let shared = || {
        let both = rows(4, 1.0);
        vec![both.clone(), both]
    };
    assert_eq!(step.call(shared), CANDIDATE);
    assert_eq!(misses(&step.session, "args[1].sharing"), 1);
    assert_eq!(step.call(shared), KEPT(1));
    assert_eq!(step.call(shared), How::Replayed(1));
    // The state is known once a recording has named it.
    let of_state = |model: &Model| vec![rows(4, 1.0), Argument::Tensor(model.weight())];
    assert_eq!(step.call_on(of_state), CANDIDATE);
    assert_eq!(
        misses(&step.session, "args[1].sharing"),
        3,
        "as two calls before"
    );
    assert_eq!(step.call_on(of_state), KEPT(2));
    assert_eq!(step.call_on(of_state), How::Replayed(2));
}

#[test]
fn an_argument_of_the_state_is_told_from_another_in_the_first_call_too() {
    fn twice(
        eager: &mut Eager<'_>,
        model: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let (x, weight) = (tensor(arguments, 0)?, model.weight());
        eager.op("aten::mul_", &[&weight], &[0.5])?;
        Ok(vec![eager.op("aten::add", &[x, &weight], &[1.0])?])
    }
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(twice, config(plans.path()));
    let of_state = |model: &Model| vec![Argument::Tensor(model.weight())];
    let calls = [(); 3].map(|()| step.call_on(of_state));
    assert_eq!(calls, [CANDIDATE, KEPT(0), How::Replayed(0)]);
    assert_eq!(step.call(|| vec![rows(4, 1.0)]), CANDIDATE);
    assert_eq!(misses(&step.session, "args[0].sharing"), 1);
}

#[test]
fn a_hyperparameter_that_only_arithmetic_uses_becomes_a_number_of_the_plan() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.change(|model| model.rate.set(0.25));
    assert_eq!(
        step.call(|| vec![rows(3, 1.0)]),
        KEPT(1),
        "it takes the place of the first"
    );
    assert_eq!(misses(&step.session, "optimizer.rate"), 1);
    assert_eq!(step.session.variants().len(), 1);
    for rate in [0.5, 0.125, -3.0] {
        step.change(|model| model.rate.set(rate));
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(1));
    }
    assert_eq!(misses(&step.session, "optimizer.rate"), 1);
}

#[test]
fn a_hyperparameter_that_changes_between_two_recordings_is_a_number_at_once() {
    let (mut step, _plans) = captured();
    step.call(|| vec![rows(3, 1.0)]);
    let expected = [CANDIDATE, KEPT(0), How::Replayed(0), How::Replayed(0)];
    for (rate, how) in [0.125, 0.25, 0.5, -1.0].into_iter().zip(expected) {
        step.change(|model| model.rate.set(rate));
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), how);
    }
}

#[test]
fn a_hyperparameter_that_decides_something_stays_a_guard() {
    fn hasty(
        eager: &mut Eager<'_>,
        model: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let rate = eager.read("optimizer.rate", model.rate.get())?;
        let times = if eager.looked_at(rate)? > 0.2 {
            2.0
        } else {
            1.0
        };
        let x = tensor(arguments, 0)?;
        Ok(vec![eager.op("aten::add", &[x, x], &[times])?])
    }
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(hasty, config(plans.path()));
    step.learn(|| vec![rows(3, 1.0)]);
    step.change(|model| model.rate.set(0.25));
    let calls = [(); 3].map(|()| step.call(|| vec![rows(3, 1.0)]));
    assert_eq!(calls, [CANDIDATE, KEPT(1), How::Replayed(1)]);
    step.change(|model| model.rate.set(0.125));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
}

#[test]
fn a_replay_draws_what_eager_draws() {
    fn noisy(
        eager: &mut Eager<'_>,
        _: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let x = tensor(arguments, 0)?;
        let noise = eager.op("aten::rand_like", &[x], &[])?;
        Ok(vec![eager.op("aten::add", &[x, &noise], &[1.0])?])
    }
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(noisy, config(plans.path()));
    step.learn(|| vec![rows(3, 1.0)]);
    for _ in 0..3 {
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
    }
}

#[test]
fn the_most_variants_leave_no_room_until_one_is_idle() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut config = config(plans.path());
    config.max_variants = 1;
    let mut step = Captured::new(train, config);
    step.learn(|| vec![rows(3, 1.0)]);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), How::Eager);
    let notice = step.session.take_notice().expect("a warning");
    assert!(
        notice.contains("max_variants=1") && notice.contains("args[0].shape"),
        "{notice}"
    );
    // The variant was made by the third call, and is idle 256 calls after it.
    for call in 5..3 + 256 {
        assert_eq!(step.call(|| vec![rows(5, 1.0)]), How::Eager, "call {call}");
    }
    assert_eq!(step.session.take_notice(), None, "said once");
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), CANDIDATE);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), KEPT(1));
    assert_eq!(step.session.variants().len(), 1);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), How::Replayed(1));
}

#[test]
fn recordings_that_nothing_confirms_are_paused_and_tried_again() {
    let (mut step, _plans) = captured();
    for shape in 1..=4 {
        assert_eq!(step.call(|| vec![rows(shape, 1.0)]), CANDIDATE);
    }
    for call in 0..256 {
        assert_eq!(
            step.call(|| vec![rows(5 + call % 3, 1.0)]),
            How::Eager,
            "call {call}"
        );
    }
    let notice = step.session.take_notice().expect("a warning");
    assert!(
        notice.contains("4 recordings in a row") && notice.contains("256 calls"),
        "{notice}"
    );
    for shape in 11..=14 {
        assert_eq!(step.call(|| vec![rows(shape, 1.0)]), CANDIDATE);
    }
    for call in 0..512 {
        assert_eq!(
            step.call(|| vec![rows(5 + call % 3, 1.0)]),
            How::Eager,
            "call {call}"
        );
    }
    step.learn(|| vec![rows(2, 1.0)]);
}

#[test]
fn a_step_that_fails_while_it_is_recorded_leaves_no_recording() {
    let (mut step, _plans) = captured();
    step.call(|| vec![rows(3, 1.0)]);
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), CANDIDATE);
    step.fail("aten::add_");
    let failed = step.call(|| vec![rows(3, 1.0)]);
    assert_eq!(failed, How::Failed("aten::add_: out of memory".to_owned()));
    assert!(step.session.active().is_none());
    assert_eq!(
        step.call(|| vec![rows(3, 1.0)]),
        KEPT(0),
        "the candidate was not touched"
    );
}

#[test]
fn a_step_that_is_refused_stays_eager() {
    fn reads_the_unknown(
        eager: &mut Eager<'_>,
        model: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let unknown = model.kept.borrow()[0].clone();
        Ok(vec![eager.op(
            "aten::add",
            &[tensor(arguments, 0)?, &unknown],
            &[1.0],
        )?])
    }
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(reads_the_unknown, config(plans.path()));
    step.change(|model| {
        model
            .kept
            .borrow_mut()
            .push(Tensor::new(vec![2.0; 12], &[3, 4]))
    });
    let How::Recorded(Outcome::Refused(refusal)) = step.call(|| vec![rows(3, 1.0)]) else {
        panic!("nobody names the tensor");
    };
    assert!(
        refusal
            .to_string()
            .contains("is no argument of the step and not in the state"),
        "{refusal}"
    );
    for _ in 0..3 {
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Eager);
    }
    assert_eq!(step.session.stats().refusals, [refusal.to_string()]);
}

#[test]
fn a_session_that_was_stopped_replays_nothing() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.session.stop("the twin says so");
    assert!(!step.session.holds([rows(3, 1.0)].into()).expect("guards"));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Eager);
    assert_eq!(step.session.stats().refusals, ["the twin says so"]);
}

#[test]
fn a_variant_that_was_given_up_is_recorded_anew() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.session.give_up(7);
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
    step.session.give_up(0);
    assert!(step.session.variant(0).is_none());
    let again = step.call(|| vec![rows(3, 1.0)]);
    assert_eq!(
        again,
        How::Recorded(Outcome::Adopted(1)),
        "its plan is in the store"
    );
}

#[test]
fn whether_a_call_would_be_replayed_is_told_without_making_it() {
    let (mut step, _plans) = captured();
    let holds = |step: &mut Captured, shape| {
        let holds = step.session.holds([rows(shape, 1.0)].into());
        holds.expect("guards are checked")
    };
    assert!(!holds(&mut step, 3));
    step.learn(|| vec![rows(3, 1.0)]);
    assert!(holds(&mut step, 3));
    assert!(!holds(&mut step, 5));
    step.change(|model| model.scale.set(7.0));
    assert!(!holds(&mut step, 3));
    assert_eq!(step.session.stats().calls, 3, "asking is no call");
}

#[test]
fn a_call_under_something_that_sees_each_op_runs_eagerly() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    step.watched.set(true);
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Eager);
    step.watched.set(false);
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
    assert_eq!(step.session.stats().fallbacks, 0, "no guard has missed");
}

#[test]
fn a_call_within_a_recorded_one_runs_eagerly() {
    let (mut step, _plans) = captured();
    step.learn(|| vec![rows(3, 1.0)]);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), CANDIDATE);
    let inner = |step: &mut Captured| step.session.call_within([rows(3, 1.0)].into());
    assert!(matches!(inner(&mut step), Ok(Next::Replayed(0, _))));
    let outer = step.session.call([rows(5, 1.0)].into());
    assert!(matches!(outer, Ok(Next::Record)));
    step.session.begin().expect("a recording begins");
    assert!(matches!(inner(&mut step), Ok(Next::Eager)));
    step.session.abort();
    assert!(matches!(inner(&mut step), Ok(Next::Replayed(0, _))));
}

#[test]
fn a_plan_of_another_process_group_waits_until_that_is_back() {
    job(20, 1, |rank| {
        let plans = tempfile::tempdir().expect("a directory");
        let mut step = Captured::on_rank(Some(rank), train, config(plans.path()));
        let enter = |step: &mut Captured, group| {
            let entered = step.session.enter_world(group, 2, 0);
            entered.expect("a world");
        };
        enter(&mut step, Some(WORLD));
        step.learn(|| vec![rows(3, 1.0)]);
        enter(&mut step, None);
        let away = step.call(|| vec![rows(3, 1.0)]);
        assert!(matches!(away, How::Recorded(_)), "{away:?}");
        assert_eq!(misses(&step.session, "the process group"), 1);
        enter(&mut step, Some(WORLD));
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
        // A group that nothing is known of is another one each time.
        for _ in 0..2 {
            enter(&mut step, Some(c"unknown"));
            let holds = step.session.holds([rows(3, 1.0)].into());
            assert!(!holds.expect("guards are checked"));
            step.learn(|| vec![rows(3, 1.0)]);
        }
    });
}

#[test]
fn a_replay_holds_on_to_nothing_of_its_call() {
    for failing in [None, Some("aten::add_"), Some("aten::mm")] {
        let (mut step, _plans) = captured();
        step.learn(|| vec![rows(3, 1.0)]);
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(0));
        let x = Tensor::new(vec![0.5; 12], &[3, 4]);
        step.machine.failing.borrow_mut().extend(failing);
        let called = step.session.call([Argument::Tensor(x.clone())].into());
        assert_eq!(called.is_err(), failing == Some("aten::add_"));
        // What the session looks at now is another call.
        let other = step.session.holds([rows(5, 1.0)].into());
        assert!(!other.expect("guards are checked"));
        assert_eq!(Rc::strong_count(&x.memory), 1, "{failing:?}");
    }
}
