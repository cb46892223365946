//! The local op: what a rank calls on its shards, once placements are chosen.
//!
//! Most local ops take the arguments of the global op. There are three exceptions:
//! sizes among the arguments become those of the rank's shard; a dim whose shard has
//! size 1 does not count as a dim of size 1; and a lookup in a table whose rows are
//! split counts rows from the shard's first row (`_ops/_view_ops.py`, `_ops/_tensor_ops.py`, `placement_types.py`'s masked
//! partial).

use super::error::PropagationError;
use super::layout::Layout;
use super::placement::{PartialOp, Placement};
use super::rule::{Arg, Query};
use super::spec::{Mesh, Spec, TensorMeta};

/// What one rank calls.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalOp {
    /// The op, which is another one where local and global meaning differ.
    pub op: String,
    /// Its arguments; tensors have local metas and no placements.
    pub args: Vec<Arg>,
    /// What to do with the indices, when the output is a masked partial.
    pub lookup: Option<Lookup>,
}

/// A lookup in a shard of a table: indices outside of it count as 0, and what
/// they look up as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Which of the op's tensors holds the indices.
    pub index: usize,
    /// The first row of the rank's shard.
    pub from: u64,
    /// How many rows it has, which may be none.
    pub rows: u64,
    /// The output dim at which the dims of the indices begin.
    pub dim: usize,
}

/// How a local argument follows from the placements.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// The argument at this position is the shape of the output.
    Shape(usize),
    /// The same, with contiguous strides behind it.
    ShapeAndStrides(usize),
    /// The sizes at this position replace the dim at the position before.
    Unflatten(usize),
    /// This argument is the size of a dim of the first tensor.
    Size { at: usize, dim: usize },
    /// Dims of global size 1 go; without a position, all of them.
    Squeeze(Option<usize>),
    /// Rows of tensor 0 are looked up by tensor 1.
    Lookup(Table),
}

/// Which dim of a table indices count, and where their dims begin in the output.
#[derive(Clone, Copy, Debug)]
enum Table {
    /// Dim 0; at dim 0.
    Rows,
    /// The dim at position 1; at dim 0.
    Gather,
    /// The dim at position 1; at that dim.
    Select,
}

#[rustfmt::skip]
const CHANGES: &[(&str, Change)] = &[
    ("aten::view", Change::Shape(1)),
    ("aten::view_copy", Change::Shape(1)),
    ("aten::reshape", Change::Shape(1)),
    ("aten::_unsafe_view", Change::Shape(1)),
    ("aten::_reshape_alias", Change::ShapeAndStrides(1)),
    ("aten::expand", Change::Shape(1)),
    ("aten::expand_copy", Change::Shape(1)),
    ("aten::broadcast_to", Change::Shape(1)),
    ("aten::unflatten.int", Change::Unflatten(2)),
    ("aten::new_empty", Change::Shape(1)),
    ("aten::new_full", Change::Shape(1)),
    ("aten::new_ones", Change::Shape(1)),
    ("aten::new_zeros", Change::Shape(1)),
    ("aten::new_empty_strided", Change::ShapeAndStrides(1)),
    ("aten::zeros", Change::Shape(0)),
    ("aten::ones", Change::Shape(0)),
    ("aten::full", Change::Shape(0)),
    ("aten::empty.memory_format", Change::Shape(0)),
    ("aten::rand", Change::Shape(0)),
    ("aten::randn", Change::Shape(0)),
    ("aten::select_backward", Change::Shape(1)),
    ("aten::slice_backward", Change::Shape(1)),
    ("aten::diagonal_backward", Change::Shape(1)),
    ("aten::index_select_backward", Change::Shape(1)),
    ("aten::unfold_backward", Change::Shape(1)),
    ("aten::value_selecting_reduction_backward", Change::Shape(3)),
    ("aten::upsample_nearest1d_backward", Change::Shape(2)),
    ("aten::upsample_nearest2d_backward", Change::Shape(2)),
    ("aten::upsample_nearest3d_backward", Change::Shape(2)),
    ("aten::_upsample_nearest_exact1d_backward", Change::Shape(2)),
    ("aten::_upsample_nearest_exact2d_backward", Change::Shape(2)),
    ("aten::_upsample_nearest_exact3d_backward", Change::Shape(2)),
    ("aten::upsample_linear1d_backward", Change::Shape(2)),
    ("aten::upsample_bilinear2d_backward", Change::Shape(2)),
    ("aten::upsample_bicubic2d_backward", Change::Shape(2)),
    ("aten::upsample_trilinear3d_backward", Change::Shape(2)),
    ("aten::_upsample_bilinear2d_aa_backward", Change::Shape(2)),
    ("aten::_upsample_bicubic2d_aa_backward", Change::Shape(2)),
    ("aten::_upsample_lanczos2d_aa_backward", Change::Shape(2)),
    ("aten::native_group_norm", Change::Size { at: 3, dim: 0 }),
    ("aten::native_group_norm_backward", Change::Size { at: 5, dim: 0 }),
    ("aten::squeeze", Change::Squeeze(None)),
    ("aten::squeeze.dim", Change::Squeeze(Some(1))),
    ("aten::squeeze.dims", Change::Squeeze(Some(1))),
    ("aten::squeeze_copy", Change::Squeeze(None)),
    ("aten::squeeze_copy.dim", Change::Squeeze(Some(1))),
    ("aten::squeeze_copy.dims", Change::Squeeze(Some(1))),
    ("aten::embedding", Change::Lookup(Table::Rows)),
    ("aten::gather", Change::Lookup(Table::Gather)),
    ("aten::index_select", Change::Lookup(Table::Select)),
];

