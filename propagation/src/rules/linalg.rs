//! Linear algebra: matrices stay whole, batches of them do not
//! (`_ops/_math_ops.py`).
//!
//! Each tensor's trailing dims are written as letters: a batch shards all
//! tensors that have it, a free letter (the columns of a right-hand side)
//! shards that side and the solution, and a solution is linear in its side.

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::promote::{Class, class, complex_of, real};
use super::super::rule::{Query, R, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;
use super::pointwise::broadcast;
use rote_plans::DType;

/// An op on matrices.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Op {
    /// Where each tensor stands, with its letters; `r` is the smaller of the
    /// sizes of `m` and `n`, or of those of `m` and `k`.
    inputs: &'static [(usize, &'static str)],
    outputs: &'static [Output],
    /// The inputs in each of which the first output is linear; those of which
    /// have a free letter are solved for column by column.
    linear: &'static [usize],
    /// What else the arguments change.
    variant: Variant,
}

#[derive(Clone, Copy, Debug)]
struct Output {
    letters: &'static str,
    dtype: Type,
    /// The only input whose batch it has; without, all inputs'.
    of: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Type {
    Same,
    Real,
    Complex,
    I32,
}

/// A choice that an argument makes.
#[derive(Clone, Copy, Debug)]
enum Variant {
    None,
    /// The last tensor stands left of the matrix if the flag at a position is
    /// false: rows are free, not columns.
    Side(usize),
    /// The first output is empty if the flag at a position is false.
    Pivot(usize),
    /// `lu_unpack`: flags for the factors and for the permutation.
    Unpack,
    /// `_linalg_svd`: flags for full matrices and for any.
    Svd,
    /// `_linalg_eigh`: a flag for vectors.
    Vectors,
    /// `linalg_qr`: the mode.
    Qr,
    /// `_linalg_solve_ex`: a right-hand side may be a vector.
    Solve,
    /// `linalg_pinv`: tolerances may be absent.
    Tolerances,
    /// Raises for a matrix that failed: on every rank or on none.
    Check,
    /// `linalg_cross`: vectors of 3 along the dim at a position.
    Cross(usize),
}

const fn out(letters: &'static str) -> Output {
    Output {
        letters,
        dtype: Type::Same,
        of: None,
    }
}

const fn typed(letters: &'static str, dtype: Type) -> Output {
    Output {
        dtype,
        ..out(letters)
    }
}

/// An output that has the first input's batch alone.
const fn of(output: Output) -> Output {
    Output {
        of: Some(0),
        ..output
    }
}

const fn op(inputs: &'static [(usize, &'static str)], outputs: &'static [Output]) -> Op {
    Op {
        inputs,
        outputs,
        linear: &[],
        variant: Variant::None,
    }
}

const fn solve(
    inputs: &'static [(usize, &'static str)],
    outputs: &'static [Output],
    linear: &'static [usize],
    variant: Variant,
) -> Op {
    Op {
        linear,
        variant,
        ..op(inputs, outputs)
    }
}

const fn varied(op: Op, variant: Variant) -> Op {
    Op { variant, ..op }
}

/// The letter of the columns that are solved for one by one.
const FREE: char = 'j';

