//! What the library hands to a framework of function pointers is live and as large as it says, and each tensor that it is
//! given is deleted once. Miri watches it (`scripts/miri.sh`); without Miri the same plans run, and deletions are counted.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};

use rote_callbacks::{
    Arguments, Callbacks, Collective, DlDevice, DlManagedTensor, DlTensor, DlType, Framework, Leaf,
};
use rote_events::op::{Arg, tag};
use rote_passes::{Selection, optimize};
use rote_plans::schedule::{DYNAMIC, Into};
use rote_plans::{BindingKind, Device, Instr, NONE, Plan, Schedule};
use rote_replay::{BoundPlan, Frontend, Part, ReplayError};

#[path = "../../../plans/tests/sample/mod.rs"]
mod sample;

/// What the framework knows.
#[derive(Default)]
struct State {
    /// The sizes of each op's results, by the order of binding.
    sizes: RefCell<Vec<Vec<i64>>>,
    /// How many tensors each op is given, and whether it writes in place.
    ops: RefCell<Vec<(usize, bool)>>,
    blocks: RefCell<HashMap<usize, Vec<u64>>>,
    made: Cell<i64>,
    /// What collectives that were started read and write, until their waits.
    started: RefCell<VecDeque<(*const f32, *mut f32)>>,
    failing: Cell<Option<u64>>,
}

/// A tensor that the framework gives away.
#[repr(C)]
struct Given {
    managed: DlManagedTensor,
    sizes: Vec<i64>,
    data: Vec<f32>,
}

unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    // SAFETY: the first field of a `Given` that `give` has boxed, deleted once.
    let given = unsafe { Box::from_raw(managed.cast::<Given>()) };
    assert_eq!(given.data.len() as i64, given.sizes.iter().product::<i64>());
    // SAFETY: the state outlives its tensors.
    let state = unsafe { state(given.managed.manager_ctx) };
    state.made.set(state.made.get() - 1);
}

/// # Safety
/// `context` must be a live [`State`].
unsafe fn state<'a>(context: *mut c_void) -> &'a State {
    // SAFETY: the caller vouches for it.
    unsafe { &*context.cast::<State>() }
}

