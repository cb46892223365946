//! Decompositions of composite ops, from their definitions in
//! `aten/src/ATen/native`. A product of tensors is written as element-wise
//! products summed over the contracted dims: the same strategies as a matrix
//! product has, whatever the dims.

use super::decompose::{Builder, Decomposition, Value};
use super::error::PropagationError;
use super::rule::{Arg, Query};

type Made = Result<Vec<Value>, PropagationError>;
type One = Result<Value, PropagationError>;

#[rustfmt::skip]
pub(super) const ALL: &[(&str, Decomposition)] = &[
    // Products.
    ("aten::matmul", matmul),
    ("aten::linear", linear),
    ("aten::einsum", einsum),
    ("aten::outer", |g| { let (a, b) = pair(g)?; product(g, &[(a, "i"), (b, "j")], "ij") }),
    ("aten::ger", |g| { let (a, b) = pair(g)?; product(g, &[(a, "i"), (b, "j")], "ij") }),
    ("aten::inner", inner),
    ("aten::bilinear", bilinear),
    ("aten::tensordot", tensordot),
    ("aten::scaled_dot_product_attention", attention),
    // Norms and activations.
    ("aten::layer_norm", layer_norm),
    ("aten::rms_norm", rms_norm),
    ("aten::group_norm", group_norm),
    ("aten::softmax.int", |g| along(g, "aten::_softmax")),
    ("aten::log_softmax.int", |g| along(g, "aten::_log_softmax")),
    ("aten::glu", glu),
    ("aten::log_sigmoid", log_sigmoid),
    ("aten::prelu", prelu),
    ("aten::cosine_similarity", cosine_similarity),
    // Losses: (self, target, ..., reduction).
    ("aten::mse_loss", |g| { let d = difference(g)?; let l = g.op("aten::pow.Tensor_Scalar", [d.into(), 2.into()])?; reduced(g, l, 2) }),
    ("aten::l1_loss", |g| { let d = difference(g)?; let l = g.op("aten::abs", [d.into()])?; reduced(g, l, 2) }),
    ("aten::smooth_l1_loss", smooth),
    ("aten::huber_loss", smooth),
    ("aten::soft_margin_loss", soft_margin),
    ("aten::kl_div", kl_div),
    ("aten::binary_cross_entropy", binary_cross_entropy),
    ("aten::binary_cross_entropy_with_logits", with_logits),
    ("aten::margin_ranking_loss", margin_ranking),
    ("aten::nll_loss", nll),
    ("aten::cross_entropy_loss", cross_entropy),
    // Views by other names.
    ("aten::narrow", narrow),
    ("aten::chunk", chunk),
    ("aten::swapaxes", |g| same(g, "aten::transpose.int")),
    ("aten::swapdims", |g| same(g, "aten::transpose.int")),
    ("aten::movedim.int", movedim),
    ("aten::ravel", |g| { let x = g.input(0)?; let l = Arg::Ints(vec![-1]); Ok(vec![g.op("aten::reshape", [x.into(), l.into()])?]) }),
    ("aten::mT", |g| { let x = g.input(0)?; Ok(vec![g.op("aten::transpose.int", [x.into(), (-2).into(), (-1).into()])?]) }),
    ("aten::numpy_T", |g| { let x = g.input(0)?; let order = (0..g.ndim(x) as i64).rev().collect(); Ok(vec![g.op("aten::permute", [x.into(), Arg::Ints(order).into()])?]) }),
    // Arithmetic by other names.
    ("aten::subtract.Tensor", |g| same(g, "aten::sub.Tensor")),
    ("aten::multiply.Tensor", |g| same(g, "aten::mul.Tensor")),
    ("aten::divide.Tensor", |g| same(g, "aten::div.Tensor")),
    ("aten::true_divide.Tensor", |g| same(g, "aten::div.Tensor")),
];

fn pair(g: &Builder<'_>) -> Result<(Value, Value), PropagationError> {
    Ok((g.input(0)?, g.input(1)?))
}

