//! A bridge in Rust whose kernels do nothing. It reads all that it is handed, so that
//! Miri sees whether every pointer is live and every list as long as it says.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every pointer comes from the library, whose promises are what is tested"
)]

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::slice;

use rote_aten::sys::{Arg, Op, Payload, Tensor, tag};
use rote_plans::Anchor;
use rote_replay::WordSubject as Fact;

type Body = unsafe extern "C" fn(*mut c_void) -> c_int;

thread_local! {
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static RESULTS: RefCell<Vec<Tensor>> = const { RefCell::new(Vec::new()) };
    /// Whether a profiler listens.
    pub static LISTENED: Cell<bool> = const { Cell::new(false) };
    /// The op that fails.
    pub static FAILING: Cell<Option<u32>> = const { Cell::new(None) };
}

fn say(text: String) {
    SAID.with_borrow_mut(|said| said.push(text));
}

/// What this thread's calls have said since the last time.
pub fn said() -> Vec<String> {
    SAID.take()
}

unsafe fn text(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .expect("text")
        .to_owned()
}

unsafe fn list<'a, T>(start: *const T, len: u32) -> &'a [T] {
    unsafe { slice::from_raw_parts(start, len as usize) }
}

unsafe fn shown_tensor(tensor: &Tensor) -> String {
    if tensor.storage == 0 {
        return "absent".to_owned();
    }
    let bytes = ptr::with_exposed_provenance::<u8>(tensor.storage as usize);
    let (sizes, bytes) = unsafe {
        (
            list(tensor.sizes, tensor.ndim),
            list(bytes, tensor.storage_bytes as u32),
        )
    };
    format!("{sizes:?} of {bytes:?}")
}

unsafe fn shown(arg: &Arg) -> String {
    let Arg {
        tag, len, payload, ..
    } = arg;
    unsafe {
        match *tag {
            tag::TENSOR => shown_tensor(&*payload.tensors),
            tag::TENSORS => {
                let tensors = list(payload.tensors, *len).iter();
                format!("{:?}", tensors.map(|t| shown_tensor(t)).collect::<Vec<_>>())
            }
            tag::FLOAT => payload.f.to_string(),
            tag::COMPLEX => format!("{:?}", payload.c),
            tag::WRAPPED => format!("wrapped {}", shown(&*payload.list)),
            tag::INTS | tag::VALUES => format!("{:?}", list(payload.ints, *len)),
            tag::LIST => format!("({})", shown_args(payload.list, *len)),
            tag::STR => text(payload.s),
            tag::VALUE => format!("%{}", payload.i),
            _ => payload.i.to_string(),
        }
    }
}

unsafe fn shown_args(args: *const Arg, len: u32) -> String {
    let args = unsafe { list(args, len) }.iter();
    let args: Vec<String> = args.map(|arg| unsafe { shown(arg) }).collect();
    args.join(", ")
}

/// A Python object: a count of references, and what a list holds.
struct Thing {
    references: Cell<u32>,
    items: RefCell<Vec<*mut c_void>>,
}

