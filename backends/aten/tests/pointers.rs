//! What the library hands to a bridge is live and as long as it says, and so is what it
//! takes from one: Miri watches (`scripts/miri.sh`) while a bridge in Rust reads it all.

#![cfg(miri)]

use rote_aten::kernels;
use rote_aten::ranks::without_gil;
use rote_aten::{Args, Aten, BoundPlan, Bridge, Describer, FactKind, Group, Object, program};
use rote_plans::schedule::{DYNAMIC, Into};
use rote_plans::{BindingKind, DType, Device, Schedule};
use rote_propagation::TensorMeta;
use rote_replay::ReplayError;
use rote_replay::agreement::Ranks;
use rote_replay::frontend::{Counted, Describe, Facts, Frontend, Part};
use rote_replay::{Left, Program};
use rote_tracer::ArgEvent;
use rote_validation::{HostTensor, Kernels, Value};

mod rust_bridge;
#[path = "../../../plans/tests/sample/mod.rs"]
mod sample;

use rust_bridge::{FAILING, LISTENED, length, object, rote_bridge_decref, said};

/// An object that is dropped with the result.
fn held() -> Object {
    // SAFETY: the reference is new.
    unsafe { Object::own(object()) }
}

/// One replay of a bound plan, with a new number for each scalar.
fn replay(bound: &mut BoundPlan, number: f64) -> Result<(), ReplayError> {
    bound.begin()?;
    let numbers = vec![number; bound.scalars().len()];
    bound.set_numbers(&numbers)?;
    for &(kind, slot) in bound.bindings() {
        let (tensor, what) = match kind {
            BindingKind::Arg => (held(), Part::Tensor),
            BindingKind::Grad => (held(), Part::Grad),
            BindingKind::State => (held(), Part::Memory),
        };
        bound.program().put(slot, tensor.borrow(), what)?;
    }
    let ran = bound.run();
    if ran.is_ok() {
        let results = program::results(bound)?;
        assert!(length(results.as_ptr()) >= bound.outputs().0);
    }
    bound.clear()?;
    bound.end()?;
    ran
}

#[test]
fn a_plan_is_bound_with_every_argument_and_replayed() {
    Bridge::link();
    let plan = sample::small();
    let mut bound = program::bind(&plan, &Schedule::default()).expect("binds");
    drop(plan); // nothing of it is kept
    assert_eq!(
        said(),
        [
            "view %1 > %2: [8, 8] [1, 8] 0",
            "aten::mm.(%0, %2) > [3], 0",
            "collective over 7: %3 > %3 [4, 8] [[], []]",
            "aten::add.(%3, %3, 1) > [4], 0",
            "test::every_argument.(0, [0, -1, 3], 1, [1.0, -1.0], [1, 2], (3, 0, wrapped 2), mean, 6, 255, 0, 1) \
             > [5], 0",
            "aten::mul_.(%1, wrapped 2) > [1], 0",
        ]
    );
    for step in 0..3 {
        LISTENED.set(step == 1);
        replay(&mut bound, f64::from(step)).expect("runs");
    }
    let said = said();
    let begun = |name: &str| said.iter().any(|line| line == name);
    assert!(
        begun("begin rote::replay train.py:train_step") && begun("begin aten::mm (train.py:12)")
    );
    assert!(said.iter().any(|line| line == "number 2 to op 2, 5, 1"));
}

#[test]
fn a_plan_runs_in_an_arena_watched_and_shown() {
    Bridge::link();
    let plan = sample::small();
    let (values, instrs) = (plan.values.len(), plan.instrs.len());
    let mut schedule = Schedule {
        once: vec![false; instrs],
        offsets: vec![DYNAMIC; values],
        arena_bytes: 256,
        arena_device: Some(Device { kind: 0, index: -1 }),
        into: vec![(3, Into::Overload("out")), (6, Into::Copy)],
    };
    (schedule.once[8], schedule.offsets[3], schedule.offsets[4]) = (true, 0, 128);
    let mut bound = program::bind(&plan, &schedule).expect("binds");
    let words = said();
    assert_eq!(
        words[..3],
        [
            "arena of 256 bytes",
            "place %3: [4, 8] [8, 1] at 0, 128 bytes",
            "place %4: [4, 8] [8, 1] at 128, 128 bytes",
        ]
    );
    let allocated = bound.run_watched().expect("runs").expect("is watched");
    assert_eq!(allocated.len(), instrs);
    for _ in 0..2 {
        let mut seen = Vec::new();
        let mut show = |instr: u32, value: u32, tensor: Object| seen.push((instr, value, tensor));
        bound.run_shown(&plan, &mut show).expect("runs");
        assert!(seen.len() > 4);
        replay(&mut bound, 1.0).expect("runs");
    }
}

#[test]
fn a_run_that_fails_is_told_with_the_words_of_the_kernel() {
    Bridge::link();
    let plan = sample::small();
    let mut bound = program::bind(&plan, &Schedule::default()).expect("binds");
    FAILING.set(Some(2)); // the third op
    for _ in 0..2 {
        let failed = replay(&mut bound, 1.0);
        let Err(ReplayError::Step { step, message }) = failed else {
            panic!("{failed:?}");
        };
        assert_eq!(message, "the kernel fails");
        assert!(!bound.is_undone_at(&plan, step));
        assert_eq!(bound.written_before(&plan, step), []);
        let left = bound.left(&plan, step).expect("is known");
        assert!(matches!(left[..], [Left::Made(_), ..]), "{left:?}");
        assert!(bound.program().exception().is_some());
        assert!(bound.program().undo().expect("answers") && !bound.program().lost());
    }
}

