//! Reductions: a sharded reduced dim leaves a partial if the results of shards
//! combine, the other dims keep their shards (`_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote;
use super::super::rule::{Need, Query, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use super::create;
use rote_plans::DType;

/// A reduction: which dims, and what becomes of shards of them.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kind {
    combine: Combine,
    dims: Dims,
    /// Where `keepdim` stands.
    keep: Option<usize>,
    /// Where the k of a k-th value stands.
    k: Option<usize>,
    /// How many outputs of the reduced shape.
    outputs: usize,
    types: Types,
}

/// How the results of shards of a reduced dim combine.
#[derive(Clone, Copy, Debug)]
enum Combine {
    /// They do not: an index is of no use on another rank, a median of medians
    /// is no median.
    Not,
    /// By this op, which also passes partials of its own kind.
    By(PartialOp, Wants),
    /// By this op; partials do not pass, for elements change before.
    Changed(PartialOp),
    /// As the order of the norm at this position says.
    Norm(usize),
}

/// What shards of a reduced dim need.
#[derive(Clone, Copy, Debug)]
enum Wants {
    Nothing,
    Filled,
    Even,
}

/// The reduced dims.
#[derive(Clone, Copy, Debug)]
enum Dims {
    All,
    /// Those at a position; all, if none are given.
    At(usize),
    /// The same, but an empty list stands for no dim.
    Exactly(usize),
    /// The same, but an empty list is refused: some of these ops take it for all
    /// dims and some for none.
    Some(usize),
    /// One dim at a position, or the default.
    One(usize, Option<i64>),
}

/// The dtypes of the outputs.
#[derive(Clone, Copy, Debug)]
enum Types {
    /// The input's, or the wanted one.
    Same,
    /// The same, where integers become `i64`.
    Wide,
    /// The same, where integers become `f32`.
    Floating,
    /// The real type of the input's, or the wanted one; a second output (the
    /// mean) has the input's.
    Real,
    /// `bool`; `u8` stays.
    Truth,
    /// The last output counts positions.
    Indices,
}

const fn kind(combine: Combine, dims: Dims, keep: Option<usize>, types: Types) -> Kind {
    Kind {
        combine,
        dims,
        keep,
        k: None,
        outputs: 1,
        types,
    }
}

/// Values and indices along one dim.
const fn picks(dims: Dims, keep: usize) -> Kind {
    Kind {
        outputs: 2,
        ..kind(Combine::Not, dims, Some(keep), Types::Indices)
    }
}

