//! Reading and writing elements that integer tensors point at
//! (`_ops/_tensor_ops.py`).
//!
//! Indices count along the whole dim that they point into, so that dim stays
//! whole. Dims that run beside it may be sharded in all tensors alike; indices
//! may be sharded where each reads or adds on its own.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Need, Query, R, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use super::pointwise::broadcast;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    Gather,
    /// One value for all elements.
    ScatterValue,
    /// Elements of a tensor at position 3.
    Scatter(Write),
    IndexSelect,
    /// One value, a number or a tensor of one element, at position 3.
    IndexFill,
    /// Slices of a tensor at position 3.
    IndexWrite(Write),
    /// An index per dim.
    Index,
    /// The same, written with a tensor at position 2.
    IndexPut,
}

/// How written elements meet those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Write {
    /// They replace them.
    Replace,
    /// They are added.
    Add,
    /// As the word at position 4 says.
    Reduce,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::gather", Kind::Gather),
    ("aten::scatter.value", Kind::ScatterValue),
    ("aten::scatter.src", Kind::Scatter(Write::Replace)),
    ("aten::scatter_add", Kind::Scatter(Write::Add)),
    ("aten::scatter_reduce.two", Kind::Scatter(Write::Reduce)),
    ("aten::index_select", Kind::IndexSelect),
    ("aten::index_fill.int_Scalar", Kind::IndexFill),
    ("aten::index_fill.int_Tensor", Kind::IndexFill),
    ("aten::index_copy", Kind::IndexWrite(Write::Replace)),
    ("aten::index_add", Kind::IndexWrite(Write::Add)),
    ("aten::index_reduce", Kind::IndexWrite(Write::Reduce)),
    ("aten::index.Tensor", Kind::Index),
    ("aten::index_put", Kind::IndexPut),
    ("aten::_index_put_impl", Kind::IndexPut),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(2, 6)?;
    match kind {
        Kind::Gather => gather(query),
        Kind::ScatterValue => scatter(query, None),
        Kind::Scatter(write) => scatter(query, Some(write)),
        Kind::IndexSelect => index_select(query),
        Kind::IndexFill => index_fill(query),
        Kind::IndexWrite(write) => index_write(query, write),
        Kind::Index => index(query),
        Kind::IndexPut => index_put(query),
    }
}

/// A tensor of indices: integers, no mask.
fn indices<'a>(query: &Query<'a>, at: usize) -> Result<&'a TensorMeta, PropagationError> {
    let meta = query.tensor(at)?;
    // None at all may be of any type.
    if !meta.shape.contains(&0) {
        integers(query, at, meta)?;
    }
    Ok(meta)
}

fn integers(query: &Query<'_>, at: usize, meta: &TensorMeta) -> Result<(), PropagationError> {
    let none = meta.shape.contains(&0);
    if matches!(meta.dtype, DType::I32 | DType::I64) || none && !is_mask(meta) {
        return Ok(());
    }
    let expected = match is_mask(meta) {
        true => "indices of dtype i64 or i32, as the shape would depend on the values of a mask",
        false => "indices of dtype i64 or i32",
    };
    Err(query.wrong(at, expected, meta.to_string()))
}

/// Input, dim (at position 1) and indices (at position 2).
fn along<'a>(
    query: &Query<'a>,
) -> Result<(&'a TensorMeta, usize, &'a TensorMeta), PropagationError> {
    let input = query.tensor(0)?;
    let dim = query.dim(1, None, input.shape.len())?;
    Ok((input, dim, indices(query, 2)?))
}

