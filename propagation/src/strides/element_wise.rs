//! Element-wise ops: the output lies as the operands do.
//!
//! Fake tensors ask references in Python
//! (`compute_elementwise_output_logical_to_physical_perm` in
//! `torch/_prims_common/__init__.py`), which sort the dims by the strides of the
//! operands. A reference may compute in several steps, with casts between, and
//! kernels have fast paths of their own (`aten/src/ATen/TensorIterator.cpp`). All
//! of these agree if the operands agree. Only then are strides stated.

use super::super::rule::Arg;
use super::{Call, Tensor, dense};

/// What the output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A new tensor.
    New,
    /// The first operand, as it lies.
    Same,
    /// A copy of the first operand, or the operand itself.
    Copy,
    /// Not stated.
    Unknown,
}

/// Ops that do not make a new tensor in the order of all their operands.
const OTHERS: &[(&str, Kind)] = &[
    ("aten::_conj", Kind::Same),
    ("aten::positive", Kind::Same),
    ("aten::conj_physical", Kind::Copy),
    ("aten::copy", Kind::Copy),
    ("aten::mvlgamma", Kind::Unknown),
];

/// More tensors than any element-wise op takes.
const MAX_OPERANDS: usize = 8;

/// The kind of an element-wise op.
pub(super) fn kind(op: &str) -> Kind {
    let other = OTHERS.iter().find(|row| row.0 == op);
    other.map_or(Kind::New, |row| row.1)
}

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let shape = call.shape(output)?;
    let mut operands = [Tensor::NONE; MAX_OPERANDS];
    let mut count = 0;
    for tensor in call.tensors() {
        *operands.get_mut(count)? = tensor?;
        count += 1;
    }
    let operands = &operands[..count];
    match kind {
        Kind::New => of(shape, operands),
        Kind::Same => Some(operands.first()?.strides.to_vec()),
        Kind::Copy => {
            let first = operands.first()?;
            let copy = of(shape, std::slice::from_ref(first))?;
            (copy == first.strides).then_some(copy)
        }
        Kind::Unknown => None,
    }
}

/// The strides of a new tensor of this shape, if the operands agree on it.
pub(super) fn of(shape: &[u64], operands: &[Tensor<'_>]) -> Option<Vec<i64>> {
    let ndim = shape.len();
    if ndim < 2 {
        return (!operands.is_empty()).then(|| vec![1; ndim]);
    }
    let operands = || operands.iter().filter(|o| !o.shape.is_empty());
    let row_major = dense::row_major(ndim);
    // Other strides of dims of size 1 may be kept by one step and not by another.
    let odd = shape.contains(&1) || shape.contains(&0);
    let agree = |o: &Tensor<'_>| {
        (!odd || dense::is_plain(o.shape, o.strides))
            && pairs(ndim).all(|(p, q)| compare(o, shape, row_major[p], row_major[q]) != 1)
    };
    if operands().next().is_some() && operands().all(agree) {
        return Some(dense::contiguous(shape));
    }
    // In another order, only operands that decide about each pair of dims agree.
    if shape.iter().any(|size| *size < 2) || operands().any(|o| o.shape != shape) {
        return None;
    }
    let order = dense::sorted(ndim, |a, b| {
        operands()
            .next()
            .map_or(0, |o| compare(o, shape, a as u8, b as u8))
    });
    let decides =
        |o: &Tensor<'_>| pairs(ndim).all(|(p, q)| compare(o, shape, order[p], order[q]) == -1);
    operands()
        .all(decides)
        .then(|| dense::packed(shape, &order))
}

/// The strides of an output of an op on lists, which is made of the entries of
/// lists at its own place and of single tensors.
pub(super) fn of_entry(call: &Call<'_>, entry: usize) -> Option<Vec<i64>> {
    let shape = call.shape(entry)?;
    let mut operands = [Tensor::NONE; MAX_OPERANDS];
    let mut count = 0;
    for (at, arg) in call.query.args.iter().enumerate() {
        let place = match arg {
            Arg::Tensor(_) => 0,
            Arg::Tensors(list) if list.iter().all(Option::is_some) => entry,
            Arg::Tensors(_) => return None,
            _ => continue,
        };
        *operands.get_mut(count)? = call.tensors_at(at).nth(place)??;
        count += 1;
    }
    of(shape, &operands[..count])
}

/// Pairs of places in an order, the first inside the second.
fn pairs(ndim: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ndim).flat_map(|q| (0..q).map(move |p| (p, q)))
}

/// Which of two dims of a broadcast operand lies outside the other.
fn compare(operand: &Tensor<'_>, shape: &[u64], a: u8, b: u8) -> i8 {
    let (a, b) = (usize::from(a), usize::from(b));
    let stride = |dim: usize| match dim.checked_sub(shape.len() - operand.shape.len()) {
        Some(own) if operand.shape[own] != 1 || shape[dim] == 1 => operand.strides[own],
        _ => 0,
    };
    dense::outside((stride(a), stride(b)), (shape[a], shape[b]))
}
