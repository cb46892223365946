//! Fused optimizers and gradient scaling, for one entry of their lists: every
//! list at the start holds a tensor per parameter that lies as the parameter
//! does, everything else is whole.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Arg, Query, R, Rule, partial, shard};

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// A step of an optimizer.
    Step {
        /// How many lists hold tensors of the parameter's shape.
        lists: usize,
        /// Where the scale of gradients stands: with one, gradients are written.
        scale: usize,
        /// Whether the lists are written, or new ones returned.
        in_place: bool,
    },
    /// Divides gradients by a scale and notes whether one of their elements is
    /// not finite: on every rank those of its own shards, so that the note is
    /// the largest of all ranks'.
    Unscale,
}

const fn step(lists: usize, scale: usize) -> Kind {
    Kind::Step {
        lists,
        scale,
        in_place: false,
    }
}

const fn step_(lists: usize, scale: usize) -> Kind {
    Kind::Step {
        lists,
        scale,
        in_place: true,
    }
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::_fused_adam", step(5, 13)),
    ("aten::_fused_adam.tensor_lr", step(5, 13)),
    ("aten::_fused_adam_", step_(5, 13)),
    ("aten::_fused_adam_.tensor_lr", step_(5, 13)),
    ("aten::_fused_adamw", step(5, 13)),
    ("aten::_fused_adamw.tensor_lr", step(5, 13)),
    ("aten::_fused_adamw_", step_(5, 13)),
    ("aten::_fused_adamw_.tensor_lr", step_(5, 13)),
    ("aten::_fused_sgd", step(3, 10)),
    ("aten::_fused_sgd.tensor_lr", step(3, 10)),
    ("aten::_fused_sgd_", step_(3, 10)),
    ("aten::_fused_sgd_.tensor_lr", step_(3, 10)),
    (
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        Kind::Unscale,
    ),
];

/// Whether an op of the table takes lists, as all do, and notes something about
/// all entries in one tensor; `None` for ops of other tables.
pub(in super::super) fn on_lists(op: &str) -> Option<bool> {
    let (_, kind) = OPS.iter().find(|row| row.0 == op)?;
    Some(matches!(kind, Kind::Unscale))
}

/// The rule of one entry: lists are tensors, empty ones absent.
pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let Kind::Step {
        lists,
        scale,
        in_place,
    } = kind
    else {
        return unscale(query);
    };
    query.arity(lists + 1, 16)?;
    let parameter = query.tensor(0)?;
    let mut present = Vec::with_capacity(lists);
    for at in 0..lists {
        if let Some(meta) = query.optional_tensor(at)? {
            if meta.shape != parameter.shape {
                let expected = format!("the shape of the parameter, {:?}", parameter.shape);
                return Err(query.wrong(at, expected, meta.to_string()));
            }
            present.push((at, meta));
        }
    }
    let others = (query.args.iter().skip(lists)).filter(|a| matches!(a, Arg::Tensor(_)));
    let inputs = present.len() + others.count();
    let outputs = match in_place {
        true => Vec::new(),
        false => present.iter().map(|(_, meta)| (*meta).clone()).collect(),
    };
    let count = outputs.len();
    let mut rule = Rule::new(outputs, inputs);
    for dim in 0..parameter.shape.len() {
        let alike = std::iter::repeat_n(shard(dim), count + present.len());
        rule.add(alike.chain(std::iter::repeat_n(R, inputs - present.len())));
    }
    if in_place {
        let scaled = query.optional_tensor(scale)?.is_some();
        for (input, (at, _)) in present.iter().enumerate() {
            if *at != 1 || scaled {
                rule.writes(input);
            }
        }
    }
    Ok(rule)
}

fn unscale(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(3, 3)?;
    let gradient = query.tensor(0)?;
    query.tensor(1)?;
    query.tensor(2)?;
    let largest = partial(PartialOp::Max);
    let mut rule = Rule::new(Vec::new(), 3);
    for dim in 0..gradient.shape.len() {
        rule.add([shard(dim), largest, R]);
    }
    rule.add([R, largest, R]);
    rule.writes(0);
    rule.writes(1);
    Ok(rule)
}
