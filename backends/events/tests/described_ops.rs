//! Ops in C structs, as programs and the bridge describe them: each kind of argument is
//! read as what it is, and what makes no sense is refused before it is read.

use std::ffi::{CString, c_char};
use std::ptr;

use rote_events::events;
use rote_events::op::{Arg, Op, Payload, Tensor, tag};
use rote_plans::check::MAX_ARG_DEPTH;

const SIZES: [i64; 2] = [2, 3];
const STRIDES: [i64; 2] = [3, 1];

fn tensor(storage: u64) -> Tensor {
    Tensor {
        storage,
        sizes: SIZES.as_ptr(),
        strides: STRIDES.as_ptr(),
        offset: 0,
        storage_bytes: 24,
        ndim: 2,
        dtype: 6,
        device_kind: 0,
        device_index: -1,
        flags: 0,
    }
}

/// A tensor of which nothing but zeros and null is said.
fn absent() -> Tensor {
    Tensor {
        sizes: ptr::null(),
        strides: ptr::null(),
        storage_bytes: 0,
        ndim: 0,
        ..tensor(0)
    }
}

fn arg(tag: u8, len: usize, payload: Payload) -> Arg {
    Arg {
        tag,
        written: 0,
        len: len as u32,
        payload,
    }
}

fn tensors(tag: u8, tensors: &[Tensor]) -> Arg {
    let payload = Payload {
        tensors: tensors.as_ptr(),
    };
    arg(tag, tensors.len(), payload)
}

fn list(tag: u8, list: &[Arg]) -> Arg {
    let payload = Payload {
        list: list.as_ptr(),
    };
    arg(tag, list.len(), payload)
}

fn number(tag: u8, i: i64) -> Arg {
    arg(tag, 0, Payload { i })
}

fn text(tag: u8, s: *const c_char) -> Arg {
    arg(tag, 0, Payload { s })
}

fn op(name: *const c_char, args: &[Arg], outs: &[Arg]) -> Op {
    Op {
        name,
        overload: ptr::null(),
        args: args.as_ptr(),
        outs: outs.as_ptr(),
        nargs: args.len() as u32,
        nouts: outs.len() as u32,
        flags: 0,
    }
}

/// What is wrong with an op on these arguments.
fn problem(args: &[Arg]) -> String {
    // SAFETY: every pointer is null or live.
    unsafe { events::op_problem(&op(c"mine::op".as_ptr(), args, &[])) }.unwrap_or_default()
}

#[test]
fn each_kind_of_argument_is_read_as_what_it_is() {
    let (one, two) = ([tensor(1)], [tensor(1), absent()]);
    let (ints, inner) = ([4, 5], [number(tag::INT, 7)]);
    let nested = [number(tag::INT, 1), list(tag::WRAPPED, &inner)];
    let (word, long) = (c"sum", CString::new("w".repeat(100)).expect("text"));
    let given = [
        (number(tag::NONE, 0), "None"),
        (
            tensors(tag::TENSOR, &one),
            "Tensor(TensorEvent { storage: 1, ",
        ),
        (
            tensors(tag::TENSORS, &two),
            "Tensors([TensorEvent { storage: 1, ",
        ),
        (tensors(tag::TENSORS, &[]), "Tensors([])"),
        (
            arg(
                tag::TENSORS,
                0,
                Payload {
                    tensors: ptr::null(),
                },
            ),
            "Tensors([])",
        ),
        (number(tag::BOOL, 1), "Bool(true)"),
        (number(tag::INT, -3), "Int(-3)"),
        (arg(tag::FLOAT, 0, Payload { f: 0.5 }), "Float(0.5)"),
        (
            arg(tag::COMPLEX, 0, Payload { c: [1.0, -1.0] }),
            "Complex(1.0, -1.0)",
        ),
        (list(tag::WRAPPED, &inner), "Wrapped(Int(7))"),
        (
            arg(
                tag::INTS,
                2,
                Payload {
                    ints: ints.as_ptr(),
                },
            ),
            "Ints([4, 5])",
        ),
        (arg(tag::INTS, 0, Payload { ints: ptr::null() }), "Ints([])"),
        (list(tag::LIST, &nested), "List([Int(1), Wrapped(Int(7))])"),
        (text(tag::STR, word.as_ptr()), "Str(\"sum\")"),
        (text(tag::STR, ptr::null()), "Str(\"\")"),
        (number(tag::DTYPE, 6), "DType("),
        (
            number(tag::DEVICE, 1 << 8 | 0xff),
            "Device(Device { kind: 1, index: -1 })",
        ),
        (number(tag::LAYOUT, 2), "Layout(2)"),
        (number(tag::MEMORY_FORMAT, 1), "MemoryFormat(1)"),
        (text(tag::OTHER, long.as_ptr()), "Other(\"www"),
    ];
    let args = given.map(|(arg, _)| arg);
    assert_eq!(problem(&args), "");
    let described = op(c"mine::op".as_ptr(), &args, &args[1..3]);
    // SAFETY: every pointer is null or live.
    let event = unsafe { events::op(&described, "train.py:3") };
    assert_eq!((event.name, event.overload), ("mine::op", ""));
    assert_eq!((event.args.len(), event.outs.len()), (given.len(), 2));
    for (found, (_, expected)) in event.args.iter().zip(given) {
        let found = format!("{:?}", found.value);
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let null = Payload { list: ptr::null() };
    for tag in [tag::TENSOR, tag::WRAPPED] {
        assert_eq!(
            problem(&[arg(tag, 0, null)]),
            "mine::op: argument 0 is null"
        );
    }
    for tag in [tag::TENSORS, tag::INTS, tag::LIST] {
        assert_eq!(
            problem(&[arg(tag, 1, null)]),
            "mine::op: argument 0 is null"
        );
    }
    assert_eq!(
        problem(&[text(tag::STR, c"\xff".as_ptr())]),
        "mine::op: argument 0 is text that is not UTF-8"
    );
    for wrong in [
        number(tag::DTYPE, 128),
        number(tag::DEVICE, -1),
        number(99, 0),
    ] {
        assert!(problem(&[wrong]).starts_with("mine::op: argument 0 "));
    }
    let short = [Tensor {
        storage_bytes: 23,
        ..tensor(1)
    }];
    assert_eq!(
        problem(&[tensors(tag::TENSOR, &short)]),
        "mine::op: argument 0 reaches bytes 0 to 24 of a storage of 23 bytes"
    );
    let bare = [Tensor {
        sizes: ptr::null(),
        ..tensor(1)
    }];
    assert_eq!(
        problem(&[tensors(tag::TENSORS, &bare)]),
        "mine::op: argument 0 has no sizes or no strides"
    );
    let mut levels = vec![vec![number(tag::INT, 1)]];
    for level in 0..=MAX_ARG_DEPTH as usize {
        levels.push(vec![list(tag::LIST, &levels[level])]);
        let deep = problem(&levels[level + 1]);
        assert_eq!(deep.is_empty(), level < MAX_ARG_DEPTH as usize, "{deep}");
    }
    // SAFETY: every pointer is null or live.
    let said = |op: Op| unsafe { events::op_problem(&op) }.unwrap_or_default();
    for name in [ptr::null(), c"".as_ptr()] {
        assert_eq!(said(op(name, &[], &[])), "the op has no name");
    }
    let mut listless = op(c"mine::op".as_ptr(), &[], &[]);
    (listless.outs, listless.nouts) = (ptr::null(), 1);
    assert_eq!(said(listless), "mine::op: the list of results is null");
}
