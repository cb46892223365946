//! Copies, which keep what they are given, and factories, whose values do not
//! depend on any tensor (`_ops/_tensor_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote::commutes;
use super::super::rule::{Arg, Need, Query, R, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// The input itself.
    Same,
    /// The values of the input.
    Copy,
    /// Memory in the input's shape, whose values mean nothing.
    Empty,
    /// The values of the input in the dtype at position 1.
    Cast,
    /// The bits of the input, as the dtype at position 1.
    Bits,
    /// The number at position 1, or zeros without one, over the input.
    Fill,
    /// New values in the input's shape.
    Like,
    /// New values in the shape at position 1; `filled` says that they mean
    /// something.
    New { filled: bool },
    /// No tensor at all: the shape at position 0.
    Factory,
    /// No tensor at all: the sizes at positions 0 and 1, or one for both.
    Eye,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::clone", Kind::Copy),
    ("aten::contiguous", Kind::Copy),
    ("aten::detach", Kind::Same),
    ("aten::alias", Kind::Same),
    ("prims::view_of", Kind::Same),
    ("aten::view.dtype", Kind::Bits),
    ("aten::fill.Scalar", Kind::Fill),
    ("aten::zero", Kind::Fill),
    ("aten::empty_like", Kind::Empty),
    ("aten::_to_copy", Kind::Cast),
    ("aten::to.dtype", Kind::Cast),
    ("prims::convert_element_type", Kind::Cast),
    ("aten::ones_like", Kind::Like),
    ("aten::zeros_like", Kind::Like),
    ("aten::full_like", Kind::Like),
    ("aten::rand_like", Kind::Like),
    ("aten::randn_like", Kind::Like),
    ("aten::randint_like", Kind::Like),
    ("aten::randint_like.low_dtype", Kind::Like),
    ("aten::new_empty", Kind::New { filled: false }),
    ("aten::new_empty_strided", Kind::New { filled: false }),
    ("aten::new_full", Kind::New { filled: true }),
    ("aten::new_ones", Kind::New { filled: true }),
    ("aten::new_zeros", Kind::New { filled: true }),
    ("aten::zeros", Kind::Factory),
    ("aten::ones", Kind::Factory),
    ("aten::full", Kind::Factory),
    ("aten::empty.memory_format", Kind::Factory),
    ("aten::eye", Kind::Eye),
    ("aten::eye.m", Kind::Eye),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    if let Kind::Factory = kind {
        query.arity(1, 3)?;
        let dtype = dtype(query).unwrap_or(DType::F32);
        let shape = shape(query, 0)?;
        return Ok(Rule::new(vec![TensorMeta { dtype, shape }], 0));
    }
    if let Kind::Eye = kind {
        query.arity(1, 3)?;
        let rows = size(query, 0, query.int(0, None)?)?;
        let columns = match query.args.get(1) {
            Some(Arg::Int(columns)) => size(query, 1, *columns)?,
            _ => rows,
        };
        let (dtype, shape) = (dtype(query).unwrap_or(DType::F32), vec![rows, columns]);
        return Ok(Rule::new(vec![TensorMeta { dtype, shape }], 0));
    }
    if let Kind::Bits = kind {
        return bits(query);
    }
    query.arity(1, 4)?;
    let input = query.tensor(0)?;
    let mut output = input.clone();
    output.dtype = dtype(query).unwrap_or(input.dtype);
    if let Kind::New { .. } = kind {
        output.shape = shape(query, 1)?;
    }
    let same_shape = output.shape == input.shape;
    let to = output.dtype;
    let mut rule = Rule::new(vec![output], 1);
    for dim in 0..input.shape.len() {
        let output = if same_shape { shard(dim) } else { R };
        rule.add([output, shard(dim)]);
    }
    for op in MOVED {
        let is_registered = matches!(op, PartialOp::Registered(_));
        let keeps = match kind {
            Kind::Same => true,
            // A script may write to a copy in place, which it could not if it was a
            // registered partial.
            Kind::Copy | Kind::Cast if is_registered => continue,
            Kind::Copy => true,
            Kind::Empty => !is_registered,
            Kind::Cast => {
                if !commutes(op, input.dtype, to) {
                    continue;
                }
                true
            }
            Kind::Fill => {
                // Ranks that all write a number make it if they are combined.
                let same = match (op, query.args.get(1)) {
                    (PartialOp::Registered(_), _) => false,
                    (_, None) | (PartialOp::Avg | PartialOp::Max | PartialOp::Min, _) => true,
                    (PartialOp::Product, Some(Arg::Int(1))) => true,
                    (_, Some(number)) => {
                        matches!(number, Arg::Int(0) | Arg::Bool(false))
                            || *number == Arg::Float(0.0)
                    }
                };
                if same {
                    rule.add([partial(op), partial(op)]);
                }
                false
            }
            Kind::New { filled } => !filled && same_shape && !is_registered,
            Kind::Like | Kind::Factory | Kind::Eye | Kind::Bits => false,
        };
        rule.add([if keeps { partial(op) } else { R }, partial(op)]);
    }
    Ok(rule)
}

/// Elements of another width change the size of the last dim, whose shards are
/// then even. Bits that mean something else cannot be combined as they were.
fn bits(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(2, 2)?;
    let input = query.tensor(0)?;
    let expected = "a dtype whose width fits the last dim";
    let to = dtype(query).ok_or_else(|| query.wrong(1, expected, "none"))?;
    let (from, width) = (input.dtype.bytes().unwrap_or(1), to.bytes().unwrap_or(1));
    let mut output = input.clone();
    output.dtype = to;
    let mut kept = input.shape.len();
    let mut even = None;
    if from != width {
        let last = output
            .shape
            .last_mut()
            .filter(|n| (**n * from) % width == 0);
        let last = last.ok_or_else(|| query.wrong(1, expected, to.to_string()))?;
        let before = *last;
        *last = before * from / width;
        even = Some(Need::Divides(before.min(*last)));
        kept -= 1;
    }
    let mut rule = Rule::new(vec![output], 1);
    for dim in 0..kept {
        rule.add([shard(dim), shard(dim)]);
    }
    if let Some(need) = even {
        rule.add([shard(kept), Slot::Shard(kept as u32, need)]);
    }
    if from == width && input.dtype == to {
        rule.pass(&MOVED);
    }
    Ok(rule)
}

/// The dtype among the arguments, if one is given.
pub(super) fn dtype(query: &Query<'_>) -> Option<DType> {
    query.args.iter().find_map(|arg| match arg {
        Arg::DType(dtype) => Some(*dtype),
        _ => None,
    })
}

fn size(query: &Query<'_>, at: usize, size: i64) -> Result<u64, PropagationError> {
    u64::try_from(size).map_err(|_| query.wrong(at, "a size", size.to_string()))
}

fn shape(query: &Query<'_>, at: usize) -> Result<Vec<u64>, PropagationError> {
    let wanted = query.list(at)?;
    let sizes: Result<Vec<u64>, _> = wanted.iter().map(|s| u64::try_from(*s)).collect();
    sizes.map_err(|_| query.wrong(at, "a shape", format!("{wanted:?}")))
}
