//! PyTorch's own kernels and process groups.
//!
//! | module | subject |
//! |---|---|
//! | [`op`] | ops as they run, in C structs |
//! | [`sys`] | the C ABI of the bridge (`ffi/torch/`) |
//! | [`bridge`] | the loaded bridge, and safe owners of what it makes |
//! | [`bind`] | a plan file's instructions, handed to the bridge |
//! | [`ranges`] | what a profiler shows of a replay |
//! | [`eager`] | single calls on host data |
//! | [`fact`] | the kinds of facts |
//! | [`ranks`] | bytes from each rank of a process group to all |

mod args;
pub mod bind;
pub mod bridge;
pub mod eager;
pub mod fact;
pub mod op;
pub mod ranges;
pub mod ranks;
#[allow(missing_docs)]
pub mod sys;

pub use bind::{BoundPlan, Left};
pub use bridge::{
    AtenProgram, Bound, Bridge, Call, CallFacts, FactTable, Object, Recording, Written, place,
};
pub use fact::FactKind;
pub use ranks::Group;
