//! Products of tensors, as products of elements summed over the contracted dims:
//! the same strategies as a matrix product has, whatever the dims.

use super::super::decompose::{Builder, Value};
use super::super::error::PropagationError;
use super::super::rule::Arg;
use super::{Made, One, pair};

/// A product of tensors whose dims have letters, summed over the letters that
/// the output lacks.
pub(super) fn product(g: &mut Builder<'_>, factors: &[(Value, &str)], output: &str) -> Made {
    summed(g, factors, output, false)
}

/// The same as `torch.einsum` does it: where it sums a factor before a product, integers
/// widen.
pub(super) fn einsum_product(g: &mut Builder<'_>, factors: &[(Value, &str)], output: &str) -> Made {
    let widens = sums_a_factor(g, factors, output);
    summed(g, factors, output, widens)
}

fn summed(g: &mut Builder<'_>, factors: &[(Value, &str)], output: &str, widens: bool) -> Made {
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
        false if widens => {
            let op = "aten::sum.dim_IntList";
            g.op(op, [total.into(), Arg::Ints(summed).into()])?
        }
        false => sum(g, total, summed)?,
    }])
}

/// Whether a dim is summed that only one factor has (`sumproduct_pair` in
/// `aten/src/ATen/native/Linear.cpp`).
fn sums_a_factor(g: &Builder<'_>, factors: &[(Value, &str)], output: &str) -> bool {
    let long = |(value, own): &(Value, &str), letter: char| {
        let at = own.chars().position(|l| l == letter);
        at.is_some_and(|at| g.meta(*value).shape[at] != 1)
    };
    factors.len() == 1
        || factors.iter().any(|factor| {
            let only = |l: char| factors.iter().filter(|other| long(other, l)).count() == 1;
            let mut letters = factor.1.chars().filter(|l| !output.contains(*l));
            letters.any(|l| long(factor, l) && only(l))
        })
}

/// The sum over some dims, in the dtype of the summands: integers too.
fn sum(g: &mut Builder<'_>, summands: Value, dims: Vec<i64>) -> One {
    let dtype = Arg::DType(g.meta(summands).dtype);
    let dims = Arg::Ints(dims);
    let op = "aten::sum.dim_IntList";
    g.op(
        op,
        [summands.into(), dims.into(), false.into(), dtype.into()],
    )
}

/// Checks that a tensor has as many dims as letters, and dims of one letter one
/// size.
pub(super) fn sizes(
    g: &Builder<'_>,
    factors: &[(usize, Value, &str)],
) -> Result<(), PropagationError> {
    fitting(g, factors, |_| false)
}

/// The same, where a dim of size 1 fits others if its letter may broadcast.
pub(super) fn fitting(
    g: &Builder<'_>,
    factors: &[(usize, Value, &str)],
    broadcasts: impl Fn(char) -> bool,
) -> Result<(), PropagationError> {
    let mut known: Vec<(char, u64)> = Vec::new();
    for (argument, value, letters) in factors {
        let meta = g.meta(*value);
        if letters.chars().count() != meta.shape.len() {
            let expected = format!("a tensor of {} dims", letters.chars().count());
            return Err(g.query.wrong(*argument, expected, meta.to_string()));
        }
        for (letter, size) in letters.chars().zip(&meta.shape) {
            match known.iter_mut().find(|k| k.0 == letter) {
                Some((_, other)) if broadcasts(letter) && (*size == 1 || *other == 1) => {
                    *other = (*other).max(*size);
                    // No elements are no element, however often.
                    if *size == 0 {
                        *other = 0;
                    }
                }
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

pub(super) const LETTERS: &str = "abcdefghpqrstuvw";

/// Letters for the leading dims of a tensor.
pub(super) fn leading(
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
    let sum = sum(g, all, vec![-2])?;
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
    fitting(g, &[(0, a, &a_is), (1, b, &b_is)], |_| true)?;
    product(g, &[(a, &a_is), (b, &b_is)], &out)
}