/// The same op under another name, with up to three arguments.
fn same(g: &mut Builder<'_>, op: &str) -> Made {
    let query: &Query<'_> = g.query;
    query.arity(1, 3)?;
    let part = |at: usize| match query.args.get(at) {
        Some(Arg::Tensor(_)) => g.input(at).map(Into::into),
        Some(arg) => Ok(arg.clone().into()),
        None => Ok(Arg::None.into()),
    };
    let parts = [part(0)?, part(1)?, part(2)?];
    let [a, b, c] = parts;
    Ok(vec![match query.args.len() {
        1 => g.op(op, [a])?,
        2 => g.op(op, [a, b])?,
        _ => g.op(op, [a, b, c])?,
    }])
}

/// A product of tensors whose dims have letters, summed over the letters that
/// the output lacks.
fn product(g: &mut Builder<'_>, factors: &[(Value, &str)], output: &str) -> Made {
    let mut letters: Vec<char> = output.chars().collect();
    for letter in factors.iter().flat_map(|f| f.1.chars()) {
        if !letters.contains(&letter) {
            letters.push(letter);
        }
    }
    let mut total: Option<Value> = None;
    for (value, own) in factors {
        let own: Vec<char> = own.chars().collect();
        // Its letters in the common order, then the missing ones as dims of 1.
        let order = letters
            .iter()
            .filter_map(|l| own.iter().position(|o| o == l));
        let order: Vec<i64> = order.map(|at| at as i64).collect();
        let mut now = *value;
        if !order.is_sorted() {
            now = g.op("aten::permute", [now.into(), Arg::Ints(order).into()])?;
        }
        for (at, letter) in letters.iter().enumerate() {
            if !own.contains(letter) {
                now = g.op("aten::unsqueeze", [now.into(), (at as i64).into()])?;
            }
        }
        total = Some(match total {
            Some(before) => g.op("aten::mul.Tensor", [before.into(), now.into()])?,
            None => now,
        });
    }
    let total = total.ok_or_else(|| g.query.wrong(0, "at least one factor", "none"))?;
    let summed: Vec<i64> = (output.chars().count()..letters.len())
        .map(|at| at as i64)
        .collect();
    Ok(vec![match summed.is_empty() {
        true => total,
        false => g.op(
            "aten::sum.dim_IntList",
            [total.into(), Arg::Ints(summed).into()],
        )?,
    }])
}

/// Checks that a tensor has as many dims as letters, and dims of one letter one
/// size.
fn sizes(g: &Builder<'_>, factors: &[(usize, Value, &str)]) -> Result<(), PropagationError> {
    let mut known: Vec<(char, u64)> = Vec::new();
    for (argument, value, letters) in factors {
        let meta = g.meta(*value);
        if letters.chars().count() != meta.shape.len() {
            let expected = format!("a tensor of {} dims", letters.chars().count());
            return Err(g.query.wrong(*argument, expected, meta.to_string()));
        }
        for (letter, size) in letters.chars().zip(&meta.shape) {
            match known.iter().find(|k| k.0 == letter) {
                Some((_, other)) if other != size => {
                    let expected = format!("size {other} at {letter} of {letters}");
                    return Err(g.query.wrong(*argument, expected, meta.to_string()));
                }
                Some(_) => {}
                None => known.push((letter, *size)),
            }
        }
    }
    Ok(())
}

