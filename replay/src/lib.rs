//! Replay: bind a plan, check its guards, run it.
//!
//! | module | subject |
//! |---|---|
//! | [`guard`] | facts as flat arrays, and what differs |
//! | [`backend`] | what a framework brings: kernels, tensors, collectives |
//! | [`bind`] | a plan, bound to a framework: what runs once, what lasts, what is handed out |
//! | [`executor`] | the loop over a bound plan |
//! | [`ranges`] | what a profiler shows of a replay |
//! | [`aten`] | PyTorch's kernels and process groups, through the bridge |
//!
//! Nothing here decides a strategy.

pub mod aten;
pub mod backend;
pub mod bind;
pub mod executor;
pub mod guard;
pub mod ranges;

pub use backend::{Backend, Communicator, LocalOp, NumberSite, Program};
pub use bind::{BoundPlan, Left};
pub use executor::{Executor, ReplayError, Step};
pub use guard::first_difference;
