//! Which ops PyTorch has, and which of them write their results where they are told to.
//!
//! Passes ask for this ([`rote_plans::Ops`]). It is a crate of its own because the command line, which runs passes
//! without PyTorch, asks too.
//!
//! Only overloads that PyTorch implements natively (the functional form makes a
//! result and calls the same kernel) are listed: the ones that it generates
//! compute a result and copy it. The result given has the shape and strides that
//! the functional form made, so nothing is resized or restrided.

#![forbid(unsafe_code)]

use rote_plans::schedule::{COPIES, GroupMemory, Into, Ops};
use rote_plans::{CollectiveKind, Device, keeps_to_arguments};

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

/// The alignment that PyTorch's allocator gives on the CPU, in bytes (`c10/core/alignment.h`).
const CPU_ALIGNMENT: u64 = 64;
/// The same of its caching allocators on other devices (`kMinBlockSize`).
const DEVICE_ALIGNMENT: u64 = 512;

/// PyTorch's ops, of every supported version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtenOps;

impl Ops for AtenOps {
    /// Whether it is an op of PyTorch's. Those that passes add are in every supported version.
    fn has(&self, name: &str, _overload: &str) -> bool {
        keeps_to_arguments(name)
    }

    fn writes_into(&self, name: &str, overload: &str) -> Option<Into> {
        if COPIES.contains(&name) {
            return Some(Into::Copy);
        }
        let name = name.strip_prefix("aten::")?;
        let row = (OVERLOADS.iter()).find(|row| row.0 == overload && row.2.contains(&name))?;
        Some(Into::Overload(row.1))
    }

    /// PyTorch's functional collectives clone the input of these two (`Functional.cpp`).
    fn copies_inputs(&self) -> bool {
        true
    }

    /// `fully_shard` gathers so, with each backend (`all_gather_inputs` in `_fsdp_collectives.py`).
    fn gathers_in_place(&self) -> bool {
        true
    }

    /// Gloo gathers into memory of its own, and reduces a copy of what it scatters (`ProcessGroupGloo.cpp`).
    fn group_memory(&self, kind: CollectiveKind, device: Device) -> GroupMemory {
        match (kind, device.is_cpu()) {
            (CollectiveKind::AllGather, true) => GroupMemory::OfOutput,
            (CollectiveKind::ReduceScatter, true) => GroupMemory::OfInput,
            _ => GroupMemory::None,
        }
    }

    fn alignment(&self, device: Device) -> u64 {
        match device.is_cpu() {
            true => CPU_ALIGNMENT,
            false => DEVICE_ALIGNMENT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overload_is_found_by_the_functional_one() {
        let into = |name, overload| AtenOps.writes_into(name, overload);
        assert_eq!(into("aten::mm", ""), Some(Into::Overload("out")));
        assert_eq!(
            into("aten::pow", "Scalar"),
            Some(Into::Overload("Scalar_out"))
        );
        assert_eq!(
            into("aten::sum", "dim_IntList"),
            Some(Into::Overload("IntList_out"))
        );
        assert_eq!(into("aten::clone", ""), Some(Into::Copy));
        assert_eq!(into("aten::sum", ""), None);
        assert_eq!(into("aten::convolution", ""), None);
        assert_eq!(into("mine::mm", ""), None);
    }

    #[test]
    fn no_op_is_listed_twice_for_an_overload() {
        let mut seen = std::collections::HashSet::new();
        for (overload, _, ops) in OVERLOADS {
            for op in *ops {
                assert!(
                    seen.insert((overload, op)),
                    "{op}.{overload} is listed twice"
                );
            }
        }
    }
}
