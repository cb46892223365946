//! `einsum`, as a product of tensors whose dims have letters.

use super::super::decompose::{Builder, Value};
use super::super::error::PropagationError;
use super::Made;
use super::product::{einsum_product, fitting, sizes};

/// The dims that `...` stands for, from the last one on.
const ELLIPSIS: [char; 10] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'];

/// `(equation, operands, path)`
pub(super) fn einsum(g: &mut Builder<'_>) -> Made {
    g.query.arity(2, 3)?;
    let equation = g.query.text(0, "")?.replace(' ', "");
    let values = g.list(1)?;
    let wrong = || {
        let expected = "an equation such as 'bik,bkj->bij' or '...ij->...ji'";
        g.query.wrong(0, expected, format!("{equation:?}"))
    };
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let written: Vec<&str> = left.split(',').collect();
    let is_term = |term: &str| {
        let rest = term.replacen("...", "", 1);
        rest.chars().all(|c| c.is_ascii_alphabetic())
    };
    if written.len() != values.len() || !written.iter().all(|t| is_term(t)) {
        return Err(wrong());
    }
    // Each ellipsis becomes digits, so that the last dims of all fit together.
    let mut most = 0;
    let mut terms: Vec<String> = Vec::with_capacity(values.len());
    for (value, term) in values.iter().zip(&written) {
        let Some((before, behind)) = term.split_once("...") else {
            terms.push((*term).into());
            continue;
        };
        let count = g.ndim(*value).checked_sub(before.len() + behind.len());
        let digits = count.and_then(|n| ELLIPSIS.get(..n)).ok_or_else(wrong)?;
        most = most.max(digits.len());
        let digits: String = digits.iter().rev().collect();
        terms.push(format!("{before}{digits}{behind}"));
    }
    let ellipsis: String = ELLIPSIS[..most].iter().rev().collect();
    let right = match right {
        Some(right) if is_term(right) => right.replacen("...", &ellipsis, 1),
        Some(_) => return Err(wrong()),
        None => {
            // Letters that occur once, in order of the alphabet.
            let all = || left.chars().filter(char::is_ascii_alphabetic);
            let mut once: Vec<char> = all()
                .filter(|c| all().filter(|d| d == c).count() == 1)
                .collect();
            once.sort_unstable();
            ellipsis.chars().chain(once).collect()
        }
    };
    let repeated = |t: &str| {
        t.chars()
            .enumerate()
            .any(|(i, c)| t.chars().take(i).any(|d| d == c))
    };
    let from = |c: char| terms.iter().any(|t| t.contains(c));
    if repeated(&right) || !right.chars().all(from) {
        return Err(wrong());
    }
    let mut factors: Vec<(Value, String)> = Vec::with_capacity(values.len());
    for (value, term) in values.into_iter().zip(terms) {
        sizes(g, &[(1, value, &term)])?;
        factors.push(diagonals(g, value, term)?);
    }
    let typed: Vec<_> = factors.iter().map(|(v, t)| (1, *v, t.as_str())).collect();
    fitting(g, &typed, |_| true)?;
    let factors: Vec<_> = factors.iter().map(|(v, t)| (*v, t.as_str())).collect();
    einsum_product(g, &factors, &right)
}

/// A tensor whose letters are different: dims of one letter become their diagonal.
fn diagonals(
    g: &mut Builder<'_>,
    value: Value,
    letters: String,
) -> Result<(Value, String), PropagationError> {
    let (mut value, mut letters): (Value, Vec<char>) = (value, letters.chars().collect());
    let pair = |letters: &[char]| {
        let second = |at: usize| letters[..at].iter().position(|l| *l == letters[at]);
        (0..letters.len()).find_map(|at| Some((second(at)?, at)))
    };
    while let Some((first, second)) = pair(&letters) {
        let op = "aten::diagonal";
        let dims = [first, second].map(|at| at as i64);
        value = g.op(op, [value.into(), 0.into(), dims[0].into(), dims[1].into()])?;
        // The diagonal is the last dim.
        letters.remove(second);
        let letter = letters.remove(first);
        letters.push(letter);
    }
    Ok((value, letters.into_iter().collect()))
}