/// Checks that indices have as many dims as a tensor (at position `at`) and reach
/// no further than it does, but for one dim.
fn reaches(
    query: &Query<'_>,
    at: usize,
    meta: &TensorMeta,
    except: Option<usize>,
    index: &TensorMeta,
) -> Result<(), PropagationError> {
    // No dims count as one dim of size 1.
    let (own, other) = (padded(meta), padded(index));
    let fits = own.len() == other.len()
        && (own.iter().zip(&other).enumerate()).all(|(d, (a, b))| b <= a || Some(d) == except);
    if fits || other.contains(&0) {
        return Ok(());
    }
    let expected = format!("a tensor that reaches as far as the indices, {index}");
    Err(query.wrong(at, expected, meta.to_string()))
}

fn padded(meta: &TensorMeta) -> Vec<u64> {
    if meta.shape.is_empty() {
        return vec![1];
    }
    meta.shape.clone()
}

/// The dims but one on which all tensors have the same size.
fn beside<'a>(dim: usize, metas: &'a [&TensorMeta]) -> impl Iterator<Item = usize> + 'a {
    let ndim = metas.iter().map(|m| m.shape.len()).min().unwrap_or(0);
    let alike = move |d: usize| metas.iter().all(|m| m.shape[d] == metas[0].shape[d]);
    (0..ndim).filter(move |d| *d != dim && alike(*d))
}

fn gather(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (input, dim, index) = along(query)?;
    reaches(query, 0, input, Some(dim), index)?;
    let output = TensorMeta {
        dtype: input.dtype,
        shape: index.shape.clone(),
    };
    let mut rule = Rule::new(vec![output], 2);
    if index.shape.get(dim) == Some(&1) && !input.shape.is_empty() {
        // One rank of each line has the element, the others add a masked zero.
        let rows = Slot::Plain(dim as u32, Need::Filled);
        rule.add([partial(PartialOp::Mask), rows, R]);
    }
    if dim < index.shape.len() {
        rule.add([shard(dim), R, shard(dim)]);
    }
    for other in beside(dim, &[input, index]) {
        rule.add([shard(other); 3]);
    }
    for op in MOVED {
        rule.add([partial(op), partial(op), R]);
    }
    Ok(rule)
}

fn scatter(query: &Query<'_>, write: Option<Write>) -> Result<Rule, PropagationError> {
    let (input, dim, index) = along(query)?;
    reaches(query, 0, input, Some(dim), index)?;
    let Some(write) = write else {
        let mut rule = Rule::new(vec![input.clone()], 2);
        for other in beside(dim, &[input, index]) {
            rule.add([shard(other); 3]);
        }
        constant(&mut rule, &[R]);
        return Ok(rule);
    };
    let source = query.tensor(3)?;
    reaches(query, 3, source, None, index)?;
    same_dtype(query, 3, input, source)?;
    let mut rule = Rule::new(vec![input.clone()], 3);
    for other in beside(dim, &[input, index, source]) {
        rule.add([shard(other); 4]);
    }
    if write == Write::Add && index.shape.get(dim) == source.shape.get(dim) {
        let sum = partial(PartialOp::Sum);
        if dim < index.shape.len() {
            rule.add([sum, sum, shard(dim), shard(dim)]);
        }
    }
    // Either of two equal indices may win, and on each rank another.
    if write != Write::Replace {
        joint(&mut rule, query, write)?;
    }
    Ok(rule)
}

fn index_select(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (input, dim, index) = along(query)?;
    let count = vector(query, 2, index)?;
    let mut output = input.clone();
    if let Some(size) = output.shape.get_mut(dim) {
        *size = count;
    }
    let ndim = input.shape.len();
    let mut rule = Rule::new(vec![output], 2);
    for other in (0..ndim).filter(|d| *d != dim) {
        rule.add([shard(other), shard(other), R]);
    }
    if ndim > 0 && index.shape.len() == 1 {
        rule.add([shard(dim), R, shard(0)]);
    }
    for op in MOVED {
        rule.add([partial(op), partial(op), R]);
    }
    Ok(rule)
}