const MATRIX: &[(usize, &str)] = &[(0, "mn")];
const SQUARE: &[(usize, &str)] = &[(0, "nn")];
const PIVOTS: Output = typed("r", Type::I32);
const INFO: Output = typed("", Type::I32);

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Op)] = &[
    ("aten::cholesky_inverse", op(SQUARE, &[out("nn")])),
    ("aten::linalg_matrix_exp", op(SQUARE, &[out("nn")])),
    ("aten::linalg_cholesky_ex", op(SQUARE, &[out("nn"), INFO])),
    ("aten::linalg_inv_ex", op(SQUARE, &[out("nn"), INFO])),
    ("aten::linalg_eig", op(SQUARE, &[typed("n", Type::Complex), typed("nn", Type::Complex)])),
    ("aten::_linalg_det", op(SQUARE, &[out(""), out("nn"), typed("n", Type::I32)])),
    ("aten::_linalg_slogdet",
        op(SQUARE, &[out(""), typed("", Type::Real), out("nn"), typed("n", Type::I32)])),
    ("aten::linalg_ldl_factor_ex", op(SQUARE, &[out("nn"), typed("n", Type::I32), INFO])),
    ("aten::_linalg_eigh", varied(op(SQUARE, &[typed("n", Type::Real), out("nn")]), Variant::Vectors)),
    ("aten::geqrf", op(MATRIX, &[out("mn"), out("r")])),
    ("aten::linalg_lu_factor_ex", op(MATRIX, &[out("mn"), PIVOTS, INFO])),
    ("aten::linalg_lu", varied(op(MATRIX, &[out("mm"), out("mr"), out("rn")]), Variant::Pivot(1))),
    ("aten::lu_unpack",
        varied(op(&[(0, "mn"), (1, "r")], &[out("mm"), out("mr"), out("rn")]), Variant::Unpack)),
    ("aten::_linalg_svd",
        varied(op(MATRIX, &[out("mr"), typed("r", Type::Real), out("rn")]), Variant::Svd)),
    ("aten::linalg_qr", varied(op(MATRIX, &[out("mr"), out("rn")]), Variant::Qr)),
    ("aten::linalg_pinv.atol_rtol_tensor",
        varied(op(&[(0, "mn"), (1, ""), (2, "")], &[out("nm")]), Variant::Tolerances)),
    ("aten::_linalg_check_errors", varied(op(&[(0, "")], &[]), Variant::Check)),
    ("aten::linalg_cross", Op {
        linear: &[0, 1],
        ..varied(op(&[(0, ""), (1, "")], &[out("")]), Variant::Cross(2))
    }),
    ("aten::linalg_householder_product", op(&[(0, "mn"), (1, "k")], &[out("mn")])),
    ("aten::ormqr",
        solve(&[(0, "mk"), (1, "r"), (2, "mj")], &[out("mj")], &[2], Variant::Side(3))),
    ("aten::cholesky_solve", solve(&[(0, "nj"), (1, "nn")], &[out("nj")], &[0], Variant::None)),
    ("aten::triangular_solve",
        solve(&[(0, "nj"), (1, "nn")], &[out("nj"), out("nn")], &[0], Variant::None)),
    ("aten::linalg_solve_triangular",
        solve(&[(0, "nn"), (1, "nj")], &[out("nj")], &[1], Variant::Side(3))),
    ("aten::linalg_lu_solve",
        solve(&[(0, "nn"), (1, "n"), (2, "nj")], &[out("nj")], &[2], Variant::Side(3))),
    ("aten::linalg_ldl_solve",
        solve(&[(0, "nn"), (1, "n"), (2, "nj")], &[out("nj")], &[2], Variant::None)),
    ("aten::_linalg_solve_ex",
        solve(&[(0, "nn"), (1, "nj")],
            &[out("nj"), of(out("nn")), of(typed("n", Type::I32)), of(INFO)], &[1], Variant::Solve)),
];

/// A tensor of the question: where it stands, its meta, its letters.
struct Tensor<'a> {
    at: usize,
    meta: &'a TensorMeta,
    letters: &'static str,
}

impl Tensor<'_> {
    fn batch(&self) -> &[u64] {
        &self.meta.shape[..self.meta.shape.len() - self.letters.len()]
    }

    /// The dim of a letter.
    fn dim(&self, letter: char) -> Option<usize> {
        self.letters.find(letter).map(|d| self.batch().len() + d)
    }

    /// The slot where dim `dim` of the whole batch is sharded.
    fn slot(&self, dim: usize, batch: &[u64]) -> Slot {
        let own = dim.checked_sub(batch.len() - self.batch().len());
        match own {
            Some(own) if self.meta.shape[own] == batch[dim] => shard(own),
            _ => R,
        }
    }
}

