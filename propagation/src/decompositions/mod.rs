//! Decompositions of composite ops, from their definitions in
//! `aten/src/ATen/native`.
//!
//! | module | ops |
//! |---|---|
//! | `product` | products of tensors |
//! | `einsum` | products by an equation |
//! | `attention` | attention that is not fused |
//! | `network` | norms and activations |
//! | `loss` | losses |
//! | `view` | views by other names |

mod attention;
mod einsum;
mod loss;
mod network;
mod product;
mod view;

use super::decompose::{Builder, Decomposition, Part, Value};
use super::error::PropagationError;
use super::rule::{Arg, Query};

type Made = Result<Vec<Value>, PropagationError>;
type One = Result<Value, PropagationError>;

#[rustfmt::skip]
pub(super) const ALL: &[(&str, Decomposition)] = &[
    // Products.
    ("aten::matmul", product::matmul),
    ("aten::linear", product::linear),
    ("aten::einsum", einsum::einsum),
    ("aten::outer", product::outer),
    ("aten::ger", product::outer),
    ("aten::inner", product::inner),
    ("aten::bilinear", product::bilinear),
    ("aten::tensordot", product::tensordot),
    ("aten::scaled_dot_product_attention", attention::attention),
    // Norms and activations.
    ("aten::layer_norm", network::layer_norm),
    ("aten::rms_norm", network::rms_norm),
    ("aten::group_norm", network::group_norm),
    ("aten::softmax.int", |g| network::along(g, "aten::_softmax")),
    ("aten::log_softmax.int", |g| network::along(g, "aten::_log_softmax")),
    ("aten::glu", network::glu),
    ("aten::log_sigmoid", network::log_sigmoid),
    ("aten::prelu", network::prelu),
    ("aten::cosine_similarity", network::cosine_similarity),
    // Losses: (self, target, ..., reduction).
    ("aten::mse_loss", loss::mse),
    ("aten::l1_loss", loss::l1),
    ("aten::smooth_l1_loss", loss::smooth),
    ("aten::huber_loss", loss::smooth),
    ("aten::soft_margin_loss", loss::soft_margin),
    ("aten::kl_div", loss::kl_div),
    ("aten::binary_cross_entropy", loss::binary_cross_entropy),
    ("aten::binary_cross_entropy_with_logits", loss::with_logits),
    ("aten::margin_ranking_loss", loss::margin_ranking),
    ("aten::nll_loss", loss::nll),
    ("aten::cross_entropy_loss", loss::cross_entropy),
    // Views by other names.
    ("aten::narrow", view::narrow),
    ("aten::chunk", view::chunk),
    ("aten::swapaxes", |g| same(g, "aten::transpose.int")),
    ("aten::swapdims", |g| same(g, "aten::transpose.int")),
    ("aten::movedim.int", view::movedim),
    ("aten::ravel", view::ravel),
    ("aten::mT", view::last_two),
    ("aten::numpy_T", view::reversed),
    // Arithmetic by other names.
    ("aten::subtract.Tensor", |g| same(g, "aten::sub.Tensor")),
    ("aten::multiply.Tensor", |g| same(g, "aten::mul.Tensor")),
    ("aten::divide.Tensor", |g| same(g, "aten::div.Tensor")),
    ("aten::true_divide.Tensor", |g| same(g, "aten::div.Tensor")),
];

fn pair(g: &Builder<'_>) -> Result<(Value, Value), PropagationError> {
    Ok((g.input(0)?, g.input(1)?))
}

/// The same op under another name, with up to three arguments.
fn same(g: &mut Builder<'_>, op: &str) -> Made {
    let query: &Query<'_> = g.query;
    query.arity(1, 3)?;
    let part = |at: usize| match query.args.get(at) {
        Some(Arg::Tensor(_)) => g.input(at).map(Into::into),
        Some(arg) => Ok(arg.clone().into()),
        None => Ok(Arg::None.into()),
    };
    let parts = [part(0)?, part(1)?, part(2)?];
    let [a, b, c] = parts;
    Ok(vec![match query.args.len() {
        1 => g.op(op, [a])?,
        2 => g.op(op, [a, b])?,
        _ => g.op(op, [a, b, c])?,
    }])
}

/// An optional tensor as an argument.
fn part(g: &Builder<'_>, at: usize) -> Result<Part, PropagationError> {
    Ok(match g.optional(at)? {
        Some(value) => value.into(),
        None => Arg::None.into(),
    })
}

fn given(g: &Builder<'_>, at: usize) -> Arg {
    g.query.args.get(at).cloned().unwrap_or(Arg::None)
}