/// How many indices there are along the one dim of a tensor.
fn vector(query: &Query<'_>, at: usize, index: &TensorMeta) -> Result<u64, PropagationError> {
    match *index.shape.as_slice() {
        [] => Ok(1),
        [count] => Ok(count),
        _ => Err(query.wrong(at, "a tensor of at most 1 dim", index.to_string())),
    }
}

fn index_fill(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (input, dim, index) = along(query)?;
    vector(query, 2, index)?;
    let value = query.tensor(3).ok();
    if let Some(value) = value.filter(|v| !v.shape.is_empty()) {
        return Err(query.wrong(3, "a tensor without dims", value.to_string()));
    }
    let inputs = 2 + usize::from(value.is_some());
    let mut rule = Rule::new(vec![input.clone()], inputs);
    for other in (0..input.shape.len()).filter(|d| *d != dim) {
        let rest = std::iter::repeat_n(R, inputs - 1);
        rule.add([shard(other); 2].into_iter().chain(rest));
    }
    if value.is_some() {
        for op in MOVED {
            rule.add([partial(op), partial(op), R, partial(op)]);
        }
    } else {
        constant(&mut rule, &[R]);
    }
    Ok(rule)
}

fn index_write(query: &Query<'_>, write: Write) -> Result<Rule, PropagationError> {
    let (input, dim, index) = along(query)?;
    let count = vector(query, 2, index)?;
    let source = query.tensor(3)?;
    same_dtype(query, 3, input, source)?;
    let mut expected = input.shape.clone();
    if let Some(size) = expected.get_mut(dim) {
        *size = count;
    }
    if source.shape != expected {
        let expected = format!("a tensor of shape {expected:?}");
        return Err(query.wrong(3, expected, source.to_string()));
    }
    let ndim = input.shape.len();
    let mut rule = Rule::new(vec![input.clone()], 3);
    for other in (0..ndim).filter(|d| *d != dim) {
        rule.add([shard(other), shard(other), R, shard(other)]);
    }
    if write == Write::Add && ndim > 0 && index.shape.len() == 1 {
        let sum = partial(PartialOp::Sum);
        rule.add([sum, sum, shard(0), shard(dim)]);
    }
    joint(&mut rule, query, write)?;
    Ok(rule)
}

fn same_dtype(
    query: &Query<'_>,
    at: usize,
    input: &TensorMeta,
    source: &TensorMeta,
) -> Result<(), PropagationError> {
    if input.dtype == source.dtype {
        return Ok(());
    }
    let expected = format!("a tensor of dtype {}, as the first argument", input.dtype);
    Err(query.wrong(at, expected, source.to_string()))
}

/// Partials of a tensor into which all ranks write the same constant.
fn constant(rule: &mut Rule, rest: &[Slot]) {
    for op in [PartialOp::Avg, PartialOp::Max, PartialOp::Min] {
        let slots = [partial(op); 2];
        rule.add(slots.into_iter().chain(rest.iter().copied()));
    }
}

/// Partials of the tensor that is written and of what is written, together.
fn joint(rule: &mut Rule, query: &Query<'_>, write: Write) -> Result<(), PropagationError> {
    let ops: &[PartialOp] = match write {
        Write::Replace => &MOVED,
        Write::Add => &[PartialOp::Sum, PartialOp::Avg],
        Write::Reduce => match query.text(4, "")? {
            "sum" => &[PartialOp::Sum],
            "prod" => &[PartialOp::Product],
            "amax" => &[PartialOp::Max],
            "amin" => &[PartialOp::Min],
            "mean" => &[],
            other => {
                let expected = "'sum', 'prod', 'mean', 'amax' or 'amin'";
                return Err(query.wrong(4, expected, format!("{other:?}")));
            }
        },
    };
    for op in ops {
        both(rule, *op, 1);
    }
    Ok(())
}

