//! Ops that rearrange, repeat, pad or crop elements along some dims, and write
//! pieces into other tensors (`_ops/_tensor_ops.py`, `_ops/_matrix_ops.py`).
//!
//! The dims that an op does not touch keep their shards. Elements only move, so
//! partials pass where every rank puts the same in between.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote::{complex_of, real};
use super::super::rule::{Arg, Query, Rule, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    Flip,
    Roll,
    Repeat,
    /// The lower or upper triangles of matrices, zeros elsewhere.
    Triangle,
    /// A vector as a diagonal matrix, or the diagonal of one.
    Diag,
    Diagonal,
    DiagEmbed,
    DiagonalScatter,
    Pad,
    SelectBackward,
    SliceBackward,
    SelectScatter,
    SliceScatter,
    AsComplex,
    AsReal,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::flip", Kind::Flip),
    ("aten::roll", Kind::Roll),
    ("aten::repeat", Kind::Repeat),
    ("aten::tril", Kind::Triangle),
    ("aten::triu", Kind::Triangle),
    ("aten::diag", Kind::Diag),
    ("aten::diagonal", Kind::Diagonal),
    ("aten::diagonal_copy", Kind::Diagonal),
    ("aten::diag_embed", Kind::DiagEmbed),
    ("aten::diagonal_scatter", Kind::DiagonalScatter),
    ("aten::constant_pad_nd", Kind::Pad),
    ("aten::select_backward", Kind::SelectBackward),
    ("aten::slice_backward", Kind::SliceBackward),
    ("aten::select_scatter", Kind::SelectScatter),
    ("aten::slice_scatter", Kind::SliceScatter),
    ("aten::view_as_complex", Kind::AsComplex),
    ("aten::view_as_real", Kind::AsReal),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 6)?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    match kind {
        Kind::Flip => {
            let flipped = each_once(query, 1, query.list(1)?, ndim)?;
            Ok(untouched(input, &flipped))
        }
        Kind::Roll => roll(query, input),
        Kind::Repeat => repeat(query, input),
        Kind::Triangle => triangle(query, input),
        Kind::Diag => diag(query, input),
        Kind::Diagonal => diagonal(query, input),
        Kind::DiagEmbed => diag_embed(query, input),
        Kind::DiagonalScatter => diagonal_scatter(query, input),
        Kind::Pad => pad(query, input),
        Kind::SelectBackward => select_backward(query, input),
        Kind::SliceBackward => slice_backward(query, input),
        Kind::SelectScatter => select_scatter(query, input),
        Kind::SliceScatter => slice_scatter(query, input),
        Kind::AsComplex => as_complex(query, input),
        Kind::AsReal => as_real(query, input),
    }
}

/// The output is like the input; dims that are not touched keep their shards.
fn untouched(input: &TensorMeta, touched: &[bool]) -> Rule {
    let kept = (0..touched.len()).filter(|d| !touched[*d]);
    let pairs: Vec<_> = kept.map(|d| (d, d)).collect();
    moved(input, input.shape.clone(), &pairs)
}

/// Elements move to a new shape; of each pair, the output dim is the input dim.
fn moved(input: &TensorMeta, shape: Vec<u64>, pairs: &[(usize, usize)]) -> Rule {
    let dtype = input.dtype;
    let mut rule = Rule::new(vec![TensorMeta { dtype, shape }], 1);
    for (to, from) in pairs {
        rule.add([shard(*to), shard(*from)]);
    }
    rule.pass(&MOVED);
    rule
}

/// The same numbers as pairs or as complex ones; these have no order, and their
/// products are others.
fn reinterpreted(output: TensorMeta, dims: usize) -> Rule {
    let mut rule = Rule::new(vec![output], 1);
    for dim in 0..dims {
        rule.add([shard(dim); 2]);
    }
    rule.pass(&[PartialOp::Sum, PartialOp::Avg]);
    rule
}

/// A source of this shape, whose dims from the front are `kept` of the input's,
/// replaces a part of the input.
fn written_into(
    query: &Query<'_>,
    input: &TensorMeta,
    shape: &[u64],
    kept: &[usize],
) -> Result<Rule, PropagationError> {
    same_shape(query, 1, shape)?;
    let mut rule = Rule::new(vec![input.clone()], 2);
    for (source, dim) in kept.iter().enumerate() {
        rule.add([shard(*dim), shard(*dim), shard(source)]);
    }
    rule.pass(&MOVED);
    Ok(rule)
}

