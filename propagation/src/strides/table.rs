//! Ops whose outputs are contiguous, or lie as a tensor does.

use super::{Call, dense};

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// All outputs are contiguous.
    Contiguous,
    /// Outputs with elements are contiguous, unless dims of size 1 have strides of their own:
    /// what is reduced over these alone may keep them.
    Filled,
    /// Contiguous if rows fill multiples of 16 bytes, to which they are padded.
    Rows,
    /// Outputs with elements are contiguous if the inputs are; in other strides
    /// they are not stated.
    Plain,
    /// The tensors of a list, joined: contiguous, or channels last if all of them are.
    Joined,
    /// Outputs lie as a copy of the tensor at a position.
    Like(usize),
}

#[rustfmt::skip]
pub(super) const OPS: &[(Kind, &[&str])] = &[
    // Products, reads and writes by index, scans, factories.
    (Kind::Contiguous, &[
        "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::dot", "aten::mv",
        "aten::addmv", "aten::vdot", "aten::addbmm", "aten::_scaled_mm", "aten::_foreach_mm", "aten::gather",
        "aten::index_select", "aten::scatter.src",
        "aten::scatter.value", "aten::scatter_add", "aten::scatter_reduce.two", "aten::embedding",
        "aten::embedding_dense_backward", "aten::_softmax", "aten::_safe_softmax", "aten::cumsum",
        "aten::cumprod", "aten::cummax", "aten::cummin", "aten::logcumsumexp", "aten::topk",
        "aten::bernoulli", "aten::bernoulli.p", "aten::multinomial", "aten::diagonal_copy",
        "aten::diag", "aten::repeat", "aten::select_backward", "aten::slice_backward",
        "aten::bucketize.Tensor", "aten::searchsorted.Tensor", "aten::histc", "aten::expand_copy",
        "aten::view_copy", "aten::nll_loss_forward", "aten::nll_loss_backward", "aten::new_zeros",
        "aten::new_empty", "aten::new_full", "aten::new_ones", "aten::zeros", "aten::ones",
        "aten::full", "aten::eye",
    ]),
    (Kind::Filled, &["aten::index_add", "aten::index_reduce"]),
    // Reductions. Of some without elements, the kept dims have strides of 0.
    (Kind::Filled, &[
        "aten::sum", "aten::sum.dim_IntList", "aten::nansum", "aten::prod", "aten::prod.dim_int",
        "aten::mean", "aten::mean.dim", "aten::max", "aten::min", "aten::amax", "aten::amin",
        "aten::max.dim", "aten::min.dim", "aten::argmax", "aten::argmin", "aten::all",
        "aten::all.dim", "aten::all.dims", "aten::any", "aten::any.dim", "aten::any.dims",
        "aten::kthvalue", "aten::median", "aten::median.dim", "aten::nanmedian",
        "aten::nanmedian.dim", "aten::mode", "aten::var.correction", "aten::std.correction",
        "aten::var_mean.correction", "aten::std_mean.correction", "aten::logsumexp",
        "aten::norm.Scalar", "aten::linalg_vector_norm", "aten::linalg__powsum", "prims::sum",
        "prims::prod", "prims::amax", "prims::amin", "prims::var",
    ]),
    // Normalization, losses, dropout.
    (Kind::Plain, &[
        "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax_backward_data",
        "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::_fused_rms_norm",
        "aten::_fused_rms_norm_backward", "aten::native_batch_norm",
        "aten::native_batch_norm_backward", "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit.no_stats", "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_with_update",
        "aten::_batch_norm_with_update_functional", "aten::native_group_norm",
        "aten::nll_loss2d_forward", "aten::nll_loss2d_backward", "aten::native_dropout",
        "aten::native_dropout_backward", "aten::rrelu_with_noise",
        "aten::rrelu_with_noise_functional",
    ]),
    // Copies in which some elements are filled.
    (Kind::Plain, &["aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::fill.Scalar"]),
    // Convolution, pooling, resampling.
    (Kind::Plain, &[
        "aten::convolution", "aten::convolution_backward", "aten::avg_pool1d", "aten::avg_pool2d",
        "aten::avg_pool3d", "aten::avg_pool2d_backward", "aten::avg_pool3d_backward",
        "aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward",
        "aten::adaptive_avg_pool1d", "aten::_adaptive_avg_pool2d",
        "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d",
        "aten::_adaptive_avg_pool3d_backward", "aten::adaptive_max_pool1d",
        "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d", "aten::max_pool1d_with_indices",
        "aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward",
        "aten::max_pool3d_with_indices", "aten::max_pool3d_with_indices_backward",
        "aten::fractional_max_pool2d", "aten::fractional_max_pool3d", "aten::max_unpool2d",
        "aten::max_unpool3d", "aten::grid_sampler_2d", "aten::grid_sampler_2d_backward",
        "aten::grid_sampler_3d", "aten::grid_sampler_3d_backward", "aten::upsample_nearest1d",
        "aten::upsample_nearest1d_backward", "aten::upsample_nearest2d",
        "aten::upsample_nearest2d_backward", "aten::upsample_nearest3d",
        "aten::upsample_nearest3d_backward", "aten::_upsample_nearest_exact1d",
        "aten::_upsample_nearest_exact1d_backward", "aten::_upsample_nearest_exact2d",
        "aten::_upsample_nearest_exact2d_backward", "aten::_upsample_nearest_exact3d",
        "aten::_upsample_nearest_exact3d_backward", "aten::upsample_linear1d",
        "aten::upsample_linear1d_backward", "aten::upsample_bilinear2d",
        "aten::upsample_bilinear2d_backward", "aten::upsample_bicubic2d",
        "aten::upsample_bicubic2d_backward", "aten::upsample_trilinear3d",
        "aten::upsample_trilinear3d_backward", "aten::_upsample_bilinear2d_aa",
        "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa",
        "aten::_upsample_bicubic2d_aa_backward", "aten::_upsample_lanczos2d_aa",
        "aten::_upsample_lanczos2d_aa_backward",
    ]),
    // Pieces, triangles, order, linear algebra, optimizers.
    (Kind::Plain, &[
        "aten::stack", "aten::split_with_sizes_copy", "aten::flip", "aten::roll",
        "aten::tril", "aten::triu", "aten::diag_embed", "aten::diagonal_scatter",
        "aten::select_scatter", "aten::slice_scatter", "aten::sort", "aten::sort.stable",
        "aten::addr", "aten::index.Tensor", "aten::index_copy", "aten::index_put", "aten::index_fill.int_Scalar",
        "aten::index_fill.int_Tensor", "aten::view.dtype", "aten::to.dtype",
        "aten::linalg_cross", "aten::linalg_lu", "aten::linalg_matrix_exp",
        "aten::linalg_pinv.atol_rtol_tensor", "aten::lu_unpack", "aten::_fused_adam",
        "aten::_fused_adam.tensor_lr", "aten::_fused_adamw", "aten::_fused_adamw.tensor_lr",
        "aten::_fused_sgd", "aten::_fused_sgd.tensor_lr",
    ]),
    (Kind::Rows, &["aten::_grouped_mm"]),
    (Kind::Joined, &["aten::cat"]),
    (Kind::Like(0), &[
        "aten::normal_functional", "prims::convert_element_type", "prims::conj_physical",
    ]),
];

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let shape = call.shape(output)?;
    let filled = || shape.len() < 2 || !shape.contains(&0);
    match kind {
        Kind::Contiguous => Some(dense::contiguous(shape)),
        Kind::Filled => {
            let is_usual =
                |t: super::Tensor<'_>| !t.shape.contains(&1) || dense::is_plain(t.shape, t.strides);
            let usual = call.tensors().all(|t| t.is_some_and(is_usual));
            (usual && filled()).then(|| dense::contiguous(shape))
        }
        Kind::Rows => {
            let meta = call.outputs[output].meta.as_ref()?;
            let row = meta.shape.last()? * meta.dtype.bytes()?;
            (row % 16 == 0 && filled()).then(|| dense::contiguous(shape))
        }
        Kind::Plain => {
            let mut inputs = call.tensors();
            let plain = inputs.all(|t| t.is_some_and(|t| dense::is_plain(t.shape, t.strides)));
            (plain && filled()).then(|| dense::contiguous(shape))
        }
        Kind::Joined => {
            let has_channels = shape.len() == 4 || shape.len() == 5;
            let mut inputs = call.tensors();
            let lies_so = |t: super::Tensor<'_>| dense::suggests_channels_last(t.shape, t.strides);
            let last = has_channels && inputs.all(|t| t.is_some_and(lies_so));
            Some(match last {
                true => dense::channels_last(shape),
                false => dense::contiguous(shape),
            })
        }
        Kind::Like(at) => {
            let tensor = call.tensor(at).filter(|t| t.shape == shape)?;
            Some(dense::like(tensor.shape, tensor.strides))
        }
    }
}
