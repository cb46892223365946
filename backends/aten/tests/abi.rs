//! `ffi/torch/abi.h` says what `rote_aten` says: a C++ compiler checks
//! sizes, offsets and numbers that Rust has written down as assertions.

use std::fmt::Write;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::{Command, Stdio};

use rote_aten::fact::FactKind;
use rote_aten::sys::{self, Sink};
use rote_events::op::{self, Arg, Op, Tensor, tag};
use rote_replay::{Bound, Place, WordPlace as Fact};

/// Assertions over a struct: its size, and where its fields lie. Of a field that is a union in
/// C++, the name of its first member stands for it.
macro_rules! layout {
    ($text:ident, $kind:ident { $($field:ident $(as $other:ident)?),* $(,)? }) => {
        expect(&mut $text, concat!("sizeof(rote::", stringify!($kind), ")"), size_of::<$kind>());
        $(expect(
            &mut $text,
            concat!("offsetof(rote::", stringify!($kind), ", ", layout!(@name $field $($other)?), ")"),
            offset_of!($kind, $field),
        );)*
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $other:ident) => { stringify!($other) };
}

fn expect(text: &mut String, what: &str, value: usize) {
    writeln!(text, "static_assert({what} == {value}, \"{what}\");").expect("text");
}

/// `dict_item` as `kDictItem`.
fn constant(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let (first, rest) = word.split_at(1);
        first.to_uppercase() + rest
    });
    format!("k{}", words.collect::<String>())
}

#[test]
fn the_header_says_what_rust_says() {
    let mut text = "#include \"abi.h\"\n#include <cstddef>\n".to_owned();
    layout!(
        text,
        Tensor {
            storage,
            sizes,
            strides,
            offset,
            storage_bytes,
            ndim,
            dtype,
            device_kind,
            device_index,
            flags,
        }
    );
    layout!(text, Arg { tag, written, len, payload as i });
    layout!(
        text,
        Op {
            name,
            overload,
            args,
            outs,
            nargs,
            nouts,
            flags
        }
    );
    layout!(text, Place { start, bytes, base });
    layout!(text, Fact { leaf, field });
    layout!(
        text,
        Sink {
            session,
            observed,
            global_begin,
            global_end
        }
    );
    let numbers = [
        ("kAbiVersion", sys::ABI_VERSION as usize),
        ("kNone", tag::NONE.into()),
        ("kTensor", tag::TENSOR.into()),
        ("kTensors", tag::TENSORS.into()),
        ("kBool", tag::BOOL.into()),
        ("kInt", tag::INT.into()),
        ("kFloat", tag::FLOAT.into()),
        ("kComplex", tag::COMPLEX.into()),
        ("kWrapped", tag::WRAPPED.into()),
        ("kInts", tag::INTS.into()),
        ("kList", tag::LIST.into()),
        ("kStr", tag::STR.into()),
        ("kDType", tag::DTYPE.into()),
        ("kDevice", tag::DEVICE.into()),
        ("kLayout", tag::LAYOUT.into()),
        ("kMemoryFormat", tag::MEMORY_FORMAT.into()),
        ("kOther", tag::OTHER.into()),
        ("kValue", tag::VALUE.into()),
        ("kValues", tag::VALUES.into()),
        ("kConj", op::CONJ.into()),
        ("kNeg", op::NEG.into()),
        ("kNoStorage", op::NO_STORAGE.into()),
        ("kZeroTensor", op::ZERO_TENSOR.into()),
        ("kWrappedNumber", op::WRAPPED_NUMBER.into()),
        ("kSeeded", op::SEEDED as usize),
        ("kDataDependent", op::DATA_DEPENDENT as usize),
        ("kInplaceView", op::INPLACE_VIEW as usize),
        ("kHidden", op::HIDDEN as usize),
        ("kGrad", op::GRAD as usize),
        ("kBindTensor", Bound::Tensor as usize),
        ("kBindGrad", Bound::Grad as usize),
        ("kBindMemory", Bound::Memory as usize),
        ("kFactKinds", FactKind::ALL.len()),
    ];
    for (name, value) in numbers {
        expect(&mut text, &format!("rote::{name}"), value);
    }
    for (number, kind) in FactKind::ALL.iter().enumerate() {
        assert_eq!(*kind as usize, number);
        expect(
            &mut text,
            &format!("rote::{}", constant(kind.name())),
            number,
        );
    }

    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ffi/torch");
    let mut child = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            "-x",
            "c++",
            "-I",
        ])
        .arg(header)
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    let mut input = child.stdin.take().expect("piped");
    input
        .write_all(text.as_bytes())
        .expect("the compiler reads");
    drop(input);
    let output = child.wait_with_output().expect("the compiler ends");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
