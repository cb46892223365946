//! Checks of ops: those that a plan cannot hold are refused, and so are ops that read
//! tensors which a replay would find stale.

use super::{Recorder, met, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;
use rote_passes::ops::ABSOLUTE;
use rote_plans::DType;

/// Ops that look only at the meta of their tensor argument.
pub(super) fn reads_meta_only(name: &str) -> bool {
    name.ends_with("_like")
        || name.starts_with("aten::new_")
        || name == "aten::bernoulli"
        || name == "aten::expand"
}

/// Whether an op is one of PyTorch's `beta * first + alpha * product` with a `beta` of 0, which ignores what the first
/// argument holds.
fn ignores_first(op: &OpEvent<'_>) -> bool {
    let beta = op.args.get(3).map(|arg| &arg.value);
    matches!(
        op.name,
        "aten::addmm" | "aten::addbmm" | "aten::baddbmm" | "aten::addmv" | "aten::addr"
    ) && (matches!(beta, Some(ArgEvent::Int(0)))
        || matches!(beta, Some(ArgEvent::Float(beta)) if *beta == 0.0))
}

/// Ops that change in place how a tensor looks at its memory, and nothing else.
pub(super) fn turns(name: &str) -> bool {
    matches!(
        name,
        "aten::squeeze_"
            | "aten::unsqueeze_"
            | "aten::t_"
            | "aten::transpose_"
            | "aten::swapdims_"
            | "aten::swapaxes_"
            | "aten::as_strided_"
    )
}

/// What to do where the shape of a result depends on data.
pub const OF_FIXED_SHAPE: &str = "use an op whose result has a fixed shape (in PyTorch torch.where, topk, masked_fill), \
     or do this outside the captured function";

/// Whether an op picks elements by integers: as many as there are integers.
pub(super) fn indexes_by_integers(op: &OpEvent<'_>) -> bool {
    let is_mask =
        |t: &TensorEvent<'_>| t.storage != 0 && matches!(t.dtype, DType::U8 | DType::BOOL);
    let has_mask = |arg: &Argument<'_>| match &arg.value {
        ArgEvent::Tensors(list) => list.iter().any(is_mask),
        _ => false,
    };
    op.name == "aten::index" && !op.args.iter().skip(1).any(has_mask)
}

/// Ops of PyTorch with an answer for the host that depends on nothing but the meta
/// of their arguments, which is guarded.
#[rustfmt::skip]
const META_QUESTIONS: &[&str] = &[
    "_debug_has_internal_overlap", "_dimI", "_dimV", "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
    "_has_same_storage_numel", "_is_zerotensor", "_nested_get_ragged_idx", "_nnz", "_use_cudnn_ctc_loss",
    "_use_miopen_ctc_loss", "_version", "can_cast", "cudnn_is_acceptable", "dense_dim", "dim", "get_device",
    "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference",
    "is_leaf", "is_neg", "is_non_overlapping_and_dense", "is_pinned", "is_same_size", "is_set_to", "is_signed",
    "is_strides_like_format", "numel", "output_nr", "promote_types", "q_per_channel_axis", "q_scale", "q_zero_point",
    "qscheme", "result_type", "retains_grad", "size", "sparse_dim", "storage_offset", "stride", "sym_is_contiguous",
    "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
];

/// Questions about how a tensor lies in its storage.
const PLACE_QUESTIONS: &[&str] = &[
    "aten::storage_offset",
    "aten::sym_storage_offset",
    "aten::is_set_to",
    "aten::is_inference",
    "aten::is_pinned",
];

impl Recorder {
    /// Anchors what an op counts from the start of a storage.
    pub(super) fn anchor_absolute(&mut self, op: &OpEvent<'_>) {
        let counts = |(name, at): &(&str, usize)| {
            let given = op.args.get(*at).map(|arg| &arg.value);
            *name == op.name && !matches!(given, None | Some(ArgEvent::None))
        };
        if !ABSOLUTE.iter().any(counts) && !PLACE_QUESTIONS.contains(&op.name) {
            return;
        }
        let first = op.args.first().map(|arg| tensors(&arg.value));
        let storages: Vec<u64> = first.into_iter().flatten().map(|t| t.storage).collect();
        storages
            .into_iter()
            .for_each(|storage| self.anchor(storage));
    }

    /// Looks at an op that gives the host an answer and no tensor: nothing is to
    /// be recorded of one about meta, and one about data is refused.
    pub(super) fn question(&self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let name = op.name.split("::").last().unwrap_or_default();
        let of_data = matches!(name, "_use_cudnn_ctc_loss" | "_use_miopen_ctc_loss")
            && op.overload == "Tensor";
        let mut asked = op.args.iter().flat_map(|arg| tensors(&arg.value));
        if name == "_version" && asked.any(|t| !self.is_made(t.storage)) {
            return Self::refuse(
                op,
                "asks how often a tensor was written that exists before the step: a plan cannot hold the host's use of \
                 the answer",
                "ask outside the captured function",
            );
        }
        let none = op.outs.iter().all(|out| {
            matches!(
                out,
                ArgEvent::None | ArgEvent::Tensor(_) | ArgEvent::Tensors(_)
            )
        });
        if none || META_QUESTIONS.contains(&name) && !of_data {
            return Ok(());
        }
        Err(self.host_read(op, None))
    }

