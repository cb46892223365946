//! The sharding system's decision for each global op. People and tools read these
//! decisions; replay never does.

use rkyv::{Archive, Deserialize, Serialize};

use crate::pool::{Range, StrId};

/// One global op: how its tensors were placed and which instructions it became.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Strategy {
    /// Op name with namespace and overload, for example `aten::sum.dim_IntList`;
    /// the default overload has no suffix.
    pub op: StrId,
    /// The user's source line, `file:line`, or empty.
    pub source: StrId,
    /// All arguments in schema order, in the notation of `rote propagate`: a range
    /// of [`crate::Plan::ids`] that holds [`StrId`]s. Only for an op that tensors
    /// were redistributed for; empty otherwise.
    pub args: Range,
    /// Specs of the tensor arguments, a range of [`crate::Plan::ids`] that
    /// holds indices into [`crate::Plan::specs`] ([`crate::NONE`]: plain).
    pub inputs: Range,
    /// Specs of the tensor results, likewise.
    pub outputs: Range,
    /// The instructions it became, a range of [`crate::Plan::instrs`].
    pub instrs: Range,
    /// What was redistributed for it, a range of
    /// [`crate::Plan::redistributions`].
    pub redistributions: Range,
}

/// A change of placements, inserted by the framework or asked for by the user.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Redistribution {
    /// Spec before, an index into [`crate::Plan::specs`].
    pub from: u32,
    /// Spec after, an index into [`crate::Plan::specs`].
    pub to: u32,
    /// The user's source line, `file:line`, or empty.
    pub source: StrId,
    /// Bytes that this rank puts into collectives for it.
    pub bytes: u64,
    /// The instructions it became, a range of [`crate::Plan::instrs`].
    pub instrs: Range,
}