pub(super) fn rule(op: Op, query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(1, 5)?;
    let tensors = tensors(op, query)?;
    let sizes = sizes(&tensors, query)?;
    let batch = batch(&tensors, query)?;
    let mut outputs = Vec::with_capacity(op.outputs.len());
    let mut letters = Vec::with_capacity(op.outputs.len());
    for (i, output) in op.outputs.iter().enumerate() {
        let own = match output.of {
            Some(input) => tensors[input].batch(),
            None => &batch,
        };
        let held = held(op, i, query)?;
        letters.push(held);
        let dtype = tensors[0].meta.dtype;
        outputs.push(TensorMeta {
            dtype: match output.dtype {
                Type::Same => dtype,
                Type::Real => real(dtype),
                Type::Complex => match class(dtype) {
                    Class::Complex => dtype,
                    _ => complex_of(dtype),
                },
                Type::I32 => DType::I32,
            },
            shape: match held {
                Some(held) => own
                    .iter()
                    .copied()
                    .chain(held.chars().map(|l| sizes.find(l).unwrap_or(1)))
                    .collect(),
                None => vec![0],
            },
        });
    }
    let mut rule = Rule::new(outputs, tensors.len());
    let shards = !ambiguous(op, &tensors) && !matches!(op.variant, Variant::Check);
    let whole = crossed(op, query, &tensors)?;
    for dim in (0..batch.len()).filter(|d| shards && Some(*d) != whole) {
        let outputs =
            op.outputs
                .iter()
                .zip(&letters)
                .map(|(output, held)| match (held, output.of) {
                    (None, _) => R,
                    (_, None) => shard(dim),
                    (_, Some(input)) => tensors[input].slot(dim, &batch),
                });
        let inputs = tensors.iter().map(|t| t.slot(dim, &batch));
        rule.add(outputs.chain(inputs));
    }
    for input in op.linear.iter().copied() {
        let mut alone = |output: Slot, slot: Slot| {
            let outputs = (0..op.outputs.len()).map(|i| if i == 0 { output } else { R });
            let inputs = (0..tensors.len()).map(|i| if i == input { slot } else { R });
            rule.add(outputs.chain(inputs));
        };
        for op in [PartialOp::Sum, PartialOp::Avg] {
            alone(partial(op), partial(op));
        }
        let place = letters[0].and_then(|held| held.find(FREE));
        if let (true, Some(own), Some(place)) = (shards, tensors[input].dim(FREE), place) {
            alone(shard(batch.len() + place), shard(own));
        }
    }
    Ok(rule)
}

/// The tensors among the arguments with their letters.
fn tensors<'a>(op: Op, query: &Query<'a>) -> Result<Vec<Tensor<'a>>, PropagationError> {
    let left = side(op, query)?;
    let mut tensors = Vec::with_capacity(op.inputs.len());
    for (at, letters) in op.inputs {
        let meta = match op.variant {
            Variant::Tolerances if *at > 0 => match query.optional_tensor(*at)? {
                Some(meta) => meta,
                None => continue,
            },
            _ => query.tensor(*at)?,
        };
        let letters = match (op.variant, *letters) {
            (Variant::Solve, "nj") if is_vector(query)? => "n",
            (_, letters) => turned(letters, left),
        };
        if meta.shape.len() < letters.len() {
            let expected = format!("a tensor of at least {} dims", letters.len());
            return Err(query.wrong(*at, expected, meta.to_string()));
        }
        tensors.push(Tensor {
            at: *at,
            meta,
            letters,
        });
    }
    Ok(tensors)
}

/// Whether the matrix stands left of what is solved for.
fn side(op: Op, query: &Query<'_>) -> Result<bool, PropagationError> {
    match op.variant {
        Variant::Side(at) => query.flag_or(at, true),
        Variant::Solve => query.flag_or(2, true),
        _ => Ok(true),
    }
}

