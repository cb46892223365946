//! The trait of kernels that run the ops. This crate itself never talks to a device.

use rote_plans::DType;

use super::host::HostTensor;

/// An argument of a local op.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    /// Not given.
    None,
    /// A tensor.
    Tensor(&'a HostTensor),
    /// Tensors, some of which may be absent.
    Tensors(Vec<Option<&'a HostTensor>>),
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// Integers, or truth values as 0 and 1.
    Ints(&'a [i64]),
    /// Floats.
    Floats(&'a [f64]),
    /// A word.
    Text(&'a str),
    /// An element type.
    DType(DType),
}

/// What an op gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    /// Its results, or what it wrote if it has none; absent ones as `None`.
    pub outputs: Vec<Option<HostTensor>>,
    /// Whether it draws random numbers.
    pub random: bool,
}

/// Runs ops on host tensors.
pub trait Kernels {
    /// Runs an op, by name and overload (`aten::sum.dim_IntList`), on arguments
    /// in the order of its schema.
    ///
    /// # Errors
    ///
    /// Why the op cannot run on these arguments.
    fn run(&mut self, op: &str, args: &[Value<'_>]) -> Result<Ran, String>;
}
