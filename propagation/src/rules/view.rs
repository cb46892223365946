//! Views, from a map of dims: which input dims each output dim is made of
//! (`_ops/_view_ops.py`).
//!
//! A view whose shape changes falls into groups of neighbouring dims with equal
//! products: the first dim of a group stays sharded as the first dim of its
//! image if the shards divide both; a dim flattened behind others becomes a
//! strided shard, and comes back from one.

use super::super::error::PropagationError;
use super::super::rule::{Need, Query, Rule, Slot, shard};
use super::super::spec::TensorMeta;
use super::MOVED;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// The new shape stands at position 1.
    Reshape,
    Flatten,
    Transpose,
    /// The transpose of a matrix.
    T,
    Permute,
    Expand,
    Unsqueeze,
    Squeeze,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::view", Kind::Reshape),
    ("aten::view_copy", Kind::Reshape),
    ("aten::reshape", Kind::Reshape),
    ("aten::_unsafe_view", Kind::Reshape),
    ("aten::flatten.using_ints", Kind::Flatten),
    ("aten::transpose.int", Kind::Transpose),
    ("aten::t", Kind::T),
    ("aten::permute", Kind::Permute),
    ("aten::expand", Kind::Expand),
    ("aten::expand_copy", Kind::Expand),
    ("aten::unsqueeze", Kind::Unsqueeze),
    ("aten::squeeze", Kind::Squeeze),
    ("aten::squeeze.dim", Kind::Squeeze),
    ("aten::squeeze.dims", Kind::Squeeze),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 3)?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    let dims = match kind {
        Kind::Reshape => return reshape(input, sizes(query, input)?),
        Kind::Flatten => {
            let first = query.dim(1, Some(0), ndim)?;
            let last = query.dim(2, Some(-1), ndim)?;
            if first > last {
                return Err(query.wrong(2, format!("a dim from {first}"), last.to_string()));
            }
            let mut shape = input.shape[..first.min(ndim)].to_vec();
            shape.push(input.shape.iter().take(last + 1).skip(first).product());
            shape.extend(input.shape.iter().skip(last + 1));
            return reshape(input, shape);
        }
        Kind::Transpose => {
            let (a, b) = (query.dim(1, None, ndim)?, query.dim(2, None, ndim)?);
            let mut dims: Vec<_> = (0..ndim).map(Some).collect();
            if ndim > 0 {
                dims.swap(a, b);
            }
            dims
        }
        Kind::T if ndim > 2 => {
            return Err(query.wrong(0, "a tensor of at most 2 dims", input.to_string()));
        }
        Kind::T => (0..ndim).rev().map(Some).collect(),
        Kind::Permute => {
            let order = query.list(1)?;
            let wrong = || {
                let expected = format!("each of {ndim} dims once");
                query.wrong(1, expected, format!("{order:?}"))
            };
            let mut seen = vec![false; ndim];
            let mut dims = Vec::new();
            for dim in order {
                let dim = query.wrap(1, *dim, ndim)?;
                let first = seen
                    .get_mut(dim)
                    .is_some_and(|s| !std::mem::replace(s, true));
                if !first {
                    return Err(wrong());
                }
                dims.push(Some(dim));
            }
            if dims.len() != ndim {
                return Err(wrong());
            }
            dims
        }
        Kind::Expand => return expand(query, input),
        Kind::Unsqueeze => {
            let dim = query.dim(1, None, ndim + 1)?;
            let mut dims: Vec<_> = (0..ndim).map(Some).collect();
            dims.insert(dim, None);
            dims
        }
        Kind::Squeeze => {
            let mut dropped = vec![query.args.len() < 2; ndim];
            for dim in query.ints(1)?.unwrap_or(&[]) {
                let dim = query.wrap(1, *dim, ndim)?;
                if let Some(dropped) = dropped.get_mut(dim) {
                    *dropped = true;
                }
            }
            let kept = |d: &usize| !dropped[*d] || input.shape[*d] != 1;
            (0..ndim).filter(kept).map(Some).collect()
        }
    };
    let shape = dims.iter().map(|d| d.map_or(1, |d| input.shape[d]));
    let mut rule = one_output(input, shape.collect());
    for (to, from) in dims.iter().enumerate() {
        if let Some(from) = from {
            rule.add([shard(to), shard(*from)]);
        }
    }
    rule.pass(&MOVED);
    Ok(rule)
}

fn one_output(input: &TensorMeta, shape: Vec<u64>) -> Rule {
    let dtype = input.dtype;
    Rule::new(vec![TensorMeta { dtype, shape }], 1)
}

/// The wanted shape, with the place of -1 computed.
fn sizes(query: &Query<'_>, input: &TensorMeta) -> Result<Vec<u64>, PropagationError> {
    let wanted = query.list(1)?;
    let total: u64 = input.shape.iter().product();
    let wrong = || {
        let expected = format!("a shape of {total} elements");
        query.wrong(1, expected, format!("{wanted:?}"))
    };
    let (mut known, mut open) = (1_u64, None);
    for (at, size) in wanted.iter().enumerate() {
        match u64::try_from(*size) {
            Ok(size) => known = known.checked_mul(size).ok_or_else(wrong)?,
            Err(_) if *size == -1 && open.is_none() => open = Some(at),
            Err(_) => return Err(wrong()),
        }
    }
    let rest = match open {
        Some(_) if known > 0 && total % known == 0 => total / known,
        None if known == total => 1,
        _ => return Err(wrong()),
    };
    Ok(wanted
        .iter()
        .map(|s| u64::try_from(*s).unwrap_or(rest))
        .collect())
}

