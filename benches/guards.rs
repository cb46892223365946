//! Comparing the facts of a call with those that a plan expects: 2,000 words,
//! all equal, as at every replay. The promise is less than 10 ns for each.
//!
//! The comparison alone. Reading the facts out of Python's objects is part of
//! every replay too: `overhead.py` measures whole replays.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rote_replay::first_difference;

const FACTS: u64 = 2_000;

fn compare(c: &mut Criterion) {
    let facts: Vec<u64> = (0..FACTS)
        .map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect();
    let expected = facts.clone();
    let mut last_differs = facts.clone();
    last_differs[FACTS as usize - 1] ^= 1;
    assert_eq!(first_difference(&expected, &facts), None);
    assert_eq!(
        first_difference(&expected, &last_differs),
        Some(FACTS as usize - 1)
    );

    let mut group = c.benchmark_group("guards");
    group.throughput(Throughput::Elements(FACTS));
    for (name, found) in [
        ("2000_facts_hold", &facts),
        ("the_last_of_2000_differs", &last_differs),
    ] {
        let mut samples = Vec::new();
        group.bench_function(name, |b| {
            b.iter_custom(|times| {
                let start = Instant::now();
                for _ in 0..times {
                    black_box(first_difference(black_box(&expected), black_box(found)));
                }
                let taken = start.elapsed();
                samples.push(taken.as_secs_f64() * 1e9 / times as f64 / FACTS as f64);
                taken
            });
        });
        samples.sort_by(f64::total_cmp);
        if let Some(median) = samples.get(samples.len() / 2) {
            println!("{name}: {median:.3} ns per fact");
        }
    }
    group.finish();
}

criterion_group!(benches, compare);
criterion_main!(benches);
