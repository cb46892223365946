//! What the executor adds to each op: a step of 1,000 local ops, with views,
//! frees and collectives, over backends that do nothing. The promise is less
//! than 60 ns per op.
//!
//! - `no_op_backend`: the loop and the calls of the backend's functions.
//! - `silent_bridge`: a whole replay through the bridge's C ABI, results, bound
//!   numbers and clearing included, where each C function returns at once.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rote_plans::{Device, RngAction};
use rote_replay::{Backend, Communicator, Executor, Step};

#[path = "../replay/tests/fixed_plan/mod.rs"]
mod fixed_plan;
#[path = "../replay/tests/silent_bridge/mod.rs"]
mod silent_bridge;

/// Does nothing, out of the optimizer's sight.
struct NoOp;

#[inline(never)]
fn nothing(number: u32) -> Result<(), String> {
    black_box(number);
    Ok(())
}

impl Backend for NoOp {
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
}

impl Communicator for NoOp {
    fn start(&self, collective: u32) -> Result<(), String> {
        nothing(collective)
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        nothing(value)
    }
}

/// Per local op a view or a free beside it, and now and then a collective.
fn steps() -> Vec<Step> {
    let ops = (0..fixed_plan::OPS as u32).flat_map(|i| {
        let beside = if i % 2 == 0 {
            Step::View(i)
        } else {
            Step::Free(i)
        };
        let moved = [Step::Start(i), Step::Wait(i)].into_iter();
        [Step::Local(i), beside]
            .into_iter()
            .chain(moved.filter(move |_| i % 32 == 0))
    });
    ops.collect()
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
    let executor = Executor {
        steps: steps(),
        rng: Vec::new(),
    };
    measure(c, "no_op_backend", || {
        black_box(&executor).run(&NoOp, &NoOp).expect("runs");
    });
    silent_bridge::load();
    let mut replay = fixed_plan::FixedPlan::bind();
    measure(c, "silent_bridge", || replay.step());
}

criterion_group!(benches, run);
criterion_main!(benches);
