//! Fused attention (`torch/_meta_registrations.py`).

use super::{Call, Tensor, dense};

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The result lies as the query does, other outputs are contiguous.
    Query,
    /// The result and the sums lie with the heads behind the rows.
    Cpu,
    /// The result lies with the heads behind the rows, other outputs are
    /// contiguous.
    Efficient,
    /// Gradients lie as query, key and value do, arguments 1 to 3.
    Gradients,
    /// Gradients lie with the heads behind the rows. That of a bias has rows of
    /// a multiple of 16 elements.
    GradientsByRow,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::_scaled_dot_product_flash_attention", Kind::Query),
    (
        "aten::_scaled_dot_product_flash_attention_backward",
        Kind::Gradients,
    ),
    ("aten::_scaled_dot_product_cudnn_attention", Kind::Query),
    (
        "aten::_scaled_dot_product_cudnn_attention_backward",
        Kind::Gradients,
    ),
    (
        "aten::_scaled_dot_product_efficient_attention",
        Kind::Efficient,
    ),
    (
        "aten::_scaled_dot_product_efficient_attention_backward",
        Kind::GradientsByRow,
    ),
    (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        Kind::Cpu,
    ),
    (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        Kind::GradientsByRow,
    ),
];

/// The elements that rows of a bias are padded to.
const ALIGNED: u64 = 16;

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let shape = call.shape(output)?;
    let by_row = |ndim| match shape.len() == ndim {
        true => Some(heads_behind_rows(shape)),
        false => None,
    };
    match (kind, output) {
        (Kind::Query, 0) => matching(&call.tensor(0)?, shape),
        (Kind::Cpu, 0) => like(&call.tensor(0)?, shape),
        (Kind::Cpu, 1) => by_row(3),
        (Kind::Efficient, 0) => by_row(4),
        (Kind::Query | Kind::Cpu | Kind::Efficient, _) => Some(dense::contiguous(shape)),
        (Kind::Gradients, _) => like(&call.tensor(output + 1)?, shape),
        (Kind::GradientsByRow, 0..3) => by_row(4),
        (Kind::GradientsByRow, _) => {
            let mut padded = shape.to_vec();
            let row = padded.last_mut()?;
            *row = row.next_multiple_of(ALIGNED);
            Some(dense::contiguous(&padded))
        }
    }
}

/// Dims 1 and 2, the heads and the rows, in the other order.
fn heads_behind_rows(shape: &[u64]) -> Vec<i64> {
    let mut order = dense::row_major(shape.len());
    order.swap(shape.len() - 2, shape.len() - 3);
    dense::packed(shape, &order)
}

fn like(tensor: &Tensor<'_>, shape: &[u64]) -> Option<Vec<i64>> {
    (tensor.shape == shape).then(|| dense::empty_like(shape, tensor.strides))
}

/// A result in the order of the query's dims (`alloc_with_matching_layout`).
fn matching(query: &Tensor<'_>, shape: &[u64]) -> Option<Vec<i64>> {
    if query.shape == shape || query.shape.len() != shape.len() {
        return like(query, shape);
    }
    let mut dims: Vec<usize> = (0..shape.len()).collect();
    dims.sort_by_key(|dim| match query.strides[*dim] {
        0 => i64::MAX,
        stride => stride,
    });
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for dim in dims {
        strides[dim] = step;
        step *= shape[dim] as i64;
    }
    Some(strides)
}
