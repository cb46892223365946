//! What becomes of a recording: which are kept, which are dropped, and after how many the step stays eager.

use std::rc::Rc;

use rote::Outcome;
use rote_plans::GuardKind;

mod plain;

use plain::Argument;
use plain::captured::{Captured, How, Model, Step, config, rows, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;

type Returned = Result<Vec<Tensor>, String>;

fn captured(step: Step) -> (Captured, tempfile::TempDir) {
    let plans = tempfile::tempdir().expect("a directory");
    (Captured::new(step, config(plans.path())), plans)
}

/// What becomes of so many calls.
fn calls(step: &mut Captured, count: usize) -> Vec<How> {
    (0..count)
        .map(|_| step.call(|| vec![rows(3, 1.0)]))
        .collect()
}

fn dropped(how: &How) -> &str {
    match how {
        How::Recorded(Outcome::Dropped(why)) => why,
        other => panic!("{other:?} is not dropped"),
    }
}

fn refused(how: &How) -> String {
    match how {
        How::Recorded(Outcome::Refused(refusal)) => refusal.to_string(),
        other => panic!("{other:?} is not refused"),
    }
}

const CANDIDATE: How = How::Recorded(Outcome::Candidate);

/// The sum of the argument with itself, so many times.
fn sum(eager: &mut Eager<'_>, arguments: &[Argument], times: f64) -> Returned {
    let x = tensor(arguments, 0)?;
    Ok(vec![eager.op("aten::add", &[x, x], &[times])?])
}

#[test]
fn a_step_that_changes_a_guarded_value_is_dropped_once_and_then_refused() {
    fn counts(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        model.scale.set(model.scale.get() + 1.0);
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(counts);
    let calls = calls(&mut step, 3);
    assert_eq!(dropped(&calls[0]), "the step changed config.scale (3 -> 4)");
    let refusal = refused(&calls[1]);
    assert!(
        refusal.contains("config.scale (4 -> 5) at every call"),
        "{refusal}"
    );
    assert_eq!(calls[2], How::Eager);
}

#[test]
fn a_step_that_changes_a_value_in_its_first_call_only_is_kept() {
    fn warms_up(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        model.note.replace(Rc::from("warm"));
        train(eager, model, arguments)
    }
    let (mut step, _plans) = captured(warms_up);
    let calls = calls(&mut step, 4);
    assert_eq!(
        dropped(&calls[0]),
        "the step changed config.note (as it was -> warm)"
    );
    // Later calls put an equal text there, at another address.
    assert_eq!(calls[1], CANDIDATE);
    assert_eq!(calls[2], How::Recorded(Outcome::Kept(0)));
    assert_eq!(calls[3], How::Replayed(0));
}

#[test]
fn a_value_that_is_another_one_at_every_call_is_refused_at_the_third() {
    let (mut step, _plans) =
        captured(|eager, model, arguments| sum(eager, arguments, model.scale.get()));
    let handled: Vec<How> = (0..3)
        .flat_map(|i| {
            step.change(|model| model.scale.set(f64::from(i)));
            calls(&mut step, 1)
        })
        .collect();
    assert_eq!(handled[..2], [CANDIDATE, CANDIDATE]);
    let refusal = refused(&handled[2]);
    assert!(
        refusal.contains("config.scale (once 1) at every call"),
        "{refusal}"
    );
}

#[test]
fn a_value_that_was_steady_in_between_may_change_again() {
    let (mut step, _plans) =
        captured(|eager, model, arguments| sum(eager, arguments, model.scale.get()));
    let kept = |id| How::Recorded(Outcome::Kept(id));
    let expected = [(1, CANDIDATE), (2, CANDIDATE), (2, kept(0)), (5, CANDIDATE)];
    for (scale, how) in expected {
        step.change(|model| model.scale.set(f64::from(scale)));
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), how, "{scale}");
    }
}

