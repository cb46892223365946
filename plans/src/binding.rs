//! Bindings, outputs, gradients and scalars: how a plan meets the caller's
//! objects.

#![allow(missing_docs, reason = "the resolvers that rkyv derives carry none")]

use rkyv::{Archive, Deserialize, Serialize};

use crate::numbered;
use crate::pool::{InstrId, Range, StrId, ValueId};

numbered! {
    "kind of binding";
    /// Whose tensor a binding names.
    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
    #[repr(u8)]
    pub enum BindingKind {
        /// An argument of the captured function, bound at every call.
        Arg = "argument",
        /// A tensor of the captured state, bound once and guarded by address.
        State = "state",
        /// The gradient of an argument or of a tensor of the state, bound at every call.
        Grad = "gradient",
    }
}

/// A name tied to a tensor that the plan reads or writes.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Binding {
    /// Whose tensor it is.
    pub kind: BindingKind,
    /// Pytree path, for example `model.layers.0.wq.weight` or `args[0]`. For
    /// [`BindingKind::Grad`] the path of the tensor that owns the gradient.
    pub path: StrId,
    /// The local tensor.
    pub value: ValueId,
    /// Index into [`crate::Plan::specs`], [`crate::NONE`] for a plain tensor.
    pub spec: u32,
    /// Whether the plan writes to its storage.
    pub written: bool,
    /// How often the step raises the version counters of the tensor and of its local tensor,
    /// as autograd counts writes.
    pub counted: [u32; 2],
    /// Where in its storage an argument must lie, if the step depends on that: it
    /// counted from the start of the storage, or asked how the tensor lies in it.
    pub anchor: Option<Anchor>,
}

/// Where a tensor lies in its storage.
#[repr(C)]
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct Anchor {
    /// The byte at which its data starts.
    pub start: i64,
    /// Bytes of the storage.
    pub bytes: u64,
    /// A number for what it is a view of, and whether it is an inference tensor.
    pub base: u64,
}

/// A tensor in the captured function's result.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Output {
    /// Pytree path in the result, for example `result[0]`.
    pub path: StrId,
    /// The local tensor.
    pub value: ValueId,
    /// Index into [`crate::Plan::specs`], [`crate::NONE`] for a plain tensor.
    pub spec: u32,
    /// Whether eager returns it with `requires_grad`, its graph used up.
    pub requires_grad: bool,
}

/// What the step leaves in the `.grad` of a tensor whose gradient it replaced.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct GradResult {
    /// Path of the tensor that owns the gradient.
    pub path: StrId,
    /// The local gradient, or [`crate::NONE`] when `.grad` becomes `None`.
    pub value: ValueId,
    /// Index into [`crate::Plan::specs`], [`crate::NONE`] for a plain tensor.
    pub spec: u32,
    /// The first instruction of which the step has shown that the gradient before it was
    /// gone by then, [`crate::NONE`] if it has not: what a run that fails there leaves.
    pub gone: InstrId,
}

numbered! {
    "comparison of two floats";
    /// How two scalars compare.
    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
    #[repr(u8)]
    pub enum Comparison {
        /// `a == b`
        Equal,
        /// `a < b`
        Less,
        /// `a <= b`
        LessOrEqual,
    }
}

impl Comparison {
    /// Whether it holds between two floats.
    pub fn of(self, a: f64, b: f64) -> bool {
        match self {
            Comparison::Equal => a == b,
            Comparison::Less => a < b,
            Comparison::LessOrEqual => a <= b,
        }
    }
}

/// A float that is read or computed anew at every replay: an optimizer's
/// hyperparameter, a number in a tensor, or what Python computes from these. Operands are
/// indices of earlier scalars; arithmetic is IEEE 754 double precision as in Python. All
/// scalars are known before the first instruction runs.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
#[rkyv(derive(Clone, Copy, Debug))]
pub enum Scalar {
    /// Read from the state, for example `opt.param_groups[0]['lr']`.
    Read {
        /// Pytree path.
        path: StrId,
    },
    /// The number in a tensor of the state that has one element, for example
    /// `opt.state[0]['step']`, as it is before the replay.
    Tensor {
        /// Path of the tensor.
        path: StrId,
    },
    /// A constant operand.
    Const(f64),
    /// `-a`
    Neg(u32),
    /// `a + b`
    Add(u32, u32),
    /// `a - b`
    Sub(u32, u32),
    /// `a * b`
    Mul(u32, u32),
    /// `a / b`
    Div(u32, u32),
    /// `a ** b`
    Pow(u32, u32),
    /// `a`, which `b` must equal bit for bit: a number that may have come from either.
    Same(u32, u32),
    /// `a`, rounded to single precision (`f32`).
    Round(u32),
    /// `a`, which must compare with `b` as when the step was recorded: the step has
    /// decided by it.
    Compared {
        /// How it compares.
        how: Comparison,
        /// The first operand.
        a: u32,
        /// The second one.
        b: u32,
        /// Whether the comparison holds.
        holds: bool,
    },
}

numbered! {
    "kind of guard";
    /// Where a guard looks.
    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
    #[repr(u8)]
    pub enum GuardKind {
        /// The nested structure of the arguments.
        Structure = "structure",
        /// The meta of a tensor argument, or the value of another argument.
        Argument = "argument",
        /// A tensor of the state: meta and, within a process, address.
        State = "state",
        /// A value of the host that the step can reach, for example a flag or a number in a configuration.
        Host = "host",
        /// A global mode: grad mode, autocast, determinism, default dtype.
        Mode = "mode",
        /// World size and group membership.
        World = "world",
    }
}

/// One fact that must hold for the plan to be used.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Guard {
    /// Where it looks.
    pub kind: GuardKind,
    /// What it looks at, for example `args[0].shape`.
    pub subject: StrId,
    /// What it expects, as text. Addresses are not written: a fact that holds
    /// within one process only says `same object`.
    pub expected: StrId,
}

/// A tensor that a pass computed ahead of time.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Constant {
    /// The value it fills.
    pub value: ValueId,
    /// Its bytes, a range of [`crate::Plan::bytes`].
    pub data: Range,
}
