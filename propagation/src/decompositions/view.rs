//! Views by other names.

use super::super::decompose::Builder;
use super::super::rule::Arg;
use super::Made;

/// `(self, dim, start, length)`
pub(super) fn narrow(g: &mut Builder<'_>) -> Made {
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
pub(super) fn chunk(g: &mut Builder<'_>) -> Made {
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
pub(super) fn movedim(g: &mut Builder<'_>) -> Made {
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

pub(super) fn ravel(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 1)?;
    let x = g.input(0)?;
    let flat = Arg::Ints(vec![-1]);
    Ok(vec![g.op("aten::reshape", [x.into(), flat.into()])?])
}

/// The transpose of matrices.
pub(super) fn last_two(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 1)?;
    let x = g.input(0)?;
    let op = "aten::transpose.int";
    Ok(vec![g.op(op, [x.into(), (-2).into(), (-1).into()])?])
}

/// All dims in reverse order.
pub(super) fn reversed(g: &mut Builder<'_>) -> Made {
    g.query.arity(1, 1)?;
    let x = g.input(0)?;
    let order = (0..g.ndim(x) as i64).rev().collect();
    Ok(vec![g.op(
        "aten::permute",
        [x.into(), Arg::Ints(order).into()],
    )?])
}
