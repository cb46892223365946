//! What a session shows: each result of a replay, and in words what became of calls.

use rote::explain::explain;
use rote::passes::Selection;

mod plain;

use plain::captured::{Captured, How, config, rows, train};
use plain::fake::{Machine, Tensor};
use plain::{Argument, captured};

#[test]
fn a_replay_shows_what_each_op_of_eager_makes() {
    for (passes, recorded) in [(Selection::NONE, true), (Selection::default(), false)] {
        let plans = tempfile::tempdir().expect("a directory");
        let mut config = config(plans.path());
        config.passes = passes;
        let mut step = Captured::new(train, config);
        let id = step.learn(|| vec![rows(3, 1.0)]);
        assert_eq!(step.call(|| vec![rows(3, 1.0)]), How::Replayed(id));

        let argument = rows(3, 2.0);
        let Argument::Tensor(x) = &argument else {
            panic!("rows are a tensor");
        };
        let (eager, weight) = (Machine::default(), step.twin.weight());
        let run = |name, tensors: &[&Tensor], numbers: &[f64]| {
            let tensors: Vec<Tensor> = tensors.iter().map(|&tensor| tensor.clone()).collect();
            let made = eager.run(name, &tensors, numbers).expect("eager runs");
            made.unwrap_or_else(|| tensors[0].clone())
        };
        let turned = captured::transposed(x);
        let y = run("aten::mm", &[x, &weight], &[]);
        let gradient = run("aten::mm", &[&turned, &y], &[]);
        let moved = run("aten::add_", &[&weight, &gradient], &[-0.125]);
        let sum = run("aten::add", &[&y, &y], &[3.0]);
        let expected = [y, turned, gradient, moved, sum].map(|tensor| tensor.elements());

        let mut shown = Vec::new();
        let mut seen = |_, _, tensor: Tensor| shown.push(tensor.elements());
        let ran = step
            .session
            .show(id, [argument.clone()].into(), recorded, &mut seen);
        ran.expect("it runs");
        assert_eq!(shown, expected);
    }
}

#[test]
fn a_step_is_explained_with_its_calls_misses_and_refusals() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(train, config(plans.path()));
    step.learn(|| vec![rows(3, 1.0)]);
    step.call(|| vec![rows(3, 1.0)]);
    step.call(|| vec![rows(5, 1.0)]);
    step.session.stop("it is enough");
    let text = explain(&step.session);
    for part in [
        "calls 5, replays 1, recordings 1, fallbacks 1, variants 1",
        "args[0].shape",
        "it is enough",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}
