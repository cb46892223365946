//! Reductions: a sharded reduced dim leaves a partial, the other dims keep
//! their shards (`_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Need, Query, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use rote_plans::DType;

/// How a reduction combines what it reduced on shards.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kind {
    /// What combines the results of shards, if they combine.
    combine: Option<PartialOp>,
    /// What shards of a reduced dim need.
    need: Wants,
    /// Where the reduced dims stand; without, all are reduced.
    dims: Option<usize>,
    /// How many outputs of the reduced shape.
    outputs: usize,
    /// The dtype of the last output, if not the input's.
    indices: Option<DType>,
}

#[derive(Clone, Copy, Debug)]
enum Wants {
    Nothing,
    Filled,
    Even,
}

const I64: Option<DType> = Some(DType(4));
const BOOL: Option<DType> = Some(DType(11));

const fn kind(combine: Option<PartialOp>, need: Wants, dims: Option<usize>) -> Kind {
    Kind {
        combine,
        need,
        dims,
        outputs: 1,
        indices: None,
    }
}

const fn with(kind: Kind, outputs: usize, indices: Option<DType>) -> Kind {
    Kind {
        outputs,
        indices,
        ..kind
    }
}

const SUM: Option<PartialOp> = Some(PartialOp::Sum);
const AVG: Option<PartialOp> = Some(PartialOp::Avg);
const MAX: Option<PartialOp> = Some(PartialOp::Max);
const MIN: Option<PartialOp> = Some(PartialOp::Min);
const PRODUCT: Option<PartialOp> = Some(PartialOp::Product);

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::sum", kind(SUM, Wants::Nothing, None)),
    ("aten::sum.dim_IntList", kind(SUM, Wants::Nothing, Some(1))),
    ("aten::nansum", kind(SUM, Wants::Nothing, Some(1))),
    ("aten::prod", kind(PRODUCT, Wants::Nothing, None)),
    ("aten::prod.dim_int", kind(PRODUCT, Wants::Nothing, Some(1))),
    ("aten::mean", kind(AVG, Wants::Even, None)),
    ("aten::mean.dim", kind(AVG, Wants::Even, Some(1))),
    ("aten::max", kind(MAX, Wants::Filled, None)),
    ("aten::min", kind(MIN, Wants::Filled, None)),
    ("aten::amax", kind(MAX, Wants::Filled, Some(1))),
    ("aten::amin", kind(MIN, Wants::Filled, Some(1))),
    // Values and indices: an index is of no use on another rank.
    ("aten::max.dim", with(kind(None, Wants::Nothing, Some(1)), 2, I64)),
    ("aten::min.dim", with(kind(None, Wants::Nothing, Some(1)), 2, I64)),
    ("aten::argmax", with(kind(None, Wants::Nothing, Some(1)), 1, I64)),
    ("aten::argmin", with(kind(None, Wants::Nothing, Some(1)), 1, I64)),
    ("aten::all", with(kind(None, Wants::Nothing, None), 1, BOOL)),
    ("aten::all.dim", with(kind(None, Wants::Nothing, Some(1)), 1, BOOL)),
    ("aten::any", with(kind(None, Wants::Nothing, None), 1, BOOL)),
    ("aten::any.dim", with(kind(None, Wants::Nothing, Some(1)), 1, BOOL)),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, if kind.dims.is_some() { 4 } else { 2 })?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    let mut reduced = vec![false; ndim];
    let mut keep = false;
    let dims = match kind.dims {
        Some(at) => {
            keep = query.flag(at + 1)?;
            query.ints(at)?
        }
        None => None,
    };
    match (dims, kind.dims) {
        // No dims means all of them, as does an empty list.
        (Some(dims), Some(at)) if !dims.is_empty() => {
            for dim in dims {
                let dim = query.wrap(at, *dim, ndim)?;
                if let Some(dim) = reduced.get_mut(dim) {
                    *dim = true;
                }
            }
        }
        _ => reduced.fill(true),
    }
    let mut shape = Vec::with_capacity(ndim);
    let mut at = vec![0; ndim];
    for (dim, size) in input.shape.iter().enumerate() {
        at[dim] = shape.len();
        match (reduced[dim], keep) {
            (false, _) => shape.push(*size),
            (true, true) => shape.push(1),
            (true, false) => {}
        }
    }
    let mut outputs = vec![
        TensorMeta {
            dtype: input.dtype,
            shape,
        };
        kind.outputs
    ];
    if let (Some(dtype), Some(last)) = (kind.indices, outputs.last_mut()) {
        last.dtype = dtype;
    }
    let mut rule = Rule::new(outputs, 1);
    for dim in 0..ndim {
        if !reduced[dim] {
            let outputs = std::iter::repeat_n(shard(at[dim]), kind.outputs);
            rule.add(outputs.chain([shard(dim)]));
        } else if let Some(op) = kind.combine {
            let need = match kind.need {
                Wants::Nothing => Need::Nothing,
                Wants::Filled => Need::Filled,
                Wants::Even => Need::Divides(input.shape[dim]),
            };
            rule.add([partial(op), Slot::Shard(dim as u32, need)]);
        }
    }
    if let Some(op) = kind.combine {
        rule.pass(&[op]);
    }
    Ok(rule)
}
