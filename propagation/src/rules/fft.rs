//! Fourier transforms: linear, and whole along the transformed dims
//! (`_ops/_tensor_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote::{Class, class, complex_of, float, real};
use super::super::rule::{Query, Rule, shard};

/// A transform by what goes in and what comes out.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    ComplexToComplex,
    RealToComplex,
    ComplexToReal,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::_fft_c2c", Kind::ComplexToComplex),
    ("aten::_fft_r2c", Kind::RealToComplex),
    ("aten::_fft_c2r", Kind::ComplexToReal),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    // input, dims, normalization, then: forward, onesided, or the last size.
    query.arity(4, 4)?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    let mut transformed = vec![false; ndim];
    let mut last = None;
    for dim in query.list(1)? {
        let dim = query.wrap(1, *dim, ndim)?;
        let known = transformed.get_mut(dim);
        if known.is_none_or(|t| std::mem::replace(t, true)) {
            let found = format!("{:?}", query.list(1)?);
            return Err(query.wrong(1, format!("dims of {input}, each once"), found));
        }
        last = Some(dim);
    }
    query.int(2, None)?;
    let mut output = input.clone();
    let complex = class(input.dtype) == Class::Complex;
    if complex == matches!(kind, Kind::RealToComplex) {
        let expected = if complex { "real" } else { "complex" };
        let expected = format!("a tensor of a {expected} dtype");
        return Err(query.wrong(0, expected, input.to_string()));
    }
    match kind {
        Kind::ComplexToComplex => {}
        Kind::RealToComplex => {
            output.dtype = complex_of(float(input.dtype));
            if let (Some(dim), true) = (last, query.flag(3)?) {
                output.shape[dim] = input.shape[dim] / 2 + 1;
            }
        }
        Kind::ComplexToReal => {
            output.dtype = real(input.dtype);
            let size = query.int(3, None)?;
            let fits = u64::try_from(size).ok().filter(|s| *s > 0);
            let fits = fits.ok_or_else(|| query.wrong(3, "a positive size", size.to_string()))?;
            if let Some(dim) = last {
                output.shape[dim] = fits;
            }
        }
    }
    let mut rule = Rule::new(vec![output], 1);
    for dim in (0..ndim).filter(|d| !transformed[*d]) {
        rule.add([shard(dim), shard(dim)]);
    }
    rule.pass(&[PartialOp::Sum, PartialOp::Avg]);
    Ok(rule)
}