fn change(op: &str) -> Option<Change> {
    let op = op.strip_suffix(".default").unwrap_or(op);
    let found = |op: &str| CHANGES.iter().find(|c| c.0 == op).map(|c| c.1);
    found(op).or_else(|| {
        let (name, overload) = op.split_once('.').unwrap_or((op, ""));
        let name = name.strip_suffix('_')?;
        match overload {
            "" => found(name),
            overload => found(&format!("{name}.{overload}")),
        }
    })
}

/// Whether the local arguments of an op depend on how its outputs lie.
pub fn follows_outputs(op: &str) -> bool {
    matches!(
        change(op),
        Some(
            Change::Shape(_)
                | Change::ShapeAndStrides(_)
                | Change::Unflatten(_)
                | Change::Lookup(_)
        )
    )
}

/// How the arguments of a rank's call differ from the global ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalArgs {
    /// They do not.
    Same,
    /// The argument at this position is the shape of the rank's shard of the first output.
    Shape(usize),
    /// The argument at a position is the size of a dim of the rank's shard of the first tensor.
    Size {
        /// The position.
        at: usize,
        /// The dim.
        dim: usize,
    },
    /// Indices count rows from the first of the rank's shard, where the output is a masked partial.
    Lookup,
    /// In another way: see [`local_op`].
    Other,
}

/// How the arguments of a rank's call of an op differ from the global ones.
pub fn local_args(op: &str) -> LocalArgs {
    match change(op) {
        None => LocalArgs::Same,
        Some(Change::Shape(at)) => LocalArgs::Shape(at),
        Some(Change::Size { at, dim }) => LocalArgs::Size { at, dim },
        Some(Change::Lookup(_)) => LocalArgs::Lookup,
        Some(_) => LocalArgs::Other,
    }
}

/// The local meta of a tensor on the rank at `coordinate`.
///
/// # Errors
///
/// [`PropagationError::Argument`] for a tensor without meta, a coordinate
/// outside of the mesh, or a layout of more than 65,536 blocks.
pub fn local_meta(
    query: &Query<'_>,
    argument: usize,
    spec: &Spec,
    mesh: &Mesh,
    coordinate: &[u32],
) -> Result<TensorMeta, PropagationError> {
    let meta = (spec.meta.as_ref())
        .ok_or_else(|| query.wrong(argument, "a tensor whose meta is known", spec.to_string()))?;
    let mut local = meta.clone();
    for (dim, size) in local.shape.iter_mut().enumerate() {
        *size = rows(query, argument, spec, dim, mesh, coordinate)?.size();
    }
    Ok(local)
}

fn rows(
    query: &Query<'_>,
    argument: usize,
    spec: &Spec,
    dim: usize,
    mesh: &Mesh,
    coordinate: &[u32],
) -> Result<Layout, PropagationError> {
    let sizes = mesh.sizes();
    let inside = coordinate.len() == sizes.len()
        && spec.placements.len() == sizes.len()
        && coordinate.iter().zip(sizes).all(|(c, n)| c < n);
    let size = spec.meta.as_ref().and_then(|m| m.shape.get(dim));
    let layout = size
        .filter(|_| inside)
        .and_then(|size| Layout::of(*size, dim as u32, &spec.placements, sizes, coordinate));
    layout.ok_or_else(|| {
        let expected = format!("a shard on a rank of mesh {mesh}");
        query.wrong(argument, expected, format!("{spec} at {coordinate:?}"))
    })
}

