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
    /// A new tensor, made by `TensorIterator` or a reference that sorts as it does, so that
    /// operands in different orders have an answer too.
    Ordered,
    /// The first operand, as it lies.
    Same,
    /// A copy of the first operand, or the operand itself.
    Copy,
    /// Not stated.
    Unknown,
}

/// Ops that are no plain [`Kind::New`].
#[rustfmt::skip]
const OTHERS: &[(Kind, &[&str])] = &[
    (Kind::Same, &["aten::_conj", "aten::positive"]),
    (Kind::Copy, &["aten::conj_physical", "aten::copy"]),
    (Kind::Unknown, &["aten::mvlgamma"]),
    (Kind::Ordered, &[
        "aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor", "aten::div.Tensor",
        "aten::maximum", "aten::minimum", "aten::pow.Tensor_Tensor", "aten::where.self",
        "aten::eq.Tensor", "aten::ne.Tensor", "aten::lt.Tensor", "aten::le.Tensor",
        "aten::gt.Tensor", "aten::ge.Tensor", "aten::bitwise_and.Tensor",
        "aten::bitwise_or.Tensor", "aten::bitwise_xor.Tensor", "aten::remainder.Tensor",
        "aten::fmod.Tensor", "aten::atan2", "aten::addcmul", "aten::addcdiv",
        "aten::lerp.Scalar", "aten::lerp.Tensor", "aten::clamp_min.Tensor",
        "aten::clamp_max.Tensor", "aten::gelu_backward", "aten::silu_backward",
        "aten::sigmoid_backward", "aten::tanh_backward",
    ]),
];

/// More tensors than any element-wise op takes.
const MAX_OPERANDS: usize = 8;

/// The kind of an element-wise op.
pub(super) fn kind(op: &str) -> Kind {
    let other = OTHERS.iter().find(|(_, ops)| ops.contains(&op));
    other.map_or(Kind::New, |(kind, _)| *kind)
}

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let shape = call.shape(output)?;
    let mut operands = [Tensor::NONE; MAX_OPERANDS];
    let mut count = 0;
    for tensor in call.tensors() {
        *operands.get_mut(count)? = tensor?;
        count += 1;
    }
    made(kind, shape, &operands[..count])
}

/// The strides of an output of this shape.
fn made(kind: Kind, shape: &[u64], operands: &[Tensor<'_>]) -> Option<Vec<i64>> {
    match kind {
        Kind::New | Kind::Ordered => of(shape, operands, kind),
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
    if shape.iter().any(|size| *size < 2) {
        return None;
    }
    if kind == Kind::Ordered {
        return ordered(shape, operands());
    }
    if operands().any(|o| !whole(&o)) {
        return None;
    }
    let first = operands().next()?;
    let order = dense::sorted(ndim, |a, b| compare(first, shape, a as u8, b as u8));
    let agree = |o: &Tensor<'_>| {
        pairs(ndim).all(|(p, q)| {
            let strides = (stride(o, shape, order[p]), stride(o, shape, order[q]));
            0 < strides.0 && strides.0 < strides.1
        })
    };
    operands().all(agree).then(|| dense::packed(shape, &order))
}

/// The strides of a new tensor of this shape, no size of which is below 2: the first
/// operand that is not broadcast in either of two dims decides which of them lies outside.
///
/// Operands whose elements may overlap, and those of which none has the whole shape, are
/// copied first by some ops.
fn ordered<'a>(
    shape: &[u64],
    operands: impl Iterator<Item = &'a Tensor<'a>> + Clone,
) -> Option<Vec<i64>> {
    let ndim = shape.len();
    let dims = |o: &Tensor<'_>| ndim - o.shape.len()..ndim;
    let is_apart = |o: &Tensor<'_>| {
        let mut own = dims(o).filter(|dim| o.shape[dim + o.shape.len() - ndim] != 1);
        own.all(|a| {
            let at = |dim: usize| stride(o, shape, dim as u8);
            at(a) > 0 && dims(o).all(|b| a == b || at(a) != at(b))
        })
    };
    if !operands.clone().all(is_apart) || !operands.clone().any(|o| o.shape == shape) {
        return None;
    }
    let order = dense::sorted(ndim, |a, b| {
        let mut found = operands
            .clone()
            .map(|o| compare(o, shape, a as u8, b as u8));
        found.find(|found| *found != 0).unwrap_or(0)
    });
    Some(dense::packed(shape, &order))
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
    let kind = match call.query.op {
        "aten::_foreach_clone" => Kind::Copy,
        _ => Kind::New,
    };
    made(kind, shape, &operands[..count])
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
