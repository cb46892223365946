//! The rules, as tables of op names by family.
//!
//! | module | ops |
//! |---|---|
//! | `einsum` | what follows from letters for dims |
//! | `matmul` | matrix products, from their equation |
//! | `attention` | fused attention, from its equation |
//! | `convolution` | convolutions, from their equation |
//! | `loss` | losses that pick a class |
//! | `channels` | batch norm, group norm, dropout |
//! | `pool` | pooling windows |
//! | `resample` | upsampling and sampling at grids |
//! | `pointwise` | element-wise ops, with the partials that pass |
//! | `reduction` | sums, means, extrema |
//! | `order` | sorting, selection and scans along one dim |
//! | `normalize` | softmax and norms: whole along some dims |
//! | `linalg` | factors and solutions of batches of matrices |
//! | `fft` | Fourier transforms |
//! | `view` | views, from a map of dims |
//! | `pieces` | cat, split, slice, select, embedding |
//! | `index` | gather, scatter, reading and writing by index |
//! | `rearrange` | flips, diagonals, padding, pieces written back |
//! | `bins` | boundaries and histograms |
//! | `create` | copies and factories |
//! | `value` | ops whose result is a value of the host |
//! | `random` | random numbers |
//! | `fused` | optimizers on lists, for one entry |

pub(super) mod attention;
pub(super) mod bins;
pub(super) mod channels;
pub(super) mod convolution;
pub(super) mod create;
mod einsum;
pub(super) mod fft;
pub(super) mod fused;
pub(super) mod index;
pub(super) mod linalg;
pub(super) mod loss;
pub(super) mod matmul;
#[cfg(test)]
mod norm_tests;
pub(super) mod normalize;
pub(super) mod order;
pub(super) mod pieces;
pub(super) mod pointwise;
pub(super) mod pool;
pub(super) mod random;
pub(super) mod rearrange;
pub(super) mod reduction;
pub(super) mod resample;
#[cfg(test)]
mod tests;
pub(super) mod value;
pub(super) mod view;

pub(super) use fused::on_lists;
pub(super) use random::draws;

use super::error::PropagationError;
use super::partials::PartialId;
use super::placement::{Order, PartialOp};
use super::rule::{Query, Rule};

/// Partials that pass through ops which only move elements, or put zeros in
/// place of some: there, those that callers register do not
/// ([`Rule::without_registered_partials`]).
pub(super) const MOVED: [PartialOp; 7] = [
    PartialOp::Sum,
    PartialOp::Avg,
    PartialOp::Max,
    PartialOp::Min,
    PartialOp::Product,
    PartialOp::Norm(Order::ANY),
    PartialOp::Registered(PartialId::ANY),
];

/// A family of ops, with what tells its members apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Family {
    Matmul(matmul::Kind),
    Attention(attention::Equation),
    Convolution(convolution::Kind),
    Loss(loss::Kind),
    Channels(channels::Kind),
    Pool(pool::Kind),
    Resample(resample::Kind),
    Pointwise(pointwise::Kind),
    Reduction(reduction::Kind),
    Normalize(normalize::Kind),
    View(view::Kind),
    Pieces(pieces::Kind),
    Create(create::Kind),
    Bins(bins::Kind),
    Fft(fft::Kind),
    Index(index::Kind),
    Linalg(linalg::Op),
    Order(order::Kind),
    Rearrange(rearrange::Kind),
    Value(value::Kind),
    Random(random::Kind),
    Fused(fused::Kind),
}

impl Family {
    /// What the family's module is called.
    pub(super) fn name(self) -> String {
        let shown = format!("{self:?}");
        let variant = shown.split('(').next().unwrap_or_default();
        variant.to_lowercase()
    }