fn matmul(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 2)?;
    let (a, b) = pair(g)?;
    let matrix = match (g.ndim(a), g.ndim(b)) {
        (1, 1) => Some("aten::dot"),
        (2, 1) => Some("aten::mv"),
        (2, 2) => Some("aten::mm"),
        _ => None,
    };
    if let Some(op) = matrix {
        return Ok(vec![g.op(op, [a.into(), b.into()])?]);
    }
    let (da, db) = (g.ndim(a), g.ndim(b));
    if da == 0 || db == 0 {
        let at = usize::from(da > 0);
        return Err(g
            .query
            .wrong(at, "a tensor of at least 1 dim", "one of none"));
    }
    let contracted = |v: Value, back: usize| {
        let shape = &g.meta(v).shape;
        shape[shape.len() - back.min(shape.len())]
    };
    if contracted(a, 1) != contracted(b, 2) {
        let expected = format!("a contracted dim of size {}", contracted(a, 1));
        return Err(g.query.wrong(1, expected, g.meta(b).to_string()));
    }
    // a[..., m, k, 1] * b[..., 1, k, n], summed over k.
    let left = g.op("aten::unsqueeze", [a.into(), (-1).into()])?;
    let right = match db {
        1 => g.op("aten::unsqueeze", [b.into(), (-1).into()])?,
        _ => b,
    };
    let right = match da {
        1 => right,
        _ => g.op("aten::unsqueeze", [right.into(), (-3).into()])?,
    };
    let all = g.op("aten::mul.Tensor", [left.into(), right.into()])?;
    let sum = g.op(
        "aten::sum.dim_IntList",
        [all.into(), Arg::Ints(vec![-2]).into()],
    )?;
    Ok(vec![match db {
        1 => g.op("aten::squeeze.dim", [sum.into(), (-1).into()])?,
        _ => sum,
    }])
}

const LETTERS: &str = "abcdefghpqrstuvw";

/// Letters for the leading dims of a tensor.
fn leading(
    g: &Builder<'_>,
    argument: usize,
    v: Value,
    own: usize,
) -> Result<String, PropagationError> {
    let lead = g.ndim(v).checked_sub(own).filter(|n| *n <= LETTERS.len());
    let lead = lead.ok_or_else(|| {
        let expected = format!("a tensor of {own} to {} dims", own + LETTERS.len());
        g.query.wrong(argument, expected, g.meta(v).to_string())
    })?;
    Ok(LETTERS[..lead].into())
}

fn linear(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let (x, w) = pair(g)?;
    let lead = leading(g, 0, x, 1)?;
    let out = if g.ndim(w) == 1 { "" } else { "o" };
    let (x_is, w_is) = (format!("{lead}i"), format!("{out}i"));
    sizes(g, &[(0, x, &x_is), (1, w, &w_is)])?;
    let made = product(g, &[(x, &x_is), (w, &w_is)], &format!("{lead}{out}"))?;
    match g.optional(2)? {
        Some(bias) => Ok(vec![
            g.op("aten::add.Tensor", [made[0].into(), bias.into()])?,
        ]),
        None => Ok(made),
    }
}

fn bilinear(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 4)?;
    let (a, b) = pair(g)?;
    let w = g.input(2)?;
    let lead = leading(g, 0, a, 1)?;
    let (a_is, b_is) = (format!("{lead}i"), format!("{lead}j"));
    sizes(g, &[(0, a, &a_is), (1, b, &b_is), (2, w, "oij")])?;
    let made = product(
        g,
        &[(a, &a_is), (b, &b_is), (w, "oij")],
        &format!("{lead}o"),
    )?;
    match g.optional(3)? {
        Some(bias) => Ok(vec![
            g.op("aten::add.Tensor", [made[0].into(), bias.into()])?,
        ]),
        None => Ok(made),
    }
}

fn inner(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 2)?;
    let (a, b) = pair(g)?;
    let (da, db) = (g.ndim(a), g.ndim(b));
    if da == 0 || db == 0 {
        return Ok(vec![g.op("aten::mul.Tensor", [a.into(), b.into()])?]);
    }
    let left = leading(g, 0, a, 1)?;
    let right = leading(g, 1, b, 1)?.to_uppercase();
    let (a_is, b_is) = (format!("{left}i"), format!("{right}i"));
    sizes(g, &[(0, a, &a_is), (1, b, &b_is)])?;
    product(g, &[(a, &a_is), (b, &b_is)], &format!("{left}{right}"))
}

