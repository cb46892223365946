//! From the C structs of ops to what the recorder takes.

use std::ffi::{CStr, c_char};

use rote_plans::check::MAX_ARG_DEPTH;
use rote_plans::{DType, Device, Marks};
use rote_tracer::{ArgEvent, Argument, OpEvent, TensorEvent};

use crate::op::{self as sys, tag};

/// How many dims a tensor has at most, as in PyTorch.
pub const MAX_DIMS: usize = 64;

/// Borrowed text of the bridge.
///
/// # Safety
/// `text` must be null or a C string that lives as long as the result is used.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("?")
}

/// # Safety
/// `start` must point at `len` entries, or `len` must be 0.
unsafe fn slice<'a, T>(start: *const T, len: usize) -> &'a [T] {
    if len == 0 || start.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for the array.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Why a described op cannot be read, if so: it comes from a program that may
/// be wrong, not from the bridge.
///
/// # Safety
/// Pointers of the description must be null or live, lists as long as they say.
pub unsafe fn op_problem(op: &sys::Op) -> Option<String> {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        if op.name.is_null() || CStr::from_ptr(op.name).is_empty() {
            return Some("the op has no name".to_owned());
        }
        if !is_text(op.name) || !is_text(op.overload) {
            return Some("the op's name is not UTF-8".to_owned());
        }
        for (what, list, len) in [
            ("argument", op.args, op.nargs),
            ("result", op.outs, op.nouts),
        ] {
            if list.is_null() && len > 0 {
                return Some(format!("{}: the list of {what}s is null", text(op.name)));
            }
            for (i, arg) in slice(list, len as usize).iter().enumerate() {
                if let Some(problem) = arg_problem(arg, 0) {
                    return Some(format!("{}: {what} {i} {problem}", text(op.name)));
                }
            }
        }
    }
    None
}

/// # Safety
/// As [`op_problem`].
unsafe fn arg_problem(arg: &sys::Arg, depth: u32) -> Option<String> {
    let payload = &arg.payload;
    // SAFETY: the tag says which member of the union is set, and the caller
    // vouches for the pointers in it.
    unsafe {
        let null = match arg.tag {
            tag::TENSOR => payload.tensors.is_null(),
            tag::TENSORS => arg.len > 0 && payload.tensors.is_null(),
            tag::INTS => arg.len > 0 && payload.ints.is_null(),
            tag::WRAPPED => payload.list.is_null(),
            tag::LIST => arg.len > 0 && payload.list.is_null(),
            _ => false,
        };
        if null {
            return Some("is null".to_owned());
        }
        match arg.tag {
            tag::TENSOR => tensor_problem(&*payload.tensors),
            tag::TENSORS => slice(payload.tensors, arg.len as usize)
                .iter()
                .find_map(|tensor| tensor_problem(tensor)),
            tag::WRAPPED | tag::LIST if depth == MAX_ARG_DEPTH => {
                Some(format!("nests more than {MAX_ARG_DEPTH} deep"))
            }
            tag::WRAPPED => arg_problem(&*payload.list, depth + 1),
            tag::LIST => slice(payload.list, arg.len as usize)
                .iter()
                .find_map(|inner| arg_problem(inner, depth + 1)),
            tag::STR | tag::OTHER => {
                (!is_text(payload.s)).then(|| "is text that is not UTF-8".to_owned())
            }
            tag::DTYPE | tag::LAYOUT | tag::MEMORY_FORMAT => (!(0..128).contains(&payload.i))
                .then(|| format!("is {}, which is not a number of this kind", payload.i)),
            tag::DEVICE => (!(0..1 << 16).contains(&payload.i))
                .then(|| format!("is {}, which is not a device", payload.i)),
            tag::NONE | tag::BOOL | tag::INT | tag::FLOAT | tag::COMPLEX | tag::INTS => None,
            tag => Some(format!("has the tag {tag}, which does not exist")),
        }
    }
}

/// Why a described tensor cannot be read, if so.
///
/// # Safety
/// As [`op_problem`].
pub unsafe fn tensor_problem(tensor: &sys::Tensor) -> Option<String> {
    if tensor.ndim as usize > MAX_DIMS {
        return Some(format!(
            "has {} dims, expected 0 to {MAX_DIMS}",
            tensor.ndim
        ));
    }
    let strided = tensor.storage != 0 && tensor.flags & sys::NO_STORAGE == 0;
    if strided && tensor.ndim > 0 && (tensor.sizes.is_null() || tensor.strides.is_null()) {
        return Some("has no sizes or no strides".to_owned());
    }
    // SAFETY: the caller vouches for the pointers.
    unsafe { self::tensor(tensor) }.problem()
}

