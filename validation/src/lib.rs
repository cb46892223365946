//! The truth table: decides which placement combinations of an op are correct, by
//! running its local ops on the pieces, and compares the rules with it.
//!
//! | module | subject |
//! |---|---|
//! | [`host`] | tensors in host memory |
//! | [`kernels`] | the trait of kernels that run the ops |
//! | `draw` | random whole tensors |
//! | `pieces` | from whole tensors to the pieces of ranks, and back |
//! | `registered` | tensors that lie in registered partials |
//! | `names` | facts about ops, by name |
//! | `run` | an op on whole tensors |
//! | `judge` | one sample of an op: claims and truth |
//! | [`table`] | the truth tables of ops |
//! | `left_out` | rules that are true and left out, with reasons |
//! | [`report`] | the findings |
//! | [`samples`] | a few calls of every op that has a rule |

#![forbid(unsafe_code)]

mod draw;
pub mod host;
#[cfg(test)]
mod hostile_tests;
mod judge;
pub mod kernels;
mod left_out;
mod names;
mod pieces;
mod registered;
pub mod report;
mod run;
pub mod samples;
pub mod table;

pub use host::{HostTensor, Numbers};
pub use kernels::{Kernels, Ran, Value};
pub use report::{Finding, OpReport};
pub use table::{Event, Options, validate};
