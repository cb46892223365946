//! Element-wise ops: shards of the broadcast shape pass, and the partials that
//! the op is linear or monotone in (`_ops/_pointwise_ops.py`).
//!
//! | module | subject |
//! |---|---|
//! | `pass` | which partials pass, from what the op does to its tensors |
//! | `table` | the ops |

mod pass;
mod table;

use super::super::error::PropagationError;
use super::super::promote::{self, Class, class};
use super::super::rule::{Arg, Query, R, Rule, Slot, shard};
use super::super::spec::TensorMeta;
use pass::Pass;
use rote_plans::DType;

/// The element type of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Out {
    /// That of all tensors and numbers together.
    Promoted,
    /// The same, but truth values become integers.
    Number,
    /// The same, but integers become floats.
    Float,
    /// Floats, unless the quotient is rounded.
    Quotient,
    /// Truth values.
    Bool,
    /// That of the parts of a complex number.
    Real,
    /// The same, and integers become floats.
    RealFloat,
    /// Double precision.
    Double,
    /// That of the first tensor.
    First,
    /// That of the tensors behind the first, which is a condition.
    Branches,
    /// Two outputs: that of the tensor, and the integers of exponents.
    Parts,
}

/// What tells element-wise ops apart.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kind {
    out: Out,
    pass: Pass,
}

/// The ops with what tells them apart.
pub(super) fn ops() -> impl Iterator<Item = (String, Kind)> {
    table::OPS.iter().flat_map(|group| {
        let (out, pass) = (group.out, group.pass);
        group.names.iter().flat_map(move |name| {
            group.overloads.iter().map(move |overload| {
                let dot = if overload.is_empty() { "" } else { "." };
                (format!("{name}{dot}{overload}"), Kind { out, pass })
            })
        })
    })
}

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 8)?;
    let mut metas: Vec<&TensorMeta> = Vec::with_capacity(3);
    let mut shape: Vec<u64> = Vec::new();
    for (i, arg) in query.args.iter().enumerate() {
        if !matches!(arg, Arg::Tensor(_)) {
            continue;
        }
        let meta = query.tensor(i)?;
        metas.push(meta);
        if !broadcast(&mut shape, &meta.shape) {
            let expected = format!("a shape that broadcasts with {shape:?}");
            return Err(query.wrong(i, expected, meta.to_string()));
        }
    }
    if metas.is_empty() {
        query.tensor(0)?;
    }
    let ndim = shape.len();
    let dtype = dtype(kind.out, query, &metas);
    let mut outputs = vec![TensorMeta { dtype, shape }];
    if kind.out == Out::Parts {
        let mut exponent = outputs[0].clone();
        exponent.dtype = DType::I32;
        outputs.push(exponent);
    }
    let counts = outputs.len();
    let mut rule = Rule::new(outputs, metas.len());
    for dim in 0..ndim {
        let size = rule.outputs[0].shape[dim];
        let inputs = metas.iter().map(|meta| own_shard(meta, ndim, dim, size));
        rule.add(std::iter::repeat_n(shard(dim), counts).chain(inputs));
    }
    if counts == 1 {
        pass::add(kind.pass, query, &metas, &mut rule);
    }
    Ok(rule)
}

/// How a tensor lies when a dim of the broadcast shape is sharded.
fn own_shard(meta: &TensorMeta, ndim: usize, dim: usize, size: u64) -> Slot {
    match dim.checked_sub(ndim - meta.shape.len()) {
        Some(own) if meta.shape[own] == size => shard(own),
        _ => R,
    }
}

fn dtype(out: Out, query: &Query<'_>, metas: &[&TensorMeta]) -> DType {
    let promoted = || promote::result(query.args).unwrap_or(DType::F32);
    let first = metas.first().map_or(DType::F32, |m| m.dtype);
    match out {
        Out::Promoted => promoted(),
        Out::Number => match promoted() {
            DType::BOOL => DType::I64,
            dtype => dtype,
        },
        Out::Float => promote::float(promoted()),
        Out::Quotient if query.args.iter().any(|a| matches!(a, Arg::Text(_))) => promoted(),
        Out::Quotient => promote::float(promoted()),
        Out::Bool => DType::BOOL,
        Out::Real => promote::real(promoted()),
        Out::RealFloat => promote::float(promote::real(promoted())),
        Out::Double => promote::double(promoted()),
        Out::First | Out::Parts => first,
        Out::Branches => promote::result(&query.args[1..]).unwrap_or(first),
    }
}

/// Whether numbers of a type can be told greater and smaller.
fn ordered(dtype: DType) -> bool {
    class(dtype) != Class::Complex
}

/// Widens a shape so that another fits; false when they cannot.
pub(in super::super) fn broadcast(shape: &mut Vec<u64>, other: &[u64]) -> bool {
    while shape.len() < other.len() {
        shape.insert(0, 1);
    }
    let missing = shape.len() - other.len();
    for (own, other) in shape[missing..].iter_mut().zip(other) {
        if *own == 1 {
            *own = *other;
        } else if *other != 1 && *own != *other {
            return false;
        }
    }
    true
}
