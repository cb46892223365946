//! Ops that take tensors apart, join them, or look rows up
//! (`_ops/_tensor_ops.py`, `_ops/_embedding_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Need, Query, R, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use super::rearrange::slice_length;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    Cat,
    Stack,
    Split,
    SplitSizes,
    Slice,
    Select,
    Unbind,
    Embedding,
    EmbeddingBackward,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::cat", Kind::Cat),
    ("aten::stack", Kind::Stack),
    ("aten::split.Tensor", Kind::Split),
    ("aten::split_with_sizes", Kind::SplitSizes),
    ("aten::split_with_sizes_copy", Kind::SplitSizes),
    ("aten::slice.Tensor", Kind::Slice),
    ("aten::select.int", Kind::Select),
    ("aten::unbind.int", Kind::Unbind),
    ("aten::embedding", Kind::Embedding),
    ("aten::embedding_dense_backward", Kind::EmbeddingBackward),
];

/// More outputs than any tensor is split into.
const MAX_OUTPUTS: u64 = 4096;

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    match kind {
        Kind::Cat => cat(query),
        Kind::Stack => stack(query),
        Kind::Split => {
            let (input, dim) = apart(query, 2)?;
            let size = query.int(1, None)?;
            let total = input.shape[dim];
            let size = u64::try_from(size).ok().filter(|s| *s > 0);
            let size = size.ok_or_else(|| query.wrong(1, "a positive size", "another"))?;
            let count = total.div_ceil(size).max(1);
            outputs_fit(query, count)?;
            let sizes = (0..count).map(|i| size.min(total - i * size));
            Ok(split(input, dim, sizes.collect()))
        }
        Kind::SplitSizes => {
            let (input, dim) = apart(query, 2)?;
            let list = query.list(1)?;
            let sizes: Option<Vec<u64>> = list.iter().map(|s| u64::try_from(*s).ok()).collect();
            let fits = |s: &Vec<u64>| {
                let sum = s.iter().try_fold(0_u64, |a, b| a.checked_add(*b));
                !s.is_empty() && sum == Some(input.shape[dim])
            };
            let sizes = sizes.filter(fits).ok_or_else(|| {
                let expected = format!("sizes that add up to {}", input.shape[dim]);
                query.wrong(1, expected, format!("{list:?}"))
            })?;
            outputs_fit(query, sizes.len() as u64)?;
            Ok(split(input, dim, sizes))
        }
        Kind::Slice => slice(query),
        Kind::Select => {
            let (input, dim) = apart(query, 1)?;
            let index = query.int(2, None)?;
            let size = i64::try_from(input.shape[dim]).unwrap_or(i64::MAX);
            if !(-size..size).contains(&index) {
                let expected = format!("an index from {} to {}", -size, size - 1);
                return Err(query.wrong(2, expected, index.to_string()));
            }
            Ok(without(input, dim, 1))
        }
        Kind::Unbind => {
            let (input, dim) = apart(query, 1)?;
            outputs_fit(query, input.shape[dim])?;
            Ok(without(input, dim, input.shape[dim] as usize))
        }
        Kind::Embedding => {
            query.arity(2, 5)?;
            let (weight, indices) = (query.tensor(0)?, query.tensor(1)?);
            let [_, width] = *weight.shape.as_slice() else {
                return Err(query.wrong(0, "a tensor of 2 dims", weight.to_string()));
            };
            let ndim = indices.shape.len();
            let mut output = weight.clone();
            output.shape = indices.shape.iter().copied().chain([width]).collect();
            let mut rule = Rule::new(vec![output], 2);
            rule.add([shard(ndim), shard(1), R]);
            // Strided rows would need a mask per block: plain shards only.
            // A rank without rows has none to look up.
            let rows = Slot::Plain(0, Need::Filled);
            rule.add([partial(PartialOp::Mask), rows, R]);
            for dim in 0..ndim {
                rule.add([shard(dim), R, shard(dim)]);
            }
            Ok(rule)
        }
        Kind::EmbeddingBackward => {
            query.arity(3, 5)?;
            let (grad, indices) = (query.tensor(0)?, query.tensor(1)?);
            let ndim = indices.shape.len();
            if grad.shape.len() != ndim + 1 || grad.shape[..ndim] != indices.shape {
                let expected = format!("a tensor of shape {:?} and one more dim", indices.shape);
                return Err(query.wrong(0, expected, grad.to_string()));
            }
            let rows = query.int(2, None)?;
            let rows = u64::try_from(rows)
                .map_err(|_| query.wrong(2, "a number of rows", rows.to_string()))?;
            let mut output = grad.clone();
            output.shape = vec![rows, grad.shape[ndim]];
            let mut rule = Rule::new(vec![output], 2);
            rule.add([shard(1), shard(ndim), R]);
            // Rows are divided by how often all indices name them, if asked for.
            let by_frequency = query.flag(4)?;
            for dim in (0..ndim).filter(|_| !by_frequency) {
                rule.add([partial(PartialOp::Sum), shard(dim), shard(dim)]);
            }
            rule.add([partial(PartialOp::Sum), partial(PartialOp::Sum), R]);
            Ok(rule)
        }
    }
}

