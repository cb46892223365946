//! Tracing: makes a plan of the ops of a step, as they run.
//!
//! | module | subject |
//! |---|---|
//! | [`event`] | what a framework tells the recorder |
//! | [`recorder`] | the recorder, and what it refuses |
//! | `refusal` | a reason not to record, with its remedy |
//! | [`compare`] | what differs between two recordings of one step |
//! | [`scalars`] | floats computed from hyperparameters and from numbers in tensors |
//! | [`contents`] | what tensors of one element hold, as such floats |
//! | [`tables`] | building a plan's pools |
//! | `sample` | tensors, ops and recordings for tests, with the feature `sample` |

#![forbid(unsafe_code)]

pub mod compare;
pub mod contents;
pub mod event;
pub mod recorder;
mod refusal;
#[cfg(any(test, feature = "sample"))]
pub mod sample;
pub mod scalars;
pub mod tables;

pub use event::{ArgEvent, Argument, OpEvent, SpecEvent, TensorEvent};
pub use recorder::Recorder;
pub use refusal::Refusal;
