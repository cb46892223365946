//! Questions to sharding propagation and its answers, in C structs. The bridge asks PyTorch's questions in them, and any
//! program its own through `rote.h`.

use std::ffi::c_char;

use crate::op::Arg;

/// What a mesh dim holds of a tensor.
pub mod kind {
    /// Placement: every rank of the mesh dim holds the whole tensor.
    pub const REPLICATE: u8 = 0;
    /// Placement: the tensor dim `dim` is split over the ranks, as `torch.chunk` splits.
    pub const SHARD: u8 = 1;
    /// Placement: each of `split_factor` blocks of the tensor dim `dim` is split over the ranks.
    pub const STRIDED_SHARD: u8 = 2;
    /// Placement: every rank holds a part; `reduce` is the reduction (`ROTE_SUM`, ...).
    pub const PARTIAL: u8 = 3;
    /// Placement: a sum, where a rank's rows are zero if it does not hold their part of a table. A rank of an op with
    /// such a result looks up 0 in the place of indices outside of its part, and counts the others from its first row.
    pub const MASK_PARTIAL: u8 = 4;
    /// Placement: every rank holds the norm of its part; `order` is the norm's.
    pub const NORM_PARTIAL: u8 = 5;
    /// Placement, in strategies only: a shard of the tensor dim `dim`, plain or strided, as the inputs have it.
    pub const PLACEHOLDER: u8 = 6;
    /// Placement: the tensor dim `dim` is split as a sharding that the caller has registered says; `split_factor` is the
    /// number of the sharding (`rote_sharding`).
    pub const REGISTERED_SHARD: u8 = 7;
    /// Placement: every rank holds a part, and they combine as the caller knows who has registered it; `split_factor` is
    /// the number of the partial (`rote_partial`).
    pub const REGISTERED_PARTIAL: u8 = 8;
}

/// How one mesh dim holds a tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    /// The kind of placement (`ROTE_REPLICATE`, ...).
    pub kind: u8,
    /// Of a partial: the reduction (`ROTE_SUM`, ...).
    pub reduce: u8,
    /// Of a shard: the tensor dim, counted from the front.
    pub dim: u32,
    /// Of a strided shard: the number of blocks. Of a registered one: the number of the sharding. Of a registered partial:
    /// its number.
    pub split_factor: u32,
    /// Of the partial of a norm: the order.
    pub order: f64,
}

/// A distributed tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Global shape, `ndim` entries.
    pub shape: *const i64,
    /// Global strides in elements, `ndim` entries. In a question, null stands for those of a contiguous tensor; in an
    /// answer, for strides that Rote does not know.
    pub strides: *const i64,
    /// A placement for each mesh dim.
    pub placements: *const Placement,
    /// Number of dims.
    pub ndim: u32,
    /// Element type: PyTorch's `ScalarType` number (6 is f32, 15 bf16, 4 i64).
    pub dtype: u8,
}

/// A tensor that an op writes, and that so stays where it is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Its place among the question's tensors.
    pub tensor: u32,
    /// The result that it is returned as; -1 if it is not returned.
    pub output: i32,
}

/// A rule of the caller's own. The strategy that replicates every tensor is added to it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StatedRule {
    /// The strategies, one after another: on one mesh dim, the placements of the results, then those of the question's
    /// tensors.
    pub strategies: *const Placement,
    /// The results; strides and placements are not read.
    pub outputs: *const Spec,
    /// The tensors that the op writes.
    pub written: *const Written,
    /// Number of strategies.
    pub nstrategies: u32,
    /// Number of results.
    pub noutputs: u32,
    /// Number of tensors that the op writes.
    pub nwritten: u32,
    /// Whether the strategies are added to Rote's rule for the op, which says what is written; `sums_only` does not hold for
    /// them. If not, they are in its place.
    pub added: u8,
}

/// An op with its arguments.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Name with namespace and overload, for example `aten::sum.dim_IntList`; the default overload has no suffix.
    pub op: *const c_char,
    /// Arguments in the order of the op's schema; those at the end that have their defaults may be left out. A tensor
    /// is a `ROTE_ARG_INPUT`, `i` is its place among `tensors`; a list of tensors is a `ROTE_ARG_INPUTS`.
    pub args: *const Arg,
    /// The tensors among the arguments, in the order of the arguments.
    pub tensors: *const Spec,
    /// The rule to answer by, whatever rule Rote has for the op; null: Rote's rule.
    pub rule: *const StatedRule,
    /// Whether Rote's rule passes no partials but sums from a tensor to a result: others are reduced before the op.
    pub sums_only: u8,
    /// Number of arguments.
    pub nargs: u32,
    /// Number of tensors.
    pub ntensors: u32,
}

/// How an op runs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The placements in which the op takes each tensor: those of the first for each mesh dim, then those of the second.
    pub inputs: *const Placement,
    /// The results.
    pub outputs: *const Spec,
    /// What each of the ranks gives to the op as `shape_arg`: the shape of its shard of the first result. Null if
    /// there is none, or the propagator was made without a coordinate.
    pub local_shape: *const i64,
    /// Estimated time of all redistributions, in microseconds.
    pub cost_us: f64,
    /// Bytes that a rank sends for all redistributions.
    pub bytes: u64,
    /// Number of results.
    pub noutputs: u32,
    /// How many tensors must be redistributed.
    pub moved: u32,
    /// The argument that is the global shape of the first result: a rank calls the op with `local_shape` there. -1 if
    /// there is none.
    pub shape_arg: i32,
    /// Whether the arguments of a rank's call differ from the global ones in other ways than by `local_shape`.
    pub other_args: u8,
    /// Whether other placements may cost the same, or up to a twentieth more.
    pub tied: u8,
}
