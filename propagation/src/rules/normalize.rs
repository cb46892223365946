//! Ops that need some dims whole and treat the others apart: softmax, layer and
//! RMS norm (`_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Arg, Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// Whole along one dim, before which this many tensors come.
    Along(usize),
    /// Normalized over the trailing dims; `statistics` more outputs of the
    /// leading dims, `parameters` weights and biases.
    Norm {
        statistics: usize,
        parameters: usize,
    },
    /// The gradients of a norm.
    NormBackward {
        statistics: usize,
        parameters: usize,
    },
}

const fn norm(statistics: usize, parameters: usize) -> Kind {
    Kind::Norm {
        statistics,
        parameters,
    }
}

const fn backward(statistics: usize, parameters: usize) -> Kind {
    Kind::NormBackward {
        statistics,
        parameters,
    }
}

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::_softmax", Kind::Along(1)),
    ("aten::_log_softmax", Kind::Along(1)),
    ("aten::_safe_softmax", Kind::Along(1)),
    ("aten::_softmax_backward_data", Kind::Along(2)),
    ("aten::_log_softmax_backward_data", Kind::Along(2)),
    ("aten::native_layer_norm", norm(2, 2)),
    ("aten::_fused_rms_norm", norm(1, 1)),
    ("aten::native_layer_norm_backward", backward(2, 2)),
    ("aten::_fused_rms_norm_backward", backward(1, 1)),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    match kind {
        Kind::Along(inputs) => {
            query.arity(inputs, inputs + 2)?;
            let input = query.tensor(0)?;
            let ndim = input.shape.len();
            let dim = query.dim(inputs, None, ndim)?;
            for i in 1..inputs {
                same_shape(query, i, input)?;
            }
            let mut rule = Rule::new(vec![input.clone()], inputs);
            for other in (0..ndim).filter(|d| *d != dim) {
                rule.add(std::iter::repeat_n(shard(other), 1 + inputs));
            }
            Ok(rule)
        }
        Kind::Norm {
            statistics,
            parameters,
        } => {
            query.arity(2, 3 + parameters)?;
            let input = query.tensor(0)?;
            let axis = axis(query, 1, input)?;
            let mut outputs = vec![input.clone()];
            outputs.extend(std::iter::repeat_n(statistic(input, axis), statistics));
            let present = given(query, 2, parameters)?;
            let mut rule = Rule::new(outputs, 1 + present);
            for dim in 0..axis {
                let same = std::iter::repeat_n(shard(dim), 2 + statistics);
                rule.add(same.chain(std::iter::repeat_n(R, present)));
            }
            Ok(rule)
        }
        Kind::NormBackward {
            statistics,
            parameters,
        } => {
            // grad, input, normalized shape, statistics, parameters, mask
            query.arity(4 + statistics, 4 + statistics + parameters)?;
            let (grad, input) = (query.tensor(0)?, query.tensor(1)?);
            same_shape(query, 0, input)?;
            let axis = axis(query, 2, input)?;
            for i in 0..statistics {
                same_shape(query, 3 + i, &statistic(input, axis))?;
            }
            let first = 3 + statistics;
            let present = given(query, first, parameters)?;
            let mask = query.list(first + parameters)?;
            if mask.len() != 1 + parameters {
                let expected = format!("{} truth values", 1 + parameters);
                return Err(query.wrong(first + parameters, expected, format!("{mask:?}")));
            }
            let mut outputs = Vec::new();
            if mask[0] != 0 {
                outputs.push(grad.clone());
            }
            for (i, wanted) in mask[1..].iter().enumerate() {
                if let (Some(meta), 1..) = (query.optional_tensor(first + i)?, *wanted) {
                    outputs.push(meta.clone());
                }
            }
            let weights = outputs.len() - usize::from(mask[0] != 0);
            let mut rule = Rule::new(outputs, 2 + statistics + present);
            for dim in 0..axis {
                let grads = std::iter::repeat_n(shard(dim), usize::from(mask[0] != 0))
                    .chain(std::iter::repeat_n(partial(PartialOp::Sum), weights));
                let inputs = std::iter::repeat_n(shard(dim), 2 + statistics)
                    .chain(std::iter::repeat_n(R, present));
                rule.add(grads.chain(inputs));
            }
            Ok(rule)
        }
    }
}

fn same_shape(query: &Query<'_>, i: usize, other: &TensorMeta) -> Result<(), PropagationError> {
    let meta = query.tensor(i)?;
    if meta.shape == other.shape {
        return Ok(());
    }
    let expected = format!("a tensor of shape {:?}", other.shape);
    Err(query.wrong(i, expected, meta.to_string()))
}

/// The first normalized dim.
fn axis(query: &Query<'_>, i: usize, input: &TensorMeta) -> Result<usize, PropagationError> {
    let normalized = query.list(i)?;
    let axis = input.shape.len().checked_sub(normalized.len());
    axis.filter(|axis| {
        let tail = input.shape[*axis..].iter();
        !normalized.is_empty()
            && tail
                .zip(normalized)
                .all(|(a, b)| i64::try_from(*a) == Ok(*b))
    })
    .ok_or_else(|| {
        let expected = format!("the last dims of {input}");
        query.wrong(i, expected, format!("{normalized:?}"))
    })
}

/// How many of the optional tensors from a position on are given.
fn given(query: &Query<'_>, first: usize, count: usize) -> Result<usize, PropagationError> {
    let mut present = 0;
    for i in first..first + count {
        if matches!(query.args.get(i), Some(Arg::Tensor(_))) {
            query.tensor(i)?;
            present += 1;
        } else {
            query.optional_tensor(i)?;
        }
    }
    Ok(present)
}

/// Mean or standard deviation: the leading dims, the others of size 1.
fn statistic(input: &TensorMeta, axis: usize) -> TensorMeta {
    let mut meta = input.clone();
    meta.shape[axis..].fill(1);
    meta
}
