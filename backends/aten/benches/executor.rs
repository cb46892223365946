//! What the executor adds to each op: a step of 1,000 local ops, with frees and
//! collectives, over backends that do nothing. The promise is less
//! than 60 ns per op.
//!
//! - `no_op_backend`: the loop and the calls of the backend's functions.
//! - `silent_bridge`: a whole replay through the bridge's C ABI, results, bound
//!   numbers and clearing included, where each C function returns at once.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rote_plans::{Collective, Device, Plan, RngAction, Schedule};
use rote_replay::{Backend, BoundPlan, Communicator, LocalOp, NumberSite, Program, ReplayError};

#[path = "../tests/fixed_plan/mod.rs"]
mod fixed_plan;
#[path = "../tests/silent_bridge/mod.rs"]
mod silent_bridge;

/// Does nothing, out of the optimizer's sight; numbers what is bound.
#[derive(Default)]
struct NoOp {
    bound: u32,
}

impl NoOp {
    fn next(&mut self) -> u32 {
        self.bound += 1;
        self.bound
    }
}

#[inline(never)]
fn nothing(number: u32) -> Result<(), String> {
    black_box(number);
    Ok(())
}

impl Backend for NoOp {
    type Tensor = ();

    fn bind_arena(&mut self, _: u64, _: Device) -> Result<(), ReplayError> {
        Ok(())
    }

    fn bind_place(&mut self, _: &Plan, _: u32, _: u64) -> Result<(), ReplayError> {
        Ok(())
    }

    fn bind_op(&mut self, _: &Plan, _: &LocalOp<'_>) -> Result<u32, ReplayError> {
        Ok(self.next())
    }

    fn bind_view(&mut self, _: &Plan, _: u32, _: u32) -> Result<u32, ReplayError> {
        Ok(self.next())
    }

    fn set_number(&mut self, _: &NumberSite, _: f64) -> Result<(), ReplayError> {
        Ok(())
    }

    fn is_own(&self, _: &str) -> bool {
        true
    }

    fn local(&self, op: u32) -> Result<(), String> {
        nothing(op)
    }

    fn view(&self, view: u32) -> Result<(), String> {
        nothing(view)
    }

    fn rng(&self, _: RngAction, _: Device, slot: u32) -> Result<(), String> {
        nothing(slot)
    }

    fn free(&self, value: u32) -> Result<(), String> {
        nothing(value)
    }

    fn clear(&self, _: &[u32]) -> Result<(), ReplayError> {
        Ok(())
    }

    fn output(&self, _: u32, _: bool) -> Result<(), ReplayError> {
        Ok(())
    }
}

impl Communicator for NoOp {
    fn bind_collective(&mut self, _: &Plan, _: &Collective) -> Result<u32, ReplayError> {
        Ok(self.next())
    }

    fn start(&self, collective: u32) -> Result<(), String> {
        nothing(collective)
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        nothing(value)
    }
}

impl Program for NoOp {
    fn undo(&self) -> Result<bool, ReplayError> {
        Ok(true)
    }
}

fn measure(c: &mut Criterion, name: &str, mut step: impl FnMut()) {
    let mut group = c.benchmark_group("executor");
    group.throughput(Throughput::Elements(fixed_plan::OPS as u64));
    let mut samples = Vec::new();
    group.bench_function(name, |b| {
        b.iter_custom(|times| {
            let start = Instant::now();
            (0..times).for_each(|_| step());
            let taken: Duration = start.elapsed();
            samples.push(taken.as_secs_f64() * 1e9 / times as f64 / fixed_plan::OPS as f64);
            taken
        });
    });
    group.finish();
    samples.sort_by(f64::total_cmp);
    if let Some(median) = samples.get(samples.len() / 2) {
        println!("{name}: {median:.2} ns per local op");
    }
}

fn run(c: &mut Criterion) {
    let plan = fixed_plan::plan();
    let mut bound = BoundPlan::bind(NoOp::default(), &plan, &Schedule::default()).expect("binds");
    measure(c, "no_op_backend", || {
        black_box(&mut bound).run().expect("runs")
    });
    silent_bridge::load();
    let mut replay = fixed_plan::FixedPlan::bind();
    measure(c, "silent_bridge", || replay.step());
}

criterion_group!(benches, run);
criterion_main!(benches);
