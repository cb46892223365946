//! Finding and counting bins: boundaries in order, one element apart from the
//! others (`_ops/_tensor_ops.py`, `_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// Values, then boundaries.
    Bucketize,
    /// Boundaries, which may be many lines, then values.
    Search,
    Histogram,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::bucketize.Tensor", Kind::Bucketize),
    ("aten::searchsorted.Tensor", Kind::Search),
    ("aten::histc", Kind::Histogram),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 6)?;
    match kind {
        Kind::Bucketize => bucketize(query),
        Kind::Search => search(query),
        Kind::Histogram => histogram(query),
    }
}

/// Positions of values, in `i32` if the flag (at position 2) says so.
fn positions(query: &Query<'_>, values: &TensorMeta) -> Result<TensorMeta, PropagationError> {
    Ok(TensorMeta {
        dtype: DType(if query.flag(2)? { 3 } else { 4 }),
        shape: values.shape.clone(),
    })
}

fn bucketize(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (values, boundaries) = (query.tensor(0)?, query.tensor(1)?);
    if boundaries.shape.len() != 1 {
        return Err(query.wrong(1, "a tensor of 1 dim", boundaries.to_string()));
    }
    let mut rule = Rule::new(vec![positions(query, values)?], 2);
    for dim in 0..values.shape.len() {
        rule.add([shard(dim), shard(dim), R]);
    }
    // As many boundaries lie below a value as do so on all ranks together.
    rule.add([partial(PartialOp::Sum), R, shard(0)]);
    // A larger value is in no earlier bin.
    for op in [PartialOp::Max, PartialOp::Min] {
        rule.add([partial(op), partial(op), R]);
    }
    Ok(rule)
}

fn search(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (boundaries, values) = (query.tensor(0)?, query.tensor(1)?);
    let sorter = query.optional_tensor(5)?;
    let Some((_, lead)) = boundaries.shape.split_last() else {
        return Err(query.wrong(0, "a tensor with dims", boundaries.to_string()));
    };
    let lines = !lead.is_empty();
    if lines && values.shape.split_last().map(|v| v.1) != Some(lead) {
        let expected = format!("a tensor of shape {lead:?} and one more dim");
        return Err(query.wrong(1, expected, values.to_string()));
    }
    if let Some(sorter) = sorter.filter(|s| s.shape != boundaries.shape) {
        let expected = format!("a tensor of shape {:?}", boundaries.shape);
        return Err(query.wrong(5, expected, sorter.to_string()));
    }
    let extra = usize::from(sorter.is_some());
    let mut rule = Rule::new(vec![positions(query, values)?], 2 + extra);
    for dim in 0..values.shape.len() {
        // Each line of values has its line of boundaries.
        let line = if dim < lead.len() { shard(dim) } else { R };
        let slots = [shard(dim), line, shard(dim)].into_iter();
        rule.add(slots.chain(std::iter::repeat_n(line, extra)));
    }
    if sorter.is_none() {
        rule.add([partial(PartialOp::Sum), shard(lead.len()), R]);
    }
    for op in [PartialOp::Max, PartialOp::Min] {
        let slots = [partial(op), R, partial(op)].into_iter();
        rule.add(slots.chain(std::iter::repeat_n(R, extra)));
    }
    Ok(rule)
}

fn histogram(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let values = query.tensor(0)?;
    let bins = query.int(1, Some(100))?;
    let count = u64::try_from(bins).ok().filter(|b| *b > 0);
    let count = count.ok_or_else(|| query.wrong(1, "a positive number", bins.to_string()))?;
    let (low, high) = (query.float(2, Some(0.0))?, query.float(3, Some(0.0))?);
    let output = TensorMeta {
        dtype: values.dtype,
        shape: vec![count],
    };
    let mut rule = Rule::new(vec![output], 1);
    // Equal limits stand for those of the values, which a shard does not know.
    if low < high {
        for dim in 0..values.shape.len() {
            rule.add([partial(PartialOp::Sum), shard(dim)]);
        }
    }
    Ok(rule)
}
