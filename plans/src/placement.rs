//! How a global tensor lies on a mesh: placements and specs.

#![allow(missing_docs, reason = "the resolvers that rkyv derives carry none")]

use rkyv::{Archive, Deserialize, Serialize};

use crate::numbered;
use crate::pool::{Range, StrId};

numbered! {
    "reduction";
    /// The reduction that turns a partial tensor into a whole one, and that a
    /// reducing collective applies.
    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
    #[repr(u8)]
    pub enum ReduceOp {
        /// Element-wise sum.
        Sum = "sum",
        /// Element-wise mean over the ranks.
        Avg = "avg",
        /// Element-wise maximum.
        Max = "max",
        /// Element-wise minimum.
        Min = "min",
        /// Element-wise product.
        Product = "product",
    }
}

/// How one mesh dim holds a tensor, in DTensor's terms.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub enum Placement {
    /// Every rank of the mesh dim holds the whole tensor.
    Replicate,
    /// The tensor dim is split over the ranks of the mesh dim.
    Shard {
        /// The tensor dim, counted from the front.
        dim: u32,
    },
    /// A shard of a tensor dim that a later mesh dim has already split.
    StridedShard {
        /// The tensor dim, counted from the front.
        dim: u32,
        /// Into how many pieces the dim was split before this one.
        split_factor: u32,
    },
    /// Every rank holds a summand (or factor, ...) of the tensor.
    Partial {
        /// How the ranks' tensors combine.
        op: ReduceOp,
    },
    /// A placement this version has no name for, kept as its printed form.
    Other {
        /// The framework's own text for it.
        text: StrId,
    },
}

/// The spec of one distributed tensor: its mesh, a placement per mesh dim and
/// the global tensor meta.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Spec {
    /// Index into [`crate::Plan::meshes`].
    pub mesh: u32,
    /// One [`Placement`] per mesh dim, a range of [`crate::Plan::placements`].
    pub placements: Range,
    /// Global shape in elements, a range of [`crate::Plan::dims`].
    pub shape: Range,
    /// Global strides in elements, a range of [`crate::Plan::dims`].
    pub strides: Range,
}
