//! Which partials pass through an element-wise op.
//!
//! A sum of pieces passes where the op is linear in all tensors that come in
//! pieces, the others being whole; an average already where it is affine in
//! them; a maximum becomes a maximum where the op never falls in that tensor,
//! and a minimum where it never rises. A norm of norms passes where they are
//! multiplied by a positive number.

use super::super::super::placement::Order;
use super::super::super::placement::PartialOp::{self, Avg, Max, Min, Sum};
use super::super::super::promote::commutes;
use super::super::super::rule::{Arg, Query, R, Rule, partial};
use super::super::super::spec::TensorMeta;
use super::ordered;
use rote_plans::DType;

/// What an op does to its tensors, by their positions among the tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// Sets of tensors that the op is linear in together.
    pub(super) linear: &'static [&'static [usize]],
    /// Tensors that the op is affine in, alone.
    pub(super) affine: &'static [usize],
    /// Tensors that it never falls in.
    pub(super) rises: &'static [usize],
    /// Tensors that it never rises in.
    pub(super) falls: &'static [usize],
    /// Extrema that pass from all of some tensors at once.
    pub(super) joint: Joint,
    /// What the above asks of the other arguments.
    pub(super) given: Given,
}

/// Extrema that pass from several tensors at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    None,
    /// The larger of two.
    Max,
    /// The smaller of two.
    Min,
    /// One of the tensors behind the first, which is a condition.
    Chosen,
    /// The second of two, whatever the first is.
    Second,
}

/// What the numbers among the arguments do to a [`Pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    Nothing,
    /// The number at this position, 1 by default, is a factor of the tensor at
    /// the other: where it is negative, rising is falling.
    Factor(usize, usize),
    /// With a single tensor it is multiplied or divided by the number at
    /// position 1.
    Scaled,
    /// Nothing falls unless the numbers at these positions are at least 0.
    AtLeastZero(&'static [usize]),
    /// The number at position 2 lies between 0 and 1.
    Weight,
    /// The number at position 2 is not above the one at 1.
    Below,
    /// Sums pass if the number at position 2 is 0.
    ZeroFill,
    /// The numbers at these positions are not given.
    Absent(&'static [usize]),
    /// It holds above 0 only.
    Positive,
}

/// Whatever the order.
const ANY_NORM: PartialOp = PartialOp::Norm(Order::ANY);

/// No partials.
pub(super) const NOTHING: Pass = Pass {
    linear: &[],
    affine: &[],
    rises: &[],
    falls: &[],
    joint: Joint::None,
    given: Given::Nothing,
};

/// Adds the strategies of a [`Pass`] to a rule with one output.
pub(super) fn add(pass: Pass, query: &Query<'_>, metas: &[&TensorMeta], rule: &mut Rule) {
    let n = metas.len();
    let number = |at: usize| match query.args.get(at) {
        Some(Arg::Float(x)) => Some(*x),
        Some(Arg::Int(x)) => Some(*x as f64),
        Some(Arg::Bool(x)) => Some(f64::from(u8::from(*x))),
        _ => None,
    };
    let to = rule.outputs[0].dtype;
    let mut row = |out: PartialOp, op: PartialOp, from: &[usize]| {
        if from
            .iter()
            .all(|i| *i < n && commutes(op, metas[*i].dtype, to))
        {
            let inputs = (0..n).map(|i| if from.contains(&i) { partial(op) } else { R });
            rule.add([partial(out)].into_iter().chain(inputs));
        }
    };
    let mut affine = pass.affine;
    let mut linear = true;
    // Whether rising and falling hold, per tensor; and whether they are swapped.
    let mut monotone = true;
    let mut swapped = None;
    match pass.given {
        Given::Nothing | Given::Positive => {}
        Given::Factor(at, tensor) => {
            let factor = number(at).unwrap_or(1.0);
            swapped = (factor < 0.0).then_some(tensor);
            monotone = !factor.is_nan();
            if n == 1 {
                // A number is added to the only tensor, or it to a number.
                linear = false;
                affine = &[0];
            }
        }
        Given::Scaled => {
            let usable = |x: f64| x != 0.0 && x.is_finite();
            linear = n > 1 || number(1).is_some_and(usable);
            monotone = n == 1 && linear;
            swapped = (number(1) < Some(0.0)).then_some(0);
        }
        Given::AtLeastZero(at) => {
            monotone = at.iter().all(|at| number(*at).unwrap_or(1.0) >= 0.0);
        }
        Given::Weight => monotone = number(2).is_some_and(|w| (0.0..=1.0).contains(&w)),
        Given::Below => {
            monotone = matches!((number(1), number(2)), (Some(t), Some(v)) if v <= t);
        }
        Given::ZeroFill => linear = number(2) == Some(0.0),
        Given::Absent(at) => {
            let absent = |at: &usize| matches!(query.args.get(*at), None | Some(Arg::None));
            monotone = at.iter().all(absent);
        }
    }
    if linear {
        for set in pass.linear {
            row(Sum, Sum, set);
            row(Avg, Avg, set);
        }
    }
    for i in affine {
        row(Avg, Avg, &[*i]);
    }
    if pass.given == Given::Scaled && n == 1 && number(1).is_some_and(|x| x > 0.0 && x.is_finite())
    {
        row(ANY_NORM, ANY_NORM, &[0]);
    }
    let wraps = unsigned(to)
        && (!pass.falls.is_empty() || matches!(pass.given, Given::Factor(..) | Given::Scaled));
    if !ordered(to) || metas.iter().any(|m| !ordered(m.dtype)) || !monotone || wraps {
        return;
    }
    for (set, rising) in [(pass.rises, true), (pass.falls, false)] {
        for i in set {
            let (small, large) = match rising != (swapped == Some(*i)) {
                true => (Min, Max),
                false => (Max, Min),
            };
            // Pieces of a smallest element are in the domain if it is; pieces
            // of a largest need not be.
            if pass.given != Given::Positive {
                row(large, Max, &[*i]);
            }
            row(small, Min, &[*i]);
        }
    }
    match pass.joint {
        Joint::None => {}
        Joint::Max => row(Max, Max, &[0, 1]),
        Joint::Min => row(Min, Min, &[0, 1]),
        Joint::Chosen => {
            row(Max, Max, &[1, 2]);
            row(Min, Min, &[1, 2]);
        }
        Joint::Second => {
            row(Max, Max, &[0, 1]);
            row(Min, Min, &[0, 1]);
        }
    }
}

/// Whether a difference below 0 wraps around to a large number.
fn unsigned(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64)
}
