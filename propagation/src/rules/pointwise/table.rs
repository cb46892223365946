//! The element-wise ops, by element type of the output and by what passes.
//!
//! Where PyTorch lets fewer partials pass than mathematics does, the entry says
//! what mathematics does; functions that are monotone only where they are
//! defined are not listed as monotone.

use super::Out;
use super::pass::{Given, Joint, NOTHING, Pass};

/// Ops that have the same overloads and do the same to partials.
pub(super) struct Group {
    pub(super) out: Out,
    pub(super) pass: Pass,
    pub(super) overloads: &'static [&'static str],
    pub(super) names: &'static [&'static str],
}

const fn group(
    out: Out,
    pass: Pass,
    overloads: &'static [&'static str],
    names: &'static [&'static str],
) -> Group {
    Group {
        out,
        pass,
        overloads,
        names,
    }
}

/// `a + b`, with a factor at position 2.
const ADD: Pass = Pass {
    linear: &[&[0, 1]],
    affine: &[0, 1],
    rises: &[0, 1],
    given: Given::Factor(2, 1),
    ..NOTHING
};
const SUB: Pass = Pass {
    rises: &[0],
    falls: &[1],
    ..ADD
};
/// `b - a`, with a factor of a at position 2.
const RSUB: Pass = Pass {
    rises: &[1],
    falls: &[0],
    given: Given::Factor(2, 0),
    ..ADD
};
/// A number is added, or the tensor is subtracted from a number.
const SHIFT: Pass = Pass {
    affine: &[0],
    rises: &[0],
    given: Given::Factor(2, 1),
    ..NOTHING
};
const RSHIFT: Pass = Pass {
    affine: &[0],
    falls: &[0],
    given: Given::Factor(2, 0),
    ..NOTHING
};
const MUL: Pass = Pass {
    linear: &[&[0], &[1]],
    rises: &[0],
    given: Given::Scaled,
    ..NOTHING
};
const DIV: Pass = Pass {
    linear: &[&[0]],
    ..MUL
};
/// Linear in the first tensor: gradients of element-wise ops.
const FIRST: Pass = Pass {
    linear: &[&[0]],
    ..NOTHING
};
const SCALED: Pass = Pass {
    linear: &[&[0]],
    rises: &[0],
    ..NOTHING
};
const NEGATED: Pass = Pass {
    linear: &[&[0]],
    falls: &[0],
    ..NOTHING
};
const RISES: Pass = Pass {
    rises: &[0],
    ..NOTHING
};
const FALLS: Pass = Pass {
    falls: &[0],
    ..NOTHING
};
/// Falls where it is defined, above 0.
const FALLS_ABOVE_0: Pass = Pass {
    falls: &[0],
    given: Given::Positive,
    ..NOTHING
};
const RISES_IN_ALL: Pass = Pass {
    rises: &[0, 1, 2],
    ..NOTHING
};
const LARGER: Pass = Pass {
    rises: &[0, 1],
    joint: Joint::Max,
    ..NOTHING
};
const SMALLER: Pass = Pass {
    rises: &[0, 1],
    joint: Joint::Min,
    ..NOTHING
};
/// Writes the second tensor over the first.
const COPY: Pass = Pass {
    linear: &[&[0, 1], &[1]],
    rises: &[1],
    joint: Joint::Second,
    ..NOTHING
};
/// The second tensor or the third, by the first.
const WHERE: Pass = Pass {
    linear: &[&[1, 2]],
    affine: &[1, 2],
    rises: &[1, 2],
    joint: Joint::Chosen,
    ..NOTHING
};
/// The first tensor, or the third where the second says so.
const FILL: Pass = Pass {
    linear: &[&[0, 2]],
    affine: &[0, 2],
    rises: &[0, 2],
    ..NOTHING
};
const FILL_NUMBER: Pass = Pass {
    linear: &[&[0]],
    affine: &[0],
    rises: &[0],
    given: Given::ZeroFill,
    ..NOTHING
};
/// `a + b * c`
const ADDCMUL: Pass = Pass {
    linear: &[&[0, 1], &[0, 2]],
    affine: &[0, 1, 2],
    rises: &[0],
    ..NOTHING
};
/// `a + b / c`
const ADDCDIV: Pass = Pass {
    linear: &[&[0, 1]],
    affine: &[0, 1],
    rises: &[0],
    ..NOTHING
};
/// `a + w * (b - a)`
const LERP: Pass = Pass {
    linear: &[&[0, 1]],
    affine: &[0, 1, 2],
    ..NOTHING
};
const LERP_NUMBER: Pass = Pass {
    affine: &[0, 1],
    rises: &[0, 1],
    given: Given::Weight,
    ..LERP
};