fn dl(data: *mut f32, sizes: &mut [i64]) -> DlTensor {
    DlTensor {
        data: data.cast(),
        device: DlDevice {
            device_type: 1,
            device_id: 0,
        },
        ndim: sizes.len() as i32,
        dtype: DlType {
            code: 2,
            bits: 32,
            lanes: 1,
        },
        shape: sizes.as_mut_ptr(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    }
}

fn give(context: *mut c_void, sizes: &[i64], value: f32) -> *mut DlManagedTensor {
    // SAFETY: the state outlives the call.
    let state = unsafe { state(context) };
    state.made.set(state.made.get() + 1);
    let mut given = Box::new(Given {
        managed: DlManagedTensor {
            dl_tensor: dl(std::ptr::null_mut(), &mut []),
            manager_ctx: context,
            deleter: Some(delete),
        },
        sizes: sizes.to_vec(),
        data: vec![value; sizes.iter().product::<i64>() as usize],
    });
    given.managed.dl_tensor = dl(given.data.as_mut_ptr(), &mut given.sizes);
    Box::into_raw(given).cast()
}

unsafe extern "C" fn has_op(_: *mut c_void, _: *const c_char, _: *const c_char, _: c_int) -> c_int {
    1
}

unsafe extern "C" fn bind_op(
    context: *mut c_void,
    name: *const c_char,
    _: *const c_char,
    args: *const Arg,
    n: u32,
    outs: u32,
    _: c_int,
    op: *mut u64,
) -> c_int {
    // SAFETY: what is passed is live, and lists are as long as they say.
    unsafe {
        let state = state(context);
        let args = std::slice::from_raw_parts(args, n as usize);
        let tensors = args.iter().map(|arg| match arg.tag {
            tag::VALUE => 1,
            tag::VALUES => {
                let places = std::slice::from_raw_parts(arg.payload.ints, arg.len as usize);
                places.iter().filter(|place| **place >= 0).count()
            }
            _ => 0,
        });
        let in_place = CStr::from_ptr(name).to_bytes().ends_with(b"_");
        assert_eq!(outs, 1);
        state.ops.borrow_mut().push((tensors.sum(), in_place));
        *op = state.ops.borrow().len() as u64 - 1;
    }
    0
}

unsafe extern "C" fn run_op(
    context: *mut c_void,
    op: u64,
    tensors: *const *const DlTensor,
    into: *const *const DlTensor,
    made: *mut *mut DlManagedTensor,
) -> c_int {
    // SAFETY: what is passed is live, and lists are as long as binding has said.
    unsafe {
        let state = state(context);
        if state.failing.get() == Some(op) {
            return 3;
        }
        let (count, in_place) = state.ops.borrow()[op as usize];
        let mut sum = 0.0;
        let numel = |tensor: &DlTensor| -> usize {
            let sizes = std::slice::from_raw_parts(tensor.shape, tensor.ndim as usize);
            sizes.iter().product::<i64>() as usize
        };
        for place in 0..count {
            let tensor = &**tensors.add(place);
            // All elements lie close together, in whatever order.
            for at in 0..numel(tensor) {
                sum += *tensor.data.cast::<f32>().add(at);
            }
        }
        let target = if in_place { tensors } else { into };
        if target.is_null() {
            *made = give(context, &state.sizes.borrow()[op as usize], sum);
        } else {
            let tensor = &**target;
            for at in 0..numel(tensor) {
                *tensor.data.cast::<f32>().add(at) = if in_place { 1.0 } else { sum };
            }
        }
    }
    0
}

unsafe extern "C" fn set_number(_: *mut c_void, _: u64, _: u32, _: i64, _: f64) -> c_int {
    0
}

unsafe extern "C" fn allocate(
    context: *mut c_void,
    bytes: u64,
    _: u32,
    _: i32,
    memory: *mut *mut c_void,
) -> c_int {
    let mut block = vec![0_u64; bytes as usize / 8 + 1];
    // SAFETY: a live state, and a valid place.
    unsafe {
        *memory = block.as_mut_ptr().cast();
        state(context)
            .blocks
            .borrow_mut()
            .insert((*memory).addr(), block);
    }
    0
}

unsafe extern "C" fn release(context: *mut c_void, memory: *mut c_void) {
    // SAFETY: a live state.
    let block = unsafe { state(context) }
        .blocks
        .borrow_mut()
        .remove(&memory.addr());
    assert!(block.is_some(), "memory is given back once");
}

unsafe extern "C" fn is_alive(_: *mut c_void, _: u64) -> c_int {
    0
}

unsafe extern "C" fn keep_generator(_: *mut c_void, _: u32, _: u32, _: i32, slot: u32) -> c_int {
    c_int::from(slot > 2)
}

unsafe extern "C" fn generator(_: *mut c_void, _: u32, _: i32, state: *mut u64) -> c_int {
    // SAFETY: a valid place.
    unsafe { *state = 0 };
    0
}

unsafe extern "C" fn bind_collective(
    _: *mut c_void,
    described: *const Collective,
    collective: *mut u64,
) -> c_int {
    // SAFETY: what is passed is live.
    unsafe {
        assert!(!CStr::from_ptr((*described).group).is_empty());
        *collective = 7;
    }
    0
}

unsafe extern "C" fn start(
    context: *mut c_void,
    _: u64,
    input: *const DlTensor,
    output: *const DlTensor,
) -> c_int {
    // SAFETY: what is passed is live.
    unsafe {
        let (input, output) = ((*input).data.cast(), (*output).data.cast());
        state(context)
            .started
            .borrow_mut()
            .push_back((input, output));
    }
    0
}

/// Collectives read until they are waited for.
unsafe extern "C" fn wait(context: *mut c_void, collective: u64) -> c_int {
    // SAFETY: memory of a collective stays until its wait.
    unsafe {
        let started = state(context).started.borrow_mut().pop_front();
        let (input, output) = started.expect("a collective was started");
        *output = *input * 2.0;
    }
    c_int::from(collective != 7)
}

fn framework(state: &State) -> Framework {
    Framework {
        has_op: Some(has_op),
        bind_op: Some(bind_op),
        run_op: Some(run_op),
        set_number: Some(set_number),
        allocate: Some(allocate),
        release: Some(release),
        is_alive: Some(is_alive),
        generator: Some(generator),
        keep_generator: Some(keep_generator),
        bind_collective: Some(bind_collective),
        start: Some(start),
        wait: Some(wait),
        ..Framework::empty(std::ptr::from_ref(state).cast_mut().cast())
    }
}

/// Sizes of the results of each local op that is bound, in order.
fn sizes_of(plan: &Plan) -> Vec<Vec<i64>> {
    let ops = plan.instrs.iter().filter_map(|instr| match instr {
        Instr::Local { outs, .. } => Some(plan.ids(*outs)[0]),
        _ => None,
    });
    let sizes = ops.map(|out| match out {
        NONE => Vec::new(),
        out => plan.dims(plan.values[out as usize].shape).to_vec(),
    });
    sizes.collect()
}

/// Replays a plan some times. Returns how each ended, and the first element of each result.
fn replays(
    plan: &Plan,
    schedule: &Schedule,
    failing: Option<u64>,
) -> (Vec<Result<(), ReplayError>>, Vec<f32>) {
    let state = State::default();
    state.sizes.replace(sizes_of(plan));
    plan.check().expect("a valid plan");
    let mut frontend = Callbacks::new(framework(&state));
    let tensors = plan.bindings.iter().map(|binding| {
        let sizes = plan
            .dims(plan.values[binding.value as usize].shape)
            .to_vec();
        let data = vec![0.5_f32; sizes.iter().product::<i64>() as usize];
        (sizes, data)
    });
    let mut tensors: Vec<(Vec<i64>, Vec<f32>)> = tensors.collect();
    let described: Vec<DlTensor> = tensors
        .iter_mut()
        .map(|(sizes, data)| dl(data.as_mut_ptr(), sizes))
        .collect();
    let leaves: Vec<Leaf> = described
        .iter()
        .zip(&plan.bindings)
        .map(|(tensor, binding)| Leaf {
            name: c"leaf".as_ptr(),
            spec: std::ptr::null(),
            tensor,
            storage: 0,
            start: 0,
            bytes: 0,
            word: 0,
            state: u32::from(binding.kind == BindingKind::State),
        })
        .collect();
    let mut ended = Vec::new();
    let mut kept = Vec::new();
    {
        let program = frontend.program(plan).expect("slots");
        let mut bound = BoundPlan::bind(program, plan, schedule).expect("binds");
        for run in 0..4 {
            state.started.borrow_mut().clear();
            state.failing.set(failing.filter(|_| run == 2));
            // SAFETY: the lists outlive the frontend's use of them.
            let arguments = unsafe { Arguments::new(&leaves, &[], &[]) };
            frontend.collect(arguments).expect("is read");
            for (at, &(kind, slot)) in (0..).zip(bound.bindings()) {
                if kind == BindingKind::Arg || run == 0 {
                    let leaf = frontend.leaf(at).expect("a leaf");
                    let what = match kind {
                        BindingKind::State => Part::Memory,
                        _ => Part::Tensor,
                    };
                    frontend
                        .put(bound.program(), slot, leaf, what)
                        .expect("binds");
                }
            }
            let scalars = vec![f64::from(run); bound.scalars().len()];
            bound.set_numbers(&scalars).expect("numbers are set");
            let ran = bound.run();
            if ran.is_ok() {
                kept.extend(frontend.results(&bound).expect("results"));
            }
            bound.clear().expect("is cleared");
            ended.push(ran);
        }
    }
    // Results outlive the plan; each is the caller's to delete.
    drop(frontend);
    let mut firsts = Vec::new();
    for tensor in kept {
        let managed = tensor.into_raw();
        // SAFETY: live until it is deleted, once.
        unsafe {
            let tensor = &(*managed).dl_tensor;
            firsts.push(*tensor.data.cast::<f32>());
            (*managed).deleter.expect("a deleter")(managed);
        }
    }
    assert_eq!(state.made.get(), 0, "every tensor is deleted");
    assert!(state.blocks.borrow().is_empty(), "all memory is given back");
    (ended, firsts)
}

#[test]
fn every_kind_of_instruction_runs() {
    let (ended, _) = replays(&sample::small(), &Schedule::default(), None);
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

#[test]
fn results_lie_in_an_arena() {
    let plan = sample::small();
    let ops = plan.instrs.iter().zip(0_u32..);
    let add = ops.filter_map(|(instr, at)| match instr {
        Instr::Local { op, outs, .. } if plan.str(*op) == "aten::add" => {
            Some((at, plan.ids(*outs)[0]))
        }
        _ => None,
    });
    let (at, spare) = add.last().expect("an addition");
    let mut schedule = Schedule {
        once: vec![false; plan.instrs.len()],
        offsets: vec![DYNAMIC; plan.values.len()],
        arena_bytes: 256,
        arena_device: Some(Device { kind: 0, index: -1 }),
        into: vec![(at, Into::Overload("out"))],
    };
    schedule.offsets[spare as usize] = 128;
    let (ended, _) = replays(&plan, &schedule, None);
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

#[test]
fn a_long_plan_runs_and_fails_and_runs() {
    let plan = sample::large(if cfg!(miri) { 12 } else { 200 });
    let (ended, _) = replays(&plan, &Schedule::default(), Some(5));
    let failed: Vec<bool> = ended.iter().map(Result::is_err).collect();
    assert_eq!(failed, [false, false, true, false]);
}

#[test]
fn what_a_collective_reads_stays_until_its_wait() {
    use rote_tracer::event::ArgEvent;
    use rote_tracer::sample::{collective, finish, op, record, recorder, tensor, wait};

    let [x, y, out, z, t] = [1, 2, 3, 4, 5].map(|storage| tensor(storage, &[4]));
    for kind in ["all_reduce", "all_gather_into_tensor", "broadcast"] {
        let name = format!("_c10d_functional::{kind}");
        let middle = match kind {
            "all_reduce" => ArgEvent::Str("sum"),
            "broadcast" => ArgEvent::Int(0),
            _ => ArgEvent::Int(1),
        };
        let mut recorder = recorder(&[&x]);
        let steps = [
            op("aten::neg", &[&x], &[&y]),
            collective(&name, &y, vec![middle], &out),
            op("aten::maximum", &[&x, &x], &[&z]),
            op("aten::exp", &[&z], &[&t]),
            wait(&out),
        ];
        record(&mut recorder, &steps);
        let (plan, _) = finish(recorder, &[&out, &t]);
        // Each op gives the sum of its arguments: of halves, then of fours.
        let expected = [4.0, 16.0].repeat(4);
        let (_, found) = replays(&plan, &Schedule::default(), None);
        assert_eq!(found, expected, "{kind}");
        let backend = Framework {
            has_op: Some(has_op),
            ..Framework::empty(std::ptr::null_mut())
        };
        let arena = Selection::parse("arena").expect("a pass");
        let (program, _) = optimize(plan, arena, &backend);
        assert!(program.schedule.arena_bytes > 0);
        let (_, found) = replays(&program.plan, &program.schedule, None);
        assert_eq!(found, expected, "{kind} with an arena");
    }
}
