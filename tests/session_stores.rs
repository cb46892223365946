//! Plans outlive their process: what a second session does with a stored plan, and which plans it leaves alone.

use std::fs;
use std::path::{Path, PathBuf};

use rote::plans::{PlanFile, PlanStore};
use rote::{Config, Outcome};

mod plain;

use plain::captured::{Captured, How, Model, config, rows, tensor, train};
use plain::eager::Eager;
use plain::fake::Tensor;
use plain::said::said;
use plain::{Argument, captured::Step};

/// What a first session leaves in its store.
struct Stored {
    plans: tempfile::TempDir,
    file: PathBuf,
}

impl Stored {
    fn by(step: Step) -> Self {
        let plans = tempfile::tempdir().expect("a directory");
        Captured::new(step, config(plans.path())).learn(|| vec![rows(3, 1.0)]);
        let file = only_file(plans.path());
        Stored { plans, file }
    }

    fn new() -> Self {
        Stored::by(train)
    }

    fn config(&self) -> Config {
        config(self.plans.path())
    }

    /// A second session on this store, after a call that finds no gradient.
    fn second(&self, step: Step, config: Config) -> (Captured, Vec<String>) {
        let mut step = Captured::new(step, config);
        let (_, said) = said(|| step.call(|| vec![rows(3, 1.0)]));
        (step, said)
    }
}

fn only_file(plans: &Path) -> PathBuf {
    let store = PlanStore::open(plans).expect("a store");
    let files = store.files().expect("files");
    assert_eq!(files.len(), 1);
    files[0].2.clone()
}

fn call(step: &mut Captured) -> (How, Vec<String>) {
    said(|| step.call(|| vec![rows(3, 2.0)]))
}

fn has(said: &[String], parts: &[&str]) -> bool {
    let all = |text: &String| parts.iter().all(|part| text.contains(part));
    said.iter().any(all)
}

const CANDIDATE: How = How::Recorded(Outcome::Candidate);

#[test]
fn what_is_replayed_is_what_was_written() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(train, config(plans.path()));
    let id = step.learn(|| vec![rows(3, 1.0)]);
    let variant = step.session.variant(id).expect("the variant");
    let written = PlanFile::open(only_file(plans.path())).expect("a plan");
    assert_eq!(written.to_plan(), variant.file.to_plan());
    assert_eq!(written.to_plan().function, "train.py:step");
}

#[test]
fn a_second_session_adopts_a_plan_after_one_recording() {
    let stored = Stored::new();
    let (mut step, said) = stored.second(train, stored.config());
    assert!(
        has(&said, &["is not for this call", "model.weight.grad"]),
        "{said:?}"
    );
    assert_eq!(call(&mut step).0, How::Recorded(Outcome::Adopted(0)));
    assert_eq!(call(&mut step).0, How::Replayed(0));
    assert_eq!(step.session.stats().recordings, 0, "no new plan");
}

#[test]
fn a_second_session_that_trusts_the_store_replays_without_a_recording() {
    let stored = Stored::new();
    let (mut step, _) = stored.second(train, stored.config());
    step.trusting = true;
    step.machine.log.take();
    assert_eq!(call(&mut step).0, How::Trusted);
    assert_eq!(call(&mut step).0, How::Replayed(0));
    assert_eq!(
        (
            step.session.stats().recordings,
            step.session.stats().replays
        ),
        (0, 2)
    );
}

#[test]
fn a_plan_that_lets_a_hyperparameter_vary_does_so_in_later_sessions_too() {
    for trusting in [false, true] {
        let plans = tempfile::tempdir().expect("a directory");
        let mut first = Captured::new(train, config(plans.path()));
        first.learn(|| vec![rows(3, 1.0)]);
        first.change(|model| model.rate.set(0.25));
        assert_eq!(call(&mut first).0, How::Recorded(Outcome::Kept(1)));
        let mut second = Captured::new(train, config(plans.path()));
        second.change(|model| model.rate.set(0.75));
        call(&mut second);
        second.trusting = trusting;
        let expected = match trusting {
            true => How::Trusted,
            false => How::Recorded(Outcome::Adopted(0)),
        };
        assert_eq!(call(&mut second).0, expected);
        second.change(|model| model.rate.set(0.5));
        assert_eq!(call(&mut second).0, How::Replayed(0));
    }
}

#[test]
fn a_plan_that_lets_a_hyperparameter_vary_is_not_used_where_that_decides_something() {
    for trusting in [false, true] {
        let plans = tempfile::tempdir().expect("a directory");
        let mut first = Captured::new(train, config(plans.path()));
        first.learn(|| vec![rows(3, 1.0)]);
        first.change(|model| model.rate.set(0.25));
        assert_eq!(call(&mut first).0, How::Recorded(Outcome::Kept(1)));
        let mut second = Captured::new(train, config(plans.path()));
        call(&mut second);
        (second.trusting, second.looked_at) = (trusting, true);
        let (how, said) = call(&mut second);
        assert_eq!(how, CANDIDATE);
        let why = [
            "it lets optimizer.rate vary",
            "more than arithmetic with it",
        ];
        let times = said
            .iter()
            .filter(|text| text.contains(why[0]) && text.contains(why[1]));
        assert_eq!(times.count(), 1 + usize::from(trusting), "{said:?}");
    }
}