const SUM: Combine = Combine::By(PartialOp::Sum, Wants::Nothing);
const MEAN: Combine = Combine::By(PartialOp::Avg, Wants::Even);
const MAX: Combine = Combine::By(PartialOp::Max, Wants::Filled);
const MIN: Combine = Combine::By(PartialOp::Min, Wants::Filled);
const PRODUCT: Combine = Combine::By(PartialOp::Product, Wants::Nothing);
/// A NaN counts as 0, but not before the summands of a partial are added.
const NANSUM: Combine = Combine::Changed(PartialOp::Sum);

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::sum", kind(SUM, Dims::All, None, Types::Wide)),
    ("aten::sum.dim_IntList", kind(SUM, Dims::At(1), Some(2), Types::Wide)),
    ("aten::nansum", kind(NANSUM, Dims::At(1), Some(2), Types::Wide)),
    ("aten::prod", kind(PRODUCT, Dims::All, None, Types::Wide)),
    ("aten::prod.dim_int", kind(PRODUCT, Dims::One(1, None), Some(2), Types::Wide)),
    ("aten::mean", kind(MEAN, Dims::All, None, Types::Same)),
    ("aten::mean.dim", kind(MEAN, Dims::At(1), Some(2), Types::Same)),
    ("aten::max", kind(MAX, Dims::All, None, Types::Same)),
    ("aten::min", kind(MIN, Dims::All, None, Types::Same)),
    ("aten::amax", kind(MAX, Dims::At(1), Some(2), Types::Same)),
    ("aten::amin", kind(MIN, Dims::At(1), Some(2), Types::Same)),
    ("aten::max.dim", picks(Dims::One(1, None), 2)),
    ("aten::min.dim", picks(Dims::One(1, None), 2)),
    ("aten::argmax", kind(Combine::Not, Dims::At(1), Some(2), Types::Indices)),
    ("aten::argmin", kind(Combine::Not, Dims::At(1), Some(2), Types::Indices)),
    ("aten::all", kind(Combine::Not, Dims::All, None, Types::Truth)),
    ("aten::all.dim", kind(Combine::Not, Dims::One(1, None), Some(2), Types::Truth)),
    ("aten::all.dims", kind(Combine::Not, Dims::Exactly(1), Some(2), Types::Truth)),
    ("aten::any", kind(Combine::Not, Dims::All, None, Types::Truth)),
    ("aten::any.dim", kind(Combine::Not, Dims::One(1, None), Some(2), Types::Truth)),
    ("aten::any.dims", kind(Combine::Not, Dims::Exactly(1), Some(2), Types::Truth)),
    ("aten::kthvalue", Kind { k: Some(1), ..picks(Dims::One(2, Some(-1)), 3) }),
    ("aten::median", kind(Combine::Not, Dims::All, None, Types::Same)),
    ("aten::median.dim", picks(Dims::One(1, None), 2)),
    ("aten::nanmedian", kind(Combine::Not, Dims::All, None, Types::Same)),
    ("aten::nanmedian.dim", picks(Dims::One(1, None), 2)),
    ("aten::mode", picks(Dims::One(1, Some(-1)), 2)),
    ("aten::var.correction", kind(Combine::Not, Dims::At(1), Some(3), Types::Real)),
    ("aten::std.correction", kind(Combine::Not, Dims::At(1), Some(3), Types::Real)),
    ("aten::var_mean.correction", SPREAD_AND_MEAN),
    ("aten::std_mean.correction", SPREAD_AND_MEAN),
    ("aten::logsumexp", kind(Combine::Not, Dims::Some(1), Some(2), Types::Floating)),
    ("aten::norm.Scalar", kind(Combine::Norm(1), Dims::All, None, Types::Real)),
    ("aten::linalg_vector_norm", kind(Combine::Norm(1), Dims::At(2), Some(3), Types::Real)),
    ("aten::linalg__powsum",
        kind(Combine::Changed(PartialOp::Sum), Dims::At(2), Some(3), Types::Real)),
    ("prims::sum", kind(SUM, Dims::Some(1), None, Types::Wide)),
    ("prims::prod", kind(PRODUCT, Dims::Some(1), None, Types::Wide)),
    ("prims::amax", kind(MAX, Dims::Some(1), None, Types::Same)),
    ("prims::amin", kind(MIN, Dims::Some(1), None, Types::Same)),
    ("prims::var", kind(Combine::Not, Dims::Some(1), None, Types::Real)),
];

