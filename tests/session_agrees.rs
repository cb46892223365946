//! Ranks as threads, with passes that alter collectives: all replay the altered ones, or all keep those of eager.

use rote::passes::Selection;

mod plain;

use plain::captured::{Captured, How, Model, Step, config, rows, tensor};
use plain::eager::Eager;
use plain::fake::Tensor;
use plain::ranks::{Rank, job};
use plain::{Argument, WORLD};

type Returned = Result<Vec<Tensor>, String>;

/// Two sums over the ranks, one after the other.
fn two_sums(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
    let (x, weight) = (tensor(arguments, 0)?, model.weight());
    let y = eager.op("aten::mm", &[x, &weight], &[])?;
    let started = eager.all_reduce(&y)?;
    let first = eager.wait(started)?;
    let started = eager.all_reduce(x)?;
    let second = eager.wait(started)?;
    Ok(vec![eager.op("aten::add", &[&first, &second], &[0.5])?])
}

/// The same, but that the second sum begins after a look at the first.
fn one_by_one(eager: &mut Eager<'_>, model: &Model, arguments: &[Argument]) -> Returned {
    let (x, weight) = (tensor(arguments, 0)?, model.weight());
    let y = eager.op("aten::mm", &[x, &weight], &[])?;
    let started = eager.all_reduce(&y)?;
    let first = eager.wait(started)?;
    let looked = eager.op("aten::add", &[&first, &first], &[0.5])?;
    let started = eager.all_reduce(&looked)?;
    let second = eager.wait(started)?;
    Ok(vec![second])
}

/// A captured step on one rank, whose ranks agree about its calls.
fn on(rank: &Rank, plans: &std::path::Path, step: Step) -> Captured {
    let mut config = config(plans);
    (config.fingerprint.rank, config.fingerprint.world_size) = (rank.rank, rank.ranks);
    config.passes = "buckets,sums".parse().expect("passes");
    let mut step = Captured::on_rank(Some(rank.clone()), step, config);
    assert!(step.session.agree_in(WORLD).expect("there is the group"));
    step
}

/// What only this rank is given.
fn own(rank: &Rank, call: usize) -> Vec<Argument> {
    vec![rows(3, rank.rank as f32 + call as f32 / 4.0)]
}

/// The sums of a step's last call.
fn sums(step: &Captured) -> usize {
    let log = step.machine.log.take();
    log.iter().filter(|what| *what == "all_reduce").count()
}

fn ranks_that_all_replay_alter_their_collectives(number: u64, ranks: u32) {
    let plans = tempfile::tempdir().expect("a directory");
    let counted = job(number, ranks, |rank| {
        let mut step = on(&rank, plans.path(), two_sums);
        step.learn(|| own(&rank, 0));
        for call in 0..4 {
            step.machine.log.take();
            assert_eq!(step.call(|| own(&rank, call)), How::Replayed(0));
            assert_eq!(sums(&step), 1, "two sums have become one");
        }
        let stats = step.session.stats();
        (stats.altered, stats.kept, stats.exchanges)
    });
    assert_eq!(counted, vec![(4, 0, 1); ranks as usize]);
}

#[test]
fn two_ranks_that_all_replay_alter_their_collectives() {
    ranks_that_all_replay_alter_their_collectives(1, 2);
}

#[test]
fn three_ranks_that_all_replay_alter_their_collectives() {
    ranks_that_all_replay_alter_their_collectives(2, 3);
}

fn one_rank_that_misses_keeps_all_to_what_was_recorded(number: u64, ranks: u32) {
    let plans = tempfile::tempdir().expect("a directory");
    let counted = job(number, ranks, |rank| {
        let mut step = on(&rank, plans.path(), two_sums);
        step.learn(|| own(&rank, 0));
        assert_eq!(step.call(|| own(&rank, 1)), How::Replayed(0));
        for call in 0..2 {
            let misses = rank.rank + 1 == rank.ranks;
            if misses {
                step.change(|model| model.scale.set(5.0 + call as f64));
            }
            step.machine.log.take();
            let how = step.call(|| own(&rank, call));
            assert_eq!(matches!(how, How::Replayed(0)), !misses, "{how:?}");
            assert_eq!(sums(&step), 2, "as eager does");
        }
        step.change(|model| model.scale.set(3.0));
        step.machine.log.take();
        assert_eq!(step.call(|| own(&rank, 2)), How::Replayed(0));
        assert_eq!(sums(&step), 1, "together again");
        let stats = step.session.stats();
        (stats.altered, stats.kept)
    });
    let last = ranks as usize - 1;
    assert_eq!(counted[..last], vec![(2, 2); last]);
    assert_eq!(counted[last], (2, 0));
}