fn expand(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let wanted = query.list(1)?;
    let wrong = || {
        query.wrong(
            1,
            format!("a shape that {input} broadcasts to"),
            format!("{wanted:?}"),
        )
    };
    let lead = wanted
        .len()
        .checked_sub(input.shape.len())
        .ok_or_else(wrong)?;
    let mut shape = Vec::new();
    let mut kept = Vec::new();
    for (at, size) in wanted.iter().enumerate() {
        let own = at.checked_sub(lead).map(|d| (d, input.shape[d]));
        shape.push(match (u64::try_from(*size), own) {
            (Ok(size), None) => size,
            (Ok(size), Some((_, 1))) if size != 1 => size,
            (Ok(size), Some((dim, own))) if size == own => {
                kept.push((at, dim));
                size
            }
            (Err(_), Some((dim, own))) if *size == -1 => {
                kept.push((at, dim));
                own
            }
            _ => return Err(wrong()),
        });
    }
    let mut rule = one_output(input, shape);
    for (to, from) in kept {
        rule.add([shard(to), shard(from)]);
    }
    rule.pass(&MOVED);
    Ok(rule)
}

/// A group of input dims and the output dims with the same elements.
type Group = (std::ops::Range<usize>, std::ops::Range<usize>);

/// Splits a change of shape into its smallest groups.
fn groups(from: &[u64], to: &[u64]) -> Vec<Group> {
    let (mut i, mut o, mut groups) = (0, 0, Vec::new());
    while i < from.len() && o < to.len() {
        let (i0, o0) = (i, o);
        let (mut a, mut b) = (from[i], to[o]);
        (i, o) = (i + 1, o + 1);
        while a != b {
            if a < b && i < from.len() {
                a = a.saturating_mul(from[i]);
                i += 1;
            } else if b < a && o < to.len() {
                b = b.saturating_mul(to[o]);
                o += 1;
            } else {
                break;
            }
        }
        groups.push((i0..i, o0..o));
    }
    groups
}

fn reshape(input: &TensorMeta, shape: Vec<u64>) -> Result<Rule, PropagationError> {
    let mut rule = one_output(input, shape);
    let to = rule.outputs[0].shape.clone();
    let from = &input.shape;
    if from.contains(&0) {
        // Nothing to tell apart the groups by; nothing to move either.
        if *from == to {
            (0..from.len()).for_each(|d| rule.add([shard(d), shard(d)]));
        }
        rule.pass(&MOVED);
        return Ok(rule);
    }
    for (ins, outs) in groups(from, &to) {
        if ins.len() == 1 && outs.len() == 1 {
            rule.add([shard(outs.start), shard(ins.start)]);
            continue;
        }
        let lead = |dims: &std::ops::Range<usize>, sizes: &[u64]| {
            dims.clone().find(|d| sizes[*d] != 1).unwrap_or(dims.start)
        };
        let (i, o) = (lead(&ins, from), lead(&outs, &to));
        let same = ins.clone().all(|d| d == i || from[d] == 1)
            && outs.clone().all(|d| d == o || to[d] == 1);
        let both = match same {
            true => Need::Nothing,
            false => Need::Divides(gcd(from[i], to[o])),
        };
        rule.add([shard(o), Slot::Shard(i as u32, both)]);
        let first = ins.start as u32;
        if outs.len() == 1 {
            let mut blocks = from[i];
            for (dim, size) in from.iter().enumerate().take(ins.end).skip(i + 1) {
                let need = uneven_if_last(from, dim, ins.end);
                if let (Ok(blocks), true) = (u32::try_from(blocks), *size != 1) {
                    let flat = Slot::Flattened {
                        dim: o as u32,
                        blocks,
                        leading: (first, dim as u32),
                        need,
                    };
                    rule.add([flat, Slot::Shard(dim as u32, need)]);
                }
                blocks = blocks.saturating_mul(*size);
            }
        }
        if ins.len() == 1 {
            let mut blocks = to[o];
            for (dim, size) in to.iter().enumerate().take(outs.end).skip(o + 1) {
                let need = uneven_if_last(&to, dim, outs.end);
                if let (Ok(blocks), true) = (u32::try_from(blocks), *size != 1) {
                    let flat = Slot::Flattened {
                        dim: i as u32,
                        blocks,
                        leading: (outs.start as u32, dim as u32),
                        need,
                    };
                    rule.add([shard(dim), flat]);
                }
                blocks = blocks.saturating_mul(*size);
            }
        }
    }
    rule.pass(&MOVED);
    Ok(rule)
}

/// A block of a strided shard that is one dim splits as that dim does; one that
/// is several dims only does if the shards divide the first.
fn uneven_if_last(shape: &[u64], dim: usize, end: usize) -> Need {
    if shape[dim + 1..end].iter().all(|s| *s == 1) {
        Need::Nothing
    } else {
        Need::Divides(shape[dim])
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn a_change_of_shape_falls_into_groups() {
        assert_eq!(groups(&[2, 3, 4], &[2, 12]), [(0..1, 0..1), (1..3, 1..2)]);
        assert_eq!(groups(&[2, 3], &[3, 2]), [(0..2, 0..2)]);
        assert_eq!(groups(&[24], &[4, 6]), [(0..1, 0..2)]);
        assert_eq!(groups(&[1, 8], &[8, 1]), [(0..2, 0..1)]);
        assert_eq!(groups(&[4, 4], &[4, 4]), [(0..1, 0..1), (1..2, 1..2)]);
    }
}
