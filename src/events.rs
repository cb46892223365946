//! From the bridge's structs to what the recorder takes.

use std::ffi::{CStr, c_char};

use rote_plans::{DType, Device};
use rote_replay::aten::sys::{self, tag};
use rote_tracer::{ArgEvent, Argument, OpEvent, TensorEvent};

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
        device: Device {
            kind: tensor.device_kind,
            index: tensor.device_index,
        },
        // SAFETY: the caller vouches for the pointers.
        sizes: unsafe { slice(tensor.sizes, ndim) },
        // SAFETY: as above; null for tensors without strides.
        strides: unsafe { slice(tensor.strides, ndim) },
        offset: tensor.offset,
        storage_bytes: tensor.storage_bytes,
        lazy_bits: tensor.flags & (sys::CONJ | sys::NEG),
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
            source,
        }
    }
}