/// `(self, other, dims_self, dims_other)`
fn tensordot(g: &mut Builder<'_>) -> Made {
    g.query.arity(4, 4)?;
    let (a, b) = pair(g)?;
    let (left, right) = (g.query.list(2)?, g.query.list(3)?);
    if left.len() != right.len() {
        let expected = format!("{} dims, as argument 2 has", left.len());
        return Err(g.query.wrong(3, expected, format!("{right:?}")));
    }
    let mut a_is: Vec<char> = leading(g, 0, a, 0)?.chars().collect();
    let mut b_is: Vec<char> = leading(g, 1, b, 0)?.to_uppercase().chars().collect();
    for (l, r) in left.iter().zip(right) {
        let (l, r) = (
            g.query.wrap(2, *l, a_is.len())?,
            g.query.wrap(3, *r, b_is.len())?,
        );
        let (Some(letter), Some(other)) = (a_is.get(l).copied(), b_is.get_mut(r)) else {
            return Err(g
                .query
                .wrong(2, "dims of both tensors", format!("{left:?}")));
        };
        if other.is_lowercase() {
            return Err(g.query.wrong(3, "each dim once", format!("{right:?}")));
        }
        *other = letter;
    }
    let summed = |l: &char| !b_is.contains(l);
    let out: String = (a_is.iter().filter(|l| summed(l)))
        .chain(b_is.iter().filter(|l| l.is_uppercase()))
        .collect();
    let distinct = a_is.iter().filter(|l| b_is.contains(l)).count();
    if distinct != left.len() {
        return Err(g.query.wrong(2, "each dim once", format!("{left:?}")));
    }
    a_is.shrink_to_fit();
    let (a_is, b_is): (String, String) = (a_is.into_iter().collect(), b_is.into_iter().collect());
    sizes(g, &[(0, a, &a_is), (1, b, &b_is)])?;
    product(g, &[(a, &a_is), (b, &b_is)], &out)
}

/// `(equation, operands)`, without ellipsis and without diagonals.
fn einsum(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let equation = g.query.text(0, "")?.replace(' ', "");
    let values = g.list(1)?;
    let wrong = || {
        let expected = "an equation such as 'bik,bkj->bij', each letter of a dim once";
        g.query.wrong(0, expected, format!("{equation:?}"))
    };
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right.to_owned())),
        None => (equation.as_str(), None),
    };
    let terms: Vec<&str> = left.split(',').collect();
    let right = right.unwrap_or_else(|| {
        // Letters that occur once, in order of the alphabet.
        let all = || left.chars().filter(|c| *c != ',');
        let mut once: Vec<char> = all()
            .filter(|c| all().filter(|d| d == c).count() == 1)
            .collect();
        once.sort_unstable();
        once.into_iter().collect()
    });
    let letters = |t: &str| {
        let distinct = (t.chars().enumerate()).all(|(i, c)| !t.chars().take(i).any(|d| d == c));
        distinct && t.chars().all(|c| c.is_ascii_alphabetic())
    };
    let from = |c| left.contains(c);
    if terms.len() != values.len()
        || !terms.iter().all(|t| letters(t))
        || !letters(&right)
        || !right.chars().all(from)
    {
        return Err(wrong());
    }
    let typed: Vec<_> = (values.iter().zip(&terms))
        .map(|(v, t)| (1, *v, *t))
        .collect();
    sizes(g, &typed)?;
    let factors: Vec<_> = values.into_iter().zip(terms).collect();
    product(g, &factors, &right)
}

/// `(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`
fn attention(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 8)?;
    let (q, k) = pair(g)?;
    let v = g.input(2)?;
    if g.query.float(4, Some(0.0))? != 0.0 {
        return Err(g
            .query
            .wrong(4, "no dropout, which draws random numbers", "some"));
    }
    if g.query.flag(7)? {
        return Err(g
            .query
            .wrong(7, "as many heads of keys as of queries", "true"));
    }
    let lead = leading(g, 0, q, 2)?;
    let [q_is, k_is, v_is] = ["xe", "ye", "yz"].map(|t| format!("{lead}{t}"));
    sizes(g, &[(0, q, &q_is), (1, k, &k_is), (2, v, &v_is)])?;
    let scores = product(g, &[(q, &q_is), (k, &k_is)], &format!("{lead}xy"))?[0];
    let scale = g.query.float(6, Some(1.0))?;
    let mut scores = g.op("aten::mul.Tensor", [scores.into(), scale.into()])?;
    if let Some(mask) = g.optional(3)? {
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
    product(
        g,
        &[(weights, &format!("{lead}xy")), (v, &v_is)],
        &format!("{lead}xz"),
    )
}

