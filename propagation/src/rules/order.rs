//! Sorting, selection and scans: whole along one dim, each line apart from the
//! others (`_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote::{Class, class, commutes};
use super::super::rule::{Query, Rule, shard};
use super::super::spec::TensorMeta;
use super::create;
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// Values and indices along the dim at a position; of the last dim by
    /// default, where that is allowed.
    Indexed { dim: usize, default: Option<i64> },
    /// The largest or smallest `k` (at position 1) and their indices.
    Top,
    /// Sums that partial sums pass.
    Sum,
    /// Products, of integers in `i64`.
    Product,
    /// Any other scan.
    Scan,
}

const fn sorted(dim: usize) -> Kind {
    let default = Some(-1);
    Kind::Indexed { dim, default }
}

const EXTREMES: Kind = Kind::Indexed {
    dim: 1,
    default: None,
};

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::sort", sorted(1)),
    ("aten::sort.stable", sorted(2)),
    ("aten::topk", Kind::Top),
    ("aten::cummax", EXTREMES),
    ("aten::cummin", EXTREMES),
    ("aten::cumsum", Kind::Sum),
    ("aten::cumprod", Kind::Product),
    ("aten::logcumsumexp", Kind::Scan),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 5)?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    let (at, default) = match kind {
        Kind::Indexed { dim, default } => (dim, default),
        Kind::Top => (2, Some(-1)),
        Kind::Sum | Kind::Product | Kind::Scan => (1, None),
    };
    let dim = query.dim(at, default, ndim)?;
    let mut values = input.clone();
    if let Kind::Top = kind {
        let k = query.int(1, None)?;
        let size = input.shape.get(dim).copied().unwrap_or(1);
        let fits = u64::try_from(k).ok().filter(|k| *k <= size);
        let fits = fits
            .ok_or_else(|| query.wrong(1, format!("a number from 0 to {size}"), k.to_string()))?;
        if let Some(size) = values.shape.get_mut(dim) {
            *size = fits;
        }
    }
    if let Kind::Sum | Kind::Product = kind {
        let widened = match class(input.dtype) {
            Class::Bool | Class::Integer => DType::I64,
            Class::Float | Class::Complex => input.dtype,
        };
        values.dtype = create::dtype(query).unwrap_or(widened);
    }
    let to = values.dtype;
    let outputs = match kind {
        Kind::Indexed { .. } | Kind::Top => {
            let shape = values.shape.clone();
            let indices = TensorMeta {
                dtype: DType::I64,
                shape,
            };
            vec![values, indices]
        }
        _ => vec![values],
    };
    let width = outputs.len() + 1;
    let mut rule = Rule::new(outputs, 1);
    for other in (0..ndim).filter(|d| *d != dim) {
        rule.add(std::iter::repeat_n(shard(other), width));
    }
    if let Kind::Sum = kind {
        for op in [PartialOp::Sum, PartialOp::Avg] {
            if commutes(op, input.dtype, to) {
                rule.pass(&[op]);
            }
        }
    }
    Ok(rule)
}