fn roll(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    let shifts = query.list(1)?;
    let dims = query.ints(2)?.unwrap_or(&[]);
    if shifts.len() != dims.len().max(1) {
        let expected = format!("{} shifts, one per dim", dims.len().max(1));
        return Err(query.wrong(1, expected, format!("{shifts:?}")));
    }
    // Without dims the flattened tensor is rolled.
    let mut rolled = vec![dims.is_empty(); ndim];
    for dim in dims {
        let dim = query.wrap(2, *dim, ndim)?;
        if let Some(rolled) = rolled.get_mut(dim) {
            *rolled = true;
        }
    }
    Ok(untouched(input, &rolled))
}

fn triangle(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    if ndim < 2 {
        return Err(query.wrong(0, "a tensor of at least 2 dims", input.to_string()));
    }
    query.int(1, Some(0))?;
    let matrix: Vec<_> = (0..ndim).map(|d| d + 2 >= ndim).collect();
    Ok(untouched(input, &matrix).without_registered_partials())
}

fn diag(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let offset = query.int(1, Some(0))?;
    let shape = match *input.shape.as_slice() {
        [n] => {
            let shape = vec![n.saturating_add(offset.unsigned_abs()); 2];
            return Ok(moved(input, shape, &[]).without_registered_partials());
        }
        [rows, columns] => vec![diagonal_length(offset, rows, columns)],
        _ => return Err(query.wrong(0, "a tensor of 1 or 2 dims", input.to_string())),
    };
    Ok(moved(input, shape, &[]))
}

fn diagonal(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let (kept, shape) = diagonals(query, 1, input)?;
    let pairs: Vec<_> = kept.into_iter().enumerate().collect();
    Ok(moved(input, shape, &pairs))
}

fn diagonal_scatter(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let (kept, shape) = diagonals(query, 2, input)?;
    written_into(query, input, &shape, &kept)
}

fn diag_embed(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    let Some((length, lead)) = input.shape.split_last() else {
        return Err(query.wrong(0, "a tensor with dims", input.to_string()));
    };
    let (offset, a, b) = diagonal_dims(query, 1, ndim + 1, (-2, -1))?;
    let size = length.saturating_add(offset.unsigned_abs());
    let mut shape = lead.to_vec();
    for dim in [a.min(b), a.max(b)] {
        shape.insert(dim, size);
    }
    let kept = (0..ndim + 1).filter(|d| *d != a && *d != b);
    let pairs: Vec<_> = kept.enumerate().map(|(from, to)| (to, from)).collect();
    Ok(moved(input, shape, &pairs).without_registered_partials())
}

fn select_backward(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    let (sizes, dim) = backward_of(query, ndim + 1)?;
    let mut expected = sizes.clone();
    expected.remove(dim);
    same_shape(query, 0, &expected)?;
    index_in(query, 3, sizes[dim])?;
    let pairs: Vec<_> = (0..ndim).map(|d| (d + usize::from(d >= dim), d)).collect();
    Ok(moved(input, sizes, &pairs).without_registered_partials())
}

fn slice_backward(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    let (sizes, dim) = backward_of(query, ndim)?;
    let mut expected = sizes.clone();
    expected[dim] = slice_length(query, 3, sizes[dim])?;
    same_shape(query, 0, &expected)?;
    let kept = (0..ndim).filter(|d| *d != dim || expected == sizes);
    let pairs: Vec<_> = kept.map(|d| (d, d)).collect();
    Ok(moved(input, sizes, &pairs).without_registered_partials())
}

fn select_scatter(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let dim = apart(query, 2, None, input)?;
    index_in(query, 3, input.shape[dim])?;
    let kept: Vec<_> = (0..input.shape.len()).filter(|d| *d != dim).collect();
    let shape: Vec<_> = kept.iter().map(|d| input.shape[*d]).collect();
    written_into(query, input, &shape, &kept)
}

fn slice_scatter(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let dim = apart(query, 2, Some(0), input)?;
    let mut shape = input.shape.clone();
    shape[dim] = slice_length(query, 3, input.shape[dim])?;
    same_shape(query, 1, &shape)?;
    let mut rule = Rule::new(vec![input.clone()], 2);
    for other in (0..shape.len()).filter(|d| *d != dim || shape == input.shape) {
        rule.add([shard(other); 3]);
    }
    rule.pass(&MOVED);
    Ok(rule)
}

