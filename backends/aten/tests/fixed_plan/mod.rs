//! A plan of 1,000 ops with views, frees, collectives, a learning rate and a
//! result, replayed as a session does once its guards hold.

use rote_aten::{Borrowed, BoundPlan, program};
use rote_plans::{BindingKind, Plan, Schedule};
use rote_replay::Part;

#[path = "../../../../plans/tests/sample/mod.rs"]
mod sample;

/// Local ops of a step.
pub const OPS: usize = 1_000;

/// The plan.
pub fn plan() -> Plan {
    sample::large(OPS)
}

/// The plan, bound.
pub struct FixedPlan {
    bound: BoundPlan,
    rate: f64,
}

impl FixedPlan {
    /// Binds it. The bridge must be loaded.
    pub fn bind() -> Self {
        let bound = program::bind(&plan(), &Schedule::default()).expect("binds");
        FixedPlan { bound, rate: 0.0 }
    }

    /// One replay, with a new learning rate.
    pub fn step(&mut self) {
        self.rate += 0.5;
        self.bound.begin().expect("begins");
        self.bound
            .set_numbers(&[self.rate])
            .expect("numbers are set");
        for &(kind, slot) in self.bound.bindings() {
            if kind == BindingKind::Arg {
                // SAFETY: this bridge looks at no object.
                let tensor = unsafe { Borrowed::new(std::ptr::null_mut()) };
                let program = self.bound.program();
                program.put(slot, tensor, Part::Tensor).expect("binds");
            }
        }
        self.bound.run().expect("runs");
        drop(program::results(&self.bound).expect("results"));
        self.bound.clear().expect("is cleared");
        self.bound.end().expect("ends");
    }
}
