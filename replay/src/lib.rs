//! Replay: bind a plan, check its guards, run it.
//!
//! | module | subject |
//! |---|---|
//! | [`guard`] | facts as flat arrays, and their first difference |
//! | [`backend`] | what a framework brings: kernels, tensors, collectives |
//! | [`bind`] | a plan, bound to a framework: steps that run once, values that are kept, results |
//! | [`executor`] | the loop over a bound plan |
//! | [`ranges`] | the ranges that a profiler shows of a replay |
//! | [`frontend`] | what a session asks of a framework |
//! | [`agreement`] | ranks agree before they replay altered collectives |
//!
//! Nothing here decides a strategy.

#![forbid(unsafe_code)]

pub mod agreement;
pub mod backend;
pub mod bind;
pub mod executor;
pub mod frontend;
pub mod guard;
pub mod ranges;

pub use backend::{Backend, Communicator, LocalOp, NumberSite, Program};
pub use bind::{BoundPlan, Left};
pub use executor::{Executor, ReplayError, Step};
pub use frontend::{CallFacts, Counted, Frontend, Part, TensorOf, WordSubject};
pub use guard::first_difference;