fn as_complex(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let floats = [DType::F16, DType::F32, DType::F64];
    let (Some((2, lead)), true) = (input.shape.split_last(), floats.contains(&input.dtype)) else {
        let expected = "a real floating point tensor whose last dim is of size 2";
        return Err(query.wrong(0, expected, input.to_string()));
    };
    let (dtype, shape) = (complex_of(input.dtype), lead.to_vec());
    Ok(reinterpreted(TensorMeta { dtype, shape }, lead.len()))
}

fn as_real(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let dtype = real(input.dtype);
    if dtype == input.dtype {
        return Err(query.wrong(0, "a complex tensor", input.to_string()));
    }
    let shape = input.shape.iter().copied().chain([2]).collect();
    Ok(reinterpreted(
        TensorMeta { dtype, shape },
        input.shape.len(),
    ))
}

fn repeat(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let counts = query.list(1)?;
    let wrong = || {
        let expected = format!("a count from 0 for each dim of {input}, more in front");
        query.wrong(1, expected, format!("{counts:?}"))
    };
    let lead = counts
        .len()
        .checked_sub(input.shape.len())
        .ok_or_else(wrong)?;
    let (mut shape, mut pairs) = (Vec::with_capacity(counts.len()), Vec::new());
    for (to, count) in counts.iter().enumerate() {
        let count = u64::try_from(*count).map_err(|_| wrong())?;
        let size = to.checked_sub(lead).map_or(1, |from| input.shape[from]);
        shape.push(size.checked_mul(count).ok_or_else(wrong)?);
        if let (Some(from), 1) = (to.checked_sub(lead), count) {
            pairs.push((to, from));
        }
    }
    Ok(moved(input, shape, &pairs))
}

fn pad(query: &Query<'_>, input: &TensorMeta) -> Result<Rule, PropagationError> {
    let ndim = input.shape.len();
    let widths = query.list(1)?;
    if widths.len() % 2 != 0 || widths.len() / 2 > ndim {
        let expected = format!("two widths for each of up to {ndim} dims");
        return Err(query.wrong(1, expected, format!("{widths:?}")));
    }
    let value = match query.args.get(2) {
        Some(Arg::Bool(truth)) => f64::from(u8::from(*truth)),
        Some(Arg::Complex(re, 0.0)) => *re,
        Some(Arg::Complex(..)) => f64::NAN,
        _ => query.float(2, Some(0.0))?,
    };
    let mut shape = input.shape.clone();
    let mut touched = vec![false; ndim];
    // From the last dim on; negative widths crop.
    for (at, pair) in widths.chunks_exact(2).enumerate() {
        let dim = ndim - 1 - at;
        touched[dim] = pair != [0, 0];
        let size = i128::from(shape[dim]) + i128::from(pair[0]) + i128::from(pair[1]);
        let size = u64::try_from(size);
        shape[dim] = size.map_err(|_| {
            let expected = format!("widths that leave something of {input}");
            query.wrong(1, expected, format!("{widths:?}"))
        })?;
    }
    let dtype = input.dtype;
    let mut rule = Rule::new(vec![TensorMeta { dtype, shape }], 1);
    for dim in (0..ndim).filter(|d| !touched[*d]) {
        rule.add([shard(dim); 2]);
    }
    // Every rank pads with the value: it must be what its copies combine to.
    let pads = widths.iter().any(|w| *w > 0);
    for op in MOVED {
        let stays = match op {
            PartialOp::Sum | PartialOp::Mask | PartialOp::Norm(_) => value == 0.0,
            PartialOp::Product => value == 0.0 || value == 1.0,
            PartialOp::Avg | PartialOp::Max | PartialOp::Min => true,
            PartialOp::Registered(_) => false,
        };
        if stays || !pads {
            rule.pass(&[op]);
        }
    }
    Ok(rule)
}

/// The shape (at position 1) and dim (at position 2) of what was selected from.
fn backward_of(query: &Query<'_>, ndim: usize) -> Result<(Vec<u64>, usize), PropagationError> {
    let sizes = query.list(1)?;
    let shape: Option<Vec<u64>> = sizes.iter().map(|s| u64::try_from(*s).ok()).collect();
    let shape = shape.filter(|s| s.len() == ndim && ndim > 0);
    let shape =
        shape.ok_or_else(|| query.wrong(1, format!("{ndim} sizes"), format!("{sizes:?}")))?;
    Ok((shape, query.dim(2, None, ndim)?))
}