#[test]
fn a_plan_of_another_world_size_is_not_used_and_it_is_said_why() {
    let stored = Stored::new();
    let mut config = stored.config();
    config.fingerprint.world_size = 4;
    let (mut step, said) = stored.second(train, config);
    let why = ["world size 2, this process has 4", "recording a new plan"];
    assert!(has(&said, &why), "{said:?}");
    assert_eq!(call(&mut step).0, CANDIDATE);
}

#[test]
fn a_plan_of_another_framework_is_not_used_and_it_is_said_why() {
    let stored = Stored::new();
    let mut config = stored.config();
    config.fingerprint.framework = "plain 2".to_owned();
    let (mut step, said) = stored.second(train, config);
    assert!(
        has(&said, &["recorded with plain 1, this process runs plain 2"]),
        "{said:?}"
    );
    assert_eq!(call(&mut step).0, CANDIDATE);
}

#[test]
fn a_plan_of_another_rank_is_left_alone() {
    let stored = Stored::new();
    let mut other = stored.config();
    other.fingerprint.rank = 1;
    let (mut step, said) = stored.second(train, other.clone());
    assert_eq!(said, [] as [&str; 0]);
    assert_eq!(call(&mut step).0, CANDIDATE);
    assert_eq!(call(&mut step).0, How::Recorded(Outcome::Kept(0)));
    // In the other one's place, it says of itself which rank it is of.
    let store = PlanStore::open(stored.plans.path()).expect("a store");
    let key = &store.keys().expect("keys")[0];
    fs::copy(&stored.file, store.path(key, 1).expect("a key")).expect("a copy");
    let (mut step, said) = stored.second(train, other);
    assert!(
        has(&said, &["recorded on rank 0, this process is rank 1"]),
        "{said:?}"
    );
    assert_eq!(call(&mut step).0, CANDIDATE);
}

#[test]
fn a_plan_with_another_guard_is_not_used_and_it_is_said_why() {
    let stored = Stored::new();
    let mut step = Captured::new(train, stored.config());
    step.change(|model| {
        model.scale.set(9.0);
        let weight = model.weight();
        weight
            .grad
            .replace(Some(Tensor::new(vec![0.0; 16], &[4, 4])));
    });
    let (how, said) = call(&mut step);
    assert_eq!(how, CANDIDATE);
    let why = ["expects config.scale to be 3, this process has 9"];
    assert!(has(&said, &why), "{said:?}");
}

#[test]
fn a_plan_that_holds_a_hyperparameter_is_not_used_for_another_value() {
    let stored = Stored::new();
    let (mut step, _) = stored.second(train, stored.config());
    step.change(|model| model.rate.set(0.25));
    let (how, said) = call(&mut step);
    assert_eq!(how, CANDIDATE);
    let why = ["expects optimizer.rate to be 0.125, this process has 0.25"];
    assert!(has(&said, &why), "{said:?}");
}

#[test]
fn a_plan_of_what_the_script_did_once_is_recorded_anew() {
    fn changed(
        eager: &mut Eager<'_>,
        model: &Model,
        arguments: &[Argument],
    ) -> Result<Vec<Tensor>, String> {
        let y = train(eager, model, arguments)?;
        Ok(vec![eager.op(
            "aten::add",
            &[&y[0], tensor(arguments, 0)?],
            &[1.5],
        )?])
    }
    let stored = Stored::new();
    let before = fs::read(&stored.file).expect("a file");
    let (mut step, _) = stored.second(changed, stored.config());
    let (how, said) = call(&mut step);
    assert_eq!(how, CANDIDATE);
    assert!(has(&said, &["differs from the recording"]), "{said:?}");
    assert_eq!(call(&mut step).0, How::Recorded(Outcome::Kept(0)));
    assert_ne!(
        fs::read(&stored.file).expect("a file"),
        before,
        "it takes the old one's place"
    );
    assert_eq!(call(&mut step).0, How::Replayed(0));
}

/// What becomes of a file's bytes.
type Damage = fn(&mut Vec<u8>);

#[test]
fn a_damaged_file_is_not_used_and_it_is_said_why() {
    let damage: [(Damage, &str); 3] = [
        (|bytes| bytes[200] ^= 1, "checksum"),
        (|bytes| bytes.truncate(bytes.len() / 2), "bytes follow it"),
        (|bytes| bytes.clear(), "file has 0 bytes"),
    ];
    for (damage, why) in damage {
        for trusting in [false, true] {
            let stored = Stored::new();
            let mut bytes = fs::read(&stored.file).expect("a file");
            damage(&mut bytes);
            fs::write(&stored.file, bytes).expect("is written");
            let (mut step, said) = stored.second(train, stored.config());
            assert!(
                has(&said, &[why, "recording a new plan"]),
                "{why}: {said:?}"
            );
            step.trusting = trusting;
            assert_eq!(call(&mut step).0, CANDIDATE, "{why}");
            assert_eq!(call(&mut step).0, How::Recorded(Outcome::Kept(0)));
            PlanFile::open(&stored.file).expect("a good file is in its place");
        }
    }
}

#[test]
fn a_plan_that_cannot_be_stored_is_replayed_all_the_same() {
    let plans = tempfile::tempdir().expect("a directory");
    let mut step = Captured::new(train, config(plans.path()));
    call(&mut step);
    call(&mut step);
    fs::remove_dir_all(plans.path()).expect("is removed");
    let (how, said) = call(&mut step);
    assert_eq!(how, How::Recorded(Outcome::Kept(0)));
    assert!(has(&said, &["could not be stored"]), "{said:?}");
    assert_eq!(call(&mut step).0, How::Replayed(0));
}
