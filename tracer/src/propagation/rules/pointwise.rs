//! Element-wise ops: shards of the broadcast shape pass, and the partials that
//! the op is linear or monotone in (`_ops/_pointwise_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Arg, Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;
use rote_plans::DType;

/// Which partials pass, by what the op does to its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Pass {
    /// None.
    Nothing,
    /// None, and the output is a truth value.
    Compare,
    /// Linear in the only tensor.
    Linear,
    /// Linear in all arguments together: `a + b`.
    Additive,
    /// Linear in each of two arguments: `a * b`.
    Bilinear,
    /// Linear in the first argument: `a / b`.
    LinearInFirst,
    /// Never decreases.
    NonDecreasing,
    /// Never increases.
    NonIncreasing,
    /// Linear and never increases: `-a`.
    Negative,
    /// Never decreases in either argument and picks the larger.
    Larger,
    /// Never decreases in either argument and picks the smaller.
    Smaller,
    /// Never decreases in either argument.
    Monotone,
    /// The same values again.
    Identity,
    /// Writes the second argument over the first.
    Copy,
}

/// A strategy's partials: the output's, then the inputs' (`None`: replicated).
type Row = &'static [Option<PartialOp>];

/// The strategies of a [`Pass`]; those whose length does not fit the number of
/// tensors do not apply.
fn rows(pass: Pass) -> &'static [Row] {
    const SUM: Option<PartialOp> = Some(PartialOp::Sum);
    const AVG: Option<PartialOp> = Some(PartialOp::Avg);
    const MAX: Option<PartialOp> = Some(PartialOp::Max);
    const MIN: Option<PartialOp> = Some(PartialOp::Min);
    const N: Option<PartialOp> = None;
    match pass {
        Pass::Nothing | Pass::Compare => &[],
        Pass::Linear => &[&[SUM, SUM], &[AVG, AVG]],
        Pass::Additive => &[
            &[SUM, SUM, SUM],
            &[AVG, AVG, AVG],
            &[AVG, AVG, N],
            &[MAX, MAX, N],
            &[MIN, MIN, N],
            &[AVG, N, AVG],
        ],
        Pass::Bilinear => &[
            &[SUM, SUM],
            &[AVG, AVG],
            &[SUM, SUM, N],
            &[AVG, AVG, N],
            &[SUM, N, SUM],
            &[AVG, N, AVG],
        ],
        Pass::LinearInFirst => &[&[SUM, SUM], &[AVG, AVG], &[SUM, SUM, N], &[AVG, AVG, N]],
        Pass::NonDecreasing => &[&[MAX, MAX], &[MIN, MIN]],
        Pass::NonIncreasing => &[&[MIN, MAX], &[MAX, MIN]],
        Pass::Negative => &[&[SUM, SUM], &[AVG, AVG], &[MIN, MAX], &[MAX, MIN]],
        Pass::Larger => &[
            &[MAX, MAX, N],
            &[MAX, N, MAX],
            &[MIN, MIN, N],
            &[MIN, N, MIN],
            &[MAX, MAX, MAX],
        ],
        Pass::Smaller => &[
            &[MAX, MAX, N],
            &[MAX, N, MAX],
            &[MIN, MIN, N],
            &[MIN, N, MIN],
            &[MIN, MIN, MIN],
        ],
        Pass::Monotone => &[
            &[MAX, MAX, N],
            &[MAX, N, MAX],
            &[MIN, MIN, N],
            &[MIN, N, MIN],
        ],
        Pass::Identity => &[&[SUM, SUM], &[AVG, AVG], &[MAX, MAX], &[MIN, MIN]],
        Pass::Copy => &[
            &[SUM, SUM, SUM],
            &[AVG, AVG, AVG],
            &[MAX, MAX, MAX],
            &[MIN, MIN, MIN],
        ],
    }
}

