//! Norms and activations, through the ops that their rules are about.

use super::super::decompose::{Builder, Value};
use super::super::rule::Arg;
use super::{Made, One, given, pair, part};

/// `(input, normalized_shape, weight, bias, eps, cudnn_enable)`
pub(super) fn layer_norm(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 6)?;
    let eps = g.query.float(4, Some(1e-5))?;
    let (x, shape) = (g.input(0)?, given(g, 1));
    let (weight, bias) = (part(g, 2)?, part(g, 3)?);
    let op = "aten::native_layer_norm";
    Ok(vec![g.op(
        op,
        [x.into(), shape.into(), weight, bias, eps.into()],
    )?])
}

/// `(input, normalized_shape, weight, eps)`
pub(super) fn rms_norm(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (x, shape, weight) = (g.input(0)?, given(g, 1), part(g, 2)?);
    let eps = given(g, 3);
    let op = "aten::_fused_rms_norm";
    Ok(vec![
        g.op(op, [x.into(), shape.into(), weight, eps.into()])?,
    ])
}

/// `(input, num_groups, weight, bias, eps, cudnn_enabled)`
pub(super) fn group_norm(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 6)?;
    let x = g.input(0)?;
    let shape = g.meta(x).shape.clone();
    let [n, c, rest @ ..] = shape.as_slice() else {
        return Err(g
            .query
            .wrong(0, "a tensor of at least 2 dims", g.meta(x).to_string()));
    };
    let places = rest.iter().product::<u64>();
    let groups = g.query.int(1, None)?;
    let (weight, bias) = (part(g, 2)?, part(g, 3)?);
    let eps = g.query.float(4, Some(1e-5))?;
    let [n, c, places] = [*n, *c, places].map(|n| n as i64);
    Ok(vec![g.op(
        "aten::native_group_norm",
        [
            x.into(),
            weight,
            bias,
            n.into(),
            c.into(),
            places.into(),
            groups.into(),
            eps.into(),
        ],
    )?])
}

/// `(self, dim, dtype)`
pub(super) fn along(g: &mut Builder<'_>, op: &str) -> Made {
    g.query.arity(2, 3)?;
    let (mut x, dim) = (g.input(0)?, g.query.int(1, None)?);
    if let Some(Arg::DType(dtype)) = g.query.args.get(2) {
        x = g.op("aten::_to_copy", [x.into(), Arg::DType(*dtype).into()])?;
    }
    Ok(vec![g.op(op, [x.into(), dim.into(), false.into()])?])
}

/// `(self, dim)`: one half times the sigmoid of the other.
pub(super) fn glu(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 2)?;
    let x = g.input(0)?;
    let dim = g.query.dim(1, Some(-1), g.ndim(x))?;
    let size = g.meta(x).shape.get(dim).copied().unwrap_or(1);
    if size % 2 != 0 {
        return Err(g
            .query
            .wrong(0, format!("an even size of dim {dim}"), size.to_string()));
    }
    let (dim, half) = (dim as i64, (size / 2) as i64);
    let slice = |g: &mut Builder<'_>, from: i64| -> One {
        let (to, op) = (from + half, "aten::slice.Tensor");
        g.op(op, [x.into(), dim.into(), from.into(), to.into()])
    };
    let (left, right) = (slice(g, 0)?, slice(g, half)?);
    let gate = g.op("aten::sigmoid", [right.into()])?;
    Ok(vec![g.op("aten::mul.Tensor", [left.into(), gate.into()])?])
}

pub(super) fn log_sigmoid(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 1)?;
    let x = g.input(0)?;
    let gate = g.op("aten::sigmoid", [x.into()])?;
    Ok(vec![g.op("aten::log", [gate.into()])?])
}

/// `(self, weight)`, one weight per channel or one for all.
pub(super) fn prelu(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 2)?;
    let (x, mut w) = pair(g)?;
    if g.ndim(w) == 1 && g.ndim(x) > 1 {
        let mut shape = vec![1_i64; g.ndim(x) - 1];
        shape[0] = g.meta(w).shape[0] as i64;
        w = g.op("aten::view", [w.into(), Arg::Ints(shape).into()])?;
    }
    if g.ndim(w) == 1 && g.ndim(x) == 0 {
        w = g.op("aten::view", [w.into(), Arg::Ints(Vec::new()).into()])?;
    }
    let positive = g.op("aten::gt.Scalar", [x.into(), 0.into()])?;
    let scaled = g.op("aten::mul.Tensor", [w.into(), x.into()])?;
    let op = "aten::where.self";
    Ok(vec![g.op(op, [positive.into(), x.into(), scaled.into()])?])
}

/// `(x1, x2, dim, eps)`
pub(super) fn cosine_similarity(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (a, b) = pair(g)?;
    let dim = g.query.int(2, Some(1))?;
    let eps = g.query.float(3, Some(1e-8))?;
    let all = g.op("aten::mul.Tensor", [a.into(), b.into()])?;
    let shape: Vec<i64> = g.meta(all).shape.iter().map(|n| *n as i64).collect();
    let ndim = shape.len();
    let at = g.query.wrap(2, dim, ndim)?;
    // Counted from the end, the dim is the same in tensors of fewer dims.
    let dim = at as i64 - ndim.max(1) as i64;
    let sum = |g: &mut Builder<'_>, v: Value| -> One {
        let op = "aten::sum.dim_IntList";
        g.op(op, [v.into(), Arg::Ints(vec![dim]).into()])
    };
    let dot = sum(g, all)?;
    let mut norms = Vec::new();
    for mut v in [a, b] {
        let own = (at + g.ndim(v)).checked_sub(ndim);
        let size = own.and_then(|own| g.meta(v).shape.get(own).copied());
        if ndim > 0 && size != Some(shape[at] as u64) {
            v = g.op("aten::expand", [v.into(), Arg::Ints(shape.clone()).into()])?;
        }
        let square = g.op("aten::pow.Tensor_Scalar", [v.into(), 2.into()])?;
        let total = sum(g, square)?;
        let root = g.op("aten::sqrt", [total.into()])?;
        norms.push(g.op("aten::clamp_min", [root.into(), eps.into()])?);
    }
    let norm = g.op("aten::mul.Tensor", [norms[0].into(), norms[1].into()])?;
    Ok(vec![g.op("aten::div.Tensor", [dot.into(), norm.into()])?])
}