/// An optional tensor as an argument.
fn part(g: &Builder<'_>, at: usize) -> Result<super::decompose::Part, PropagationError> {
    Ok(match g.optional(at)? {
        Some(value) => value.into(),
        None => Arg::None.into(),
    })
}

fn given(g: &Builder<'_>, at: usize) -> Arg {
    g.query.args.get(at).cloned().unwrap_or(Arg::None)
}

/// `(input, normalized_shape, weight, bias, eps, cudnn_enable)`
fn layer_norm(g: &mut Builder<'_>) -> Made {
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
fn rms_norm(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (x, shape, weight) = (g.input(0)?, given(g, 1), part(g, 2)?);
    let eps = given(g, 3);
    let op = "aten::_fused_rms_norm";
    Ok(vec![
        g.op(op, [x.into(), shape.into(), weight, eps.into()])?,
    ])
}

/// `(input, num_groups, weight, bias, eps, cudnn_enabled)`
fn group_norm(g: &mut Builder<'_>) -> Made {
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
fn along(g: &mut Builder<'_>, op: &str) -> Made {
    g.query.arity(2, 3)?;
    let (x, dim) = (g.input(0)?, g.query.int(1, None)?);
    Ok(vec![g.op(op, [x.into(), dim.into(), false.into()])?])
}

/// `(self, dim)`: one half times the sigmoid of the other.
fn glu(g: &mut Builder<'_>) -> Made {
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

fn log_sigmoid(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 1)?;
    let x = g.input(0)?;
    let gate = g.op("aten::sigmoid", [x.into()])?;
    Ok(vec![g.op("aten::log", [gate.into()])?])
}

/// `(self, weight)`, one weight per channel or one for all.
fn prelu(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 2)?;
    let (x, mut w) = pair(g)?;
    if g.ndim(w) == 1 && g.ndim(x) > 1 {
        let mut shape = vec![1_i64; g.ndim(x) - 1];
        shape[0] = g.meta(w).shape[0] as i64;
        w = g.op("aten::view", [w.into(), Arg::Ints(shape).into()])?;
    }
    let positive = g.op("aten::gt.Scalar", [x.into(), 0.into()])?;
    let scaled = g.op("aten::mul.Tensor", [w.into(), x.into()])?;
    let op = "aten::where.self";
    Ok(vec![g.op(op, [positive.into(), x.into(), scaled.into()])?])
}

/// `(x1, x2, dim, eps)`
fn cosine_similarity(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (a, b) = pair(g)?;
    let dim = g.query.int(2, Some(1))?;
    let eps = g.query.float(3, Some(1e-8))?;
    let all = g.op("aten::mul.Tensor", [a.into(), b.into()])?;
    if g.meta(a).shape != g.meta(all).shape || g.meta(b).shape != g.meta(all).shape {
        return Err(g
            .query
            .wrong(1, "tensors of one shape", g.meta(b).to_string()));
    }
    let mut along = |v: Value| -> One {
        let sum = "aten::sum.dim_IntList";
        g.op(sum, [v.into(), Arg::Ints(vec![dim]).into()])
    };
    let dot = along(all)?;
    let mut norms = Vec::new();
    for v in [a, b] {
        let square = g.op("aten::pow.Tensor_Scalar", [v.into(), 2.into()])?;
        let sum = g.op(
            "aten::sum.dim_IntList",
            [square.into(), Arg::Ints(vec![dim]).into()],
        )?;
        let root = g.op("aten::sqrt", [sum.into()])?;
        norms.push(g.op("aten::clamp_min", [root.into(), eps.into()])?);
    }
    let norm = g.op("aten::mul.Tensor", [norms[0].into(), norms[1].into()])?;
    Ok(vec![g.op("aten::div.Tensor", [dot.into(), norm.into()])?])
}

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

/// `(self, target, reduction, beta or delta)`: a square near 0, straight beyond.
fn smooth(g: &mut Builder<'_>) -> Made {
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
fn soft_margin(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let (x, target) = pair(g)?;
    let margin = g.op("aten::mul.Tensor", [target.into(), x.into()])?;
    let margin = g.op("aten::neg", [margin.into()])?;
    let loss = g.op("aten::exp", [margin.into()])?;
    let loss = g.op("aten::log1p", [loss.into()])?;
    reduced(g, loss, 2)
}

/// `(self, target, reduction, log_target)`: target * (log(target) - self).
fn kl_div(g: &mut Builder<'_>) -> Made {
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
fn binary_cross_entropy(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 4)?;
    let (x, target) = pair(g)?;
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
fn with_logits(g: &mut Builder<'_>) -> Made {
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
fn margin_ranking(g: &mut Builder<'_>) -> Made {
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
fn nll(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 5)?;
    let x = g.input(0)?;
    picked(g, x, 3, 4)
}

fn picked(g: &mut Builder<'_>, x: Value, reduction: usize, ignored: usize) -> Made {
    let (target, weight) = (g.input(1)?, part(g, 2)?);
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

/// `(self, target, weight, reduction, ignore_index, label_smoothing)`, classes
/// by index.
fn cross_entropy(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 6)?;
    if g.query.float(5, Some(0.0))? != 0.0 {
        return Err(g.query.wrong(5, "no label smoothing", "some"));
    }
    let (x, target) = pair(g)?;
    let (input, classes) = (g.meta(x), g.meta(target));
    if input.shape == classes.shape && !input.shape.is_empty() {
        return Err(g.query.wrong(1, "classes by index", classes.to_string()));
    }
    let dim = i64::from(input.shape.len() > 1);
    let log = g.op("aten::_log_softmax", [x.into(), dim.into(), false.into()])?;
    picked(g, log, 3, 4)
}

/// `(self, dim, start, length)`
fn narrow(g: &mut Builder<'_>) -> Made {
    g.query.arity(4, 4)?;
    let (x, dim) = (g.input(0)?, g.query.int(1, None)?);
    let (start, length) = (g.query.int(2, None)?, g.query.int(3, None)?);
    let end = start.checked_add(length).filter(|_| length >= 0);
    let end = end.ok_or_else(|| g.query.wrong(3, "a length", length.to_string()))?;
    let op = "aten::slice.Tensor";
    Ok(vec![g.op(
        op,
        [x.into(), dim.into(), start.into(), end.into()],
    )?])
}

/// `(self, chunks, dim)`
fn chunk(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let x = g.input(0)?;
    let dim = g.query.dim(2, Some(0), g.ndim(x))?;
    let chunks = u64::try_from(g.query.int(1, None)?).ok().filter(|n| *n > 0);
    let chunks = chunks.ok_or_else(|| g.query.wrong(1, "a positive number", "another"))?;
    let size = g.meta(x).shape.get(dim).copied().unwrap_or(1);
    let piece = size.div_ceil(chunks).max(1) as i64;
    g.all(
        "aten::split.Tensor",
        [x.into(), piece.into(), (dim as i64).into()],
    )
}

/// `(self, source, destination)`
fn movedim(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 3)?;
    let x = g.input(0)?;
    let ndim = g.ndim(x);
    let (from, to) = (g.query.dim(1, None, ndim)?, g.query.dim(2, None, ndim)?);
    let mut order: Vec<i64> = (0..ndim as i64).collect();
    if ndim > 0 {
        let moved = order.remove(from);
        order.insert(to, moved);
    }
    Ok(vec![g.op(
        "aten::permute",
        [x.into(), Arg::Ints(order).into()],
    )?])
}