#[test]
fn a_large_plan_is_replayed() {
    Bridge::link();
    let plan = sample::large(40);
    let mut bound = program::bind(&plan, &Schedule::default()).expect("binds");
    for step in 0..2 {
        LISTENED.set(step == 1);
        replay(&mut bound, 0.5).expect("runs");
    }
}

#[test]
fn single_calls_take_every_argument() {
    Bridge::link();
    let data = |shape: &[u64], bytes: &[u8]| {
        let (dtype, shape) = (DType::U8, shape.to_vec());
        HostTensor::from_bytes(TensorMeta { dtype, shape }, bytes).expect("is of bytes")
    };
    let (three, none, number) = (data(&[3], &[1, 2, 3]), data(&[0], &[]), data(&[], &[9]));
    for given in [&three, &none, &number] {
        let args = [
            Value::Tensor(given),
            Value::Tensors(vec![Some(&three), None, Some(&none)]),
            Value::Tensors(Vec::new()),
            Value::None,
            Value::Bool(true),
            Value::Int(-1),
            Value::Float(0.5),
            Value::Ints(&[1, 2]),
            Value::Ints(&[]),
            Value::Floats(&[0.5, 1.5]),
            Value::Text("mean"),
            Value::DType(DType::F32),
        ];
        let ran = kernels::Aten.run("aten::op.out", &args).expect("is called");
        assert!(ran.random);
        assert_eq!(
            ran.outputs,
            [Some(given.clone()), None, Some(given.clone())]
        );
    }
    assert_eq!(
        said()[0],
        "aten::op.out([3] of [1, 2, 3], [\"[3] of [1, 2, 3]\", \"absent\", \"[0] of []\"], [], 0, 1, -1, 0.5, \
         [1, 2], [], (0.5, 1.5), mean, 6)"
    );
}

#[test]
fn facts_of_calls_are_copied_and_compared() {
    Bridge::link();
    let mut call = Aten::new();
    let (args, kwargs) = (held(), held());
    let state = [(1, args.borrow()), (2, kwargs.borrow())];
    call.add_state(state.into_iter()).expect("is added");
    call.enter_world(7);
    // SAFETY: live objects, at which this bridge does not look.
    let arguments = unsafe { Args::new(args.as_ptr(), kwargs.as_ptr()) };
    call.collect(arguments).expect("is collected");
    let first = call.last().expect("is held");
    assert_eq!(call.difference(&first).expect("is known"), None);
    call.recollect().expect("is collected");
    assert_eq!(call.difference(&first).expect("is known"), Some(0));
    assert_eq!((first.words.len(), call.words().len()), (1, 2));
    assert_eq!(call.subjects().len(), 2);
    let leaf = call.leaf(0).expect("a leaf");
    assert_eq!(call.place(leaf, true).expect("is known").bytes, 64);
    assert!(call.leaf(1).is_none());

    let mut table = call.facts();
    for kind in FactKind::ALL {
        // SAFETY: as above.
        unsafe { table.add(*kind, args.as_ptr(), std::ptr::null_mut()) }.expect("is added");
        table.read(&call).expect("is read");
        assert!(!table.words().is_empty());
    }
    assert!(table.words().iter().all(|word| *word == 3));
    table.hold().expect("is held");
    assert!(table.same(0));
    assert_eq!(table.text(0, true), "what it sees");
    assert_eq!(table.float(0).expect("is read"), 0.5);
    let said = said();
    assert!(
        said.len() == 1 && said[0].starts_with("state [[1, 2], "),
        "{said:?}"
    );
}

#[test]
fn what_a_describer_tells_lives_until_its_next_call() {
    Bridge::link();
    let mut describer = Describer::new();
    let any = held();
    for _ in 0..3 {
        // SAFETY: live objects, at which this bridge does not look.
        let op = unsafe { describer.op([any.as_ptr(); 4], "train.py:1") }.expect("is described");
        let ArgEvent::Tensor(tensor) = &op.args[0].value else {
            panic!("{op:?}");
        };
        assert!(tensor.sizes.iter().all(|size| *size == 2));
        let op = describer.observed_op("").expect("is described");
        assert!(!op.name.is_empty());
        let tensor = describer.tensor(any.borrow()).expect("is described");
        assert_eq!((tensor.storage, tensor.sizes[0]), (1, 2));
    }
    assert!(describer.is_alive(1) && !describer.is_alive(2));
}

#[test]
fn bytes_of_ranks_and_versions_of_tensors() {
    Bridge::link();
    assert!(Group::find(c"pp").expect("is asked").is_none());
    let group = Group::find(c"tp").expect("is asked").expect("is there");
    assert_eq!(group.gather(&[1, 2]).expect("answers"), [1, 2, 1, 2]);
    assert!(group.gather(&[]).expect("answers").is_empty());
    let text = without_gil(|| "said".to_owned()).expect("is called");
    assert_eq!(text, "said");

    let bridge = Bridge::get();
    let device = Device { kind: 1, index: 0 };
    assert_eq!(bridge.rng_digest(device).expect("is read"), 8);
    let (a, b) = (held(), held());
    let written = [(&a, false, [1, 2]), (&b, true, [3, 4])];
    let written = written.map(|(object, grad, times)| Counted {
        tensor: object.borrow(),
        grad,
        times,
    });
    let aten = Aten::new();
    aten.count(written.into_iter()).expect("is told");
    aten.count([].into_iter()).expect("is told");
    assert_eq!(
        said(),
        ["written 2 [0, 1] [[1, 3], [2, 4]]", "written 0 [] [[], []]"]
    );
    // SAFETY: a live object.
    let second = unsafe { Object::hold(a.as_ptr()) };
    drop(a);
    // SAFETY: the reference is given up by its owner.
    unsafe { rote_bridge_decref(second.into_ptr()) };
}