#[test]
fn one_of_two_ranks_that_misses_keeps_both_to_what_was_recorded() {
    one_rank_that_misses_keeps_all_to_what_was_recorded(3, 2);
}

#[test]
fn one_of_three_ranks_that_misses_keeps_all_to_what_was_recorded() {
    one_rank_that_misses_keeps_all_to_what_was_recorded(4, 3);
}

#[test]
fn ranks_whose_altered_collectives_do_not_fit_keep_those_of_eager() {
    let plans = tempfile::tempdir().expect("a directory");
    job(5, 2, |rank| {
        // Two sums become one on rank 0 alone; eager's go together.
        let (body, kept): (Step, u64) = match rank.rank {
            0 => (two_sums, 2),
            _ => (one_by_one, 0),
        };
        let mut step = on(&rank, plans.path(), body);
        step.learn(|| own(&rank, 0));
        step.machine.log.take();
        for call in 0..2 {
            assert_eq!(step.call(|| own(&rank, call)), How::Replayed(0));
            assert_eq!(sums(&step), 2, "as eager does");
        }
        let stats = step.session.stats();
        assert_eq!((stats.altered, stats.kept, stats.exchanges), (0, kept, 1));
        let notice = step.session.take_notice().expect("a warning");
        assert!(notice.contains("do not fit together"), "{notice}");
        assert!(step.session.unfit().is_some());
    });
}

#[test]
fn a_rank_whose_guards_cannot_be_checked_answers_the_others_all_the_same() {
    let plans = tempfile::tempdir().expect("a directory");
    job(6, 2, |rank| {
        let mut step = on(&rank, plans.path(), two_sums);
        step.learn(|| own(&rank, 0));
        step.machine.log.take();
        step.unreadable.set(rank.rank == 1);
        let how = step.call(|| own(&rank, 1));
        let expected = [How::Replayed(0), How::Eager];
        assert_eq!(how, expected[rank.rank as usize]);
        assert_eq!(sums(&step), 2, "as eager does");
        step.unreadable.set(false);
        assert_eq!(step.call(|| own(&rank, 1)), How::Replayed(0));
    });
}

#[test]
fn a_rank_that_fails_to_come_is_an_error_on_the_others() {
    let plans = tempfile::tempdir().expect("a directory");
    let ended = job(7, 2, |rank| {
        let mut step = on(&rank, plans.path(), two_sums);
        step.learn(|| own(&rank, 0));
        if rank.rank == 1 {
            return None;
        }
        let arguments = own(&rank, 1);
        Some(
            step.session
                .call(arguments.into())
                .map(|_| ())
                .expect_err("rank 1 is gone"),
        )
    });
    let error = ended[0]
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default();
    assert!(
        error.contains("the ranks could not agree about a call"),
        "{error}"
    );
}

#[test]
fn a_rank_that_fails_after_it_has_agreed_does_not_run_eagerly() {
    let plans = tempfile::tempdir().expect("a directory");
    let ended = job(9, 2, |rank| {
        let mut step = on(&rank, plans.path(), two_sums);
        step.learn(|| own(&rank, 0));
        if rank.rank == 1 {
            // Before its collective: a replay without agreement would be undone.
            step.machine.failing.replace(vec!["aten::mm"]);
        }
        let called = step.session.call(own(&rank, 1).into());
        called.expect_err("an error on every rank").to_string()
    });
    assert!(ended[1].ends_with("aten::mm: out of memory"), "{ended:?}");
    assert!(ended[0].contains("do not sum together"), "{ended:?}");
}

#[test]
fn without_passes_that_alter_collectives_nothing_is_agreed() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut config = config(plans.path());
    config.passes = Selection::NONE;
    let answered = job(8, 1, |rank| {
        let mut step = Captured::on_rank(Some(rank), two_sums, config.clone());
        step.session.agree_in(WORLD).expect("there is the group")
    });
    assert_eq!(answered, [false]);
}
