//! Instructions: the steps of a plan, in order.

#![allow(missing_docs, reason = "the resolvers that rkyv derives carry none")]

use rkyv::{Archive, Deserialize, Serialize};

use crate::numbered;
use crate::placement::ReduceOp;
use crate::pool::{Range, StrId, ValueId};
use crate::value::{DType, Device};

numbered! {
    "kind of collective";
    /// Which collective a [`Instr::Collective`] is.
    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
    #[repr(u8)]
    pub enum CollectiveKind {
        /// Each rank gets the sum, or another reduction, of all.
        AllReduce = "all_reduce",
        /// Each rank gets the tensors of all, joined along dim 0.
        AllGather = "all_gather",
        /// Each rank gets its slice of dim 0 of the reduction.
        ReduceScatter = "reduce_scatter",
        /// Each rank sends a slice of dim 0 to each other rank.
        AllToAll = "all_to_all",
        /// Each rank gets the tensor of one.
        Broadcast = "broadcast",
    }
}

impl CollectiveKind {
    /// Whether it takes one tensor and leaves its result there, where a step calls it by hand.
    pub fn is_in_place(self) -> bool {
        match self {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast => true,
            CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll => false,
        }
    }
}

/// A collective over one process group, started without waiting for it.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// The reduction, for reducing kinds.
    pub reduce: Option<ReduceOp>,
    /// Index into [`crate::Plan::groups`].
    pub group: u32,
    /// The source rank of a broadcast, counted in the group; else 0.
    pub root: u32,
    /// What this rank puts in.
    pub input: ValueId,
    /// What it gets: a new value, or `input` itself when in place.
    pub output: ValueId,
    /// All-to-all: rows of dim 0 sent to each rank, a range of
    /// [`crate::Plan::dims`]; empty for an even split and other kinds.
    pub input_splits: Range,
    /// All-to-all: rows received from each rank, likewise.
    pub output_splits: Range,
}

/// An argument of a local op, already in the order of the op's schema with
/// defaults filled in.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
#[rkyv(derive(Clone, Copy, Debug))]
pub enum Arg {
    /// No value given (`None`).
    None,
    /// A tensor.
    Value(ValueId),
    /// A list of tensors, a range of [`crate::Plan::ids`]; an id of
    /// [`crate::NONE`] is an absent optional tensor.
    Values(Range),
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A complex number, real and imaginary part.
    Complex(f64, f64),
    /// A number bound at every replay: index into [`crate::Plan::scalars`].
    Scalar(u32),
    /// A number where the schema wants a tensor: PyTorch wraps it, so that it
    /// does not take part in type promotion. Index into [`crate::Plan::args`].
    Wrapped(u32),
    /// A list of integers, a range of [`crate::Plan::dims`].
    Ints(Range),
    /// A list of anything else, a range of [`crate::Plan::args`].
    List(Range),
    /// Text.
    Str(StrId),
    /// An element type.
    DType(DType),
    /// A device.
    Device(Device),
    /// PyTorch's `Layout` number.
    Layout(i8),
    /// PyTorch's `MemoryFormat` number.
    MemoryFormat(i8),
}

/// Whether an op reads and writes its arguments and nothing else: one of PyTorch's own, or one
/// of Rote's. Those of others may do what their schema does not say.
pub fn keeps_to_arguments(op: &str) -> bool {
    op.starts_with("aten::")
        || op.starts_with("prims::")
        || is_check(op)
        || NUMBER_OPS.contains(&op)
}

/// Ops that do what the op of PyTorch does with numbers, each of which they find in a tensor of one `f64` on
/// the host: numbers that follow from what the step has read of tensors after it had written others.
pub const NUMBER_OPS: [&str; 2] = ["rote::add_number_", "rote::foreach_mul_numbers_"];

/// The op `(Tensor number, int bits)` that ends a run if a tensor of one element, which the step
/// has read on the host, does not hold the number that it held when the step was recorded: of
/// integers and booleans the value, of floats the bits of the number as an `f64`.
pub const CHECK_NUMBER: &str = "rote::check_number";

/// The op `(Tensor a, Tensor b, bool equal)` that ends a run if two tensors are equal, or are not,
/// unlike when the step asked.
pub const CHECK_EQUAL: &str = "rote::check_equal";

/// The op `(Tensor(a!) result, int[] shape)` that ends a run if a result whose shape depends on data has another shape
/// than when the step was recorded. It declares the result as written, so that whoever reads it stays behind the check.
pub const CHECK_SHAPE: &str = "rote::check_shape";

/// The op `(Tensor handle, Tensor[] received, Tensor[] sent)` that waits for an op of a process group which a plan
/// holds as a local op. The result of that op stands for its handle. What it receives is there behind the wait.
pub const WAIT: &str = "rote::wait";

/// Whether an op is one of these: what Python did with the answer, a replay does only for the same
/// answer.
pub fn is_check(op: &str) -> bool {
    matches!(op, CHECK_NUMBER | CHECK_EQUAL | CHECK_SHAPE)
}

/// What happens to a random generator outside the dispatcher.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub enum RngAction {
    /// Copy the device's generator state into a slot.
    Save,
    /// Set the generator to what a slot holds.
    Restore,
}

/// One step of the program.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
#[rkyv(derive(Clone, Copy, Debug))]
pub enum Instr {
    /// An ATen op on local tensors.
    Local {
        /// Op name with namespace, for example `aten::mm`.
        op: StrId,
        /// Overload name, empty for the default overload.
        overload: StrId,
        /// Arguments, a range of [`crate::Plan::args`].
        args: Range,
        /// Results, a range of [`crate::Plan::ids`]. [`crate::NONE`] stands
        /// for a result that is not a tensor or that nothing reads, and an
        /// id that is also an argument for an in-place result.
        outs: Range,
        /// Arguments that it writes in place, a range of [`crate::Plan::ids`].
        writes: Range,
        /// Whether it draws random numbers.
        seeded: bool,
        /// Whether gradients are enabled while its kernel runs: some kernels
        /// compute otherwise then.
        grad: bool,
    },
    /// Look at a root's storage through another shape, strides, offset or dtype.
    View {
        /// A live value on the same storage.
        base: ValueId,
        /// The new value.
        out: ValueId,
    },
    /// Start a collective.
    Collective(Collective),
    /// Wait until the collective that writes `value` has finished.
    Wait {
        /// The output of a collective.
        value: ValueId,
    },
    /// Save or restore a generator's state.
    Rng {
        /// What to do.
        action: RngAction,
        /// Whose generator.
        device: Device,
        /// The slot, below [`crate::Plan::rng_slots`].
        slot: u32,
    },
    /// The value is not used again: drop it.
    Free {
        /// The value.
        value: ValueId,
    },
}