/// # Safety
/// As [`text`].
unsafe fn is_text(text: *const c_char) -> bool {
    // SAFETY: the caller vouches for the string.
    text.is_null() || unsafe { CStr::from_ptr(text) }.to_str().is_ok()
}

/// What flags say of a tensor's marks.
fn marks(flags: u8) -> Marks {
    let table = [
        (sys::CONJ, Marks::CONJ),
        (sys::NEG, Marks::NEG),
        (sys::ZERO_TENSOR, Marks::ZERO),
        (sys::WRAPPED_NUMBER, Marks::WRAPPED),
    ];
    let set = table.iter().filter(|(flag, _)| flags & flag != 0);
    Marks(set.fold(0, |all, (_, mark)| all | mark.0))
}

/// A device. The CPU is one, whatever index it is given.
fn device(kind: u8, index: i8) -> Device {
    let index = if kind == Device::CPU { -1 } else { index };
    Device { kind, index }
}

/// A tensor that the bridge described.
///
/// # Safety
/// The description's pointers must be live, as they are until the bridge's
/// next call.
pub unsafe fn tensor<'a>(tensor: &sys::Tensor) -> TensorEvent<'a> {
    let ndim = tensor.ndim as usize;
    TensorEvent {
        storage: tensor.storage,
        dtype: DType(tensor.dtype),
        device: device(tensor.device_kind, tensor.device_index),
        // SAFETY: the caller vouches for the pointers.
        sizes: unsafe { slice(tensor.sizes, ndim) },
        // SAFETY: as above; null for tensors without strides.
        strides: unsafe { slice(tensor.strides, ndim) },
        offset: tensor.offset,
        storage_bytes: tensor.storage_bytes,
        marks: marks(tensor.flags),
        opaque: tensor.flags & sys::NO_STORAGE != 0,
    }
}

/// # Safety
/// As [`tensor`].
unsafe fn arg<'a>(arg: &sys::Arg) -> ArgEvent<'a> {
    let len = arg.len as usize;
    let payload = &arg.payload;
    // SAFETY: the tag says which member of the union is set, and the caller
    // vouches for the pointers in it.
    unsafe {
        match arg.tag {
            tag::TENSOR => ArgEvent::Tensor(tensor(&*payload.tensors)),
            tag::TENSORS => ArgEvent::Tensors(
                slice(payload.tensors, len)
                    .iter()
                    .map(|t| tensor(t))
                    .collect(),
            ),
            tag::BOOL => ArgEvent::Bool(payload.i != 0),
            tag::INT => ArgEvent::Int(payload.i),
            tag::FLOAT => ArgEvent::Float(payload.f),
            tag::COMPLEX => ArgEvent::Complex(payload.c[0], payload.c[1]),
            tag::WRAPPED => ArgEvent::Wrapped(Box::new(self::arg(&*payload.list))),
            tag::INTS => ArgEvent::Ints(slice(payload.ints, len)),
            tag::LIST => ArgEvent::List(
                slice(payload.list, len)
                    .iter()
                    .map(|a| self::arg(a))
                    .collect(),
            ),
            tag::STR => ArgEvent::Str(text(payload.s)),
            tag::DTYPE => ArgEvent::DType(DType(payload.i as u8)),
            tag::DEVICE => ArgEvent::Device(Device {
                kind: (payload.i >> 8) as u8,
                index: payload.i as u8 as i8,
            }),
            tag::LAYOUT => ArgEvent::Layout(payload.i as i8),
            tag::MEMORY_FORMAT => ArgEvent::MemoryFormat(payload.i as i8),
            tag::OTHER => ArgEvent::Other(text(payload.s)),
            _ => ArgEvent::None,
        }
    }
}

/// An op that the bridge, or a framework through the C ABI, described.
///
/// # Safety
/// As [`tensor`].
pub unsafe fn op<'a>(op: &sys::Op, source: &'a str) -> OpEvent<'a> {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        OpEvent {
            name: text(op.name),
            overload: text(op.overload),
            args: slice(op.args, op.nargs as usize)
                .iter()
                .map(|a| Argument {
                    value: arg(a),
                    written: a.written != 0,
                })
                .collect(),
            outs: slice(op.outs, op.nouts as usize)
                .iter()
                .map(|a| arg(a))
                .collect(),
            seeded: op.flags & sys::SEEDED != 0,
            data_dependent: op.flags & sys::DATA_DEPENDENT != 0,
            inplace_view: op.flags & sys::INPLACE_VIEW != 0,
            hidden: op.flags & sys::HIDDEN != 0,
            internal: op.flags & sys::INTERNAL != 0,
            grad: op.flags & sys::GRAD != 0,
            source,
        }
    }
}
