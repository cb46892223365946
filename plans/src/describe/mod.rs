//! Plans for people: a plan as text and as JSON.
//!
//! Everything here takes a plan that has been opened by [`crate::PlanFile`],
//! so its tables agree with each other. Text from the plan is printed with its
//! control characters escaped.
//!
//! | function | subject |
//! |---|---|
//! | [`summary`] | the summary that `rote show` prints: bindings, collectives, memory, guards |
//! | [`ops`] | the instructions, one line each |
//! | [`strategies`] | the global ops, their placements and redistributions |
//! | `json` | all of it, for programs |
//! | [`collectives`], [`memory`], [`instructions`] | the figures behind them |

mod figures;
mod json;
mod notation;
mod sections;

pub use figures::{
    CollectiveTotal, Instructions, Memory, collectives, exchange, instructions, memory,
    tensor_bytes,
};
pub use json::json;
pub use notation::{
    Bytes, Specs, arg, collective_kind, instr, placement, placements, scalar, spec, tensor, text,
};
pub(crate) use notation::{binding_kind, binding_marks, guard_kind};
pub use sections::{ops, strategies, summary};