/// `indices` replicated tensors stand between what is written to and what is
/// written.
fn both(rule: &mut Rule, op: PartialOp, indices: usize) {
    let between = std::iter::repeat_n(R, indices);
    let slots = [partial(op); 2].into_iter().chain(between);
    rule.add(slots.chain([partial(op)]));
}

/// What points into an input.
#[derive(Clone, Copy)]
struct Pointer<'a> {
    /// The first of its dims.
    dim: usize,
    /// How many dims it points into: one, or those of a mask.
    count: usize,
    meta: &'a TensorMeta,
}

impl Pointer<'_> {
    fn is_mask(&self) -> bool {
        is_mask(self.meta)
    }
}

fn is_mask(meta: &TensorMeta) -> bool {
    matches!(meta.dtype, DType::BOOL | DType::U8)
}

/// Indices per dim, and where their broadcast dims stand in the result.
struct Places<'a> {
    input: &'a TensorMeta,
    indexed: Vec<Pointer<'a>>,
    /// The broadcast shape of all indices.
    shape: Vec<u64>,
    /// The first result dim that they become.
    first: usize,
}

impl<'a> Places<'a> {
    /// Masks pick one element, until [`Places::pick`] says how many.
    fn of(query: &Query<'a>, masks: bool) -> Result<Self, PropagationError> {
        let input = query.tensor(0)?;
        let list = query.optional_tensors(1)?;
        let mut indexed: Vec<Pointer<'a>> = Vec::new();
        let mut shape = Vec::new();
        let mut next = 0;
        for index in list {
            let dim = next;
            let mask = index.is_some_and(|index| masks && is_mask(index));
            next += index.filter(|_| mask).map_or(1, |mask| mask.shape.len());
            let Some(within) = input.shape.get(dim..next) else {
                let expected = format!("indices of at most {} dims", input.shape.len());
                return Err(query.wrong(1, expected, format!("indices of {next}")));
            };
            let Some(index) = index else { continue };
            indexed.push(Pointer {
                dim,
                count: next - dim,
                meta: index,
            });
            if mask {
                if index.shape != within || within.is_empty() {
                    let expected = format!("a mask of shape {within:?}");
                    return Err(query.wrong(1, expected, index.to_string()));
                }
                broadcast(&mut shape, &[1]);
                continue;
            }
            integers(query, 1, index)?;
            if !broadcast(&mut shape, &index.shape) {
                let expected = format!("indices that broadcast with {shape:?}");
                return Err(query.wrong(1, expected, index.to_string()));
            }
        }
        let beside = |pair: &[Pointer<'_>]| pair[0].dim + pair[0].count == pair[1].dim;
        let adjacent = indexed.windows(2).all(beside);
        let first = match indexed.first() {
            Some(pointer) if adjacent => pointer.dim,
            Some(_) => 0,
            None => return Err(query.wrong(1, "at least one tensor of indices", "none")),
        };
        Ok(Places {
            input,
            indexed,
            shape,
            first,
        })
    }

    fn is_indexed(&self, dim: usize) -> bool {
        let mut indexed = self.indexed.iter();
        indexed.any(|i| (i.dim..i.dim + i.count).contains(&dim))
    }

    fn has_masks(&self) -> bool {
        self.indexed.iter().any(Pointer::is_mask)
    }

    /// Takes the number of elements that masks pick from the values to write, which
    /// have one for each or one for all.
    fn pick(&mut self, values: &TensorMeta) {
        let result = self.result();
        let place = self.first + self.shape.len() - 1;
        let own = (place + values.shape.len()).checked_sub(result.len());
        if let (Some(own), Some(1)) = (own, self.shape.last()) {
            let at = self.shape.len() - 1;
            self.shape[at] = values.shape[own];
        }
    }

    /// The input dims that are not indexed, each with its dim in the result.
    fn beside(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let dims = (0..self.input.shape.len()).filter(|d| !self.is_indexed(*d));
        dims.enumerate().map(|(at, dim)| {
            let behind = at >= self.first;
            (dim, if behind { at + self.shape.len() } else { at })
        })
    }

    /// The shape of what is read or written.
    fn result(&self) -> Vec<u64> {
        let mut shape: Vec<u64> = self.beside().map(|(d, _)| self.input.shape[d]).collect();
        let behind = shape.split_off(self.first);
        shape.extend(&self.shape);
        shape.extend(behind);
        shape
    }

    /// The indices' slots where broadcast dim `dim` is sharded.
    fn sharded(&self, dim: usize) -> impl Iterator<Item = Slot> + '_ {
        self.indexed.iter().map(move |Pointer { meta, .. }| {
            let own = dim.checked_sub(self.shape.len() - meta.shape.len());
            match own {
                Some(own) if meta.shape[own] == self.shape[dim] => shard(own),
                _ => R,
            }
        })
    }
}

