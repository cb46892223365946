//! PyTorch's own kernels and process groups.
//!
//! | module | subject |
//! |---|---|
//! | [`op`] | ops as they run, in C structs |
//! | [`sys`] | the C ABI of the bridge (`ffi/torch/`) |
//! | `args` | an op's arguments as the bridge takes them |
//! | [`bridge`] | the loaded bridge, and safe owners of what it makes |
//! | [`program`] | a bound plan's ops and slots on the bridge's side |
//! | [`eager`] | single calls on host data |
//! | [`fact`] | the kinds of facts |
//! | [`ranks`] | bytes from each rank of a process group to all |

mod args;
pub mod bridge;
pub mod eager;
pub mod fact;
pub mod op;
pub mod program;
pub mod ranks;
#[allow(missing_docs)]
pub mod sys;

pub use bridge::{Bridge, Call, CallFacts, FactTable, Object, Recording, Written, place};
pub use fact::FactKind;
pub use program::{AtenProgram, Bound};
pub use ranks::Group;

/// A plan, bound to PyTorch.
pub type BoundPlan = crate::BoundPlan<AtenProgram>;
/// What a run that failed leaves in the `.grad` of a tensor.
pub type Left = crate::Left<Object>;