/// The letters of a right-hand side, or of a solution.
fn turned(letters: &'static str, left: bool) -> &'static str {
    match (left, letters) {
        (false, "nj") => "jn",
        (false, "mj") => "jm",
        _ => letters,
    }
}

/// Whether `_linalg_solve_ex` takes its right-hand side for vectors.
fn is_vector(query: &Query<'_>) -> Result<bool, PropagationError> {
    let (matrix, side) = (&query.tensor(0)?.shape, &query.tensor(1)?.shape);
    Ok(side.len() == 1 || matrix.split_last().is_some_and(|(_, lead)| lead == side))
}

/// The letters of an output, or `None` for one that is left empty.
fn held(
    op: Op,
    output: usize,
    query: &Query<'_>,
) -> Result<Option<&'static str>, PropagationError> {
    let letters = op.outputs[output].letters;
    let given = match (op.variant, output) {
        (Variant::Pivot(at), 0) => query.flag_or(at, true)?,
        (Variant::Unpack, 0) => query.flag_or(3, true)?,
        (Variant::Unpack, _) => query.flag_or(2, true)?,
        (Variant::Svd, 0 | 2) | (Variant::Vectors, 1) => query.flag_or(2, true)?,
        (Variant::Qr, _) => match (query.text(1, "reduced")?, output) {
            ("reduced", _) | ("r", 1) => true,
            ("r", _) => false,
            ("complete", 0) => return Ok(Some("mm")),
            ("complete", _) => return Ok(Some("mn")),
            (other, _) => {
                return Err(query.wrong(1, "'reduced', 'complete' or 'r'", format!("{other:?}")));
            }
        },
        _ => true,
    };
    let letters = match (op.variant, output) {
        (Variant::Svd, 0) if query.flag(1)? => "mm",
        (Variant::Svd, 2) if query.flag(1)? => "nn",
        (Variant::Solve, 0) if is_vector(query)? => "n",
        _ => turned(letters, side(op, query)?),
    };
    Ok(given.then_some(letters))
}

/// The size of each letter; all tensors must agree.
fn sizes(tensors: &[Tensor<'_>], query: &Query<'_>) -> Result<Sizes, PropagationError> {
    let mut sizes = Sizes(Vec::with_capacity(4));
    // `r` follows from the others.
    for smaller in [false, true] {
        for tensor in tensors {
            let dims = tensor.meta.shape[tensor.batch().len()..].iter();
            for (letter, size) in tensor.letters.chars().zip(dims) {
                if (letter == 'r') != smaller {
                    continue;
                }
                match sizes.find(letter) {
                    None => sizes.0.push((letter, *size)),
                    Some(known) if known == *size => {}
                    Some(known) => {
                        let dim = tensor.dim(letter).unwrap_or(0);
                        let expected = format!("dim {dim} of size {known}");
                        return Err(query.wrong(tensor.at, expected, tensor.meta.to_string()));
                    }
                }
            }
        }
        if let (false, Some(m)) = (smaller, sizes.find('m')) {
            let other = sizes.find('n').or(sizes.find('k')).unwrap_or(m);
            sizes.0.push(('r', m.min(other)));
        }
    }
    Ok(sizes)
}

struct Sizes(Vec<(char, u64)>);

impl Sizes {
    fn find(&self, letter: char) -> Option<u64> {
        self.0.iter().find(|s| s.0 == letter).map(|s| s.1)
    }
}

/// The batch dims of all tensors, broadcast.
fn batch(tensors: &[Tensor<'_>], query: &Query<'_>) -> Result<Vec<u64>, PropagationError> {
    let mut batch = Vec::new();
    for tensor in tensors {
        if !broadcast(&mut batch, tensor.batch()) {
            let expected = format!("batch dims that broadcast with {batch:?}");
            return Err(query.wrong(tensor.at, expected, tensor.meta.to_string()));
        }
    }
    Ok(batch)
}

/// Whether shards could pass for something else: a matrix of fewer columns, or
/// the piece of a batch, for a batch of vectors.
fn ambiguous(op: Op, tensors: &[Tensor<'_>]) -> bool {
    matches!(op.variant, Variant::Solve)
        && tensors[1].letters.len() == 2
        && tensors[1].meta.shape.len() + 1 == tensors[0].meta.shape.len()
}

/// The dim along which vectors are multiplied.
fn crossed(
    op: Op,
    query: &Query<'_>,
    tensors: &[Tensor<'_>],
) -> Result<Option<usize>, PropagationError> {
    let Variant::Cross(at) = op.variant else {
        return Ok(None);
    };
    let ndim = tensors[0].meta.shape.len();
    let dim = query.dim(at, Some(-1), ndim)?;
    for tensor in tensors {
        if tensor.meta.shape.len() != ndim || tensor.meta.shape.get(dim) != Some(&3) {
            let expected = format!("a tensor of {ndim} dims, dim {dim} of size 3");
            return Err(query.wrong(tensor.at, expected, tensor.meta.to_string()));
        }
    }
    Ok(Some(dim))
}