#[rustfmt::skip]
pub(super) const OPS: &[(Pass, &[&str])] = &[
    (Pass::Additive, &["aten::add.Tensor", "aten::sub.Tensor"]),
    (Pass::Bilinear, &["aten::mul.Tensor"]),
    (Pass::LinearInFirst, &["aten::div.Tensor"]),
    (Pass::Linear, &["aten::mul.Scalar", "aten::div.Scalar"]),
    (Pass::Negative, &["aten::neg"]),
    (Pass::Identity, &["aten::positive"]),
    (Pass::Copy, &["aten::copy"]),
    (Pass::NonDecreasing, &[
        "aten::asinh", "aten::atan", "aten::ceil", "aten::deg2rad", "aten::erf", "aten::exp",
        "aten::exp2", "aten::expm1", "aten::floor", "aten::rad2deg", "aten::relu", "aten::round",
        "aten::round.decimals", "aten::sgn", "aten::sigmoid", "aten::sign", "aten::sinh",
        "aten::tanh", "aten::trunc", "aten::nan_to_num", "aten::hardshrink",
    ]),
    (Pass::NonIncreasing, &["aten::erfc"]),
    (Pass::Larger, &["aten::maximum", "aten::fmax", "aten::clamp_min.Tensor"]),
    (Pass::Smaller, &["aten::minimum", "aten::fmin", "aten::clamp_max.Tensor"]),
    (Pass::Monotone, &["aten::logaddexp", "aten::logaddexp2"]),
    (Pass::Compare, &[
        "aten::eq.Tensor", "aten::eq.Scalar", "aten::ne.Tensor", "aten::ne.Scalar",
        "aten::lt.Tensor", "aten::lt.Scalar", "aten::le.Tensor", "aten::le.Scalar",
        "aten::gt.Tensor", "aten::gt.Scalar", "aten::ge.Tensor", "aten::ge.Scalar",
        "aten::isnan", "aten::isinf", "aten::isfinite", "aten::logical_not", "aten::logical_and",
        "aten::logical_or", "aten::logical_xor", "aten::signbit",
    ]),
    (Pass::Nothing, &[
        "aten::abs", "aten::acos", "aten::acosh", "aten::asin", "aten::atanh", "aten::cos",
        "aten::cosh", "aten::digamma", "aten::elu", "aten::erfinv", "aten::frac", "aten::gelu",
        "aten::hardsigmoid", "aten::hardswish", "aten::hardtanh", "aten::i0", "aten::leaky_relu",
        "aten::lgamma", "aten::log", "aten::log10", "aten::log1p", "aten::log2", "aten::logit",
        "aten::log_sigmoid_forward", "aten::mish", "aten::reciprocal", "aten::rsqrt",
        "aten::silu", "aten::sin", "aten::sinc", "aten::softplus", "aten::softshrink",
        "aten::sqrt", "aten::square", "aten::tan", "aten::bitwise_not", "aten::clamp",
        "aten::clamp_max", "aten::clamp_min", "aten::add.Scalar", "aten::sub.Scalar",
        "aten::pow.Tensor_Scalar", "aten::pow.Tensor_Tensor", "aten::pow.Scalar",
        "aten::rsub.Tensor", "aten::rsub.Scalar", "aten::atan2", "aten::bitwise_and.Tensor",
        "aten::bitwise_or.Tensor", "aten::bitwise_xor.Tensor", "aten::copysign.Tensor",
        "aten::div.Tensor_mode", "aten::fmod.Tensor", "aten::fmod.Scalar", "aten::hypot",
        "aten::remainder.Tensor", "aten::remainder.Scalar", "aten::xlogy.Tensor",
        "aten::heaviside", "aten::nextafter", "aten::addcmul", "aten::addcdiv", "aten::lerp.Scalar",
        "aten::lerp.Tensor", "aten::where.self", "aten::masked_fill.Scalar",
        "aten::masked_fill.Tensor", "aten::gelu_backward", "aten::silu_backward",
        "aten::sigmoid_backward", "aten::tanh_backward", "aten::threshold_backward",
        "aten::hardswish_backward", "aten::leaky_relu_backward", "aten::elu_backward",
    ]),
];

pub(super) fn rule(pass: Pass, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 8)?;
    let mut metas: Vec<&TensorMeta> = Vec::with_capacity(3);
    let mut shape: Vec<u64> = Vec::new();
    for (i, arg) in query.args.iter().enumerate() {
        if !matches!(arg, Arg::Tensor(_)) {
            continue;
        }
        let meta = query.tensor(i)?;
        metas.push(meta);
        if !broadcast(&mut shape, &meta.shape) {
            let expected = format!("a shape that broadcasts with {shape:?}");
            return Err(query.wrong(i, expected, meta.to_string()));
        }
    }
    if metas.is_empty() {
        query.tensor(0)?;
    }
    let dtype = match pass {
        Pass::Compare => DType(11),
        _ => promoted(&metas),
    };
    let ndim = shape.len();
    let mut rule = Rule::new(vec![TensorMeta { dtype, shape }], metas.len());
    for dim in 0..ndim {
        let size = rule.outputs[0].shape[dim];
        let inputs = metas.iter().map(|meta| {
            let missing = ndim - meta.shape.len();
            match dim.checked_sub(missing) {
                Some(own) if meta.shape[own] == size => shard(own),
                _ => R,
            }
        });
        rule.add([shard(dim)].into_iter().chain(inputs));
    }
    for row in rows(pass) {
        if row.len() == metas.len() + 1 {
            rule.add(row.iter().map(|op| op.map_or(R, partial)));
        }
    }
    Ok(rule)
}

/// Widens a shape so that another fits; false when they cannot.
fn broadcast(shape: &mut Vec<u64>, other: &[u64]) -> bool {
    while shape.len() < other.len() {
        shape.insert(0, 1);
    }
    let missing = shape.len() - other.len();
    for (own, other) in shape[missing..].iter_mut().zip(other) {
        if *own == 1 {
            *own = *other;
        } else if *other != 1 && *own != *other {
            return false;
        }
    }
    true
}

/// The first tensor with dims decides, then the widest: close enough for bytes,
/// which is all that propagation needs of an output's type.
fn promoted(metas: &[&TensorMeta]) -> DType {
    let widest = metas.iter().max_by_key(|m| {
        (
            !m.shape.is_empty(),
            m.dtype.bytes(),
            std::cmp::Reverse(m.dtype.0),
        )
    });
    widest.map_or(DType(6), |m| m.dtype)
}
