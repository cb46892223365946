//! Ops whose result is a value of the host: a number, or whether two tensors
//! are equal (`_ops/_tensor_ops.py`). The value stands as an output without
//! dims. Where ranks compare their shards, it is partial: the smallest truth
//! value of all ranks, which PyTorch's dispatcher gathers likewise.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// The only element.
    Item,
    /// Whether all elements are equal.
    Equal,
    /// Whether the shapes are equal.
    SameSize,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::_local_scalar_dense", Kind::Item),
    ("aten::equal", Kind::Equal),
    ("aten::is_same_size", Kind::SameSize),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let first = query.tensor(0)?;
    let value = |dtype| {
        let shape = Vec::new();
        vec![TensorMeta { dtype, shape }]
    };
    if let Kind::Item = kind {
        query.arity(1, 1)?;
        if first.shape.iter().product::<u64>() != 1 {
            return Err(query.wrong(0, "a tensor of one element", first.to_string()));
        }
        return Ok(Rule::new(value(first.dtype), 1));
    }
    query.arity(2, 2)?;
    let second = query.tensor(1)?;
    let mut rule = Rule::new(value(DType::BOOL), 2);
    // Sizes that differ are split into shards of which some differ too.
    if first.shape.len() == second.shape.len() {
        for dim in 0..first.shape.len() {
            rule.add([partial(PartialOp::Min), shard(dim), shard(dim)]);
        }
    }
    if let Kind::SameSize = kind {
        for op in MOVED {
            let p = partial(op);
            for inputs in [[p, p], [p, R], [R, p]] {
                rule.add([R].into_iter().chain(inputs));
            }
        }
    }
    Ok(rule)
}
