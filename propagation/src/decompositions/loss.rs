//! Losses, from their formulas. Where a formula has a choice, `where` stands for
//! it: element-wise, and linear in nothing.

use super::super::decompose::{Builder, Value};
use super::super::rule::Arg;
use super::{Made, One, pair, part};

fn difference(g: &mut Builder<'_>) -> One {
    let (a, b) = pair(g)?;
    g.op("aten::sub.Tensor", [a.into(), b.into()])
}

/// Not reduced, the mean or the sum, as the reduction at a position says.
fn reduced(g: &mut Builder<'_>, loss: Value, at: usize) -> Made {
    Ok(vec![match g.query.int(at, Some(1))? {
        0 => loss,
        1 => g.op("aten::mean", [loss.into()])?,
        2 => g.op("aten::sum", [loss.into()])?,
        other => {
            let expected = "0 for none, 1 for mean or 2 for sum";
            return Err(g.query.wrong(at, expected, other.to_string()));
        }
    }])
}

/// `(self, target, reduction)`
pub(super) fn mse(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let d = difference(g)?;
    let loss = g.op("aten::pow.Tensor_Scalar", [d.into(), 2.into()])?;
    reduced(g, loss, 2)
}

/// `(self, target, reduction)`
pub(super) fn l1(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let d = difference(g)?;
    let loss = g.op("aten::abs", [d.into()])?;
    reduced(g, loss, 2)
}

/// `(self, target, reduction, beta or delta)`: a square near 0, straight beyond.
pub(super) fn smooth(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let bound = g.query.float(3, Some(1.0))?;
    let d = difference(g)?;
    let size = g.op("aten::abs", [d.into()])?;
    let near = g.op("aten::lt.Scalar", [size.into(), bound.into()])?;
    let square = g.op("aten::pow.Tensor_Scalar", [d.into(), 2.into()])?;
    let loss = g.op(
        "aten::where.self",
        [near.into(), square.into(), size.into()],
    )?;
    reduced(g, loss, 2)
}

/// `(self, target, reduction)`: log(1 + exp(-target * self)).
pub(super) fn soft_margin(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let (x, target) = pair(g)?;
    let margin = g.op("aten::mul.Tensor", [target.into(), x.into()])?;
    let margin = g.op("aten::neg", [margin.into()])?;
    let loss = g.op("aten::exp", [margin.into()])?;
    let loss = g.op("aten::log1p", [loss.into()])?;
    reduced(g, loss, 2)
}

/// `(self, target, reduction, log_target)`: target * (log(target) - self).
pub(super) fn kl_div(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (x, target) = pair(g)?;
    let op = if g.query.flag(3)? {
        "aten::exp"
    } else {
        "aten::log"
    };
    let other = g.op(op, [target.into()])?;
    let (plain, log) = if g.query.flag(3)? {
        (other, target)
    } else {
        (target, other)
    };
    let less = g.op("aten::sub.Tensor", [log.into(), x.into()])?;
    let loss = g.op("aten::mul.Tensor", [plain.into(), less.into()])?;
    reduced(g, loss, 2)
}

/// `(self, target, weight, reduction)`
pub(super) fn binary_cross_entropy(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (x, target) = pair(g)?;
    // The kernel refuses targets that are none, as the pieces of a mean may be.
    let target = g.op("aten::clamp", [target.into(), 0.into(), 1.into()])?;
    let yes = g.op("aten::log", [x.into()])?;
    let no = g.op("aten::neg", [x.into()])?;
    let no = g.op("aten::log1p", [no.into()])?;
    // no + target * (yes - no), with its sign turned.
    let loss = g.op("aten::sub.Tensor", [yes.into(), no.into()])?;
    let loss = g.op("aten::mul.Tensor", [target.into(), loss.into()])?;
    let loss = g.op("aten::add.Tensor", [loss.into(), no.into()])?;
    weighed(g, loss, 2, 3)
}

/// `(self, target, weight, pos_weight, reduction)`
pub(super) fn with_logits(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 5)?;
    let (x, target) = pair(g)?;
    let opposite = g.op("aten::neg", [x.into()])?;
    let mut log = g.op("aten::softplus", [opposite.into()])?;
    if let Some(positive) = g.optional(3)? {
        // log weight = 1 + (pos_weight - 1) * target
        let weight = g.op("aten::mul.Tensor", [positive.into(), target.into()])?;
        let weight = g.op("aten::sub.Tensor", [weight.into(), target.into()])?;
        let weight = g.op("aten::add.Scalar", [weight.into(), 1.into()])?;
        log = g.op("aten::mul.Tensor", [log.into(), weight.into()])?;
    }
    let other = g.op("aten::rsub.Scalar", [target.into(), 1.into()])?;
    let loss = g.op("aten::mul.Tensor", [other.into(), x.into()])?;
    let loss = g.op("aten::add.Tensor", [loss.into(), log.into()])?;
    weighed(g, loss, 2, 4)
}

