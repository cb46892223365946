//! From an op's arguments in a plan to the C structs with which it is bound.

use std::ffi::{CString, c_char};
use std::ptr;

use rote_plans::{Arg, NONE, Plan};

use rote_replay::ReplayError;

use crate::op::{self as sys, Payload, tag};

/// Owns what argument structs point at.
#[derive(Default)]
pub struct Arguments {
    lists: Vec<Box<[sys::Arg]>>,
    ints: Vec<Box<[i64]>>,
    text: Vec<CString>,
}

/// Keeps a list, and points at it: a pointer from before a box moves may not be used.
pub fn keep<T>(kept: &mut Vec<Box<[T]>>, list: Box<[T]>) -> *const T {
    kept.push(list);
    kept.last().map_or(ptr::null(), |list| list.as_ptr())
}

/// Keeps a text, and points at it.
pub fn keep_text(kept: &mut Vec<CString>, text: CString) -> *const c_char {
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

    /// One argument, pointing into `self`. `tensor` numbers the value of each tensor, with -1 for an absent one.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Bind`] for text with a zero byte.
    pub fn arg(
        &mut self,
        plan: &Plan,
        arg: Arg,
        tensor: &mut dyn FnMut(Option<u32>) -> i64,
    ) -> Result<sys::Arg, ReplayError> {
        Ok(match arg {
            Arg::None => integer(tag::NONE, 0),
            Arg::Value(value) => integer(tag::VALUE, tensor(Some(value))),
            Arg::Values(range) => {
                let ids = plan.ids(range).iter();
                let numbers = ids.map(|&id| tensor((id != NONE).then_some(id)));
                self.ints(tag::VALUES, numbers.collect())
            }
            Arg::Bool(value) => integer(tag::BOOL, i64::from(value)),
            Arg::Int(value) => integer(tag::INT, value),
            Arg::Float(f) => simple(tag::FLOAT, Payload { f }),
            Arg::Complex(re, im) => simple(tag::COMPLEX, Payload { c: [re, im] }),
            Arg::Scalar(_) => simple(tag::FLOAT, Payload { f: 0.0 }),
            Arg::Wrapped(inner) => {
                let inner = self.arg(plan, plan.args[inner as usize], tensor)?;
                self.list(tag::WRAPPED, Box::new([inner]))
            }
            Arg::Ints(range) => self.ints(tag::INTS, plan.dims(range).into()),
            Arg::List(range) => {
                let mut list = Vec::with_capacity(range.indices().len());
                for &inner in &plan.args[range.indices()] {
                    list.push(self.arg(plan, inner, tensor)?);
                }
                self.list(tag::LIST, list.into())
            }
            Arg::Str(text) => {
                let text = c_string(plan.str(text))?;
                let s = keep_text(&mut self.text, text);
                simple(tag::STR, Payload { s })
            }
            Arg::DType(dtype) => integer(tag::DTYPE, i64::from(dtype.0)),
            Arg::Device(device) => integer(
                tag::DEVICE,
                i64::from(device.kind) << 8 | i64::from(device.index as u8),
            ),
            Arg::Layout(layout) => integer(tag::LAYOUT, i64::from(layout)),
            Arg::MemoryFormat(format) => integer(tag::MEMORY_FORMAT, i64::from(format)),
        })
    }
}

fn bind_error(message: impl Into<String>) -> ReplayError {
    ReplayError::Bind(message.into())
}

/// Text for C.
///
/// # Errors
///
/// [`ReplayError::Bind`] for text with a zero byte.
pub fn c_string(text: &str) -> Result<CString, ReplayError> {
    CString::new(text).map_err(|_| bind_error(format!("text {text:?} holds a zero byte")))
}
