//! Losses that pick a class: negative log likelihood and its gradient
//! (`_ops/_math_ops.py`, `aten/src/ATen/native/LossNLL.cpp`).
//!
//! The class dim stays whole. A mean is no average of the means of shards: they
//! weigh different numbers of targets, ignored ones and class weights too. So
//! only sums and what is not reduced have sharded strategies.

use super::super::error::PropagationError;
use super::super::rule::{Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// `(self, target, weight, reduction, ignore_index)`: loss and total weight.
    Forward { image: bool },
    /// `(grad_output, self, target, weight, reduction, ignore_index,
    /// total_weight)`
    Backward { image: bool },
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::nll_loss_forward", Kind::Forward { image: false }),
    ("aten::nll_loss2d_forward", Kind::Forward { image: true }),
    ("aten::nll_loss_backward", Kind::Backward { image: false }),
    ("aten::nll_loss2d_backward", Kind::Backward { image: true }),
];

const NONE: i64 = 0;
const MEAN: i64 = 1;
const SUM: i64 = 2;

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let (image, first) = match kind {
        Kind::Forward { image } => (image, 0),
        Kind::Backward { image } => (image, 1),
    };
    query.arity(5 + 2 * first, 5 + 2 * first)?;
    let input = query.tensor(first)?;
    let (classes, places) = match (image, input.shape.len()) {
        (true, 4) => ("ncyx", "nyx"),
        (false, 2) => ("nc", "n"),
        (false, 1) => ("c", ""),
        _ => {
            let expected = if image {
                "a tensor of 4 dims"
            } else {
                "a tensor of 1 or 2 dims"
            };
            return Err(query.wrong(first, expected, input.to_string()));
        }
    };
    let reduction = query.int(first + 3, None)?;
    if !(NONE..=SUM).contains(&reduction) {
        let expected = "0 for none, 1 for mean or 2 for sum";
        return Err(query.wrong(first + 3, expected, reduction.to_string()));
    }
    query.int(first + 4, None)?;
    let target = Operand::new(first + 1, query.tensor(first + 1)?, places);
    let mut inputs = vec![Operand::new(first, input, classes), target];
    if let Some(weight) = query.optional_tensor(first + 2)? {
        inputs.push(Operand::new(first + 2, weight, "c"));
    }
    einsum::check(query, &inputs)?;
    let kept = if reduction == NONE { places } else { "" };
    let loss = TensorMeta {
        dtype: input.dtype,
        shape: if reduction == NONE {
            target.meta.shape.clone()
        } else {
            Vec::new()
        },
    };
    let letters = ["n", "y", "x"].into_iter().filter(|l| places.contains(l));
    let letters: Vec<_> = match (reduction, kind) {
        (MEAN, Kind::Forward { .. }) => Vec::new(),
        _ => letters.map(|l| (l, Need::Filled)).collect(),
    };
    let Kind::Backward { .. } = kind else {
        let total = TensorMeta {
            dtype: input.dtype,
            shape: Vec::new(),
        };
        // The total weight is zero where nothing is reduced, unless there is but one
        // sample, and does not depend on the input anywhere.
        let adds_up = reduction == SUM || reduction == NONE && places.is_empty();
        let of: &[usize] = if adds_up { &[1, 2] } else { &[] };
        let outputs = vec![
            Output::new(loss, kept),
            Output {
                meta: total,
                dims: "",
                of: Some(of),
            },
        ];
        let weighted = inputs.len() > 2 && reduction != MEAN;
        let linear: &[usize] = if weighted { &[0, 2] } else { &[0] };
        return Ok(einsum::rule(outputs, &inputs, letters, linear));
    };
    let grad = query.tensor(0)?;
    if grad.shape != loss.shape {
        return Err(query.wrong(
            0,
            format!("a tensor like the loss, {loss}"),
            grad.to_string(),
        ));
    }
    inputs.insert(0, Operand::new(0, grad, kept));
    let total = query.tensor(6)?;
    if !total.shape.is_empty() {
        return Err(query.wrong(6, "a tensor of no dims", total.to_string()));
    }
    inputs.push(Operand::new(6, total, ""));
    let total = inputs.len() - 1;
    let outputs = vec![Output::new(input.clone(), classes)];
    let mut rule = einsum::rule(outputs, &inputs, letters.iter().copied(), &[0]);
    if reduction != MEAN {
        // Only a mean reads the total weight: a partial one may stay.
        rule.ignores(total);
    }
    Ok(rule)
}
