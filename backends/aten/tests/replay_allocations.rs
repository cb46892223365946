//! A replayed step allocates nothing in Rust, from the call of the session to
//! the list of results: counted by this program's allocator, over a bridge whose
//! kernels do nothing. What a kernel or Python allocates is not counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rote::recording::Named;
use rote::stored::guard_key;
use rote::{Config, Next, Session};
use rote_aten::{Args, Aten, FactKind, FactTable, Object};
use rote_passes::Selection;
use rote_plans::{BindingKind, Guard, GuardKind, Plan, PlanStore};
use rote_tracer::scalars::Origin;

#[path = "../../../plans/tests/sample/mod.rs"]
mod sample;
mod silent_bridge;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks for.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations_of(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

/// Stands for a Python object; this bridge looks at none.
fn object() -> *mut std::ffi::c_void {
    std::ptr::dangling_mut::<u8>().cast()
}

fn arguments() -> Args {
    // SAFETY: this bridge looks at no object.
    unsafe { Args::new(object(), object()) }
}

/// A session with one trusted plan of 1,000 ops, guards held.
fn session(plans: &std::path::Path, passes: Selection) -> Session<Aten> {
    let mut plan = sample::large(1_000);
    // A step size as an optimizer computes it, in place of the bare rate.
    plan.scalars.extend([rote_plans::Scalar::Neg(0)]);
    let guard = |plan: &mut Plan, kind: GuardKind, subject: &str, expected: &str| {
        let mut text = |text: &str| {
            plan.strings.push(text.to_owned());
            plan.strings.len() as u32 - 1
        };
        let (subject, expected) = (text(subject), text(expected));
        plan.guards.push(Guard {
            kind,
            subject,
            expected,
        });
    };
    for (subject, expected) in [("args[0].shape", "(64, 64)"), ("grad_mode", "on")] {
        guard(&mut plan, GuardKind::Argument, subject, expected);
    }
    let config = Config {
        function: plan.function.clone(),
        fingerprint: plan.fingerprint.clone(),
        plans: plans.to_owned(),
        max_variants: 8,
        passes,
    };
    let mut session = Session::new(config, Aten::new()).expect("a session");

    let next = session.call(arguments()).expect("is handled");
    assert!(matches!(next, Next::Record), "{next:?}");
    let active = session.begin().expect("begins");
    let modes = active.guards.clone(); // which the session knows by itself
    for guard in &plan.guards {
        active.guard(
            guard.kind,
            plan.str(guard.subject),
            plan.str(guard.expected),
        );
    }
    for mode in modes {
        guard(&mut plan, mode.kind, &mode.subject, &mode.expected);
    }
    for binding in &plan.bindings {
        let is_argument = binding.kind == BindingKind::Arg;
        active.named.push(Named {
            kind: binding.kind,
            path: plan.str(binding.path).to_owned(),
            // SAFETY: this bridge counts no references.
            tensor: (!is_argument).then(|| unsafe { Object::hold(object()) }),
            leaf: is_argument.then_some(0),
            storage: 0,
            storage_bytes: 0,
            written: None,
        });
    }
    let rates = [
        ("opt.param_groups[0]['lr']", true),
        ("model.training", false),
    ];
    for (subject, hyperparameter) in rates {
        let fact = rote::facts::NewFact {
            kind: GuardKind::Host,
            subject,
            text: "",
            hyperparameter,
            gradient: false,
            names: false,
            parts: &[],
        };
        // SAFETY: this bridge looks at no object.
        let add =
            |table: &mut FactTable| unsafe { table.add(FactKind::DictItem, object(), object()) };
        active.facts.add(fact, add).expect("is added");
    }
    let key = guard_key(&plan.function, &active.guard_texts());
    PlanStore::open(plans)
        .expect("a store")
        .write(&key, &plan)
        .expect("is written");
    active
        .float(Origin::Read(rates[0].0.to_owned()), 0.1)
        .expect("is followed");
    session.ready().expect("is ready");
    assert!(session.trust().expect("binds"), "the plan was not found");
    session.replay_last().expect("replays");
    session
}

/// Replays counted, after a few that settle what is sized once.
fn allocations_per_replay(passes: Selection) -> u64 {
    let plans = tempfile::tempdir().expect("temporary directory");
    let mut session = session(plans.path(), passes);
    let mut replay = || {
        let next = session.call(arguments()).expect("is handled");
        assert!(matches!(next, Next::Replayed(0, _)), "{next:?}");
    };
    replay();
    replay();
    let counted = allocations_of(|| (0..100).for_each(|_| replay()));
    assert_eq!(session.stats().replays, 103);
    assert_eq!(session.stats().fallbacks, 0);
    counted
}

#[test]
fn a_replayed_step_allocates_nothing() {
    assert!(
        allocations_of(|| drop(vec![1, 2, 3])) > 0,
        "nothing is counted"
    );
    silent_bridge::load();
    for passes in ["none", "all"] {
        let selection = Selection::parse(passes).expect("known");
        let counted = allocations_per_replay(selection);
        assert_eq!(counted, 0, "allocations in 100 replays, passes: {passes}");
    }
}
