//! Replay: bind a plan, check its guards, run it.
//!
//! | module | subject |
//! |---|---|
//! | [`guard`] | facts as flat arrays, and what differs |
//! | [`executor`] | the loop over a bound plan, and the traits it runs on |
//! | [`aten`] | PyTorch's kernels and process groups, through the bridge |
//!
//! Nothing here decides a strategy.

pub mod aten;
pub mod executor;
pub mod guard;

pub use executor::{Backend, Communicator, Executor, ReplayError, Step};
pub use guard::first_difference;