fn index(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let places = Places::of(query, false)?;
    let output = TensorMeta {
        dtype: places.input.dtype,
        shape: places.result(),
    };
    let count = places.indexed.len();
    let mut rule = Rule::new(vec![output], 1 + count);
    for (dim, place) in places.beside() {
        let rest = std::iter::repeat_n(R, count);
        rule.add([shard(place), shard(dim)].into_iter().chain(rest));
    }
    for dim in 0..places.shape.len() {
        let slots = [shard(places.first + dim), R].into_iter();
        rule.add(slots.chain(places.sharded(dim)));
    }
    for op in MOVED {
        let rest = std::iter::repeat_n(R, count);
        rule.add([partial(op); 2].into_iter().chain(rest));
    }
    Ok(rule)
}

fn index_put(query: &Query<'_>) -> Result<Rule, PropagationError> {
    let mut places = Places::of(query, true)?;
    let values = query.tensor(2)?;
    if places.has_masks() {
        places.pick(values);
    }
    same_dtype(query, 2, places.input, values)?;
    let result = places.result();
    let mut widened = result.clone();
    if !broadcast(&mut widened, &values.shape) || widened != result {
        let expected = format!("a tensor that broadcasts to {result:?}");
        return Err(query.wrong(2, expected, values.to_string()));
    }
    let accumulate = query.flag(3)?;
    let missing = result.len() - values.shape.len();
    let value = |place: usize| match place.checked_sub(missing) {
        Some(own) if values.shape[own] == result[place] => shard(own),
        _ => R,
    };
    let count = places.indexed.len();
    let mut rule = Rule::new(vec![places.input.clone()], 2 + count);
    for (dim, place) in places.beside() {
        let between = std::iter::repeat_n(R, count);
        let slots = [shard(dim), shard(dim)].into_iter().chain(between);
        rule.add(slots.chain([value(place)]));
    }
    if places.has_masks() {
        // A mask names each element once.
        let ops: &[PartialOp] = match accumulate {
            true => &[PartialOp::Sum, PartialOp::Avg],
            false => &MOVED,
        };
        for op in ops {
            both(&mut rule, *op, count);
        }
        // One value for all that a single mask picks: shards pick their own.
        if let ([pointer], [1]) = (places.indexed.as_slice(), places.shape.as_slice()) {
            for at in 0..pointer.count {
                rule.add([
                    shard(pointer.dim + at),
                    shard(pointer.dim + at),
                    shard(at),
                    R,
                ]);
            }
        }
    } else if accumulate {
        let sum = partial(PartialOp::Sum);
        for dim in 0..places.shape.len() {
            let slots = [sum, sum].into_iter().chain(places.sharded(dim));
            rule.add(slots.chain([value(places.first + dim)]));
        }
        both(&mut rule, PartialOp::Sum, count);
        both(&mut rule, PartialOp::Avg, count);
    } else {
        // What two equal indices write is undefined (`torch.Tensor.index_put_`).
        for op in MOVED {
            both(&mut rule, op, count);
        }
    }
    Ok(rule)
}