const SPREAD_AND_MEAN: Kind = Kind {
    outputs: 2,
    ..kind(Combine::Not, Dims::At(1), Some(3), Types::Real)
};

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 5)?;
    let input = query.tensor(0)?;
    let ndim = input.shape.len();
    let reduced = reduced(kind.dims, query, ndim)?;
    if let Some(k) = kind.k {
        position(query, k, input, &reduced)?;
    }
    let keep = kind.keep.map_or(Ok(false), |at| query.flag(at))?;
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
    let wanted = create::dtype(query);
    let outputs = (0..kind.outputs).map(|i| TensorMeta {
        dtype: dtype(kind, i, input.dtype, wanted),
        shape: shape.clone(),
    });
    let mut rule = Rule::new(outputs.collect(), 1);
    let combine = match kind.combine {
        Combine::Not => None,
        Combine::By(op, wants) => Some((op, wants)),
        Combine::Changed(op) => Some((op, Wants::Nothing)),
        Combine::Norm(at) => norm(query.float(at, Some(2.0))?),
    };
    for dim in 0..ndim {
        if !reduced[dim] {
            let outputs = std::iter::repeat_n(shard(at[dim]), kind.outputs);
            rule.add(outputs.chain([shard(dim)]));
        } else if let Some((op, wants)) = combine {
            let need = match wants {
                Wants::Nothing => Need::Nothing,
                Wants::Filled => Need::Filled,
                Wants::Even => Need::Divides(input.shape[dim]),
            };
            rule.add([partial(op), Slot::Shard(dim as u32, need)]);
        }
    }
    let passes = match (kind.combine, combine) {
        (Combine::By(..), passes) => passes,
        // Norms of norms of one order; absolute values of summands and extrema
        // are not those of the whole.
        (Combine::Norm(_), passes) => passes.filter(|p| matches!(p.0, PartialOp::Norm(_))),
        _ => None,
    };
    if let Some((op, _)) = passes {
        if promote::commutes(op, input.dtype, rule.outputs[0].dtype) {
            rule.pass(&[op]);
        }
    }
    Ok(rule)
}

/// How p-norms of pieces make the norm of the whole (`_NormPartial` in
/// `_ops/_math_ops.py`). Of no elements, only those of positive orders exist.
fn norm(order: f64) -> Option<(PartialOp, Wants)> {
    let wants = match order >= 0.0 && order.is_finite() {
        true => Wants::Nothing,
        false => Wants::Filled,
    };
    PartialOp::of_norm(order).map(|op| (op, wants))
}

fn reduced(dims: Dims, query: &Query<'_>, ndim: usize) -> Result<Vec<bool>, PropagationError> {
    let (at, list) = match dims {
        Dims::All => return Ok(vec![true; ndim]),
        Dims::One(at, default) => {
            let dim = query.dim(at, default, ndim)?;
            return Ok((0..ndim).map(|d| d == dim).collect());
        }
        Dims::At(at) | Dims::Exactly(at) | Dims::Some(at) => (at, query.ints(at)?),
    };
    let Some(list) = list else {
        return Ok(vec![true; ndim]);
    };
    match dims {
        Dims::At(_) if list.is_empty() => return Ok(vec![true; ndim]),
        Dims::Some(_) if list.is_empty() && ndim > 0 => {
            return Err(query.wrong(at, "at least one dim", "[]"));
        }
        _ => {}
    }
    let mut reduced = vec![false; ndim];
    for dim in list {
        let wrapped = query.wrap(at, *dim, ndim)?;
        if let Some(reduced) = reduced.get_mut(wrapped) {
            if std::mem::replace(reduced, true) {
                return Err(query.wrong(at, "each dim once", format!("{list:?}")));
            }
        }
    }
    Ok(reduced)
}

/// Checks that the reduced dim has a k-th value.
fn position(
    query: &Query<'_>,
    at: usize,
    input: &TensorMeta,
    reduced: &[bool],
) -> Result<(), PropagationError> {
    let k = query.int(at, None)?;
    let size = (input.shape.iter().zip(reduced)).find_map(|(s, r)| r.then_some(*s));
    let size = size.unwrap_or(1);
    if u64::try_from(k).is_ok_and(|k| (1..=size).contains(&k)) {
        return Ok(());
    }
    Err(query.wrong(at, format!("a number from 1 to {size}"), k.to_string()))
}

fn dtype(kind: Kind, output: usize, input: DType, wanted: Option<DType>) -> DType {
    const U8: DType = DType::U8;
    let integer = promote::class(input) < promote::Class::Float;
    match kind.types {
        Types::Indices if output + 1 == kind.outputs => DType::I64,
        Types::Truth if input != U8 => DType::BOOL,
        Types::Wide if integer => wanted.unwrap_or(DType::I64),
        Types::Floating => promote::float(input),
        Types::Real if output == 0 => promote::real(wanted.unwrap_or(input)),
        _ => wanted.unwrap_or(input),
    }
}
