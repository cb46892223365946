//! Views: the strides of their input, rearranged (`aten/src/ATen/native/TensorShape.cpp`,
//! `computeStride` in `aten/src/ATen/TensorUtils.cpp`).

use super::{Call, Tensor, dense};

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The input itself.
    Same,
    /// Another shape of the same elements.
    View,
    /// The same, or a contiguous copy if there is no such view.
    Reshape,
    Transpose,
    /// The transpose of a matrix.
    T,
    Permute,
    Expand,
    Unsqueeze,
    /// Dims of size 1 left out: all, or those at position 1.
    Squeeze,
    /// One index of a dim, or each of them in turn.
    Select,
    /// Pieces of a dim.
    Split,
    /// Every n-th element of a dim; n stands at position 4.
    Slice,
    /// Two dims made one, the last: offset, first and second dim from position
    /// 1 on.
    Diagonal,
    /// Pairs of floats for complex numbers.
    AsReal,
    /// Complex numbers for pairs of floats.
    AsComplex,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::alias", Kind::Same),
    ("aten::detach", Kind::Same),
    ("aten::detach_", Kind::Same),
    ("prims::view_of", Kind::Same),
    ("aten::view", Kind::View),
    ("aten::_unsafe_view", Kind::View),
    ("aten::reshape", Kind::Reshape),
    ("aten::transpose.int", Kind::Transpose),
    ("aten::t", Kind::T),
    ("aten::t_", Kind::T),
    ("aten::permute", Kind::Permute),
    ("aten::expand", Kind::Expand),
    ("aten::unsqueeze", Kind::Unsqueeze),
    ("aten::unsqueeze_", Kind::Unsqueeze),
    ("aten::squeeze", Kind::Squeeze),
    ("aten::squeeze_", Kind::Squeeze),
    ("aten::squeeze.dim", Kind::Squeeze),
    ("aten::squeeze_.dim", Kind::Squeeze),
    ("aten::squeeze.dims", Kind::Squeeze),
    ("aten::squeeze_.dims", Kind::Squeeze),
    ("aten::select.int", Kind::Select),
    ("aten::unbind.int", Kind::Select),
    ("aten::split.Tensor", Kind::Split),
    ("aten::split_with_sizes", Kind::Split),
    ("aten::slice.Tensor", Kind::Slice),
    ("aten::diagonal", Kind::Diagonal),
    ("aten::view_as_real", Kind::AsReal),
    ("aten::view_as_complex", Kind::AsComplex),
];

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let input = call.tensor(0)?;
    let ndim = input.shape.len();
    let query = call.query;
    let dim = |at, default, ndim| query.dim(at, default, ndim).ok();
    let mut strides = Vec::with_capacity(ndim + 1);
    strides.extend_from_slice(input.strides);
    match kind {
        Kind::Same | Kind::Split => {}
        Kind::View => return view(&input, call.shape(output)?),
        Kind::Reshape => {
            let shape = call.shape(output)?;
            return view(&input, shape).or_else(|| Some(dense::contiguous(shape)));
        }
        Kind::Transpose => {
            let (a, b) = (dim(1, None, ndim)?, dim(2, None, ndim)?);
            if ndim > 0 {
                strides.swap(a, b);
            }
        }
        Kind::T => strides.reverse(),
        Kind::Permute => {
            let order = query.list(1).ok()?;
            for (to, from) in strides.iter_mut().zip(order) {
                *to = *input.strides.get(query.wrap(1, *from, ndim).ok()?)?;
            }
        }
        Kind::Expand => return expand(&input, call.shape(output)?),
        Kind::Unsqueeze => {
            let dim = dim(1, None, ndim + 1)?;
            let inside = input.shape.get(dim).map(|size| *size as i64 * strides[dim]);
            strides.insert(dim, inside.unwrap_or(1));
        }
        Kind::Squeeze => {
            let dims = query.ints(1).ok()?;
            let named = |dim: usize| match dims {
                None => true,
                Some(dims) => (dims.iter()).any(|d| query.wrap(1, *d, ndim) == Ok(dim)),
            };
            let mut at = 0..ndim;
            strides.retain(|_| at.next().is_some_and(|d| input.shape[d] != 1 || !named(d)));
        }
        Kind::Select => {
            let dim = dim(1, Some(0), ndim)?;
            if dim < ndim {
                strides.remove(dim);
            }
        }
        Kind::Slice => {
            let dim = dim(1, Some(0), ndim)?;
            *strides.get_mut(dim)? *= query.int(4, Some(1)).ok()?;
        }
        Kind::Diagonal => {
            let (a, b) = (dim(2, Some(0), ndim)?, dim(3, Some(1), ndim)?);
            let both = strides.get(a)? + strides.get(b)?;
            strides.remove(a.max(b));
            strides.remove(a.min(b));
            strides.push(both);
        }
        Kind::AsReal => {
            strides.iter_mut().for_each(|s| *s *= 2);
            strides.push(1);
        }
        Kind::AsComplex => {
            strides.pop();
            strides.iter_mut().for_each(|s| *s /= 2);
        }
    }
    Some(strides)
}

fn expand(input: &Tensor<'_>, shape: &[u64]) -> Option<Vec<i64>> {
    let lead = shape.len().checked_sub(input.shape.len())?;
    let mut strides = vec![0; shape.len()];
    if input.shape.is_empty() {
        return Some(strides);
    }
    for dim in (0..shape.len()).rev() {
        let (size, stride) = match dim.checked_sub(lead) {
            Some(own) => (input.shape[own], input.strides[own]),
            None => {
                let inside = shape.get(dim + 1).zip(strides.get(dim + 1));
                (1, inside.map_or(1, |(size, stride)| *size as i64 * stride))
            }
        };
        strides[dim] = if size == shape[dim] { stride } else { 0 };
    }
    Some(strides)
}

/// The strides of a view of another shape: each run of dims that lie without
/// gaps is split anew. `None` if a new dim would reach over a gap.
pub(super) fn view(input: &Tensor<'_>, shape: &[u64]) -> Option<Vec<i64>> {
    let (old, old_strides) = (input.shape, input.strides);
    if old.is_empty() {
        return Some(vec![1; shape.len()]);
    }
    if old.contains(&0) {
        return Some(match old == shape {
            true => old_strides.to_vec(),
            false => dense::contiguous(shape),
        });
    }
    let mut strides = vec![0; shape.len()];
    let mut left = shape.len();
    let mut base = old_strides[old.len() - 1];
    let (mut run, mut covered) = (1, 1);
    for dim in (0..old.len()).rev() {
        run *= old[dim];
        let outer = dim.checked_sub(1);
        if outer.is_some_and(|o| old[o] == 1 || old_strides[o] == run as i64 * base) {
            continue;
        }
        while left > 0 && (covered < run || shape[left - 1] == 1) {
            left -= 1;
            strides[left] = covered as i64 * base;
            covered *= shape[left];
        }
        if covered != run {
            return None;
        }
        if let Some(outer) = outer {
            base = old_strides[outer];
            (run, covered) = (1, 1);
        }
    }
    (left == 0).then_some(strides)
}