/// The tensor to take apart and the dim at a position, 0 by default.
fn apart<'a>(query: &Query<'a>, at: usize) -> Result<(&'a TensorMeta, usize), PropagationError> {
    query.arity(1, 5)?;
    let input = query.tensor(0)?;
    if input.shape.is_empty() {
        return Err(query.wrong(0, "a tensor with dims", input.to_string()));
    }
    Ok((input, query.dim(at, Some(0), input.shape.len())?))
}

fn outputs_fit(query: &Query<'_>, found: u64) -> Result<(), PropagationError> {
    if found <= MAX_OUTPUTS {
        return Ok(());
    }
    let expected = format!("at most {MAX_OUTPUTS} pieces");
    Err(query.wrong(0, expected, found.to_string()))
}

fn split(input: &TensorMeta, dim: usize, sizes: Vec<u64>) -> Rule {
    let piece = |size| {
        let mut meta = input.clone();
        meta.shape[dim] = size;
        meta
    };
    let outputs: Vec<_> = sizes.into_iter().map(piece).collect();
    let width = outputs.len() + 1;
    let mut rule = Rule::new(outputs, 1);
    for other in (0..input.shape.len()).filter(|d| *d != dim) {
        rule.add(std::iter::repeat_n(shard(other), width));
    }
    rule.pass(&MOVED);
    rule
}

/// `count` outputs that lack a dim of the input.
fn without(input: &TensorMeta, dim: usize, count: usize) -> Rule {
    let mut meta = input.clone();
    meta.shape.remove(dim);
    let mut rule = Rule::new(vec![meta; count], 1);
    for other in (0..input.shape.len()).filter(|d| *d != dim) {
        let to = shard(if other < dim { other } else { other - 1 });
        rule.add(std::iter::repeat_n(to, count).chain([shard(other)]));
    }
    rule.pass(&MOVED);
    rule
}

fn slice(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (input, dim) = apart(query, 1)?;
    let length = slice_length(query, 2, input.shape[dim])?;
    // A longer step than 1 leaves everything of a dim of size 1 alone.
    let whole = length == input.shape[dim];
    let mut output = input.clone();
    output.shape[dim] = length;
    let mut rule = Rule::new(vec![output], 1);
    for other in (0..input.shape.len()).filter(|d| *d != dim || whole) {
        rule.add([shard(other), shard(other)]);
    }
    rule.pass(&MOVED);
    Ok(rule)
}

fn cat(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 2)?;
    let inputs = query.tensors(0)?;
    // An empty tensor of one dim joins anything, as it always did.
    let empty = |m: &TensorMeta| m.shape == [0];
    let first = inputs.iter().find(|m| !empty(m)).unwrap_or(&inputs[0]);
    let ndim = first.shape.len();
    if ndim == 0 {
        return Err(query.wrong(0, "tensors with dims", first.to_string()));
    }
    let dim = query.dim(1, Some(0), ndim)?;
    let mut output = TensorMeta::clone(first);
    output.shape[dim] = 0;
    for meta in &inputs {
        let alike = |d: usize| d == dim || meta.shape[d] == first.shape[d];
        if empty(meta) {
            continue;
        }
        if meta.shape.len() != ndim || !(0..ndim).all(alike) {
            let expected = format!("tensors like {first} but for dim {dim}");
            return Err(query.wrong(0, expected, meta.to_string()));
        }
        output.shape[dim] = output.shape[dim].saturating_add(meta.shape[dim]);
    }
    let mut rule = Rule::new(vec![output], inputs.len());
    let mut add = |slot| {
        let follow = inputs.iter().map(|m| if empty(m) { R } else { slot });
        rule.add([slot].into_iter().chain(follow));
    };
    for other in (0..ndim).filter(|d| *d != dim) {
        add(shard(other));
    }
    MOVED.iter().for_each(|op| add(partial(*op)));
    Ok(rule)
}

fn stack(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 2)?;
    let inputs = query.tensors(0)?;
    let ndim = inputs[0].shape.len();
    let dim = query.dim(1, Some(0), ndim + 1)?;
    if let Some(other) = inputs.iter().find(|m| m.shape != inputs[0].shape) {
        let expected = format!("tensors of shape {:?}", inputs[0].shape);
        return Err(query.wrong(0, expected, other.to_string()));
    }
    let mut output = inputs[0].clone();
    output.shape.insert(dim, inputs.len() as u64);
    let mut rule = Rule::new(vec![output], inputs.len());
    for from in 0..ndim {
        let to = shard(if from < dim { from } else { from + 1 });
        let follow = std::iter::repeat_n(shard(from), inputs.len());
        rule.add([to].into_iter().chain(follow));
    }
    rule.pass(&MOVED);
    Ok(rule)
}