/// A new object with one reference.
pub fn object() -> *mut c_void {
    let thing = Thing {
        references: Cell::new(1),
        items: RefCell::default(),
    };
    Box::into_raw(Box::new(thing)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_incref(object: *mut c_void) {
    let references = unsafe { &(*object.cast::<Thing>()).references };
    references.set(references.get() + 1);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_bridge_decref(object: *mut c_void) {
    let thing = object.cast::<Thing>();
    let left = unsafe { (*thing).references.get() } - 1;
    unsafe { (*thing).references.set(left) };
    if left == 0 {
        let thing = unsafe { Box::from_raw(thing) };
        for item in thing.items.take() {
            unsafe { rote_bridge_decref(item) };
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_list_new(_: u32) -> *mut c_void {
    object()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_list_set(list: *mut c_void, at: u32, item: *mut c_void) {
    let items = unsafe { &(*list.cast::<Thing>()).items };
    assert_eq!(items.borrow().len(), at as usize);
    items.borrow_mut().push(item);
}

/// How many objects a list holds.
pub fn length(list: *mut c_void) -> usize {
    unsafe { (*list.cast::<Thing>()).items.borrow().len() }
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_error() -> *const c_char {
    c"the kernel fails".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_rng_digest(kind: u8, _: i8, digest: *mut u64) -> c_int {
    unsafe { *digest = 7 + u64::from(kind) };
    0
}

// -- programs ---------------------------------------------------------------------

#[derive(Default)]
struct Program {
    ops: u32,
    views: u32,
    collectives: u32,
    ranges: u32,
}

unsafe fn program<'a>(program: *mut c_void) -> &'a mut Program {
    unsafe { &mut *program.cast::<Program>() }
}

fn next(number: &mut u32) -> u32 {
    *number += 1;
    *number - 1
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_new(_: u32, _: u32) -> *mut c_void {
    Box::into_raw(Box::<Program>::default()).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_free(program: *mut c_void) {
    let program = unsafe { Box::from_raw(program.cast::<Program>()) };
    assert_eq!(program.ranges, 0, "every range is ended");
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_op(
    program: *mut c_void,
    name: *const c_char,
    overload: *const c_char,
    args: *const Arg,
    nargs: u32,
    outs: *const i64,
    nouts: u32,
    how: u8,
    other: *const c_char,
    _: c_int,
    _: c_int,
    index: *mut u32,
) -> c_int {
    unsafe {
        let (name, overload) = (text(name), text(overload));
        let (args, outs) = (shown_args(args, nargs), list(outs, nouts));
        let other = match other.is_null() {
            true => format!("{how}"),
            false => text(other),
        };
        say(format!("{name}.{overload}({args}) > {outs:?}, {other}"));
        *index = next(&mut self::program(program).ops);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_view(
    program: *mut c_void,
    base: u32,
    out: u32,
    _: u8,
    _: u8,
    shape: *const i64,
    strides: *const i64,
    ndim: u32,
    offset: i64,
    index: *mut u32,
) -> c_int {
    unsafe {
        let (shape, strides) = (list(shape, ndim), list(strides, ndim));
        say(format!(
            "view %{base} > %{out}: {shape:?} {strides:?} {offset}"
        ));
        *index = next(&mut self::program(program).views);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_collective(
    program: *mut c_void,
    _: u32,
    _: i32,
    group: *const c_char,
    _: u32,
    input: u32,
    output: u32,
    shape: *const i64,
    ndim: u32,
    input_splits: *const i64,
    inputs: u32,
    output_splits: *const i64,
    outputs: u32,
    index: *mut u32,
) -> c_int {
    unsafe {
        let (group, shape) = (text(group), list(shape, ndim));
        let splits = [list(input_splits, inputs), list(output_splits, outputs)];
        say(format!(
            "collective over {group}: %{input} > %{output} {shape:?} {splits:?}"
        ));
        *index = next(&mut self::program(program).collectives);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_arena(_: *mut c_void, bytes: u64, _: u8, _: i8) -> c_int {
    say(format!("arena of {bytes} bytes"));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_place(
    _: *mut c_void,
    value: u32,
    _: u8,
    shape: *const i64,
    strides: *const i64,
    ndim: u32,
    offset: u64,
    bytes: u64,
) -> c_int {
    let (shape, strides) = unsafe { (list(shape, ndim), list(strides, ndim)) };
    say(format!(
        "place %{value}: {shape:?} {strides:?} at {offset}, {bytes} bytes"
    ));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_fix(_: *mut c_void, slots: *const u32, n: u32) -> c_int {
    say(format!("fix {:?}", unsafe { list(slots, n) }));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_clear(_: *mut c_void, slots: *const u32, n: u32) -> c_int {
    say(format!("clear {:?}", unsafe { list(slots, n) }));
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_draws(_: *mut c_void, _: u8, _: i8) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_undo(_: *mut c_void, done: *mut c_int) -> c_int {
    unsafe { *done = 1 };
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_lost(_: *mut c_void) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_differs(_: *mut c_void) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_expect(
    _: *mut c_void,
    _: u32,
    _: u32,
    _: u8,
    _: u8,
    _: u8,
    _: i8,
    _: *const i64,
    _: *const i64,
    _: u32,
) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_exception(_: *mut c_void) -> *mut c_void {
    object()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_program_put(
    _: *mut c_void,
    _: u32,
    object: *mut c_void,
    _: u32,
) -> c_int {
    assert!(unsafe { (*object.cast::<Thing>()).references.get() } > 0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_number(
    _: *mut c_void,
    op: u32,
    arg: u32,
    element: i64,
    value: f64,
) -> c_int {
    say(format!("number {value} to op {op}, {arg}, {element}"));
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_output(_: *mut c_void, _: u32, _: c_int) -> *mut c_void {
    object()
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_shown(_: *mut c_void, value: u32) -> *mut c_void {
    match value {
        0 => ptr::null_mut(),
        _ => object(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_program_listened(_: *mut c_void) -> c_int {
    LISTENED.get().into()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_range_begin(program: *mut c_void, name: *const c_char) -> c_int {
    unsafe {
        say(format!("begin {}", text(name)));
        self::program(program).ranges += 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_range_end(program: *mut c_void) -> c_int {
    unsafe { self::program(program).ranges -= 1 };
    0
}

// -- runs -------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_run(_: *mut c_void, body: Body, context: *mut c_void) -> c_int {
    unsafe { body(context) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_with_gil(body: Body, context: *mut c_void) -> c_int {
    unsafe { body(context) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_without_gil(body: Body, context: *mut c_void) -> c_int {
    unsafe { body(context) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_run_op(program: *mut c_void, op: u32) -> c_int {
    assert!(op < unsafe { self::program(program) }.ops);
    (FAILING.get() == Some(op)).into()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_run_view(program: *mut c_void, view: u32) -> c_int {
    assert!(view < unsafe { self::program(program) }.views);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_run_collective(program: *mut c_void, collective: u32) -> c_int {
    assert!(collective < unsafe { self::program(program) }.collectives);
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_run_wait(_: *mut c_void, _: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_run_rng(_: *mut c_void, _: u32, _: u8, _: i8, _: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_run_free(_: *mut c_void, _: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_watch_new(watch: *mut *mut c_void) -> c_int {
    unsafe { *watch = Box::into_raw(Box::new(0_i64)).cast() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_watch_free(watch: *mut c_void) {
    drop(unsafe { Box::from_raw(watch.cast::<i64>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_watch_rise(watch: *mut c_void) -> i64 {
    let rise = watch.cast::<i64>();
    unsafe {
        *rise += 64;
        *rise
    }
}

// -- single calls ------------------------------------------------------------------

/// Returns what it is given first, twice, and an absent tensor between.
#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_call_op(
    name: *const c_char,
    overload: *const c_char,
    args: *const Arg,
    nargs: u32,
    out: *mut *const Tensor,
    count: *mut u32,
    flags: *mut u32,
) -> c_int {
    unsafe {
        say(format!(
            "{}.{}({})",
            text(name),
            text(overload),
            shown_args(args, nargs)
        ));
        let given = *list(args, nargs)[0].payload.tensors;
        let absent = Tensor {
            storage: 0,
            ..given
        };
        RESULTS.set(vec![given, absent, given]);
        *out = RESULTS.with_borrow(|results| results.as_ptr());
        *count = 3;
        *flags = rote_aten::sys::SEEDED;
    }
    0
}

// -- what is recorded --------------------------------------------------------------

/// A description of an op on one tensor, anew at each call.
struct Described {
    sizes: Vec<i64>,
    tensors: Vec<Tensor>,
    name: Vec<u8>,
    args: Vec<Arg>,
    op: Vec<Op>,
}

impl Described {
    fn new(calls: usize) -> Self {
        let sizes = vec![2; calls];
        let tensors = vec![Tensor {
            storage: 1,
            sizes: sizes.as_ptr(),
            strides: sizes.as_ptr(),
            offset: 0,
            storage_bytes: 64,
            ndim: sizes.len() as u32,
            dtype: 6,
            device_kind: 0,
            device_index: -1,
            flags: 0,
        }];
        let name = format!("aten::op{calls}\0").into_bytes();
        let args = vec![Arg {
            tag: tag::TENSOR,
            written: 0,
            len: 1,
            payload: Payload {
                tensors: tensors.as_ptr(),
            },
        }];
        let op = vec![Op {
            name: name.as_ptr().cast(),
            overload: c"".as_ptr(),
            args: args.as_ptr(),
            outs: args.as_ptr(),
            nargs: 1,
            nouts: 1,
            flags: 0,
        }];
        Described {
            sizes,
            tensors,
            name,
            args,
            op,
        }
    }
}

unsafe fn again<'a>(describer: *mut c_void) -> &'a Described {
    let described = unsafe { &mut *describer.cast::<Described>() };
    assert!(!described.name.is_empty() && described.args.len() == 1);
    *described = Described::new(described.sizes.len() + 1);
    described
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_describer_new() -> *mut c_void {
    Box::into_raw(Box::new(Described::new(0))).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_describer_free(describer: *mut c_void) {
    drop(unsafe { Box::from_raw(describer.cast::<Described>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_describe_op(
    describer: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    op: *mut *const Op,
) -> c_int {
    unsafe { *op = again(describer).op.as_ptr() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_describe_observed(
    describer: *mut c_void,
    op: *mut *const Op,
) -> c_int {
    unsafe { *op = again(describer).op.as_ptr() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_describe_tensor(
    describer: *mut c_void,
    _: *mut c_void,
    tensor: *mut *const Tensor,
) -> c_int {
    unsafe { *tensor = again(describer).tensors.as_ptr() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_storage_alive(describer: *const c_void, storage: u64) -> c_int {
    let tensors = unsafe { &(*describer.cast::<Described>()).tensors };
    tensors.iter().any(|t| t.storage == storage).into()
}

// -- what is guarded ---------------------------------------------------------------

#[derive(Default)]
struct Collected {
    words: Vec<u64>,
    facts: Vec<Fact>,
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_call_new() -> *mut c_void {
    Box::into_raw(Box::<Collected>::default()).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_call_free(call: *mut c_void) {
    drop(unsafe { Box::from_raw(call.cast::<Collected>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_call_state(
    _: *mut c_void,
    storages: *const u64,
    objects: *const u64,
    n: u32,
) -> c_int {
    let state = unsafe { [list(storages, n), list(objects, n)] };
    say(format!("state {state:?}"));
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_call_world(_: *mut c_void, _: u64) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_call_collect(
    call: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    words: *mut *const u64,
    facts: *mut *const Fact,
    n: *mut u32,
) -> c_int {
    unsafe {
        let call = &mut *call.cast::<Collected>();
        let number = call.words.len() as u64 + 1;
        call.words = vec![number; number as usize];
        call.facts = vec![Fact { leaf: 0, field: 0 }; number as usize];
        (*words, *facts) = (call.words.as_ptr(), call.facts.as_ptr());
        *n = number as u32;
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_call_leaf(call: *mut c_void, leaf: u32) -> *mut c_void {
    match leaf {
        0 => call, // stands for an object
        _ => ptr::null_mut(),
    }
}

/// No collector of garbage here asks what a session holds.
#[unsafe(no_mangle)]
extern "C" fn rote_bridge_call_owner(
    _: *mut c_void,
    _: *mut c_void,
    _: unsafe extern "C" fn(*mut c_void) -> c_int,
) -> *mut c_void {
    ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_call_hold(call: *mut c_void) -> *mut c_void {
    let words = unsafe { (*call.cast::<Collected>()).words.clone() };
    Box::into_raw(Box::new(words)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_held_free(held: *mut c_void) {
    drop(unsafe { Box::from_raw(held.cast::<Vec<u64>>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_held_difference(
    held: *const c_void,
    call: *const c_void,
    word: *mut i64,
) -> c_int {
    unsafe {
        let (held, call) = (&*held.cast::<Vec<u64>>(), &*call.cast::<Collected>());
        *word = if *held == call.words { -1 } else { 0 };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_tensor_place(
    _: *mut c_void,
    _: c_int,
    place: *mut Anchor,
) -> c_int {
    let found = Anchor {
        start: 8,
        bytes: 64,
        base: 0,
    };
    unsafe { *place = found };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_number_in(_: *mut c_void, _: *mut f64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_table_new(_: *mut c_void) -> *mut c_void {
    Box::into_raw(Box::new(0_u32)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_table_free(table: *mut c_void) {
    drop(unsafe { Box::from_raw(table.cast::<u32>()) });
}

/// Each fact has as many words as its kind's number and one.
#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_table_add(
    table: *mut c_void,
    kind: u32,
    _: *mut c_void,
    _: *mut c_void,
    width: *mut u32,
) -> c_int {
    unsafe {
        *width = kind + 1;
        *table.cast::<u32>() += kind + 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_table_read(
    table: *const c_void,
    call: *const c_void,
    out: *mut u64,
    _: c_int,
) -> c_int {
    unsafe {
        assert!(!(*call.cast::<Collected>()).words.is_empty());
        slice::from_raw_parts_mut(out, *table.cast::<u32>() as usize).fill(3);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_table_hold(_: *mut c_void) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_table_same(_: *const c_void, _: u32, same: *mut c_int) -> c_int {
    unsafe { *same = 1 };
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_table_text(_: *const c_void, _: u32, _: c_int) -> *const c_char {
    c"what it sees".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_read_float(_: *const c_void, _: u32, out: *mut f64) -> c_int {
    unsafe { *out = 0.5 };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_written(
    objects: *const *mut c_void,
    grads: *const u8,
    times: *const u32,
    local_times: *const u32,
    n: u32,
) -> c_int {
    unsafe {
        let (objects, grads) = (list(objects, n), list(grads, n));
        let times = [list(times, n), list(local_times, n)];
        say(format!(
            "written {} {grads:?} {times:?}",
            objects.iter().filter(|object| !object.is_null()).count()
        ));
    }
    0
}

// -- code that runs ------------------------------------------------------------------

// -- ranks ------------------------------------------------------------------------

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_group(
    name: *const c_char,
    number: *mut u64,
    ranks: *mut u32,
    cpu: *mut c_int,
) -> c_int {
    unsafe {
        let known = text(name) == "tp";
        (*number, *ranks, *cpu) = (1, if known { 2 } else { 0 }, 1);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn rote_bridge_compare_checks(_: *const c_char, _: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_found_answer(n: *mut u64) -> *const i64 {
    unsafe { *n = 0 };
    std::ptr::null()
}

/// Every rank says the same.
#[unsafe(no_mangle)]
unsafe extern "C" fn rote_bridge_gather(
    _: *const c_char,
    _: u64,
    ours: *const u8,
    n: u64,
    all: *mut u8,
) -> c_int {
    let n = n as usize;
    unsafe {
        let ours = slice::from_raw_parts(ours, n);
        slice::from_raw_parts_mut(all, 2 * n)[..n].copy_from_slice(ours);
        slice::from_raw_parts_mut(all, 2 * n)[n..].copy_from_slice(ours);
    }
    0
}