    pub(super) fn rule(self, query: &Query<'_>) -> Result<Rule, PropagationError> {
        match self {
            Family::Matmul(kind) => matmul::rule(kind, query),
            Family::Attention(equation) => attention::rule(equation, query),
            Family::Convolution(kind) => convolution::rule(kind, query),
            Family::Loss(kind) => loss::rule(kind, query),
            Family::Channels(kind) => channels::rule(kind, query),
            Family::Pool(kind) => pool::rule(kind, query),
            Family::Resample(kind) => resample::rule(kind, query),
            Family::Pointwise(kind) => pointwise::rule(kind, query),
            Family::Reduction(kind) => reduction::rule(kind, query),
            Family::Normalize(kind) => normalize::rule(kind, query),
            Family::View(kind) => view::rule(kind, query),
            Family::Pieces(kind) => pieces::rule(kind, query),
            Family::Create(kind) => create::rule(kind, query),
            Family::Bins(kind) => bins::rule(kind, query),
            Family::Fft(kind) => fft::rule(kind, query),
            Family::Index(kind) => index::rule(kind, query),
            Family::Linalg(kind) => linalg::rule(kind, query),
            Family::Order(kind) => order::rule(kind, query),
            Family::Rearrange(kind) => rearrange::rule(kind, query),
            Family::Value(kind) => value::rule(kind, query),
            Family::Random(kind) => random::rule(kind, query),
            Family::Fused(kind) => fused::rule(kind, query),
        }
    }
}

/// The element-wise ops, whose table is by overloads.
pub(super) fn element_wise() -> impl Iterator<Item = (String, Family)> {
    pointwise::ops().map(|(op, kind)| (op, Family::Pointwise(kind)))
}

/// Every op of the other tables.
pub(super) fn all() -> impl Iterator<Item = (&'static str, Family)> {
    let matmul = matmul::OPS.iter().map(|(op, k)| (*op, Family::Matmul(*k)));
    let attention = attention::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Attention(*k)));
    let convolution = convolution::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Convolution(*k)));
    let loss = loss::OPS.iter().map(|(op, k)| (*op, Family::Loss(*k)));
    let channels = channels::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Channels(*k)));
    let pool = pool::OPS.iter().map(|(op, k)| (*op, Family::Pool(*k)));
    let resample = resample::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Resample(*k)));
    let reduction = reduction::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Reduction(*k)));
    let normalize = normalize::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Normalize(*k)));
    let view = view::OPS.iter().map(|(op, k)| (*op, Family::View(*k)));
    let pieces = pieces::OPS.iter().map(|(op, k)| (*op, Family::Pieces(*k)));
    let create = create::OPS.iter().map(|(op, k)| (*op, Family::Create(*k)));
    let bins = bins::OPS.iter().map(|(op, k)| (*op, Family::Bins(*k)));
    let fft = fft::OPS.iter().map(|(op, k)| (*op, Family::Fft(*k)));
    let index = index::OPS.iter().map(|(op, k)| (*op, Family::Index(*k)));
    let linalg = linalg::OPS.iter().map(|(op, k)| (*op, Family::Linalg(*k)));
    let order = order::OPS.iter().map(|(op, k)| (*op, Family::Order(*k)));
    let rearrange = rearrange::OPS
        .iter()
        .map(|(op, k)| (*op, Family::Rearrange(*k)));
    matmul
        .chain(attention)
        .chain(convolution)
        .chain(loss)
        .chain(channels)
        .chain(pool)
        .chain(resample)
        .chain(reduction)
        .chain(normalize)
        .chain(view)
        .chain(pieces)
        .chain(create)
        .chain(bins)
        .chain(fft)
        .chain(index)
        .chain(linalg)
        .chain(order)
        .chain(rearrange)
        .chain(value::OPS.iter().map(|(op, k)| (*op, Family::Value(*k))))
        .chain(random::OPS.iter().map(|(op, k)| (*op, Family::Random(*k))))
        .chain(fused::OPS.iter().map(|(op, k)| (*op, Family::Fused(*k))))
}
