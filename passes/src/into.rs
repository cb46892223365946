//! Which ops can write their results where they are told to.
//!
//! Only overloads that PyTorch implements natively (the functional form makes a
//! result and calls the same kernel) are listed: the ones that it generates
//! compute a result and copy it. The result given has the shape and strides that
//! the functional form made, so nothing is resized or restrided.

use rote_plans::schedule::Into;

use crate::ops::ALLOCATORS;

/// Ops that copy their first argument to a layout of their own.
pub(super) const COPIES: &[&str] = &["aten::clone", "aten::_to_copy", "aten::contiguous"];

/// Overload of the functional form, of the form that writes, and the ops.
type Row = (&'static str, &'static str, &'static [&'static str]);

#[rustfmt::skip]
const OVERLOADS: &[Row] = &[
    ("", "out", &[
        "mm", "addmm", "bmm", "baddbmm", "addmv", "cat",
        "neg", "rsqrt", "sqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sigmoid",
        "abs", "reciprocal", "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "sgn", "silu", "gelu", "mish",
        "softplus", "leaky_relu", "elu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max",
        "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_not",
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "amax", "amin", "argmax", "argmin",
        "addcmul", "addcdiv", "cumsum", "cumprod", "tril", "triu", "index_select", "gather", "hypot", "atan2", "square",
    ]),
    ("", "grad_input", &[
        "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward",
        "nll_loss_backward", "leaky_relu_backward", "elu_backward", "softplus_backward",
        "mse_loss_backward",
    ]),
    ("", "output", &["nll_loss_forward"]),
    ("Tensor", "out", &["add", "sub", "mul", "div"]),
    ("Tensor_mode", "out_mode", &["div"]),
    ("Tensor_Scalar", "Tensor_Scalar_out", &["pow"]),
    ("Tensor_Tensor", "Tensor_Tensor_out", &["pow"]),
    ("Scalar", "Scalar_out", &["pow", "eq", "ne", "lt", "le", "gt", "ge", "lerp", "remainder", "fmod"]),
    ("Tensor", "Tensor_out", &[
        "eq", "ne", "lt", "le", "gt", "ge", "lerp", "bitwise_and", "bitwise_or", "bitwise_xor", "clamp", "remainder",
        "fmod",
    ]),
    ("dim_IntList", "IntList_out", &["sum"]),
    ("dim", "out", &["mean", "all", "any"]),
    ("dim_int", "int_out", &["prod"]),
    ("self", "self_out", &["where"]),
    ("dim", "dim_max", &["max"]),
    ("dim", "dim_min", &["min"]),
];

/// Element-wise ops among them: each element of the result depends on the same
/// element of the arguments, so a result may lie over an argument.
#[rustfmt::skip]
const ELEMENT_WISE: &[&str] = &[
    "neg", "rsqrt", "sqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sigmoid",
    "abs", "reciprocal", "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "sgn", "silu", "gelu", "mish",
    "softplus", "leaky_relu", "elu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv",
    "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward", "add", "sub", "mul",
    "div", "pow", "lerp", "where", "hypot", "atan2", "square",
];

/// How an op writes its results where it is told to, if it can.
pub(super) fn into(op: &str, overload: &str) -> Option<Into> {
    if ALLOCATORS.contains(&op) {
        return Some(Into::Nothing);
    }
    if COPIES.contains(&op) {
        return Some(Into::Copy);
    }
    let name = op.strip_prefix("aten::")?;
    let row = (OVERLOADS.iter()).find(|row| row.0 == overload && row.2.contains(&name))?;
    Some(Into::Overload(row.1))
}

/// Whether each element of the result depends on the same elements of the
/// arguments.
pub(super) fn element_wise(op: &str) -> bool {
    let name = op.strip_prefix("aten::");
    name.is_some_and(|name| ELEMENT_WISE.contains(&name))
}