    /// Refuses ops that a plan can never hold.
    pub(super) fn check(&self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let indexes_by_integers = indexes_by_integers(op);
        // What it packs, and how long the result is, depends on lengths that lie in a tensor.
        let packs = op.name == "aten::_pack_padded_sequence";
        if op.data_dependent && !indexes_by_integers && !self.may_check_shapes(op) || packs {
            return Self::refuse(
                op,
                "makes a result whose shape or value on the host depends on tensor data",
                OF_FIXED_SHAPE,
            );
        }
        if op.inplace_view {
            return Self::refuse(
                op,
                "changes the shape or strides of an existing tensor in place",
                "use the out-of-place form of the op (in PyTorch without the trailing underscore)",
            );
        }
        if matches!(
            op.name,
            "aten::resize_" | "aten::resize_as_" | "aten::set_" | "inductor::resize_storage_bytes_"
        ) {
            return Self::refuse(
                op,
                "changes the storage of an existing tensor",
                "allocate tensors with their final size",
            );
        }
        for (i, arg) in op.args.iter().enumerate() {
            if let Some(kind) = unfit(&arg.value) {
                return Self::refuse(
                    op,
                    format!("argument {i} is a {kind}, which a plan cannot hold"),
                    "call the op outside the captured function",
                );
            }
        }
        Ok(())
    }

    /// Refuses answers for the host from ops of other libraries, of which nobody knows
    /// whether they depend on data.
    pub(super) fn check_answers(op: &OpEvent<'_>) -> Result<(), Refusal> {
        let answer = op.outs.iter().find_map(|out| match out {
            ArgEvent::Tensor(_) | ArgEvent::Tensors(_) => None,
            ArgEvent::None => Some("None in place of a tensor"),
            ArgEvent::Other(kind) => Some(*kind),
            _ => Some("number or text"),
        });
        match answer {
            Some(answer) => Self::refuse(
                op,
                format!(
                    "returns a result to the host ({answer}): a plan cannot hold the host's use of the result"
                ),
                "return the result as a tensor, or call the op outside the captured function",
            ),
            None => Ok(()),
        }
    }

    /// Refuses tensors that the plan could only read stale.
    pub(super) fn check_tensors(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        for (i, arg) in op.args.iter().enumerate() {
            for tensor in tensors(&arg.value) {
                if tensor.opaque || tensor.dtype.bytes().is_none() {
                    return Self::refuse(
                        op,
                        format!(
                            "argument {i} ({}) is not a plain strided tensor",
                            tensor.describe()
                        ),
                        "convert the argument to a strided tensor of a supported dtype",
                    );
                }
                if !self.roots.contains_key(&tensor.storage) && !self.bind(tensor.storage) {
                    if matches!(
                        op.name,
                        "aten::lift_fresh" | "aten::lift" | "aten::lift_fresh_copy"
                    ) {
                        return Self::refuse(
                            op,
                            format!(
                                "makes a tensor ({}) from host data inside the step: a replay would reuse the old data",
                                tensor.describe()
                            ),
                            "pass the data as an argument, keep it in the state (a buffer), or make the tensor by an \
                             op (torch.full, torch.arange); in PyTorch, torch.tensor() may be given up to 64 numbers in \
                             lists and tuples",
                        );
                    }
                    return Err(met::unknown(op, i, tensor, None));
                }
                let root = self.roots[&tensor.storage];
                if root.storage_bytes != tensor.storage_bytes && root.binding.is_none() {
                    return Self::refuse(
                        op,
                        format!(
                            "the storage of argument {i} changed its size from {} to {} bytes",
                            root.storage_bytes, tensor.storage_bytes
                        ),
                        "allocate tensors with their final size",
                    );
                }
                if arg.written {
                    if let Some(root) = self.roots.get_mut(&tensor.storage) {
                        root.uninitialized = false;
                    }
                    if let Some(binding) = root.binding {
                        self.tables.plan.bindings[binding as usize].written = true;
                    }
                } else if root.uninitialized
                    && tensor.numel() > 0
                    && !reads_meta_only(op.name)
                    && !self.only_views(op)
                    && !(i == 0 && ignores_first(op))
                {
                    return Self::refuse(
                        op,
                        format!(
                            "argument {i} ({}) comes from an allocation (empty) that no recorded op wrote to: something \
                             else wrote it (in Python a raw kernel launch, numpy or ctypes)",
                            tensor.describe()
                        ),
                        "make the kernel an op (torch.library.custom_op in PyTorch), or run it outside the captured \
                         function",
                    );
                }
            }
        }
        Ok(())
    }
}

/// What in an argument a plan cannot hold.
fn unfit<'a>(arg: &ArgEvent<'a>) -> Option<&'a str> {
    let inside = |inner: &ArgEvent<'a>| match inner {
        ArgEvent::Tensor(_) | ArgEvent::Tensors(_) => Some("list of tensors and other things"),
        other => unfit(other),
    };
    match arg {
        ArgEvent::Other(kind) => Some(kind),
        ArgEvent::Wrapped(inner) => inside(inner),
        ArgEvent::List(list) => list.iter().find_map(inside),
        _ => None,
    }
}
