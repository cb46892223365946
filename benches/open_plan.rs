//! Opening a plan of 10,000 ops: header, checksum, bytecheck and every rule
//! between the tables. The promise is less than 1 ms once the file's pages are
//! in memory.

use std::fs::File;
use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rote_plans::PlanFile;
use xxhash_rust::xxh3::xxh3_64;

#[path = "../plans/tests/sample/mod.rs"]
mod sample;

fn open(c: &mut Criterion) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("rank3.rote");
    let plan = sample::large(10_000);
    plan.write(&path).expect("written");
    let bytes = std::fs::read(&path).expect("read");
    println!(
        "{} instructions, {} values, {} arguments, {} KiB",
        plan.instrs.len(),
        plan.values.len(),
        plan.args.len(),
        bytes.len() / 1024
    );
    let mut group = c.benchmark_group("open_plan");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("10000_ops", |b| {
        b.iter(|| PlanFile::open(black_box(&path)).expect("valid"));
    });
    // What no opening can be faster than: mapping the file and hashing it.
    group.bench_function("map_and_checksum_only", |b| {
        b.iter(|| floor(black_box(&path)))
    });
    group.finish();
}

fn floor(path: &Path) -> u64 {
    let file = File::open(path).expect("opened");
    // SAFETY: nothing changes the file while it is mapped.
    let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
    xxh3_64(&map)
}

criterion_group!(benches, open);
criterion_main!(benches);