const fn rises_if(given: Given) -> Pass {
    Pass { given, ..RISES }
}

#[rustfmt::skip]
pub(super) const OPS: &[Group] = &[
    // Arithmetic.
    group(Out::Promoted, ADD, &["Tensor"], &["aten::add"]),
    group(Out::Promoted, SUB, &["Tensor"], &["aten::sub"]),
    group(Out::Promoted, RSUB, &["Tensor"], &["aten::rsub"]),
    group(Out::Promoted, SHIFT, &["Scalar"], &["aten::add", "aten::sub"]),
    group(Out::Promoted, RSHIFT, &["Scalar"], &["aten::rsub"]),
    group(Out::Promoted, MUL, &["Tensor", "Scalar"], &["aten::mul"]),
    group(Out::Float, DIV, &["Tensor", "Scalar"], &["aten::div"]),
    group(Out::Float, DIV, &["Tensor"], &["aten::true_divide"]),
    group(Out::Quotient, NOTHING, &["Tensor_mode", "Scalar_mode"], &["aten::div"]),
    group(Out::Promoted, NOTHING, &[""], &["prims::div"]),
    group(Out::Promoted, NEGATED, &[""], &["aten::neg"]),
    group(Out::Promoted, SCALED, &[""], &[
        "aten::positive", "aten::conj_physical", "aten::_conj", "prims::conj_physical",
    ]),
    group(Out::Float, SCALED, &[""], &["aten::deg2rad", "aten::rad2deg"]),
    group(Out::Promoted, ADDCMUL, &[""], &["aten::addcmul"]),
    group(Out::Promoted, ADDCDIV, &[""], &["aten::addcdiv"]),
    group(Out::Promoted, LERP, &["Tensor"], &["aten::lerp"]),
    group(Out::First, LERP_NUMBER, &["Scalar"], &["aten::lerp"]),
    group(Out::Promoted, NOTHING, &["Tensor_Tensor", "Tensor_Scalar", "Scalar"], &["aten::pow"]),
    group(Out::Double, NOTHING, &["Tensor_Tensor", "Tensor_Scalar", "Scalar"], &["aten::float_power"]),
    group(Out::Promoted, NOTHING, &["Tensor", "Scalar"], &["aten::fmod"]),
    group(Out::Promoted, NOTHING, &["Tensor", "Scalar", "Scalar_Tensor"], &["aten::remainder"]),
    group(Out::Promoted, NOTHING, &[""], &[
        "aten::gcd", "aten::lcm", "aten::hypot", "aten::nextafter", "aten::frac",
        "prims::gcd", "prims::hypot", "prims::nextafter",
    ]),
    group(Out::Number, NOTHING, &[""], &["aten::square"]),
    group(Out::Real, NOTHING, &[""], &["aten::abs", "prims::abs"]),
    group(Out::RealFloat, NOTHING, &[""], &["aten::angle"]),
    group(Out::Parts, NOTHING, &["Tensor"], &["aten::frexp"]),
    group(Out::Parts, NOTHING, &[""], &["prims::frexp"]),
    group(Out::Float, SCALED, &["Tensor"], &["aten::ldexp"]),

    // Choice.
    group(Out::Promoted, LARGER, &[""], &[
        "aten::maximum", "aten::fmax", "prims::maximum", "prims::fmax",
    ]),
    group(Out::Promoted, SMALLER, &[""], &[
        "aten::minimum", "aten::fmin", "prims::minimum", "prims::fmin",
    ]),
    group(Out::Promoted, LARGER, &["other"], &["aten::max"]),
    group(Out::Promoted, SMALLER, &["other"], &["aten::min"]),
    group(Out::Promoted, LARGER, &["Tensor"], &["aten::clamp_min"]),
    group(Out::Promoted, SMALLER, &["Tensor"], &["aten::clamp_max"]),
    group(Out::Promoted, RISES, &[""], &["aten::clamp_min", "aten::clamp_max"]),
    group(Out::Promoted, RISES, &[""], &["aten::clamp", "aten::clip"]),
    group(Out::Promoted, RISES_IN_ALL, &["Tensor"], &["aten::clamp", "aten::clip"]),
    group(Out::Branches, WHERE, &["self"], &["aten::where"]),
    group(Out::First, FILL, &["Tensor"], &["aten::masked_fill"]),
    group(Out::First, FILL_NUMBER, &["Scalar"], &["aten::masked_fill"]),
    group(Out::First, COPY, &[""], &["aten::copy"]),
    group(Out::First, rises_if(Given::Below), &[""], &["aten::threshold"]),
    group(Out::First, rises_if(Given::Absent(&[2, 3])), &[""], &["aten::nan_to_num"]),
    group(Out::First, NOTHING, &[""], &["aten::heaviside"]),

    // Rounding, signs, steps.
    group(Out::First, RISES, &[""], &[
        "aten::ceil", "aten::floor", "aten::round", "aten::trunc", "aten::sign", "aten::sgn",
        "prims::sign", "prims::trunc",
    ]),
    group(Out::First, RISES, &["decimals"], &["aten::round"]),
    group(Out::Float, NOTHING, &["Tensor", "Scalar"], &["aten::copysign"]),

    // Truth values.
    group(Out::Bool, NOTHING, &["Tensor", "Scalar"], &[
        "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge",
    ]),
    group(Out::Bool, NOTHING, &[""], &[
        "aten::isnan", "aten::isinf", "aten::isposinf", "aten::isneginf", "aten::isfinite",
        "aten::signbit", "aten::logical_not", "aten::logical_and", "aten::logical_or",
        "aten::logical_xor", "prims::ne", "prims::signbit",
    ]),

    // Bits.
    group(Out::Promoted, NOTHING, &[""], &["aten::bitwise_not", "prims::bitwise_not"]),
    group(Out::Promoted, NOTHING, &["Tensor", "Scalar", "Scalar_Tensor"], &[
        "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor",
    ]),
    group(Out::Promoted, NOTHING, &["Tensor", "Tensor_Scalar", "Scalar_Tensor"], &[
        "aten::bitwise_left_shift", "aten::bitwise_right_shift",
    ]),
    group(Out::Promoted, NOTHING, &["Tensor", "Scalar"], &[
        "aten::__lshift__", "aten::__rshift__", "aten::__and__", "aten::__or__", "aten::__xor__",
    ]),

    // Exponentials, logarithms, angles.
    group(Out::Float, RISES, &[""], &[
        "aten::exp", "aten::exp2", "aten::expm1", "aten::asinh", "aten::atan", "aten::sinh",
        "aten::tanh", "aten::erf", "aten::sigmoid", "prims::exp2",
    ]),
    group(Out::Float, FALLS, &[""], &["aten::erfc", "aten::special_erfcx", "prims::erfcx"]),
    group(Out::Promoted, Pass { rises: &[0, 1], ..NOTHING }, &[""], &[
        "aten::logaddexp", "aten::logaddexp2",
    ]),
    group(Out::Float, NOTHING, &[""], &[
        "aten::acos", "aten::acosh", "aten::asin", "aten::atanh", "aten::cos", "aten::cosh",
        "aten::digamma", "aten::erfinv", "aten::i0", "aten::lgamma", "aten::log", "aten::log10",
        "aten::log1p", "aten::log2", "aten::logit", "aten::mvlgamma", "aten::polygamma",
        "aten::reciprocal", "aten::rsqrt", "aten::sin", "aten::sinc", "aten::sqrt", "aten::tan",
        "aten::atan2", "aten::igamma", "aten::igammac", "prims::digamma", "prims::igamma",
        "prims::igammac", "prims::log2", "prims::reciprocal", "prims::rsqrt",
    ]),
    group(Out::Float, FIRST, &["Tensor", "Scalar_Other"], &["aten::xlogy"]),
    group(Out::Float, NOTHING, &["Scalar_Self"], &["aten::xlogy"]),

    // Special functions.
    group(Out::Float, RISES, &[""], &[
        "aten::special_i1", "aten::special_log_ndtr", "aten::special_modified_bessel_i1",
        "prims::bessel_i1",
    ]),
    group(Out::Float, FALLS_ABOVE_0, &[""], &[
        "aten::special_modified_bessel_k0", "aten::special_modified_bessel_k1",
        "aten::special_scaled_modified_bessel_k0", "aten::special_scaled_modified_bessel_k1",
    ]),
    group(Out::Float, NOTHING, &[""], &[
        "aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1",
        "aten::special_bessel_y0", "aten::special_bessel_y1", "aten::special_entr",
        "aten::special_i0e", "aten::special_i1e", "aten::special_modified_bessel_i0",
        "aten::special_ndtri", "aten::special_spherical_bessel_j0", "prims::bessel_i0e",
        "prims::bessel_i1e", "prims::bessel_j0", "prims::bessel_j1", "prims::ndtri",
        "prims::spherical_bessel_j0", "prims::zeta",
    ]),
    group(Out::Float, FIRST, &["", "other_scalar"], &["aten::special_xlog1py"]),
    group(Out::Float, NOTHING, &["self_scalar"], &["aten::special_xlog1py"]),
    group(Out::Float, NOTHING, &["", "other_scalar", "self_scalar"], &["aten::special_zeta"]),
    group(Out::Float, NOTHING, &["", "n_scalar", "x_scalar"], &[
        "aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
        "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
        "aten::special_shifted_chebyshev_polynomial_t",
        "aten::special_shifted_chebyshev_polynomial_u",
        "aten::special_shifted_chebyshev_polynomial_v",
        "aten::special_shifted_chebyshev_polynomial_w", "aten::special_hermite_polynomial_h",
        "aten::special_hermite_polynomial_he", "aten::special_laguerre_polynomial_l",
        "aten::special_legendre_polynomial_p",
    ]),

    // Activations.
    group(Out::First, RISES, &[""], &[
        "aten::relu", "aten::relu6", "aten::hardtanh", "aten::hardsigmoid", "aten::hardshrink",
        "aten::softshrink", "aten::selu",
    ]),
    group(Out::First, rises_if(Given::AtLeastZero(&[1])), &[""], &["aten::leaky_relu", "aten::celu"]),
    group(Out::First, rises_if(Given::AtLeastZero(&[1, 2, 3])), &[""], &["aten::elu"]),
    // Softplus is linear above its threshold, with a step down.
    group(Out::First, NOTHING, &[""], &[
        "aten::gelu", "aten::silu", "aten::mish", "aten::softplus", "aten::hardswish",
    ]),

    // Gradients: linear in the gradient that comes in.
    group(Out::Promoted, FIRST, &[""], &[
        "aten::gelu_backward", "aten::silu_backward", "aten::sigmoid_backward",
        "aten::tanh_backward", "aten::threshold_backward", "aten::hardswish_backward",
        "aten::leaky_relu_backward", "aten::elu_backward", "aten::logit_backward",
        "aten::hardshrink_backward", "aten::softshrink_backward",
    ]),
];
