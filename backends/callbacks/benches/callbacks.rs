//! What Rote adds to each op of a framework of function pointers: a step of 1,000 local ops whose kernels do nothing,
//! beside a loop that calls the same kernels as often. The promise is at most 15 ns per op above the call.

use std::ffi::{c_char, c_int, c_void};
use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rote_callbacks::{
    Arguments, CallbackProgram, Callbacks, DlDevice, DlManagedTensor, DlTensor, DlType, Framework,
    Leaf,
};
use rote_events::op::Arg;
use rote_plans::{BindingKind, Schedule};
use rote_replay::{BoundPlan, Frontend, Part};

#[path = "../../../plans/tests/sample/mod.rs"]
mod sample;

const OPS: usize = 1_000;

/// How many results there are. An op gives the one that was given the longest time ago.
const RESULTS: usize = 8;

/// Results that nobody deletes.
struct Results {
    next: usize,
    results: [DlManagedTensor; RESULTS],
    sizes: [i64; 2],
}

unsafe extern "C" fn has_op(_: *mut c_void, _: *const c_char, _: *const c_char, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn bind_op(
    context: *mut c_void,
    _: *const c_char,
    _: *const c_char,
    _: *const Arg,
    _: u32,
    _: u32,
    _: c_int,
    op: *mut u64,
) -> c_int {
    // SAFETY: Rote passes the context of the table and a valid place.
    unsafe { *op = context.addr() as u64 };
    0
}

unsafe extern "C" fn run_op(
    context: *mut c_void,
    _: u64,
    _: *const *const DlTensor,
    _: *const *const DlTensor,
    made: *mut *mut DlManagedTensor,
) -> c_int {
    // SAFETY: the context is a `Results` that outlives the bench, and ops have a result each.
    unsafe {
        let results = context.cast::<Results>();
        (*results).next = ((*results).next + 1) % RESULTS;
        *made = black_box(&raw mut (*results).results[(*results).next]);
    }
    0
}

unsafe extern "C" fn set_number(_: *mut c_void, _: u64, _: u32, _: i64, _: f64) -> c_int {
    0
}

unsafe extern "C" fn allocate(
    _: *mut c_void,
    bytes: u64,
    _: u32,
    _: i32,
    memory: *mut *mut c_void,
) -> c_int {
    let block = vec![0_u64; bytes as usize / 8 + 1].leak();
    // SAFETY: a valid place.
    unsafe { *memory = block.as_mut_ptr().cast() };
    0
}

unsafe extern "C" fn release(_: *mut c_void, _: *mut c_void) {}

unsafe extern "C" fn is_alive(_: *mut c_void, _: u64) -> c_int {
    0
}

unsafe extern "C" fn bind_collective(
    _: *mut c_void,
    _: *const rote_callbacks::Collective,
    collective: *mut u64,
) -> c_int {
    // SAFETY: a valid place.
    unsafe { *collective = 0 };
    0
}

unsafe extern "C" fn start(
    _: *mut c_void,
    _: u64,
    _: *const DlTensor,
    _: *const DlTensor,
) -> c_int {
    0
}

unsafe extern "C" fn wait(_: *mut c_void, _: u64) -> c_int {
    0
}

fn framework(context: *mut c_void) -> Framework {
    Framework {
        has_op: Some(has_op),
        bind_op: Some(bind_op),
        run_op: Some(run_op),
        set_number: Some(set_number),
        allocate: Some(allocate),
        release: Some(release),
        is_alive: Some(is_alive),
        bind_collective: Some(bind_collective),
        start: Some(start),
        wait: Some(wait),
        ..Framework::empty(context)
    }
}

fn overhead(c: &mut Criterion) {
    let plan = sample::large(OPS);
    let sizes = plan.dims(plan.values[0].shape).to_vec();
    let (rows, columns) = (sizes[0], sizes[1]);
    let made = |_| DlManagedTensor {
        dl_tensor: DlTensor {
            data: vec![0.0_f32; (rows * columns) as usize]
                .leak()
                .as_mut_ptr()
                .cast(),
            device: DlDevice {
                device_type: 1,
                device_id: 0,
            },
            ndim: 2,
            dtype: DlType {
                code: 2,
                bits: 32,
                lanes: 1,
            },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        },
        manager_ctx: std::ptr::null_mut(),
        deleter: None,
    };
    let results = Box::leak(Box::new(Results {
        next: 0,
        results: std::array::from_fn(made),
        sizes: [rows, columns],
    }));
    for result in &mut results.results {
        result.dl_tensor.shape = results.sizes.as_mut_ptr();
    }
    let mut leaf = made(0).dl_tensor;
    leaf.shape = results.sizes.as_mut_ptr();
    let results: *mut Results = results;
    let framework = framework(results.cast());
    let mut frontend = Callbacks::new(framework);
    let leaves = [Leaf {
        name: std::ptr::null(),
        spec: std::ptr::null(),
        tensor: &leaf,
        storage: 1,
        start: 0,
        bytes: (rows * columns * 4) as u64,
        word: 0,
        state: 0,
    }];
    // SAFETY: lists that live as long as the frontend.
    let arguments = unsafe { Arguments::new(&leaves, &[], &[]) };
    frontend.collect(arguments).expect("is read");
    let program = frontend.program(&plan).expect("slots");
    let mut bound: BoundPlan<CallbackProgram> =
        BoundPlan::bind(program, &plan, &Schedule::default()).expect("binds");
    let leaf = frontend.leaf(0).expect("a leaf").clone();
    let bindings = bound.bindings().to_vec();
    for &(kind, slot) in &bindings {
        if kind == BindingKind::State {
            let state = frontend.put(bound.program(), slot, &leaf, Part::Memory);
            state.expect("binds");
        }
    }
    let mut step = || {
        for &(kind, slot) in &bindings {
            if kind == BindingKind::Arg {
                frontend
                    .put(bound.program(), slot, &leaf, Part::Tensor)
                    .expect("binds");
            }
        }
        bound.run().expect("runs");
        bound.clear().expect("is cleared");
    };
    let mut made = [std::ptr::null_mut()];
    let mut bare = || {
        for op in 0..OPS as u64 {
            let run = black_box(framework.run_op).expect("a kernel");
            // SAFETY: as Rote calls it.
            let status = unsafe {
                run(
                    framework.context,
                    op,
                    std::ptr::null(),
                    std::ptr::null(),
                    made.as_mut_ptr(),
                )
            };
            black_box(status);
        }
    };
    let mut group = c.benchmark_group("callbacks");
    group.throughput(Throughput::Elements(OPS as u64));
    let mut medians = Vec::new();
    let mut measure = |name: &str, step: &mut dyn FnMut()| {
        let mut samples = Vec::new();
        group.bench_function(name, |b| {
            b.iter_custom(|times| {
                let start = Instant::now();
                for _ in 0..times {
                    step();
                }
                let taken = start.elapsed();
                samples.push(taken.as_secs_f64() * 1e9 / times as f64 / OPS as f64);
                taken
            });
        });
        samples.sort_by(f64::total_cmp);
        medians.push(samples[samples.len() / 2]);
    };
    measure("the_calls_alone", &mut bare);
    measure("a_replay", &mut step);
    println!(
        "a replay takes {:.1} ns per op, views, frees and collectives included; the call alone {:.1} ns: {:.1} ns above",
        medians[1],
        medians[0],
        medians[1] - medians[0]
    );
    group.finish();
}

criterion_group!(benches, overhead);
criterion_main!(benches);