#[test]
fn tensors_that_outlive_each_call_are_dropped_three_times_and_then_refused() {
    fn hoards(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let x = tensor(arguments, 0)?;
        let kept = eager.op("aten::add", &[x, x], &[2.0])?;
        model.kept.borrow_mut().push(kept);
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(hoards);
    let calls = calls(&mut step, 5);
    for call in &calls[..3] {
        let why = dropped(call);
        assert!(
            why.starts_with("the step made 1 tensors that outlive the call"),
            "{why}"
        );
        assert!(why.contains("aten::add"), "{why}");
    }
    let refusal = refused(&calls[3]);
    assert!(
        refusal.contains("keeps 1 tensors that outlive the call"),
        "{refusal}"
    );
    assert_eq!(calls[4], How::Eager);
}

#[test]
fn tensors_that_the_first_call_keeps_cost_one_recording() {
    fn caches(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        if model.unseen.replace(1) == 0 {
            let x = tensor(arguments, 0)?;
            let kept = eager.op("aten::add", &[x, x], &[2.0])?;
            model.kept.borrow_mut().push(kept);
        }
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(caches);
    let calls = calls(&mut step, 4);
    dropped(&calls[0]);
    let kept = How::Recorded(Outcome::Kept(0));
    assert_eq!(calls[1..], [CANDIDATE, kept, How::Replayed(0)]);
}

#[test]
fn only_drops_in_a_row_are_counted() {
    fn hoards_but_once(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let call = model.unseen.replace(model.unseen.get() + 1);
        if call != 3 {
            let x = tensor(arguments, 0)?;
            let kept = eager.op("aten::add", &[x, x], &[2.0])?;
            model.kept.borrow_mut().push(kept);
        }
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(hoards_but_once);
    let calls = calls(&mut step, 8);
    assert_eq!(calls[3], CANDIDATE);
    for call in calls[..3].iter().chain(&calls[4..7]) {
        dropped(call);
    }
    refused(&calls[7]);
}

#[test]
fn a_step_that_does_not_wait_for_a_collective_is_refused() {
    fn leaves(eager: &mut Eager<'_>, _: &Model, arguments: &[Argument]) -> Returned {
        eager.all_reduce(tensor(arguments, 0)?)?;
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(leaves);
    let refusal = refused(&calls(&mut step, 1)[0]);
    let reason = "the step does not wait for 1 of the collectives that it starts";
    assert!(refusal.contains(reason), "{refusal}");
}

#[test]
fn so_is_one_that_uses_a_result_before_it_has_waited() {
    fn hurries(eager: &mut Eager<'_>, _: &Model, arguments: &[Argument]) -> Returned {
        let x = tensor(arguments, 0)?;
        let started = eager.all_reduce(x)?;
        let early = eager.op("aten::add", &[&started.output, x], &[1.0])?;
        Ok(vec![early, eager.wait(started)?])
    }
    let (mut step, _plans) = captured(hurries);
    let refusal = refused(&calls(&mut step, 1)[0]);
    let reason = "aten::add uses the result of a collective before";
    assert!(refusal.contains(reason), "{refusal}");
}

/// A step that counts its calls where no guard looks.
fn sum_by(
    model: &Model,
    eager: &mut Eager<'_>,
    arguments: &[Argument],
    times: fn(u32) -> f64,
) -> Returned {
    let call = model.unseen.get();
    model.unseen.set(call + 1);
    sum(eager, arguments, times(call))
}

#[test]
fn recordings_that_differ_each_time_are_refused_at_the_third_difference() {
    let (mut step, _plans) =
        captured(|eager, model, arguments| sum_by(model, eager, arguments, f64::from));
    let calls = calls(&mut step, 5);
    assert_eq!(calls[0], CANDIDATE);
    for call in &calls[1..3] {
        let why = dropped(call);
        assert!(why.contains("aten::add"), "{why}");
    }
    assert!(refused(&calls[3]).contains("aten::add"));
    assert_eq!(calls[4], How::Eager);
}

#[test]
fn a_recording_that_differs_takes_the_place_of_the_one_before() {
    let (mut step, _plans) = captured(|eager, model, arguments| {
        sum_by(
            model,
            eager,
            arguments,
            |call| if call == 0 { 2.0 } else { 1.0 },
        )
    });
    let calls = calls(&mut step, 4);
    assert_eq!(calls[0], CANDIDATE);
    dropped(&calls[1]);
    assert_eq!(calls[2], How::Recorded(Outcome::Kept(0)));
    assert_eq!(calls[3], How::Replayed(0), "as the second and third call");
}

#[test]
fn a_call_that_runs_more_ops_than_the_one_before_is_no_confirmation() {
    fn grows(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        let call = model.unseen.get();
        model.unseen.set(call + 1);
        for _ in 0..call {
            sum(eager, arguments, 1.0)?;
        }
        sum(eager, arguments, 1.0)
    }
    let (mut step, _plans) = captured(grows);
    let calls = calls(&mut step, 2);
    let why = dropped(&calls[1]);
    assert!(
        why.contains("1 instructions in one call and 3 in the next"),
        "{why}"
    );
}

#[test]
fn calls_of_another_kind_in_between_confirm_nothing_and_spoil_nothing() {
    let (mut step, _plans) = captured(|eager, _, arguments| sum(eager, arguments, 1.0));
    assert_eq!(step.call(|| vec![rows(3, 1.0)]), CANDIDATE);
    assert_eq!(step.call(|| vec![rows(5, 1.0)]), CANDIDATE);
    assert_eq!(
        step.call(|| vec![rows(3, 1.0)]),
        How::Recorded(Outcome::Kept(0))
    );
    assert_eq!(
        step.call(|| vec![rows(5, 1.0)]),
        How::Recorded(Outcome::Kept(1))
    );
}

#[test]
fn a_generator_that_something_else_moves_is_refused() {
    let (mut step, _plans) = captured(|eager, model, arguments| {
        if model.scale.get() > 1.0 {
            eager.draw_unseen();
        }
        sum(eager, arguments, 1.0)
    });
    let refusal = refused(&step.call(|| vec![rows(3, 1.0)]));
    assert!(refusal.contains("outside of recorded ops"), "{refusal}");
}

#[test]
fn arguments_that_change_before_they_are_named_are_refused() {
    let (mut step, _plans) = captured(train);
    let arguments: Rc<[Argument]> = [rows(3, 1.0)].into();
    step.session.call(arguments.clone()).expect("a call");
    step.session.begin().expect("a recording begins");
    let other = rows(3, 1.0);
    let named = step.session.name_leaf("args[0]", Some(other.leaf()));
    named.expect("a recording is in progress");
    let (_, recording) = step.session.active().expect("a recording");
    let refusal = recording.refusal().expect("it is refused").to_string();
    assert!(
        refusal.contains("changed before Rote read args[0]"),
        "{refusal}"
    );
}

#[test]
fn the_second_recording_takes_over_the_guards_of_the_first() {
    let (mut step, _plans) = captured(train);
    let calls = calls(&mut step, 4); // the first one makes the gradient
    let kept = How::Recorded(Outcome::Kept(0));
    assert_eq!(calls, [CANDIDATE, CANDIDATE, kept, How::Replayed(0)]);
    assert_eq!(step.resumed, 1);
    let variant = step.session.variant(0).expect("it is kept");
    let guarded = |kind| {
        let of_kind = variant
            .parts
            .guards
            .iter()
            .filter(move |guard| guard.kind == kind);
        of_kind.count()
    };
    assert_eq!(guarded(GuardKind::Argument), 1, "each once");
    assert_eq!(guarded(GuardKind::Host), 3, "each once");
}

#[test]
fn guards_are_not_taken_over_where_one_does_not_hold() {
    let (mut step, _plans) =
        captured(|eager, model, arguments| sum(eager, arguments, model.scale.get()));
    assert_eq!(calls(&mut step, 1), [CANDIDATE]);
    step.change(|model| model.scale.set(7.0));
    assert_eq!(calls(&mut step, 1), [CANDIDATE]);
    assert_eq!(step.resumed, 0);
    let other = step.call(|| vec![rows(4, 1.0)]);
    assert_eq!((other, step.resumed), (CANDIDATE, 0), "another argument");
    let again = step.call(|| vec![rows(4, 1.0)]);
    assert_eq!((again, step.resumed), (How::Recorded(Outcome::Kept(0)), 1));
}

#[test]
fn a_step_that_goes_another_way_under_guards_taken_over_is_recorded_anew() {
    // What is not guarded steers it.
    fn steered(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
        sum(eager, arguments, f64::from(model.unseen.get()))
    }
    let (mut step, _plans) = captured(steered);
    assert_eq!(calls(&mut step, 1), [CANDIDATE]);
    step.change(|model| model.unseen.set(2));
    let differs = calls(&mut step, 1);
    assert!(dropped(&differs[0]).contains("aten::add"), "{differs:?}");
    assert_eq!(step.resumed, 1);
    assert_eq!(calls(&mut step, 1), [How::Recorded(Outcome::Kept(0))]);
    assert_eq!(step.resumed, 2, "the newer one waits in its place");
}
