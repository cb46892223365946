//! Single calls of PyTorch's ops on host data.

use std::ffi::CString;

use rote_replay::ReplayError;

use crate::bridge::Bridge;
use crate::sys::{self, Payload, tag};
use rote_events::args::{keep, keep_text};

/// A dense tensor in host memory, elements in order.
#[derive(Clone, Debug, PartialEq)]
pub struct HostData {
    /// Element type: PyTorch's `ScalarType` number.
    pub dtype: u8,
    /// Shape in elements.
    pub shape: Vec<i64>,
    /// The elements' bytes.
    pub bytes: Vec<u8>,
}

/// An argument of a call. Numbers become what the op's schema wants.
#[derive(Clone, Debug)]
pub enum CallArg<'a> {
    /// The schema's default.
    None,
    /// A tensor.
    Tensor(&'a HostData),
    /// Tensors, some of which may be absent.
    Tensors(Vec<Option<&'a HostData>>),
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// Integers, or truth values.
    Ints(&'a [i64]),
    /// Floats.
    Floats(&'a [f64]),
    /// A text.
    Text(&'a str),
    /// An element type.
    DType(u8),
}

/// What a call returned.
#[derive(Clone, Debug, PartialEq)]
pub struct CallResult {
    /// The results; numbers as tensors without dims, absent ones as `None`. The
    /// tensors that it wrote, when the op returns nothing.
    pub results: Vec<Option<HostData>>,
    /// Whether the op draws random numbers.
    pub seeded: bool,
}

/// Calls an op by name and overload.
///
/// # Errors
///
/// [`ReplayError::Bridge`] with what PyTorch has to say.
///
/// # Panics
///
/// When the bridge is not loaded.
pub fn call(op: &str, overload: &str, args: &[CallArg<'_>]) -> Result<CallResult, ReplayError> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| ReplayError::Bridge(format!("{text:?} holds a zero byte")))
    };
    let (name, overload) = (text(op)?, text(overload)?);
    let mut texts: Vec<CString> = Vec::new();
    let mut tensors: Vec<Box<[sys::Tensor]>> = Vec::new();
    let mut lists: Vec<Box<[sys::Arg]>> = Vec::new();
    let mut given = Vec::with_capacity(args.len());
    for arg in args {
        let number = |tag, i: i64| simple(tag, 0, Payload { i });
        given.push(match arg {
            CallArg::None => number(tag::NONE, 0),
            CallArg::Bool(value) => number(tag::BOOL, i64::from(*value)),
            CallArg::Int(value) => number(tag::INT, *value),
            CallArg::DType(value) => number(tag::DTYPE, i64::from(*value)),
            CallArg::Float(f) => simple(tag::FLOAT, 0, Payload { f: *f }),
            CallArg::Ints(ints) => {
                let payload = Payload {
                    ints: ints.as_ptr(),
                };
                simple(tag::INTS, ints.len(), payload)
            }
            CallArg::Floats(floats) => {
                let entries = floats
                    .iter()
                    .map(|f| simple(tag::FLOAT, 0, Payload { f: *f }));
                let list: Box<[sys::Arg]> = entries.collect();
                let payload = Payload {
                    list: keep(&mut lists, list),
                };
                simple(tag::LIST, floats.len(), payload)
            }
            CallArg::Text(word) => {
                let word = text(word)?;
                let payload = Payload {
                    s: keep_text(&mut texts, word),
                };
                simple(tag::STR, 0, payload)
            }
            CallArg::Tensor(data) => {
                let one: Box<[sys::Tensor]> = Box::new([described(Some(data))]);
                let payload = Payload {
                    tensors: keep(&mut tensors, one),
                };
                simple(tag::TENSOR, 1, payload)
            }
            CallArg::Tensors(list) => {
                let list: Box<[sys::Tensor]> = list.iter().map(|t| described(*t)).collect();
                let len = list.len();
                let payload = Payload {
                    tensors: keep(&mut tensors, list),
                };
                simple(tag::TENSORS, len, payload)
            }
        });
    }
    let bridge = Bridge::get();
    let (mut out, mut count, mut flags) = (std::ptr::null(), 0, 0);
    // SAFETY: every pointer above points into `args` or into what is kept beside
    // them, all of which outlives the call; the bridge writes the last three.
    bridge.check(unsafe {
        (bridge.functions().call_op)(
            name.as_ptr(),
            overload.as_ptr(),
            given.as_ptr(),
            given.len() as u32,
            &mut out,
            &mut count,
            &mut flags,
        )
    })?;
    let results = (0..count as usize).map(|i| {
        // SAFETY: the bridge made `count` entries, which live until its next call.
        let tensor = unsafe { &*out.add(i) };
        (tensor.storage != 0).then(|| copied(tensor))
    });
    Ok(CallResult {
        results: results.collect(),
        seeded: flags & sys::SEEDED != 0,
    })
}

fn simple(tag: u8, len: usize, payload: Payload) -> sys::Arg {
    sys::Arg {
        tag,
        written: 0,
        len: len as u32,
        payload,
    }
}

fn described(data: Option<&HostData>) -> sys::Tensor {
    let none: &[i64] = &[];
    let shape = data.map_or(none, |d| &d.shape);
    sys::Tensor {
        // A vector's pointer is not null, even without elements.
        storage: data.map_or(0, |d| d.bytes.as_ptr() as u64),
        sizes: shape.as_ptr(),
        strides: std::ptr::null(),
        offset: 0,
        storage_bytes: data.map_or(0, |d| d.bytes.len() as u64),
        ndim: shape.len() as u32,
        dtype: data.map_or(0, |d| d.dtype),
        device_kind: 0,
        device_index: -1,
        flags: 0,
    }
}

fn copied(tensor: &sys::Tensor) -> HostData {
    let bytes = tensor.storage_bytes as usize;
    // SAFETY: the bridge describes dense tensors that it holds: `ndim` sizes, and
    // `storage_bytes` bytes at `storage`; torch may have no sizes to point at.
    let (shape, bytes) = unsafe {
        let shape = match tensor.ndim {
            0 => &[],
            n => std::slice::from_raw_parts(tensor.sizes, n as usize),
        };
        (
            shape.to_vec(),
            std::slice::from_raw_parts(tensor.storage as *const u8, bytes).to_vec(),
        )
    };
    HostData {
        dtype: tensor.dtype,
        shape,
        bytes,
    }
}