fn weighed(g: &mut Builder<'_>, mut loss: Value, weight: usize, reduction: usize) -> Made {
    if let Some(weight) = g.optional(weight)? {
        loss = g.op("aten::mul.Tensor", [loss.into(), weight.into()])?;
    }
    reduced(g, loss, reduction)
}

/// `(input1, input2, target, margin, reduction)`
pub(super) fn margin_ranking(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 5)?;
    let target = g.input(2)?;
    let d = difference(g)?;
    let loss = g.op("aten::mul.Tensor", [target.into(), d.into()])?;
    let loss = g.op("aten::neg", [loss.into()])?;
    let margin = g.query.float(3, Some(0.0))?;
    let loss = g.op("aten::add.Scalar", [loss.into(), margin.into()])?;
    let loss = g.op("aten::clamp_min", [loss.into(), 0.into()])?;
    reduced(g, loss, 4)
}

/// `(self, target, weight, reduction, ignore_index)`
pub(super) fn nll(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 5)?;
    let (x, target) = pair(g)?;
    picked(g, x, target, 3, 4)
}

fn picked(g: &mut Builder<'_>, x: Value, target: Value, reduction: usize, ignored: usize) -> Made {
    let weight = part(g, 2)?;
    let (reduction, ignored) = (
        g.query.int(reduction, Some(1))?,
        g.query.int(ignored, Some(-100))?,
    );
    let op = match g.ndim(x) {
        4 => "aten::nll_loss2d_forward",
        _ => "aten::nll_loss_forward",
    };
    Ok(vec![g.op(
        op,
        [
            x.into(),
            target.into(),
            weight,
            reduction.into(),
            ignored.into(),
        ],
    )?])
}

/// `(self, target, weight, reduction, ignore_index, label_smoothing)`
pub(super) fn cross_entropy(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 6)?;
    let (x, target) = pair(g)?;
    let smoothing = g.query.float(5, Some(0.0))?;
    let dim = i64::from(g.ndim(x) > 1);
    let log = g.op("aten::_log_softmax", [x.into(), dim.into(), false.into()])?;
    if g.meta(x).shape == g.meta(target).shape && g.ndim(x) > 0 {
        return by_probability(g, log, target, dim);
    }
    if smoothing != 0.0 {
        return Err(g
            .query
            .wrong(5, "no label smoothing of classes by index", "some"));
    }
    let shape = g.meta(log).shape.clone();
    let [batch, classes, places @ ..] = shape.as_slice() else {
        return picked(g, log, target, 3, 4);
    };
    if places.is_empty() || places.len() == 2 {
        return picked(g, log, target, 3, 4);
    }
    // The kernel takes images: the places of one row.
    let row = places.iter().product::<u64>();
    let view = |g: &mut Builder<'_>, value: Value, shape: &[u64]| -> One {
        let sizes = shape.iter().map(|n| *n as i64).collect();
        g.op("aten::view", [value.into(), Arg::Ints(sizes).into()])
    };
    let target_shape = g.meta(target).shape.clone();
    let log = view(g, log, &[*batch, *classes, 1, row])?;
    let target = view(g, target, &[*batch, 1, row])?;
    let loss = picked(g, log, target, 3, 4)?[0];
    Ok(vec![match g.ndim(loss) {
        0 => loss,
        _ => view(g, loss, &target_shape)?,
    }])
}

/// The loss of targets that are a probability per class.
fn by_probability(g: &mut Builder<'_>, log: Value, mut target: Value, dim: i64) -> Made {
    let smoothing = g.query.float(5, Some(0.0))?;
    let classes = g.meta(log).shape[dim as usize];
    if smoothing != 0.0 {
        target = g.op(
            "aten::mul.Scalar",
            [target.into(), (1.0 - smoothing).into()],
        )?;
        let share = smoothing / classes.max(1) as f64;
        target = g.op("aten::add.Scalar", [target.into(), share.into()])?;
    }
    let mut loss = g.op("aten::mul.Tensor", [log.into(), target.into()])?;
    if let Some(weight) = g.optional(2)? {
        let mut shape = vec![1; g.ndim(log)];
        shape[dim as usize] = classes as i64;
        let weight = g.op("aten::view", [weight.into(), Arg::Ints(shape).into()])?;
        loss = g.op("aten::mul.Tensor", [loss.into(), weight.into()])?;
    }
    let dims = Arg::Ints(vec![dim]);
    loss = g.op("aten::sum.dim_IntList", [loss.into(), dims.into()])?;
    loss = g.op("aten::neg", [loss.into()])?;
    reduced(g, loss, 3)
}
