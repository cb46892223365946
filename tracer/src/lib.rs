//! Tracing: ops as they run in, a plan out.
//!
//! | module | subject |
//! |---|---|
//! | [`event`] | what a framework tells the recorder |
//! | [`recorder`] | the recorder, and what it refuses |
//! | [`refusal`] | a reason not to record, with its remedy |
//! | [`compare`] | what differs between two recordings of one step |
//! | [`scalars`] | floats computed from hyperparameters |
//! | [`tables`] | building a plan's pools |
//! | [`finish`] | last uses and frees |
//! | [`opinion`] | what the cheapest strategies would have moved, beside what was moved |
//! | [`passes`] | what makes a plan faster to replay |
//! | [`propagation`] | sharding propagation: placements, collectives, cost |
//! | [`samples`] | a few calls of every op that has a rule |

pub mod compare;
pub mod event;
pub mod finish;
pub mod opinion;
pub mod passes;
pub mod propagation;
mod raising;
pub mod recorder;
mod refusal;
pub mod samples;
pub mod scalars;
pub mod tables;
pub mod validation;

pub use event::{ArgEvent, Argument, OpEvent, SpecEvent, TensorEvent};
pub use recorder::Recorder;
pub use refusal::Refusal;

#[cfg(test)]
mod sample;
