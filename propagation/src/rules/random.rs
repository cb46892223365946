//! Random numbers: every rank draws those of its own shard, as if from the part
//! of one stream that belongs to it (`_ops/_random_ops.py`, `_random.py`).

use super::super::error::PropagationError;
use super::super::rule::{Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;
use super::MOVED;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// Draws in the shape of the tensor, whose values do not matter.
    Fill,
    /// Draws by the values of the tensor.
    ByValue,
    /// Draws by the values of two tensors.
    ByValues,
    /// Draws from the last dim.
    Multinomial,
    /// A slope per element, noted in the second tensor.
    Rrelu,
    /// The same, but the notes are a second output.
    RreluFunctional,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::normal", Kind::Fill),
    ("aten::normal_functional", Kind::Fill),
    ("aten::log_normal", Kind::Fill),
    ("aten::uniform", Kind::Fill),
    ("aten::exponential", Kind::Fill),
    ("aten::geometric", Kind::Fill),
    ("aten::cauchy", Kind::Fill),
    ("aten::bernoulli.float", Kind::Fill),
    ("aten::bernoulli.p", Kind::Fill),
    ("aten::bernoulli", Kind::ByValue),
    ("aten::bernoulli.Tensor", Kind::ByValues),
    ("aten::multinomial", Kind::Multinomial),
    ("aten::rrelu_with_noise", Kind::Rrelu),
    ("aten::rrelu_with_noise_functional", Kind::RreluFunctional),
];

/// Functional ops of other tables that draw random numbers.
const OTHERS: [&str; 6] = [
    "aten::native_dropout",
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
    "aten::randint_like.low_dtype",
    "aten::_fused_dropout",
];

/// Whether a functional op draws random numbers.
pub(in super::super) fn draws(op: &str) -> bool {
    OTHERS.contains(&op) || OPS.iter().any(|row| row.0 == op)
}

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 6)?;
    let input = query.tensor(0)?;
    if let Kind::Multinomial = kind {
        return multinomial(input, query);
    }
    let (inputs, outputs) = match kind {
        Kind::ByValues | Kind::Rrelu => (2, 1),
        Kind::RreluFunctional => (2, 2),
        _ => (1, 1),
    };
    if inputs == 2 {
        let other = query.tensor(1)?;
        if other.shape != input.shape {
            let expected = format!("the shape of the first tensor, {:?}", input.shape);
            return Err(query.wrong(1, expected, other.to_string()));
        }
    }
    let mut rule = Rule::new(vec![input.clone(); outputs], inputs);
    for dim in 0..input.shape.len() {
        rule.add(std::iter::repeat_n(shard(dim), inputs + outputs));
    }
    if let Kind::Fill = kind {
        for op in MOVED {
            rule.add([R, partial(op)]);
        }
    }
    if let Kind::Rrelu = kind {
        rule.writes(1);
    }
    Ok(rule)
}

fn multinomial(input: &TensorMeta, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let Some(batch) = input.shape.len().checked_sub(1).filter(|n| *n < 2) else {
        return Err(query.wrong(0, "a tensor of 1 or 2 dims", input.to_string()));
    };
    let samples = query.int(1, None)?;
    let samples = u64::try_from(samples)
        .map_err(|_| query.wrong(1, "a number of samples", samples.to_string()))?;
    let mut shape = input.shape.clone();
    shape[batch] = samples;
    let mut rule = Rule::new(
        vec![TensorMeta {
            dtype: DType::I64,
            shape,
        }],
        1,
    );
    for dim in 0..batch {
        rule.add([shard(dim), shard(dim)]);
    }
    Ok(rule)
}
