//! Strides without gaps: contiguous, channels last, and in the order in which
//! other strides lie (`c10/core/TensorImpl.cpp`, `c10/core/Contiguity.h`,
//! `infer_dense_strides` in `aten/src/ATen/ExpandUtils.cpp`).

use super::super::spec::MAX_TENSOR_DIMS;

/// Dims of a tensor, innermost first.
pub(super) type Order = [u8; MAX_TENSOR_DIMS];

/// The dims of a contiguous tensor, innermost first.
pub(super) fn row_major(ndim: usize) -> Order {
    let mut order = [0; MAX_TENSOR_DIMS];
    for (at, dim) in order[..ndim].iter_mut().enumerate() {
        *dim = (ndim - 1 - at) as u8;
    }
    order
}

/// Strides of dims that lie in this order; a dim without elements counts as one
/// of a single element.
pub(super) fn packed(shape: &[u64], order: &Order) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for dim in &order[..shape.len()] {
        strides[usize::from(*dim)] = step;
        step *= shape[usize::from(*dim)].max(1) as i64;
    }
    strides
}

/// The strides of a contiguous tensor, in elements.
pub fn contiguous(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1) as i64);
    }
    strides
}

/// Strides in which the channels, dim 1, lie innermost; of tensors of 4 dims
/// and, as `channels_last_3d`, of 5.
pub(super) fn channels_last(shape: &[u64]) -> Vec<i64> {
    let mut order = row_major(shape.len());
    order[..shape.len() - 1].rotate_right(1);
    order[0] = 1;
    packed(shape, &order)
}

/// `Tensor.is_contiguous()`.
pub(super) fn is_contiguous(shape: &[u64], strides: &[i64]) -> bool {
    let mut step = 1;
    let fits = shape.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == step;
        step *= *size as i64;
        fits
    });
    fits || shape.contains(&0)
}

/// Whether strides are those of a new contiguous tensor, those of dims of size 1
/// too.
pub(super) fn is_plain(shape: &[u64], strides: &[i64]) -> bool {
    let mut step = 1;
    shape.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *stride == step;
        step *= (*size).max(1) as i64;
        fits
    })
}

/// `Tensor.is_contiguous(memory_format=torch.channels_last)` of a tensor of 4
/// dims, `channels_last_3d` of one of 5.
pub(super) fn is_channels_last(shape: &[u64], strides: &[i64], ndim: usize) -> bool {
    let mut step = 1;
    let mut inner_first = std::iter::once(1).chain((2..ndim).rev()).chain([0]);
    shape.len() == ndim
        && inner_first.all(|dim| {
            let fits = shape[dim] == 1 || strides[dim] == step;
            step *= shape[dim] as i64;
            fits
        })
}

/// Whether `Tensor.suggest_memory_format()` is that of channels last, of a tensor of 4 or 5
/// dims (`is_channels_last_strides_2d` in `c10/core/MemoryFormat.h`).
pub(super) fn suggests_channels_last(shape: &[u64], strides: &[i64]) -> bool {
    let ndim = shape.len();
    let mut least = 0;
    let inner_first = std::iter::once(1).chain((2..ndim).rev()).chain([0]);
    (4..=5).contains(&ndim)
        && strides[1] != 0
        && inner_first.into_iter().all(|dim| {
            let stride = strides[dim];
            // Contiguous N11W and channels last look the same but for this.
            let fits = shape[dim] != 0 && stride >= least && !(dim == 0 && least == strides[1]);
            least = if stride > 1 {
                stride * shape[dim] as i64
            } else {
                stride
            };
            fits
        })
}

/// Whether each element has a place of its own and no place is unused.
pub(super) fn is_dense(shape: &[u64], strides: &[i64]) -> bool {
    if is_contiguous(shape, strides) {
        return true;
    }
    // The next dim outwards is the one whose stride is the product so far.
    let mut seen = 0_u64;
    let mut step = 1;
    loop {
        let open = |dim: &usize| seen & (1 << dim) == 0 && shape[*dim] >= 2;
        let mut left = (0..shape.len()).filter(open);
        let Some(dim) = left.clone().find(|d| strides[*d] == step) else {
            return left.next().is_none();
        };
        seen |= 1 << dim;
        step *= shape[dim] as i64;
    }
}

/// Dims sorted by strides, innermost first: insertion from row-major order,
/// where a comparison may also be undecided. It is positive if the first dim
/// lies outside the second.
pub(super) fn sorted(ndim: usize, compare: impl Fn(usize, usize) -> i8) -> Order {
    let mut order = row_major(ndim);
    for next in 1..ndim {
        let mut at = next;
        for before in (0..next).rev() {
            match compare(usize::from(order[before]), usize::from(order[at])) {
                1 => {
                    order.swap(before, at);
                    at = before;
                }
                -1 => break,
                _ => {}
            }
        }
    }
    order
}

/// Which of two dims of a tensor lies outside the other: that of the larger
/// stride, then that of the larger size. A stride of 0 decides nothing.
pub(super) fn outside(strides: (i64, i64), sizes: (u64, u64)) -> i8 {
    if strides.0 == 0 || strides.1 == 0 {
        return 0;
    }
    match strides.0.cmp(&strides.1) {
        std::cmp::Ordering::Less => -1,
        std::cmp::Ordering::Greater => 1,
        std::cmp::Ordering::Equal => i8::from(sizes.0 > sizes.1),
    }
}

/// The strides of a copy, in `torch.preserve_format`.
pub(super) fn like(shape: &[u64], strides: &[i64]) -> Vec<i64> {
    if is_dense(shape, strides) {
        return strides.to_vec();
    }
    packed(
        shape,
        &sorted(shape.len(), |a, b| {
            outside((strides[a], strides[b]), (shape[a], shape[b]))
        }),
    )
}

/// The strides of `torch.empty_like`, whose dims lie as an element-wise op has
/// them (`compute_elementwise_output_logical_to_physical_perm` in
/// `torch/_prims_common/__init__.py`).
pub(super) fn empty_like(shape: &[u64], strides: &[i64]) -> Vec<i64> {
    let plain = is_contiguous(shape, strides);
    match (plain, is_channels_last(shape, strides, 4)) {
        (true, false) => contiguous(shape),
        (false, true) => channels_last(shape),
        _ => packed(
            shape,
            &sorted(shape.len(), |a, b| {
                outside((strides[a], strides[b]), (shape[a], shape[b]))
            }),
        ),
    }
}
