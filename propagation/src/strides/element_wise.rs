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
    /// A new tensor of two operands, both of which count also if one of them is
    /// broadcast.
    Both,
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
    ("aten::add.Tensor", Kind::Both),
    ("aten::sub.Tensor", Kind::Both),
    ("aten::mul.Tensor", Kind::Both),
    ("aten::div.Tensor", Kind::Both),
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
        Kind::New | Kind::Both => of(shape, operands, kind),
        Kind::Same => Some(operands.first()?.strides.to_vec()),
        Kind::Copy => {
            let first = operands.first()?;
            let copy = of(shape, std::slice::from_ref(first), kind)?;
            (copy == first.strides).then_some(copy)
        }
        Kind::Unknown => None,
    }
}

/// The strides of a new tensor of this shape, if the operands agree on it.
fn of(shape: &[u64], operands: &[Tensor<'_>], kind: Kind) -> Option<Vec<i64>> {
    let ndim = shape.len();
    if ndim < 2 {
        return (!operands.is_empty()).then(|| vec![1; ndim]);
    }
    let operands = || operands.iter().filter(|o| !o.shape.is_empty());
    let row_major = dense::row_major(ndim);
    // Other strides of dims of size 1 may be kept by one step and not by another.
    let empty = shape.contains(&0);
    let odd = empty || shape.contains(&1);
    let agree = |o: &Tensor<'_>| {
        let plain = dense::is_plain(o.shape, o.strides);
        let inside = |p, q| compare(o, shape, row_major[p], row_major[q]) != 1;
        plain && !empty || (plain || !odd) && pairs(ndim).all(|(p, q)| inside(p, q))
    };
    if operands().next().is_some() && operands().all(agree) {
        return Some(dense::contiguous(shape));
    }
    // In another order, the operands of the whole shape decide about each pair of
    // dims. Some ops take the order of one operand alone, which must be whole.
    let whole = |o: &&Tensor<'_>| o.shape == shape;
    let parts = usize::from(kind == Kind::Both);
    if shape.iter().any(|size| *size < 2) || operands().filter(|o| !whole(o)).count() > parts {
        return None;
    }
    let first = operands().find(whole)?;
    let order = dense::sorted(ndim, |a, b| compare(first, shape, a as u8, b as u8));
    let agree = |o: &Tensor<'_>| {
        pairs(ndim).all(|(p, q)| {
            let strides = (stride(o, shape, order[p]), stride(o, shape, order[q]));
            let broadcast = o.shape != shape && (strides.0 == 0 || strides.1 == 0);
            broadcast || 0 < strides.0 && strides.0 < strides.1
        })
    };
    operands().all(agree).then(|| dense::packed(shape, &order))
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
    of(shape, &operands[..count], Kind::New)
}

/// Pairs of places in an order, the first inside the second.
fn pairs(ndim: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ndim).flat_map(|q| (0..q).map(move |p| (p, q)))
}

/// Which of two dims of a broadcast operand lies outside the other.
fn compare(operand: &Tensor<'_>, shape: &[u64], a: u8, b: u8) -> i8 {
    let strides = (stride(operand, shape, a), stride(operand, shape, b));
    dense::outside(strides, (shape[usize::from(a)], shape[usize::from(b)]))
}

/// The stride of an operand in a dim of the broadcast shape.
fn stride(operand: &Tensor<'_>, shape: &[u64], dim: u8) -> i64 {
    let dim = usize::from(dim);
    match dim.checked_sub(shape.len() - operand.shape.len()) {
        Some(own) if operand.shape[own] != 1 || shape[dim] == 1 => operand.strides[own],
        _ => 0,
    }
}