fn each_once(
    query: &Query<'_>,
    at: usize,
    dims: &[i64],
    ndim: usize,
) -> Result<Vec<bool>, PropagationError> {
    let mut seen = vec![false; ndim];
    for dim in dims {
        let dim = query.wrap(at, *dim, ndim)?;
        if let Some(seen) = seen.get_mut(dim) {
            if std::mem::replace(seen, true) {
                return Err(query.wrong(at, "each dim once", format!("{dims:?}")));
            }
        }
    }
    Ok(seen)
}

/// Offset and the two dims of a diagonal, from a position on.
fn diagonal_dims(
    query: &Query<'_>,
    at: usize,
    ndim: usize,
    default: (i64, i64),
) -> Result<(i64, usize, usize), PropagationError> {
    if ndim < 2 {
        let found = query.tensor(0)?.to_string();
        return Err(query.wrong(0, "a tensor of at least 2 dims", found));
    }
    let offset = query.int(at, Some(0))?;
    let a = query.dim(at + 1, Some(default.0), ndim)?;
    let b = query.dim(at + 2, Some(default.1), ndim)?;
    if a == b {
        return Err(query.wrong(at + 2, format!("a dim other than {a}"), b.to_string()));
    }
    Ok((offset, a, b))
}

/// The dims of the input beside those of its diagonals, in order, and the shape
/// of these diagonals. `at`: where their offset and two dims stand.
fn diagonals(
    query: &Query<'_>,
    at: usize,
    input: &TensorMeta,
) -> Result<(Vec<usize>, Vec<u64>), PropagationError> {
    let ndim = input.shape.len();
    let (offset, a, b) = diagonal_dims(query, at, ndim, (0, 1))?;
    let kept: Vec<_> = (0..ndim).filter(|d| *d != a && *d != b).collect();
    let length = diagonal_length(offset, input.shape[a], input.shape[b]);
    let shape = kept.iter().map(|d| input.shape[*d]).chain([length]);
    let shape = shape.collect();
    Ok((kept, shape))
}

fn diagonal_length(offset: i64, rows: u64, columns: u64) -> u64 {
    let skip = offset.unsigned_abs();
    let (rows, columns) = if offset >= 0 {
        (rows, columns.saturating_sub(skip))
    } else {
        (rows.saturating_sub(skip), columns)
    };
    rows.min(columns)
}

/// The dim at a position of a tensor that has dims.
fn apart(
    query: &Query<'_>,
    at: usize,
    default: Option<i64>,
    input: &TensorMeta,
) -> Result<usize, PropagationError> {
    if input.shape.is_empty() {
        return Err(query.wrong(0, "a tensor with dims", input.to_string()));
    }
    query.dim(at, default, input.shape.len())
}

fn index_in(query: &Query<'_>, at: usize, size: u64) -> Result<(), PropagationError> {
    let index = query.int(at, None)?;
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    if (-size..size).contains(&index) {
        return Ok(());
    }
    let expected = format!("an index from {} to {}", -size, size - 1);
    Err(query.wrong(at, expected, index.to_string()))
}

/// How many elements start, end and step (from a position on) take of a dim.
pub(super) fn slice_length(
    query: &Query<'_>,
    at: usize,
    size: u64,
) -> Result<u64, PropagationError> {
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let clamp = |n: i64| (if n < 0 { n.saturating_add(size) } else { n }).clamp(0, size);
    let start = clamp(query.int(at, Some(0))?);
    let end = clamp(query.int(at + 1, Some(i64::MAX))?).max(start);
    let step = query.int(at + 2, Some(1))?;
    if step < 1 {
        return Err(query.wrong(at + 2, "a positive step", step.to_string()));
    }
    Ok((end - start).unsigned_abs().div_ceil(step.unsigned_abs()))
}

fn same_shape(query: &Query<'_>, at: usize, shape: &[u64]) -> Result<(), PropagationError> {
    let meta = query.tensor(at)?;
    if meta.shape == shape {
        return Ok(());
    }
    Err(query.wrong(at, format!("a tensor of shape {shape:?}"), meta.to_string()))
}
