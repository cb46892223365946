//! What is known of ops by their names: which may raise for other data than they were recorded with, which allocate
//! without writing, which go element by element, which count from the start of a storage, which do not write what they
//! declare.

use rote_plans::{Arg, Instr, Plan, Range, keeps_to_arguments};

use crate::liveness::{for_each_out, for_each_written};

/// Ops that allocate without writing.
pub const ALLOCATORS: &[&str] = &[
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
];

/// Element-wise ops, without `aten::`: each element of the result depends on the same
/// element of the arguments, so a result may lie over an argument.
#[rustfmt::skip]
const ELEMENT_WISE: &[&str] = &[
    "neg", "rsqrt", "sqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sigmoid",
    "abs", "reciprocal", "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "sgn", "silu", "gelu", "mish",
    "softplus", "leaky_relu", "elu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv",
    "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward", "add", "sub", "mul",
    "div", "pow", "lerp", "where", "hypot", "atan2", "square",
];

/// Optimizer steps over lists of tensors: parameters, gradients, states. Their schemas
/// declare gradients written, which the kernels do only to unscale them: if the last
/// argument but one (`grad_scale`) is given.
const FUSED_STEPS: &[&str] = &[
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
];

/// Ops that count from the start of their argument's storage, not of the argument, and
/// which of their arguments says from where.
pub const ABSOLUTE: &[(&str, usize)] = &[
    ("aten::as_strided", 3),
    ("aten::as_strided_copy", 3),
    ("aten::as_strided_scatter", 4),
    ("aten::as_strided_", 3),
];

/// Ops that raise for some values of their tensors, by how their names begin after
/// `aten::` and underscores: indices and targets out of range, numbers outside of a domain, what
/// has no inverse or factors, too few elements. `python -m tests.torch.sweep --handled` looks for
/// others.
const RAISING: &[&str] = &[
    "index",
    "gather",
    "scatter",
    "take",
    "put",
    "embedding",
    "nll_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "binary_cross_entropy",
    "ctc_loss",
    "cudnn_ctc_loss",
    "max_unpool",
    "masked_scatter",
    "masked_select",
    "segment_reduce",
    "repeat_interleave",
    "bincount",
    "histc",
    "histogram",
    "one_hot",
    "multinomial",
    "bernoulli",
    "binomial",
    "normal",
    "poisson",
    "standard_gamma",
    "sample_dirichlet",
    "searchsorted",
    "bucketize",
    "linspace",
    "logspace",
    "linalg",
    "cholesky",
    "lu_",
    "geqrf",
    "ormqr",
    "orgqr",
    "triangular_solve",
    "svd",
    "qr",
    "inverse",
    "fake_quantize",
    "quantize",
    "choose_qparams",
    "assert",
    "functional_assert",
    "functional_sym_constrain_range",
    "sym_constrain_range",
    "validate",
    "sparse",
    "coalesce",
    "nested",
];

/// Those that do so for integers: division by zero, negative powers.
const RAISING_FOR_INTEGERS: &[&str] = &[
    "div",
    "floor_divide",
    "remainder",
    "fmod",
    "pow",
    "foreach_div",
    "foreach_pow",
];

/// Whether an instruction may raise for some values of its tensors, or for what happens
/// elsewhere: ops of ATen by their names, all ops of others, and collectives.
pub fn may_raise(plan: &Plan, instr: &Instr) -> bool {
    match instr {
        Instr::Local { op, .. } => {
            let name = plan.str(*op);
            let mut integers = false;
            let mut look = |result| integers |= plan.values[result as usize].dtype.is_integer();
            for_each_out(plan, instr, &mut look);
            for_each_written(plan, instr, &mut look);
            !keeps_to_arguments(name) || may_raise_by_name(name, integers)
        }
        Instr::Collective(_) | Instr::Wait { .. } => true,
        Instr::View { .. } | Instr::Rng { .. } | Instr::Free { .. } => false,
    }
}

/// `integers`: its results are of integers.
fn may_raise_by_name(name: &str, integers: bool) -> bool {
    let own = name.split_once("::").map_or(name, |(_, own)| own);
    let own = own.trim_start_matches('_');
    let begins = |names: &[&str]| names.iter().any(|start| own.starts_with(start));
    begins(RAISING) || integers && begins(RAISING_FOR_INTEGERS)
}

/// Whether each element of the result depends on the same elements of the
/// arguments.
pub(crate) fn element_wise(op: &str) -> bool {
    let name = op.strip_prefix("aten::");
    name.is_some_and(|name| ELEMENT_WISE.contains(&name))
}

/// Whether an op, or each op of a list (`_foreach_`), goes element by element, in place
/// or not: its results are the same wherever its arguments start.
pub(crate) fn goes_by_elements(op: &str) -> bool {
    let Some(name) = op.strip_prefix("aten::") else {
        return false;
    };
    let name = name.strip_prefix("_foreach_").unwrap_or(name);
    let name = name.strip_suffix('_').unwrap_or(name);
    ELEMENT_WISE.contains(&name)
}

/// The gradients of an optimizer step that reads them and leaves them as they are,
/// whatever its schema declares: a list of values. None for all else.
pub(crate) fn leaves_gradients(plan: &Plan, instr: &Instr) -> Option<Range> {
    let Instr::Local { op, args, .. } = instr else {
        return None;
    };
    let op = plan.str(*op);
    let name = op.split_once('.').map_or(op, |(name, _)| name);
    match plan.args[args.indices()] {
        [_, Arg::Values(gradients), .., Arg::None, _] if FUSED_STEPS.contains(&name) => {
            Some(gradients)
        }
        _ => None,
    }
}
