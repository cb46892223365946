//! Batch norm, group norm and dropout, in training and evaluation
//! (`_ops/_math_ops.py`, `_ops/_random_ops.py`).
//!
//! The statistics of a batch are per channel: channels are apart. Known
//! statistics make the whole op element-wise. A group of channels stays whole.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote;
use super::super::rule::{Need, Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    BatchNorm(BatchNorm),
    /// `(grad_out, input, weight, running_mean, running_var, save_mean,
    /// save_invstd, train, eps, output_mask)`
    BatchNormBackward,
    /// `(input, weight, bias, N, C, HxW, group, eps)`: the sizes are those of
    /// the local input.
    GroupNorm,
    /// `(input, p, train)`: output and mask.
    Dropout,
    /// `(grad_output, mask, scale)`
    DropoutBackward,
}

/// `(input, weight, bias[, running_mean, running_var][, training], momentum,
/// eps)`
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct BatchNorm {
    /// It has running statistics.
    running: bool,
    /// Whether it trains; an argument says so if `None`.
    training: Option<bool>,
    /// It returns the running statistics instead of writing them.
    functional: bool,
    /// It returns a buffer of the kernel's own.
    reserve: bool,
}

const fn norm(running: bool, training: Option<bool>, functional: bool, reserve: bool) -> Kind {
    Kind::BatchNorm(BatchNorm {
        running,
        training,
        functional,
        reserve,
    })
}

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::native_batch_norm", norm(true, None, false, false)),
    ("aten::_native_batch_norm_legit", norm(true, None, false, false)),
    ("aten::_native_batch_norm_legit.no_stats", norm(false, None, false, false)),
    ("aten::_native_batch_norm_legit_functional", norm(true, None, true, false)),
    ("aten::_native_batch_norm_legit_no_training", norm(true, Some(false), false, false)),
    ("aten::_batch_norm_with_update", norm(true, Some(true), false, true)),
    ("aten::_batch_norm_with_update_functional", norm(true, Some(true), true, true)),
    ("aten::native_batch_norm_backward", Kind::BatchNormBackward),
    ("aten::native_group_norm", Kind::GroupNorm),
    ("aten::native_dropout", Kind::Dropout),
    ("aten::native_dropout_backward", Kind::DropoutBackward),
];

/// Batch, channels and up to five dims of places.
const DIMS: &str = "ncuvxyz";

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    match kind {
        Kind::BatchNorm(norm) => batch_norm(norm, query),
        Kind::BatchNormBackward => batch_norm_backward(query),
        Kind::GroupNorm => group_norm(query),
        Kind::Dropout => {
            query.arity(2, 3)?;
            let output = query.tensor(0)?;
            let mut mask = output.clone();
            mask.dtype = DType::BOOL;
            let mut rule = Rule::new(vec![output.clone(), mask], 1);
            for dim in 0..output.shape.len() {
                rule.add([shard(dim); 3]);
            }
            Ok(rule)
        }
        Kind::DropoutBackward => {
            query.arity(3, 3)?;
            let (grad, mask) = (query.tensor(0)?, query.tensor(1)?);
            if mask.shape != grad.shape {
                let expected = format!("a mask of shape {:?}", grad.shape);
                return Err(query.wrong(1, expected, mask.to_string()));
            }
            let mut output = grad.clone();
            // It is multiplied by the scale, a float.
            output.dtype = promote::float(grad.dtype);
            let mut rule = Rule::new(vec![output], 2);
            for dim in 0..grad.shape.len() {
                rule.add([shard(dim); 3]);
            }
            for op in [PartialOp::Sum, PartialOp::Avg] {
                rule.add([partial(op), partial(op), R]);
            }
            Ok(rule)
        }
    }
}