/// The op that the rank at `coordinate` of the mesh calls, when inputs and
/// outputs lie as these specs say.
///
/// # Errors
///
/// [`PropagationError::Arity`] when the inputs are not as many as the query's,
/// [`PropagationError::Argument`] where a local argument cannot be made.
pub fn local_op(
    query: &Query<'_>,
    inputs: &[Spec],
    outputs: &[Spec],
    mesh: &Mesh,
    coordinate: &[u32],
) -> Result<LocalOp, PropagationError> {
    let expected = query.inputs().count();
    if inputs.len() != expected {
        return Err(PropagationError::Arity {
            op: query.op.into(),
            expected: format!("{expected} tensors among the"),
            found: inputs.len(),
        });
    }
    let mut rest = inputs.iter();
    let mut local = |argument: usize| -> Result<Spec, PropagationError> {
        let spec = rest
            .next()
            .ok_or_else(|| query.wrong(argument, "a spec", "none"))?;
        Ok(Spec {
            meta: Some(local_meta(query, argument, spec, mesh, coordinate)?),
            placements: Vec::new(),
        })
    };
    let mut args = Vec::with_capacity(query.args.len());
    for (i, arg) in query.args.iter().enumerate() {
        args.push(match arg {
            Arg::Tensor(_) => Arg::Tensor(local(i)?),
            Arg::Tensors(list) => {
                let entries = list
                    .iter()
                    .map(|e| e.as_ref().map(|_| local(i)).transpose());
                Arg::Tensors(entries.collect::<Result<_, _>>()?)
            }
            other => other.clone(),
        });
    }
    let mut made = LocalOp {
        op: query.op.into(),
        args,
        lookup: None,
    };
    let shape = || -> Result<Vec<i64>, PropagationError> {
        let output = outputs
            .first()
            .ok_or_else(|| query.wrong(0, "an output", "none"))?;
        let meta = local_meta(query, 0, output, mesh, coordinate)?;
        Ok(meta
            .shape
            .iter()
            .map(|s| i64::try_from(*s).unwrap_or(i64::MAX))
            .collect())
    };
    match change(query.op) {
        None => {}
        Some(Change::Shape(at)) => set(&mut made.args, at, Arg::Ints(shape()?)),
        Some(Change::ShapeAndStrides(at)) => {
            let shape = shape()?;
            let mut strides = vec![1_i64; shape.len()];
            for dim in (1..shape.len()).rev() {
                strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
            }
            set(&mut made.args, at, Arg::Ints(shape));
            set(&mut made.args, at + 1, Arg::Ints(strides));
        }
        Some(Change::Unflatten(at)) => {
            let input = query.tensor(0)?;
            let dim = query.dim(at - 1, None, input.shape.len())?;
            let count = query.list(at)?.len();
            let shape = shape()?;
            let sizes = shape.get(dim..dim + count).unwrap_or(&shape);
            set(&mut made.args, at, Arg::Ints(sizes.to_vec()));
        }
        Some(Change::Size { at, dim }) => {
            if let Some(Arg::Tensor(Spec {
                meta: Some(meta), ..
            })) = made.args.first()
            {
                let size = meta.shape.get(dim).copied().unwrap_or(1);
                set(
                    &mut made.args,
                    at,
                    Arg::Int(i64::try_from(size).unwrap_or(i64::MAX)),
                );
            }
        }
        Some(Change::Squeeze(at)) => {
            let input = query.tensor(0)?;
            let ndim = input.shape.len();
            let mut dims = Vec::new();
            match at.map(|at| query.ints(at)).transpose()?.flatten() {
                Some(given) => {
                    for dim in given {
                        dims.push(query.wrap(1, *dim, ndim)?);
                    }
                }
                None => dims.extend(0..ndim),
            }
            dims.retain(|d| input.shape.get(*d) == Some(&1));
            let name = made.op.split('.').next().unwrap_or_default();
            made.op = format!("{name}.dims");
            made.args.truncate(1);
            made.args
                .push(Arg::Ints(dims.iter().map(|d| *d as i64).collect()));
        }
        Some(Change::Lookup(table)) => {
            let masked = |s: &Spec| s.placements.contains(&Placement::Partial(PartialOp::Mask));
            if outputs.iter().any(masked) {
                let ndim = query.tensor(0)?.shape.len();
                let (dim, at) = match table {
                    Table::Rows => (0, 0),
                    Table::Gather => (query.dim(1, None, ndim)?, 0),
                    Table::Select => {
                        let dim = query.dim(1, None, ndim)?;
                        (dim, dim)
                    }
                };
                let layout = rows(query, 0, &inputs[0], dim, mesh, coordinate)?;
                made.lookup = Some(Lookup {
                    index: 1,
                    from: layout.global(0).unwrap_or(0),
                    rows: layout.size(),
                    dim: at,
                });
            }
        }
    }
    Ok(made)
}

