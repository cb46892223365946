//! PyTorch's kernels for the truth table of sharding rules: single calls of ops on host tensors.

use std::ffi::CString;

use rote_events::args::{keep, keep_text};
use rote_plans::DType;
use rote_propagation::TensorMeta;
use rote_replay::ReplayError;
use rote_validation::{HostTensor, Kernels, Ran, Value};

use crate::bridge::Bridge;
use crate::sys::{self, Payload, tag};

/// PyTorch's kernels on the CPU, through the bridge, which must be loaded.
#[derive(Debug)]
pub struct Aten;

impl Kernels for Aten {
    fn run(&mut self, op: &str, args: &[Value<'_>]) -> Result<Ran, String> {
        let held = Packed::all(args)?;
        let (name, overload) = op.split_once('.').unwrap_or((op, ""));
        let overload = if overload == "default" { "" } else { overload };
        call(name, overload, args, &held)
    }
}

/// A tensor as the bridge takes it: dense, elements in order.
struct Packed {
    dtype: u8,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

impl Packed {
    /// The tensors of some arguments, in their order.
    fn all(args: &[Value<'_>]) -> Result<Vec<Self>, String> {
        let mut all = Vec::new();
        for arg in args {
            match arg {
                Value::Tensor(tensor) => all.push(Packed::new(tensor)?),
                Value::Tensors(list) => {
                    for tensor in list.iter().flatten() {
                        all.push(Packed::new(tensor)?);
                    }
                }
                _ => {}
            }
        }
        Ok(all)
    }

    fn new(tensor: &HostTensor) -> Result<Self, String> {
        let sizes = tensor.meta.shape.iter();
        Ok(Packed {
            dtype: tensor.meta.dtype.0,
            shape: sizes
                .map(|s| i64::try_from(*s).unwrap_or(i64::MAX))
                .collect(),
            bytes: tensor
                .to_bytes()
                .ok_or_else(|| no_arithmetic(&tensor.meta))?,
        })
    }
}

fn no_arithmetic(meta: &TensorMeta) -> String {
    format!("no arithmetic for {meta}")
}

fn first_line(error: &ReplayError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Calls an op by name and overload. `held`: the tensors of the arguments, in
/// their order.
fn call(op: &str, overload: &str, args: &[Value<'_>], held: &[Packed]) -> Result<Ran, String> {
    let text = |text: &str| {
        let error = |_| ReplayError::Bridge(format!("{text:?} holds a zero byte"));
        CString::new(text).map_err(|problem| first_line(&error(problem)))
    };
    let (name, overload) = (text(op)?, text(overload)?);
    let mut held = held.iter();
    let mut texts: Vec<CString> = Vec::new();
    let mut tensors: Vec<Box<[sys::Tensor]>> = Vec::new();
    let mut lists: Vec<Box<[sys::Arg]>> = Vec::new();
    let mut given = Vec::with_capacity(args.len());
    for arg in args {
        let number = |tag, i: i64| simple(tag, 0, Payload { i });
        given.push(match arg {
            Value::None => number(tag::NONE, 0),
            Value::Bool(value) => number(tag::BOOL, i64::from(*value)),
            Value::Int(value) => number(tag::INT, *value),
            Value::DType(value) => number(tag::DTYPE, i64::from(value.0)),
            Value::Float(f) => simple(tag::FLOAT, 0, Payload { f: *f }),
            Value::Ints(ints) => {
                let payload = Payload {
                    ints: ints.as_ptr(),
                };
                simple(tag::INTS, ints.len(), payload)
            }
            Value::Floats(floats) => {
                let entries = floats
                    .iter()
                    .map(|f| simple(tag::FLOAT, 0, Payload { f: *f }));
                let list: Box<[sys::Arg]> = entries.collect();
                let payload = Payload {
                    list: keep(&mut lists, list),
                };
                simple(tag::LIST, floats.len(), payload)
            }
            Value::Text(word) => {
                let word = text(word)?;
                let payload = Payload {
                    s: keep_text(&mut texts, word),
                };
                simple(tag::STR, 0, payload)
            }
            Value::Tensor(_) => {
                let one: Box<[sys::Tensor]> = Box::new([described(held.next())]);
                let payload = Payload {
                    tensors: keep(&mut tensors, one),
                };
                simple(tag::TENSOR, 1, payload)
            }
            Value::Tensors(list) => {
                let entries = list.iter().map(|t| t.and_then(|_| held.next()));
                let list: Box<[sys::Tensor]> = entries.map(described).collect();
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
    // SAFETY: every pointer above points into `args`, into `held` or into what is kept
    // beside them, all of which outlives the call; the bridge writes the last three.
    let called = bridge.check(unsafe {
        (bridge.functions().call_op)(
            name.as_ptr(),
            overload.as_ptr(),
            given.as_ptr(),
            given.len() as u32,
            &mut out,
            &mut count,
            &mut flags,
        )
    });
    called.map_err(|error| first_line(&error))?;
    let outputs = (0..count as usize).map(|i| {
        // SAFETY: the bridge made `count` entries, which live until its next call.
        let tensor = unsafe { &*out.add(i) };
        (tensor.storage != 0).then(|| copied(tensor)).transpose()
    });
    Ok(Ran {
        outputs: outputs.collect::<Result<_, _>>()?,
        random: flags & sys::SEEDED != 0,
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

fn described(data: Option<&Packed>) -> sys::Tensor {
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

fn copied(tensor: &sys::Tensor) -> Result<HostTensor, String> {
    let bytes = tensor.storage_bytes as usize;
    // SAFETY: the bridge describes dense tensors that it holds: `ndim` sizes, and
    // `storage_bytes` bytes at `storage`; torch may have no sizes to point at.
    let (shape, bytes) = unsafe {
        let shape: &[i64] = match tensor.ndim {
            0 => &[],
            n => std::slice::from_raw_parts(tensor.sizes, n as usize),
        };
        let bytes = std::slice::from_raw_parts(tensor.storage as *const u8, bytes);
        (shape, bytes)
    };
    let meta = TensorMeta {
        dtype: DType(tensor.dtype),
        shape: shape.iter().map(|s| s.unsigned_abs()).collect(),
    };
    HostTensor::from_bytes(meta.clone(), bytes).ok_or_else(|| no_arithmetic(&meta))
}
