//! Products of tensors, as products of elements summed over the contracted dims:
//! the same strategies as a matrix product has, whatever the dims.

use super::super::decompose::{Builder, Value};
use super::super::error::PropagationError;
use super::super::rule::Arg;
use super::{Made, pair};

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

pub(super) fn matmul(g: &mut Builder<'_>) -> Made {
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

pub(super) fn linear(g: &mut Builder<'_>) -> Made {
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

pub(super) fn bilinear(g: &mut Builder<'_>) -> Made {
    g.query.arity(3, 4)?;
    g.refuses_empty();
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

pub(super) fn outer(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 2)?;
    let (a, b) = pair(g)?;
    sizes(g, &[(0, a, "i"), (1, b, "j")])?;
    product(g, &[(a, "i"), (b, "j")], "ij")
}

pub(super) fn inner(g: &mut Builder<'_>) -> Made {
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
pub(super) fn tensordot(g: &mut Builder<'_>) -> Made {
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
pub(super) fn einsum(g: &mut Builder<'_>) -> Made {
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
pub(super) fn attention(g: &mut Builder<'_>) -> Made {
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