fn set(args: &mut Vec<Arg>, at: usize, arg: Arg) {
    if args.len() <= at {
        args.resize(at + 1, Arg::None);
    }
    args[at] = arg;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// The local op of every rank of a mesh of 2.
    fn local(op: &str, args: &[&str], inputs: &[&str], output: &str) -> Vec<LocalOp> {
        let mesh = Mesh::parse("2").unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        let spec = |t: &&str| Spec::parse(t, &mesh).unwrap();
        let inputs: Vec<_> = inputs.iter().map(spec).collect();
        let outputs = [spec(&output)];
        (0..2)
            .map(|rank| local_op(&query, &inputs, &outputs, &mesh, &[rank]).unwrap())
            .collect()
    }

    #[test]
    fn a_shape_is_that_of_the_shard() {
        let ops = local(
            "aten::view",
            &["f32[6,5]", "[-1]"],
            &["f32[6,5] @ S(0)"],
            "f32[30] @ S(0)",
        );
        assert_eq!(ops[0].args[1], Arg::Ints(vec![15]));
        let ops = local(
            "aten::expand",
            &["f32[1,5]", "[4,-1]"],
            &["f32[1,5] @ S(1)"],
            "f32[4,5] @ S(1)",
        );
        let sizes: Vec<_> = ops.iter().map(|o| o.args[1].clone()).collect();
        assert_eq!(sizes, [Arg::Ints(vec![4, 3]), Arg::Ints(vec![4, 2])]);
    }

    #[test]
    fn a_shard_of_size_1_is_not_squeezed() {
        let ops = local(
            "aten::squeeze",
            &["f32[2,1]"],
            &["f32[2,1] @ S(0)"],
            "f32[2] @ S(0)",
        );
        assert_eq!(ops[1].op, "aten::squeeze.dims");
        assert_eq!(ops[1].args[1], Arg::Ints(vec![1]));
        let ops = local(
            "aten::squeeze_.dim",
            &["f32[2,1]", "0"],
            &["f32[2,1] @ S(0)"],
            "f32[2,1] @ S(0)",
        );
        assert_eq!(
            (ops[1].op.as_str(), &ops[1].args[1]),
            ("aten::squeeze_.dims", &Arg::Ints(vec![]))
        );
    }

    #[test]
    fn a_masked_lookup_counts_from_its_first_row() {
        let ops = local(
            "aten::embedding",
            &["f32[7,3]", "i64[4]"],
            &["f32[7,3] @ S(0)", "i64[4]"],
            "f32[4,3] @ P(mask)",
        );
        let rows: Vec<_> = ops
            .iter()
            .map(|o| o.lookup.map(|l| (l.from, l.rows)))
            .collect();
        assert_eq!(rows, [Some((0, 4)), Some((4, 3))]);
    }

    #[test]
    fn wrong_specs_are_errors() {
        let mesh = Mesh::parse("2").unwrap();
        let args = [Arg::parse("f32[6]", &mesh).unwrap(), Arg::Ints(vec![2, 3])];
        let query = Query {
            op: "aten::view",
            args: &args,
        };
        let spec = Spec::parse("f32[6] @ S(0)", &mesh).unwrap();
        let one = std::slice::from_ref(&spec);
        assert!(local_op(&query, &[], one, &mesh, &[0]).is_err());
        assert!(local_op(&query, one, one, &mesh, &[2]).is_err());
        assert!(local_op(&query, one, &[], &mesh, &[0]).is_err());
        assert!(local_op(&query, one, one, &mesh, &[0, 0]).is_err());
    }
}