fn dims(query: &Query<'_>, i: usize) -> Result<&'static str, PropagationError> {
    let input = query.tensor(i)?;
    DIMS.get(..input.shape.len())
        .filter(|dims| dims.len() >= 2)
        .ok_or_else(|| query.wrong(i, "a tensor of 2 to 7 dims", input.to_string()))
}

/// The letters that may be sharded when the statistics come from the batch, or
/// are known.
fn letters(dims: &'static str, training: bool) -> Vec<(&'static str, Need)> {
    let others = (0..dims.len()).map(|at| &dims[at..=at]);
    let others = others.filter(|letter| !training && *letter != "c");
    std::iter::once("c")
        .chain(others)
        .map(|letter| (letter, Need::Filled))
        .collect()
}

fn batch_norm(norm: BatchNorm, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let statistics = if norm.running { 2 } else { 0 };
    let after = 3 + statistics;
    let count = after + 2 + usize::from(norm.training.is_none());
    query.arity(count, count)?;
    let (input, dims) = (query.tensor(0)?, dims(query, 0)?);
    let training = norm.training.map_or_else(|| query.flag(after), Ok)?;
    let mut inputs = vec![Operand::new(0, input, dims)];
    let mut running = Vec::with_capacity(2);
    for i in 1..after {
        if let Some(meta) = query.optional_tensor(i)? {
            if i > 2 {
                running.push(inputs.len());
            }
            inputs.push(Operand::new(i, meta, "c"));
        }
    }
    einsum::check(query, &inputs)?;
    if running.len() < 2 && !training {
        return Err(query.wrong(3, "running statistics, as it does not train", "none"));
    }
    // Statistics are in the dtype of the parameters, if there are any.
    let parameter = inputs.get(1).map_or(input.dtype, |i| i.meta.dtype);
    let channels = TensorMeta {
        dtype: parameter,
        shape: vec![input.shape[1]],
    };
    let empty = |dtype| TensorMeta {
        dtype,
        shape: vec![0],
    };
    let of_channels = |meta, dims| Output {
        meta,
        dims,
        of: Some(&[]),
    };
    let mut outputs = vec![Output::new(input.clone(), dims)];
    for _ in 0..2 {
        // Nothing is saved in evaluation, as on the CPU; CUDA saves channels.
        let saved = if training {
            channels.clone()
        } else {
            empty(parameter)
        };
        outputs.push(of_channels(saved, "c"));
    }
    if norm.reserve {
        outputs.push(of_channels(empty(DType::U8), ""));
    }
    if norm.functional {
        let updated = running.iter().map(|at| inputs[*at].meta.clone());
        outputs.extend(updated.map(|meta| of_channels(meta, "c")));
    }
    let mut rule = einsum::rule(outputs, &inputs, letters(dims, training), &[]);
    if training && !norm.functional {
        running.iter().for_each(|at| rule.writes(*at));
    }
    Ok(rule)
}

fn batch_norm_backward(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(10, 10)?;
    let (grad, input, dims) = (query.tensor(0)?, query.tensor(1)?, dims(query, 1)?);
    let mut inputs = vec![Operand::new(0, grad, dims), Operand::new(1, input, dims)];
    for i in 2..7 {
        if let Some(meta) = query.optional_tensor(i)? {
            // What evaluation did not save is empty.
            let saved = i < 5 || meta.shape != [0];
            inputs.push(Operand::new(i, meta, if saved { "c" } else { "." }));
        }
    }
    let named: Vec<_> = (inputs.iter().copied()).filter(|i| i.dims != ".").collect();
    einsum::check(query, &named)?;
    let training = query.flag(7)?;
    let mask = query.list(9)?;
    if mask.len() != 3 {
        return Err(query.wrong(9, "3 truth values", format!("{mask:?}")));
    }
    let parameter = query.optional_tensor(2)?.map_or(input.dtype, |w| w.dtype);
    let channels = TensorMeta {
        dtype: parameter,
        shape: vec![input.shape[1]],
    };
    let made = [
        Output::new(input.clone(), dims),
        Output::new(channels.clone(), "c"),
        Output::new(channels, "c"),
    ];
    let wanted = made.into_iter().zip(mask).filter(|(_, m)| **m != 0);
    let outputs = wanted.map(|(output, _)| output).collect();
    Ok(einsum::rule(
        outputs,
        &inputs,
        letters(dims, training),
        &[0],
    ))
}

fn group_norm(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(8, 8)?;
    let (input, dims) = (query.tensor(0)?, dims(query, 0)?);
    let size = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let places = input.shape[2..].iter().product::<u64>();
    for (i, expected) in [(3, input.shape[0]), (4, input.shape[1]), (5, places)] {
        let found = query.int(i, None)?;
        if found != size(expected) {
            let expected = format!("{expected}, as the input has it");
            return Err(query.wrong(i, expected, found.to_string()));
        }
    }
    let groups = query.int(6, None)?;
    let divides = |g: &u64| *g > 0 && input.shape[1] % g == 0;
    let Some(count) = u64::try_from(groups).ok().filter(divides) else {
        let expected = format!("a number of groups that divides {}", input.shape[1]);
        return Err(query.wrong(6, expected, groups.to_string()));
    };
    let mut inputs = vec![Operand::new(0, input, dims)];
    for i in 1..3 {
        if let Some(meta) = query.optional_tensor(i)? {
            inputs.push(Operand::new(i, meta, "c"));
        }
    }
    einsum::check(query, &inputs)?;
    let statistic = TensorMeta {
        dtype: inputs.get(1).map_or(input.dtype, |i| i.meta.dtype),
        shape: vec![input.shape[0], count],
    };
    let outputs = vec![
        Output::new(input.clone(), dims),
        Output::new(statistic.clone(), "n."),
        Output::new(statistic, "n."),
    ];
    Ok(einsum::rule(outputs, &inputs, [("n", Need::Filled)], &[]))
}
