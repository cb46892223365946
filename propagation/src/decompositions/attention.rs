//! Attention that is not fused: scores, softmax, weighted values.

use super::super::decompose::{Builder, Value};
use super::super::rule::Arg;
use super::product::{LETTERS, fitting, leading, product};
use super::{Made, One, pair};

/// `(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`
pub(super) fn attention(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 8)?;
    let (q, k) = pair(g)?;
    let v = g.input(2)?;
    if g.query.flag(7)? && g.ndim(q) > 2 {
        return grouped(g, [q, k, v]);
    }
    let mask = g.optional(3)?;
    Ok(vec![attended(g, [q, k, v], mask)?])
}

/// The result for tensors whose leading dims broadcast.
fn attended(g: &mut Builder<'_>, [q, k, v]: [Value; 3], mask: Option<Value>) -> One {
    for (at, tensor) in [q, k, v].into_iter().enumerate() {
        leading(g, at, tensor, 2)?;
    }
    // The leading dims of all of them end with the same letters.
    let most = [q, k, v]
        .map(|t| g.ndim(t) - 2)
        .into_iter()
        .max()
        .unwrap_or(0);
    let named = |lead: usize, own: &str| format!("{}{own}", &LETTERS[most - lead..most]);
    let [q_lead, k_lead, v_lead] = [q, k, v].map(|t| g.ndim(t) - 2);
    let (q_is, k_is, v_is) = (
        named(q_lead, "xk"),
        named(k_lead, "yk"),
        named(v_lead, "yz"),
    );
    let factors = [
        (0, q, q_is.as_str()),
        (1, k, k_is.as_str()),
        (2, v, v_is.as_str()),
    ];
    fitting(g, &factors, |letter| LETTERS.contains(letter))?;
    let batch = |t: Value| g.meta(t).shape[..g.ndim(t) - 2].to_vec();
    if batch(q) != batch(k) || batch(q) != batch(v) {
        // Kernels do not broadcast to no elements.
        g.refuses_empty();
    }
    let lead = q_lead.max(k_lead);
    let scores = product(g, &[(q, &q_is), (k, &k_is)], &named(lead, "xy"))?[0];
    let weights = weights(g, scores, mask)?;
    let lead = g.ndim(weights) - 2;
    if lead > most {
        let expected = format!("a mask of at most {} dims", most + 2);
        return Err(g.query.wrong(3, expected, g.meta(weights).to_string()));
    }
    let weights_are = named(lead, "xy");
    let factors = [(weights, weights_are.as_str()), (v, v_is.as_str())];
    Ok(product(g, &factors, &named(lead.max(v_lead), "xz"))?[0])
}

/// What softmax and dropout make of scores.
fn weights(g: &mut Builder<'_>, scores: Value, mask: Option<Value>) -> One {
    let scale = g.query.float(6, Some(1.0))?;
    let mut scores = g.op("aten::mul.Tensor", [scores.into(), scale.into()])?;
    if let Some(mask) = mask {
        // Added, or minus infinity where it is false: element-wise either way.
        scores = g.op(
            "aten::where.self",
            [mask.into(), scores.into(), scores.into()],
        )?;
    }
    if g.query.flag(5)? {
        // The mask is made inside, and so replicated.
        let shape = &g.meta(scores).shape;
        let tail = shape[shape.len() - 2..].iter().map(|n| *n as i64).collect();
        let mask = g.op("aten::ones", [Arg::Ints(tail).into()])?;
        scores = g.op(
            "aten::where.self",
            [mask.into(), scores.into(), scores.into()],
        )?;
    }
    let weights = g.op("aten::_softmax", [scores.into(), (-1).into(), false.into()])?;
    match g.query.float(4, Some(0.0))? {
        0.0 => Ok(weights),
        dropout => g.op(
            "aten::native_dropout",
            [weights.into(), dropout.into(), true.into()],
        ),
    }
}

/// The result where groups of query heads share a key head: each group has a dim of
/// its own, of size 1 in keys and values.
fn grouped(g: &mut Builder<'_>, [q, k, v]: [Value; 3]) -> Made {
    let heads = |g: &Builder<'_>, at: usize, t: Value| {
        let shape = &g.meta(t).shape;
        let found = shape.len().checked_sub(3).map(|at| shape[at]);
        let wrong = || {
            g.query
                .wrong(at, "a tensor with a dim of heads", g.meta(t).to_string())
        };
        found.ok_or_else(wrong)
    };
    let (all, own) = (heads(g, 0, q)?, heads(g, 1, k)?);
    if own == 0 || all % own != 0 || heads(g, 2, v)? != own {
        let expected = format!("a number of heads that divides {all}, as keys and values have it");
        return Err(g.query.wrong(1, expected, g.meta(k).to_string()));
    }
    let q = split_heads(g, q, own)?;
    let k = g.op("aten::unsqueeze", [k.into(), (-3).into()])?;
    let v = g.op("aten::unsqueeze", [v.into(), (-3).into()])?;
    let mask = match g.optional(3)? {
        Some(mask) if g.ndim(mask) > 2 && heads(g, 3, mask)? == all && all > 1 => {
            Some(split_heads(g, mask, own)?)
        }
        Some(mask) if g.ndim(mask) > 2 => {
            Some(g.op("aten::unsqueeze", [mask.into(), (-3).into()])?)
        }
        mask => mask,
    };
    let made = attended(g, [q, k, v], mask)?;
    // Heads again.
    let mut shape: Vec<i64> = g.meta(made).shape.iter().map(|n| *n as i64).collect();
    let groups = shape.remove(shape.len() - 3);
    let at = shape.len() - 3;
    shape[at] *= groups;
    Ok(vec![g.op(
        "aten::view",
        [made.into(), Arg::Ints(shape).into()],
    )?])
}

/// The dim of heads as key heads and groups.
fn split_heads(g: &mut Builder<'_>, tensor: Value, own: u64) -> One {
    let mut shape: Vec<i64> = g.meta(tensor).shape.iter().map(|n| *n as i64).collect();
    let at = shape.len() - 3;
    let groups = shape[at] / own as i64;
    shape[at] = own as i64;
    shape.insert(at + 1, groups);
    g.op("aten::view", [tensor.into(), Arg::Ints(shape).into()])
}
