//! An op's arguments as the bridge takes them.

use std::ffi::{CString, c_char};
use std::ptr;

use rote_plans::instr::ArchivedArg;
use rote_plans::{ArchivedPlan, NONE};

use rote_replay::ReplayError;

use crate::sys::{self, Payload, tag};

/// Owns what the bridge's argument structs point at.
#[derive(Default)]
pub(crate) struct Arguments {
    lists: Vec<Box<[sys::Arg]>>,
    ints: Vec<Box<[i64]>>,
    text: Vec<CString>,
}

/// Keeps a list, and points at it: a pointer from before a box moves may not be used.
pub(crate) fn keep<T>(kept: &mut Vec<Box<[T]>>, list: Box<[T]>) -> *const T {
    kept.push(list);
    kept.last().map_or(ptr::null(), |list| list.as_ptr())
}

/// Keeps a text, and points at it.
pub(crate) fn keep_text(kept: &mut Vec<CString>, text: CString) -> *const c_char {
    kept.push(text);
    kept.last().map_or(ptr::null(), |text| text.as_ptr())
}

fn simple(tag: u8, payload: Payload) -> sys::Arg {
    sys::Arg {
        tag,
        written: 0,
        len: 0,
        payload,
    }
}

fn integer(tag: u8, i: i64) -> sys::Arg {
    simple(tag, Payload { i })
}

impl Arguments {
    fn ints(&mut self, tag: u8, ints: Box<[i64]>) -> sys::Arg {
        sys::Arg {
            tag,
            written: 0,
            len: ints.len() as u32,
            payload: Payload {
                ints: keep(&mut self.ints, ints),
            },
        }
    }

    fn list(&mut self, tag: u8, list: Box<[sys::Arg]>) -> sys::Arg {
        sys::Arg {
            tag,
            written: 0,
            len: list.len() as u32,
            payload: Payload {
                list: keep(&mut self.lists, list),
            },
        }
    }

    /// One argument, pointing into `self`.
    pub(crate) fn arg(
        &mut self,
        plan: &ArchivedPlan,
        arg: &ArchivedArg,
    ) -> Result<sys::Arg, ReplayError> {
        Ok(match arg {
            ArchivedArg::None => integer(tag::NONE, 0),
            ArchivedArg::Value(value) => integer(tag::VALUE, i64::from(value.to_native())),
            ArchivedArg::Values(range) => self.ints(tag::VALUES, ids_of(plan, *range).into()),
            ArchivedArg::Bool(value) => integer(tag::BOOL, i64::from(*value)),
            ArchivedArg::Int(value) => integer(tag::INT, value.to_native()),
            ArchivedArg::Float(value) => simple(
                tag::FLOAT,
                Payload {
                    f: value.to_native(),
                },
            ),
            ArchivedArg::Complex(re, im) => simple(
                tag::COMPLEX,
                Payload {
                    c: [re.to_native(), im.to_native()],
                },
            ),
            ArchivedArg::Scalar(_) => simple(tag::FLOAT, Payload { f: 0.0 }),
            ArchivedArg::Wrapped(inner) => {
                let inner = self.arg(plan, &plan.args[inner.to_native() as usize])?;
                self.list(tag::WRAPPED, Box::new([inner]))
            }
            ArchivedArg::Ints(range) => self.ints(tag::INTS, ints_of(plan, *range)),
            ArchivedArg::List(range) => {
                let mut list = Vec::with_capacity(range.indices().len());
                for inner in &plan.args[range.indices()] {
                    list.push(self.arg(plan, inner)?);
                }
                self.list(tag::LIST, list.into())
            }
            ArchivedArg::Str(text) => {
                let text = c_string(plan.str(text.to_native()))?;
                let s = keep_text(&mut self.text, text);
                simple(tag::STR, Payload { s })
            }
            ArchivedArg::DType(dtype) => integer(tag::DTYPE, i64::from(dtype.0)),
            ArchivedArg::Device(device) => integer(
                tag::DEVICE,
                i64::from(device.kind) << 8 | i64::from(device.index as u8),
            ),
            ArchivedArg::Layout(layout) => integer(tag::LAYOUT, i64::from(*layout)),
            ArchivedArg::MemoryFormat(format) => integer(tag::MEMORY_FORMAT, i64::from(*format)),
        })
    }
}

pub(crate) fn bind_error(message: impl Into<String>) -> ReplayError {
    ReplayError::Bind(message.into())
}

pub(crate) fn c_string(text: &str) -> Result<CString, ReplayError> {
    CString::new(text).map_err(|_| bind_error(format!("text {text:?} holds a zero byte")))
}

/// A list of integers of a plan.
pub(crate) fn ints_of(plan: &ArchivedPlan, range: rote_plans::pool::ArchivedRange) -> Box<[i64]> {
    plan.dims[range.indices()]
        .iter()
        .map(|dim| dim.to_native())
        .collect()
}

/// A list of values of a plan, -1 where there is none.
pub(crate) fn ids_of(plan: &ArchivedPlan, range: rote_plans::pool::ArchivedRange) -> Vec<i64> {
    plan.ids[range.indices()]
        .iter()
        .map(|id| match id.to_native() {
            NONE => -1,
            id => i64::from(id),
        })
        .collect()
}
